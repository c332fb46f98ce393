"""How many processors this process may use: by its mask, and by its container's limit."""

from __future__ import annotations

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def cores(groups: Path = _GROUPS) -> int:
    """At least one. `groups` is where the kernel shows the limits of control groups."""
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    return max(1, min(usable, _limit(groups) or usable))


def _limit(groups: Path) -> int | None:
    """Whole processors that a container's share of time amounts to: docker's --cpus, Kubernetes'
    limits. None if there is no limit."""
    words = _words(groups / "cpu.max") or [
        *_words(groups / "cpu" / "cpu.cfs_quota_us"), *_words(groups / "cpu" / "cpu.cfs_period_us"),
    ]  # fmt: skip
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        return None  # "max", -1, or not Linux
    return max(1, int(words[0]) // int(words[1]))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
