"""Shared memory that our own processes have left, and nobody else's.

A segment of ours has no name on Linux: it lasts as long as a process maps it. So what can be left
is a process that outlives the tests and holds one, or a file that is named like a segment. Other
programs put locks and files of their own into /dev/shm at any time; they are none of our business.
"""

from __future__ import annotations

import os
from pathlib import Path

#: every process that tests start inherits it: the process that all of them descend from
MARK = "STRATAGEM_TESTS_OF"
NAME = "stratagem"


def mark_our_processes() -> None:
    """In the first process of a run; those that it starts find the mark, and keep it."""
    os.environ.setdefault(MARK, str(os.getpid()))


def in_shared_memory() -> set[str]:
    """Files named as ours, and segments of processes of ours that have lost who started them."""
    shared = Path("/dev/shm")
    names = {each.name for each in shared.iterdir()} if shared.is_dir() else set()
    return {name for name in names if name.startswith(NAME)} | _held_by_orphans()


def _held_by_orphans() -> set[str]:
    mark = f"{MARK}={os.environ.get(MARK)}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                ours = mark in (entry / "environ").read_bytes().split(b"\0")
                held = ours and f"/memfd:{NAME}" in (entry / "maps").read_text()
            except OSError:  # it has ended, or is another user's
                continue
            if held and not _descends(int(entry.name), int(os.environ[MARK])):
                found.add(f"a segment of process {entry.name}")
    return found


def _descends(pid: int, ancestor: int) -> bool:
    while pid not in (0, ancestor):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True  # it has ended meanwhile, and its children are to be looked at anew
        pid = int(stat.rpartition(")")[2].split()[1])
    return pid == ancestor
