"""Freed memory stays with a process that trains, and goes back to the system when it is told so."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

BLOCKS, SIZE, PAGE = 200, 200_000, 4096
PAGES = BLOCKS * SIZE // PAGE


def faults() -> int:
    """The page faults of a step that takes and frees many blocks, after two for warming up."""
    found = 0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [b"x" * SIZE for _ in range(BLOCKS)]
        blocks.clear()
        found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return found


def resident() -> int:
    """The pages of this process that are in memory."""
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1])


SCRIPT = """
import stratagem as sg
from tests.wire.test_freed_memory import faults, resident

if __name__ == "__main__":
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        found = strategy.run(faults)
        before = resident()
    print(*found, before - resident())
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("chosen", [None, "GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_replicas_keep_what_they_freed_until_they_are_closed(chosen: str | None) -> None:
    """Both replicas; but a setting of the user's stays."""
    environ = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    if chosen is not None:
        environ[chosen] = "" if chosen == "GLIBC_TUNABLES" else "131072"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        env={**environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        text=True,
        timeout=50,
        check=True,
    )
    *found, returned = (int(word) for word in done.stdout.split())
    assert len(found) == 2
    assert all(n > PAGES / 5 if chosen else n < PAGES / 20 for n in found), (found, PAGES)
    assert chosen or returned > PAGES / 2
