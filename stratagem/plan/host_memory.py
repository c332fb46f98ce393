"""The memory of this machine, and how much of it is free.

Linux overcommits memory and kills processes that use it, so the planner counts it beforehand.
"""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.optim import Optimizer

_LIMITS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available(root: Path = Path("/")) -> int | None:
    """Return the bytes that are free or can be freed; None if unknown."""
    found = [left for limit, used in _LIMITS if (left := _left(root / limit, root / used))]
    return min([*found, *_of_kernel(root, "MemAvailable:")], default=None)


def all_memory(root: Path = Path("/")) -> float | None:
    """Return the bytes of this machine, or of this process' control group; None if unknown."""
    found = []
    for limit, _ in _LIMITS:
        try:
            found += [int(text)] if (text := (root / limit).read_text().strip()) != "max" else []
        except OSError:
            continue
    return min(map(float, [*found, *_of_kernel(root, "MemTotal:")]), default=None)


def _of_kernel(root: Path, name: str) -> list[int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) << 10 for line in lines if line.startswith(name)]


def _left(limit: Path, used: Path) -> int | None:
    """Return the bytes that a control group may still take; None where it has no limit."""
    try:
        most = limit.read_text().strip()
        return None if most == "max" else max(0, int(most) - int(used.read_text()))
    except (OSError, ValueError):
        return None


def least(module: nn.Module, optimizer: Optimizer | None) -> int:
    """The least bytes of gradients and optimizer state, as far as they are known beforehand."""
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    group = optimizer.param_groups[0] if optimizer is not None else {}
    states = ("betas" in group) * 2 or bool(group.get("momentum"))
    known = bool(optimizer.state) if optimizer is not None else True
    return trained * (1 + (0 if known else int(states)))
