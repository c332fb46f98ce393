"""Freed memory stays with a process that trains, and goes back to the system when it is told so."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratagem.strategies.strategy import Strategy
from stratagem.training.settings import Settings
from stratagem.wire import freed_memory
from stratagem.wire.freed_memory import _CHOSEN

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

BLOCKS, SIZE = 200, 200_000
PAGES = BLOCKS * SIZE // resource.getpagesize()


def faults(many: int = BLOCKS) -> int:
    """The page faults of a step that takes and frees many blocks, after two for warming up."""
    found = 0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [b"x" * SIZE for _ in range(many)]
        blocks.clear()
        found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return found


def resident() -> int:
    """The pages of this process that are in memory."""
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1])


SCRIPT = """
import stratagem as sg
from tests.wire.test_freed_memory import BLOCKS, faults, resident

if __name__ == "__main__":
    first = sg.MirroredStrategy(["cpu:0"])
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        found = strategy.run(faults)
        before = resident()
    after = resident()
    found.append(faults())
    first.close()
    # beside the memory that lies free below the end of the heap, more than glibc's own 64 MiB
    print(*found, before - after, faults(4 * BLOCKS))
"""


@pytest.mark.timeout(120)
def test_replicas_keep_what_they_freed_until_they_are_closed() -> None:
    """Both replicas, and this process until its last strategy is closed."""
    environ = {name: value for name, value in os.environ.items() if name not in _CHOSEN}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        env={**environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        text=True,
        timeout=100,
        check=True,
    )
    *found, returned, closed = (int(word) for word in done.stdout.split())
    assert len(found) == 3
    assert all(n < PAGES / 20 for n in found), (found, PAGES)
    assert returned > PAGES / 2 and closed > PAGES / 5


class Library:
    """Notes what is set of glibc."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def mallopt(self, name: int, value: int) -> None:
        self.told.append((name, value))


@pytest.mark.parametrize("chosen", [None, *_CHOSEN])
def test_a_setting_of_the_users_stays(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one, too."""
    library = Library()
    monkeypatch.setattr(freed_memory, "_glibc", lambda: library)
    for name in _CHOSEN:
        monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv(chosen, "")
    freed_memory.keep_freed_memory()
    assert library.told == ([] if chosen else [(-1, -1), (-3, 32 << 20)])


@pytest.mark.parametrize("device", ["cpu:0", "cuda:0"])
def test_only_who_trains_on_the_cpu_keeps_any(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(freed_memory, "_set", told.append)
    group: Any = SimpleNamespace(devices=(device,), place=None, close=lambda: None)
    made = Strategy(group, Settings())
    monkeypatch.setattr(freed_memory, "_users", freed_memory._users & {made})  # no other test's
    made.close()
    assert told == ([freed_memory._ANY, freed_memory._SOME] if device == "cpu:0" else [])
