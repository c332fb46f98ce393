"""Parts of a long benchmark, each in a process of its own and with a time limit: one that fails or
hangs is told in the table, and the rest still runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

Rows = list[str]


def run_apart(command: list[str], title: str, limit: float) -> tuple[Rows, bool]:
    """The rows that a process writes (`report`), and whether all went well."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return [failed(title, f"it has not ended within {limit:.0f} s")], False
    except BaseException:  # also Ctrl-C, and SIGTERM (`table`)
        os.killpg(process.pid, signal.SIGKILL)
        raise
    try:
        rows, problem = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        return [failed(title, f"exit code {process.returncode}")], False
    return (rows, True) if problem is None else ([failed(title, problem)], False)


def report(work: Callable[[], Rows]) -> None:
    """In that process: do it, and write the rows, or what has happened."""
    found: tuple[Rows, str | None]
    try:
        found = work(), None
    except Exception as error:
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        found = [], f"{type(error).__name__}: {lines[0]}"[:200].replace("|", "/")
    print(json.dumps(found), flush=True)


def failed(title: str, why: str) -> str:
    return f"| {title} | FAILED: {why} |"


def table(parts: Iterable[tuple[str, list[str]]], limit: float) -> tuple[Rows, bool]:
    """All rows of (title, command), told as they come with the time that each took, and whether
    none has failed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and nobody is left behind
    lines, well, begun, several = ["| what | seen |", "| --- | --- |"], True, _clock(), list(parts)
    for number, (title, command) in enumerate(several, 1):
        started = _clock()
        say(f"== {number} of {len(several)}: {title} ({started - begun:.0f} s so far)")
        rows, right = run_apart(command, title, limit)
        well, lines = well and right, lines + rows
        print("\n".join(rows), flush=True)
        say(f"   took {_clock() - started:.0f} s")
    signal.signal(signal.SIGTERM, before)
    say(f"== all in {(_clock() - begun) / 60:.1f} minutes{'' if well else '; NOT ALL WENT WELL'}")
    return lines, well


def write_between(page: Path, begin: str, end: str, lines: Rows) -> None:
    """Put a table between two marks of a page."""
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}")


def say(text: str) -> None:
    """To whoever watches; the table goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def _clock() -> float:
    return time.monotonic()
