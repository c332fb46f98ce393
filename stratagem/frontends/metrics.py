"""Metrics are torchmetrics, joined over replicas when they are read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stratagem.errors import UsageError
from stratagem.replicas.pool import ZygoteProcess
from stratagem.strategies.replica import Replica
from stratagem.wire.tree import gather_tree

if TYPE_CHECKING:
    import torchmetrics

    from stratagem.frontends.metric_kinds import Maker

class MetricSet:
    """The metrics of one model, by name."""

    def __init__(self, metrics: Any) -> None:
        #: whether anything has been taken in since the last reset
        self.counted = False
        self._makers: dict[str, Maker] = {}
        self._metrics: dict[str, torchmetrics.Metric] = {}
        for name, metric in _named(metrics):
            if name in self._makers or name in self._metrics:
                raise UsageError(f'two metrics are called "{name}"; give them names: a dict.')
            kept: dict[str, Any] = (
                self._metrics if isinstance(metric, nn.Module) else self._makers
            )
            kept[name] = metric

    @property
    def names(self) -> list[str]:
        return [*self._metrics, *self._makers]

    @property
    def own(self) -> bool:
        """Whether one of them is not torchmetrics' own."""
        kinds = (type(metric).__module__ for metric in self._metrics.values())
        return not all(kind.startswith("torchmetrics.") for kind in kinds)

    def __bool__(self) -> bool:
        return bool(self._makers or self._metrics)

    def update(self, output: Any, target: Any) -> None:
        """Take one share in."""
        if self._makers:
            self._make(_classes(output, target), output.device)
        self.counted = True
        with torch.no_grad():
            for metric in self._metrics.values():
                metric.update(_detached(output), target)

    def _make(self, classes: int, device: torch.device) -> None:
        for name, maker in self._makers.items():
            self._metrics[name] = maker(classes).to(device)
        self._makers = {}

    def compute(self, replica: Replica) -> dict[str, float]:
        """Values over all examples of all replicas. Collective."""
        if replica.count > 1:
            self._agree(replica)
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            values.update(_flat(name, _joined(metric, replica)))
        return values

    def state(self) -> dict[str, Any]:
        """What was counted here, for `merged` elsewhere."""
        taken: list[Tensor] = []
        for metric in self._metrics.values():
            _compute(metric, lambda t: (taken.append(t.clone()), [t])[1])  # type: ignore[func-returns-value]
        return {"classes": self._known_classes(), "tensors": taken}

    def merged(self, states: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Values over all that the states have counted."""
        if not states:
            return dict.fromkeys(self.names, math.nan)
        if self._makers:
            self._make(max(int(state["classes"]) for state in states), torch.device("cpu"))
        rows = zip(*(state["tensors"] for state in states), strict=True)
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            if not metric.update_called:  # this one counted nothing itself
                metric._update_count = 1
            device = metric.device
            values.update(_flat(name, _compute(
                metric, lambda t: [part.to(device) for part in next(rows)]  # noqa: B023
            )))  # fmt: skip
        return values

    def _known_classes(self) -> int:
        known = next((m for m in self._metrics.values() if hasattr(m, "num_classes")), None)
        return 0 if known is None else int(getattr(known, "num_classes"))  # noqa: B009

    def _agree(self, replica: Replica) -> None:
        """A replica without a single example learns from the others what it would have made."""
        mine = -1 if self._makers else self._known_classes()
        told = max(gather_tree(replica.collective, mine)) if self._has_lazy(replica) else -1
        if self._makers and told >= 0:
            self._make(told, replica.device)

    def _has_lazy(self, replica: Replica) -> bool:
        return any(gather_tree(replica.collective, bool(self._makers)))

    def reset(self) -> None:
        self.counted = False
        for metric in self._metrics.values():
            metric.reset()

    def to(self, device: torch.device) -> None:
        for metric in self._metrics.values():
            metric.to(device)


def _joined(metric: torchmetrics.Metric, replica: Replica) -> Any:
    return _compute(metric, replica.all_gather if replica.count > 1 else None)


def _compute(metric: torchmetrics.Metric, gather: Callable[[Tensor], list[Tensor]] | None) -> Any:
    """The metric's value over whatever `gather` brings for each tensor of its state."""
    before = metric.dist_sync_fn, metric.distributed_available_fn
    if gather is not None:
        metric._computed = None
        metric.dist_sync_fn = lambda t, group=None: gather(t)
        metric.distributed_available_fn = lambda: True
    try:
        with warnings.catch_warnings():
            # A replica whose every share was empty computes before any update: that is no error.
            warnings.filterwarnings("ignore", message=".*was called before the ``update``.*")
            return metric.compute()
    finally:
        metric.dist_sync_fn, metric.distributed_available_fn = before


def _flat(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(part) for key, part in value.items()}
    if isinstance(value, Tensor) and value.numel() > 1:
        return {f"{name}_{i}": float(part) for i, part in enumerate(value.reshape(-1))}
    return {name: float(value)}


def _detached(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach()
    if isinstance(tree, list | tuple):
        return type(tree)(_detached(item) for item in tree)
    if isinstance(tree, dict):
        return {key: _detached(item) for key, item in tree.items()}
    return tree


def _classes(output: Any, target: Any) -> int:
    if isinstance(output, Tensor) and isinstance(target, Tensor) and output.dim() > target.dim():
        return int(output.shape[1])
    return 0


def _named(metrics: Any) -> list[tuple[str, Any]]:
    """Metrics with their names, or what makes one. torchmetrics takes seconds to import: only who
    has metrics waits for it, and replicas that will need it import it meanwhile."""
    if metrics is None:
        return []
    ZygoteProcess.prepare("torchmetrics")
    from stratagem.frontends.metric_kinds import listed

    return listed(metrics)
