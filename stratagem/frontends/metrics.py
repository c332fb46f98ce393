"""Metrics are torchmetrics: the common ones by name, joined over replicas when they are read."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torchmetrics
from torch import Tensor
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

from stratagem.errors import UsageError
from stratagem.frontends.losses import examples
from stratagem.strategies.replica import Replica
from stratagem.wire.tree import gather_tree

Maker = Callable[[int], torchmetrics.Metric]


def _accuracy(classes: int) -> torchmetrics.Metric:
    if classes > 1:
        return MulticlassAccuracy(classes, average="micro", validate_args=False)
    return BinaryAccuracy(validate_args=False)


#: made when the first output shows how many classes there are (0: none)
_NAMED: dict[str, Maker] = {
    "accuracy": _accuracy,
    "mae": lambda _: torchmetrics.MeanAbsoluteError(),
    "mse": lambda _: torchmetrics.MeanSquaredError(),
}


class FunctionMetric(torchmetrics.MeanMetric):
    """A plain function of (output, target), averaged over examples."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(nan_strategy="disable")
        self.function = function

    def update(self, output: Any, target: Any) -> None:  # type: ignore[override]
        value = torch.as_tensor(self.function(output, target)).detach().float()
        # As many values as examples: MeanMetric with nan_strategy="disable" ignores weights.
        super().update(value if value.dim() else value.expand(examples(output, target)))


class MetricSet:
    """The metrics of one model, by name."""

    def __init__(self, metrics: Any) -> None:
        #: whether anything has been taken in since the last reset
        self.counted = False
        self._makers: dict[str, Maker] = {}
        self._metrics: dict[str, torchmetrics.Metric] = {}
        for name, metric in _listed(metrics):
            if name in self._makers or name in self._metrics:
                raise UsageError(f'two metrics are called "{name}"; give them names: a dict.')
            if isinstance(metric, str):
                self._makers[name] = _NAMED[metric]
            else:
                self._metrics[name] = metric

    @property
    def names(self) -> list[str]:
        return [*self._metrics, *self._makers]

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


def _listed(metrics: Any) -> list[tuple[str, Any]]:
    if metrics is None:
        return []
    if isinstance(metrics, Mapping):
        given = [(str(name), metric) for name, metric in metrics.items()]
    elif isinstance(metrics, Sequence) and not isinstance(metrics, str):
        given = [("", metric) for metric in metrics]
    else:
        given = [("", metrics)]
    return [pair for name, metric in given for pair in _members(name, metric)]


def _members(name: str, metric: Any) -> list[tuple[str, Any]]:
    """A metric with its name; a collection as its members, with the names that it gives them."""
    if not isinstance(metric, torchmetrics.MetricCollection):
        return [(name or _name(metric), _checked(metric))]
    # With a state for each: those of a used collection share one, which would count twice.
    members = metric.items(keep_base=False, copy_state=True)
    return [(f"{name}_{own}" if name else own, member) for own, member in members]


def _checked(metric: Any) -> Any:
    if isinstance(metric, str):
        if metric not in _NAMED:
            raise UsageError(
                f'there is no metric "{metric}" here; the names are {", ".join(_NAMED)}, and any '
                "torchmetrics metric can be given itself."
            )
        return metric
    if isinstance(metric, torchmetrics.Metric):
        return metric
    if callable(metric):
        return FunctionMetric(metric)
    raise UsageError(f"{metric!r} is no metric; give a name, a torchmetrics metric or a function.")


def _name(metric: Any) -> str:
    if isinstance(metric, str):
        return metric
    name = getattr(metric, "__name__", type(metric).__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
