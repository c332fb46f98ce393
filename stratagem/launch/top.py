"""A run as it goes: what every task does, step by step.

RUN is the folder that was given to `stratagem run --record`, or that STRATAGEM_RECORD names;
without it, the newest one in runs/. On a terminal the table is drawn anew every second; in a pipe
each task gets a plain line. A task that has died turns red and stays. It ends with the run, or
with Ctrl-C; the exit code is 1 if a task has died.

examples:
  stratagem run --record runs/first --replicas 2 train.py &
  stratagem top runs/first
  ssh host stratagem top --once runs/first            one look, over ssh
  stratagem top runs/first | tee top.log              plain lines
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stratagem.figures.run_folder import Line, RunFolder, RunTask, State, find
from stratagem.launch.cli import declare

if TYPE_CHECKING:
    from rich.table import Table

_STYLES: dict[State, str] = {"runs": "", "silent": "yellow", "done": "dim", "dead": "bold red"}
_COLUMNS = (
    "task",
    "host",
    "state",
    "step",
    "examples/s",
    "step ms",
    "computes",
    "loads",
    "waits",
    "link",
    "MB/s",
    "stale",
    "gen",
    "restarts",
)
_PAUSE = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem top`."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="the run's folder (the newest in runs/)"
    )
    declare(
        parser,
        ("--once", "one table, and no more"),
        ("--no-color", "no colours on a terminal (or set NO_COLOR)"),
    )


def main(args: argparse.Namespace) -> int:
    """Show the run until it is over."""
    run = find(args.run)
    show = _live if sys.stdout.isatty() and not args.once else _plain
    try:
        show(run, args)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(any(run.state(task) == "dead" for task in run.tasks.values()))


def _live(run: RunFolder, args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(no_color=True if args.no_color else None)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            run.read()
            over = run.is_over
            live.update(_table(run), refresh=True)
            if over:
                return
            time.sleep(_PAUSE)


def _plain(run: RunFolder, args: argparse.Namespace) -> None:
    """Print columns as wide as their heads, for files and other programs."""
    run.read()
    print(_columns(_COLUMNS, run), flush=True)
    while True:
        over = run.is_over
        for task in _sorted(run):
            print(_columns(cells(run, task), run), flush=True)
        if over or args.once:
            return
        time.sleep(_PAUSE)
        run.read()


def _columns(words: Sequence[str], run: RunFolder) -> str:
    first = max([10, *map(len, run.tasks)])
    host = max([6, *(len(task.host) for task in run.tasks.values())])
    widths = [first, host, 8, *(max(7, len(name)) for name in _COLUMNS[3:])]
    left = [word.ljust(width) for word, width in zip(words[:3], widths, strict=False)]
    right = [word.rjust(width) for word, width in zip(words[3:], widths[3:], strict=False)]
    return " ".join([*left, *right]).rstrip()


def _table(run: RunFolder) -> Table:
    from rich.table import Table

    table = Table(title=f"{run.path}, {time.strftime('%H:%M:%S')}", expand=False)
    for i, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if i < 3 else "right", no_wrap=True)
    for task in _sorted(run):
        table.add_row(*cells(run, task), style=_STYLES[run.state(task)])
    slow = [event for event in run.events if event["event"] in ("slow", "fault", "join")][-3:]
    if slow:
        table.caption = "\n".join(str(event["text"]) for event in slow)
        table.caption_justify = "left"
    return table


def _sorted(run: RunFolder) -> list[RunTask]:
    """Sort tasks by role and number: worker 2 before worker 10."""

    def key(task: RunTask) -> list[tuple[int, str]]:
        words = task.name.split()
        return [(int(word), "") if word.isdecimal() else (-1, word) for word in words]

    return sorted(run.tasks.values(), key=key)


def cells(run: RunFolder, task: RunTask) -> list[str]:
    """The row of a task."""
    line, state = task.last, run.state(task)
    busy = task.doing if state == "runs" else ""
    figures = [str(task.step), *_figures(line)] if task.lines else [""] * 10
    return [task.name, task.host, busy or state, *figures, str(task.restarts)]


def _figures(line: Line) -> list[str]:
    """Rate, step time and its parts, bytes, staleness and generation of a line."""
    parts = [float(line.get(kind, 0.0)) for kind in ("compute", "load", "wait", "link")]
    whole = sum(parts)
    shares = [f"{part / whole:.0%}" if whole else "" for part in parts]
    stale = line.get("staleness")
    return [
        f"{line['rate']:,.0f}" if "rate" in line else "",
        f"{whole * 1e3:.1f}" if whole else "",
        *shares,
        f"{line['bytes'] / 1e6:.1f}" if "bytes" in line else "",
        "" if stale is None else f"{stale:.1f}",
        str(line.get("generation", "")),
    ]
