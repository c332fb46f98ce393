"""Attributes in which a metric of somebody's own counts beside its states.

torchmetrics joins states, and nothing else: a number that `update` adds to by itself
(`self.batches += 1`) stays each replica's own, and a value computed from it is not that of one
device. It may as well be a note to oneself; so it is said, not refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torchmetrics
from torch import Tensor, nn

log = logging.getLogger("stratagem")

_TORCHMETRICS_OWN = frozenset(vars(torchmetrics.MeanMetric()))


def counters(metric: nn.Module) -> dict[str, Any]:
    """What may count: by attribute, something that is another once it has counted."""
    states = getattr(metric, "_defaults", {})
    return {
        name: _look(value) for name, value in vars(metric).items()
        if name not in _TORCHMETRICS_OWN and name not in states
        and isinstance(value, int | float | Tensor | list | dict | set)
    }  # fmt: skip


def _look(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    return value if isinstance(value, int | float) else len(value)


def warn(metric: nn.Module, before: Mapping[str, Any]) -> None:
    """After an update: of those that it has changed."""
    now = counters(metric)
    changed = [name for name in before if now.get(name) != before[name]]
    if changed:
        name = changed[0]
        log.warning(
            'the metric %s changes self.%s in update, which is no state: each replica has its own, '
            'of its own examples. If the value depends on it, declare it: self.add_state("%s", '
            'torch.tensor(0), dist_reduce_fx="sum").', type(metric).__name__, name, name,
        )  # fmt: skip
