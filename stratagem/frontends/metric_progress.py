"""What a metric has counted so far, as plain tensors that another one goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stratagem.errors import NotDistributable

if TYPE_CHECKING:
    import torchmetrics


def counts_of(metric: torchmetrics.Metric) -> dict[str, Any]:
    """Return a copy of a metric's own states."""
    states = {name: _copied(value) for name, value in metric.metric_state.items()}
    return {"updates": int(metric._update_count), "states": states}


def own_counts(metric: torchmetrics.Metric) -> dict[str, Any]:
    """Return a metric's own states themselves, which the metric is to give up for others."""
    return {"updates": int(metric._update_count), "states": dict(metric.metric_state)}


def take_counts(metric: torchmetrics.Metric, saved: Sequence[dict[str, Any]]) -> None:
    """Have a metric go on from the states of one, or from those of several as if it were one."""
    metric._update_count = sum(int(each["updates"]) for each in saved)
    for name in metric._defaults:
        values = [_on(each["states"][name], metric.device) for each in saved]
        if len(values) == 1:
            joined = values[0]
        elif isinstance(values[0], list):
            joined = [tensor for value in values for tensor in value]
        else:
            joined = _reduced(metric, name, values)
        setattr(metric, name, joined)


def _reduced(metric: torchmetrics.Metric, name: str, values: list[Tensor]) -> Tensor:
    reduce: Any = metric._reductions[name]
    if reduce is None:
        raise NotDistributable(
            f"the metric {type(metric).__name__} has counted on {len(values)} replicas, and its "
            f"state {name!r} does not say how to join them; go on with {len(values)} replicas, or "
            "from the end of an epoch."
        )
    joined: Tensor = reduce(torch.stack(values))
    return joined


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return [_copied(each) for each in value]


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else [each.to(device) for each in value]


def refuse_means(metrics: Sequence[torchmetrics.Metric]) -> None:
    """Refuse states that are averaged over replicas."""
    for metric in metrics:
        kinds = [getattr(each, "__name__", "") for each in metric._reductions.values() if each]
        if any("mean" in kind for kind in kinds):
            raise NotDistributable(
                f"the metric {type(metric).__name__} averages over replicas, and where they may "
                "leave and join its counts must add up; give one that sums, or leave elastic out."
            )
