"""The study of saturation in small: two hosts, one shaped link; and what its formulas must obey."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.clock import unless_late

FOLDER = Path(__file__).parents[2] / "studies" / "saturation"
sys.path.insert(0, str(FOLDER))
import compare  # noqa: E402
import terms  # noqa: E402


def as_root(test: Any) -> Any:
    """Skips, and says so, where namespaces cannot be made."""
    able = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
    why = "namespaces with shaped links need root and iproute2"
    return pytest.mark.root(pytest.mark.skipif(not able, reason=why)(test))


def spaces(pid: int) -> list[str]:
    """Network namespaces that a study's process has made and not taken away."""
    found = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if line.startswith(f"saturation-{pid}-")]


def study(*words: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=FOLDER,
        **more,
    )


@pytest.mark.slow
@as_root
@pytest.mark.timeout(300)
def test_measured_steps_are_near_the_formulas(tmp_path: Path) -> None:
    """The link is no faster than it may be, and nothing takes twice its time on a busy machine."""
    out = tmp_path / "rows.json"
    running = study("measure.py", "--small", "--json", str(out))
    try:
        said = running.communicate(timeout=90)[0]
    finally:
        running.kill()
    assert running.returncode == 0, said
    rows = json.loads(out.read_text())["rows"]
    assert [row["strategy"] for row in rows] == ["one", "ring", "sync"]
    own = compare.loops(rows)
    for row in rows:
        error = terms.terms(row, own[row["bytes"]]) / row["step_s"] - 1
        unless_late(-0.5 < error < 0.15, (row, error))
    assert spaces(running.pid) == []


@as_root
@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    code = (
        "import time, measure\n"
        "with measure.ended_politely(), measure.Hosts(2) as hosts:\n"
        "    hosts.shape(100e6)\n"
        "    from processes import start\n"
        "    child = start('child', hosts.names[0], {}, lambda: time.sleep(60))\n"
        "    print('up', child.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    running = study("-c", code)
    try:
        assert running.stdout is not None
        word, child = running.stdout.readline().split()
        assert word == "up" and len(spaces(running.pid)) == 3
        running.send_signal(number)
        running.communicate(timeout=40)
    finally:
        running.kill()
    assert spaces(running.pid) == []
    deadline = time.monotonic() + 20  # the kernel ends it when its parent has ended, not before
    while runs(int(child)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not runs(int(child))


def runs(pid: int) -> bool:
    """Whether a process is there, and not only its remains."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def row(**changes: Any) -> dict[str, Any]:
    given = {
        "strategy": "ring",
        "hosts": 3,
        "servers": 0,
        "wire": "float32",
        "link_bits": 1e8,
        "bytes": 4 << 20,
        "compute_s": 0.1,
    }
    return {**given, **changes}


@pytest.mark.parametrize("strategy, servers", [("ring", 0), ("sync", 1), ("sync", 2), ("async", 2)])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_a_step_takes_its_parts(strategy: str, servers: int, wire: str) -> None:
    """No shorter than computing and than the link; faster with a faster link, slower with more."""
    one = row(strategy=strategy, servers=servers, wire=wire)
    took = terms.terms(one, 0.0)
    assert took >= one["compute_s"]
    assert took >= terms.travelling(one) / (one["link_bits"] / 8)
    assert terms.terms({**one, "link_bits": 2e8}, 0.0) < took
    assert terms.terms({**one, "bytes": 8 << 20}, 0.0) > took


def test_the_data_that_are_kept_are_near_the_formulas() -> None:
    """What the README says of the committed rows, and no more than that."""
    rows = compare.read(FOLDER / "data.json")
    quiet = [r for r in rows if r["strategy"] in ("one", "ring") or r["link_bits"] < 1e9]
    off = sorted(abs(e) for e in compare.errors(quiet, terms.terms))
    assert off[len(off) // 2] < 0.10
    ring = [r for r in rows if r["strategy"] in ("one", "ring")]
    assert max(abs(e) for e in compare.errors(ring, terms.terms)) < 0.20


def test_what_no_formula_had_seen_is_predicted() -> None:
    """The goal for configurations kept out of every fit: 10% at the median, 20% at worst."""
    rows = compare.read(FOLDER / "blind.json")
    off = [abs(e) for e in compare.errors(rows, compare.planned)]
    assert len(off) == 44
    assert statistics.median(off) < 0.10 and max(off) < 0.20
