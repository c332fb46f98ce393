"""Metrics of the user's own: found, and tried whether replicas can add up what they count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.data.shard import rows
from stratagem.errors import NotDistributable


def user_metrics(model: Any) -> list[Any]:
    """Every metric object of the model, those given to `compile` too, built or not."""
    found: list[Any] = []
    waiting = [*model.metrics]
    compiled = getattr(model, "_compile_metrics", None)
    if compiled is not None:
        waiting += keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
    for each in waiting:
        if isinstance(each, keras.Metric) and type(each).__name__ != "CompileMetrics":
            found.append(each)
        elif hasattr(each, "metrics"):
            found += each.metrics
    return list({id(each): each for each in found}.values())


def watch(model: Any) -> None:
    """Have each metric of a class of the user's own tried on the first share that it sees."""
    for metric in user_metrics(model):
        if not type(metric).__module__.startswith("keras."):
            metric.__dict__["update_state"] = _trying(metric)


def _trying(metric: Any) -> Callable[..., Any]:
    def plain(*args: Any, **kwargs: Any) -> Any:
        return type(metric).update_state(metric, *args, **kwargs)  # as it is in a step, see Mean

    def update_state(*args: Any, **kwargs: Any) -> Any:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim()]
        count = min(map(len, tensors), default=0)
        result = plain(*args, **kwargs)
        if count >= 2 and all(len(v) == count for v in tensors):
            del metric.__dict__["update_state"]
            _try(metric, plain, args, kwargs, count)
        return result

    return update_state


@torch.no_grad()
def _try(metric: Any, plain: Any, args: Any, kwargs: Any, count: int) -> None:
    """Counts of two halves must add up to the count of the whole."""
    if not metric.variables:
        raise NotDistributable(
            f"metric {metric.name!r} keeps what it counts outside of its variables, where the "
            "replicas' counts cannot be added up; use self.add_variable in it."
        )
    now = [v.value.clone() for v in metric.variables]

    def counted(start: int, end: int) -> list[Tensor]:
        metric.reset_state()
        plain(*(_cut(a, start, end) for a in args),
              **{key: _cut(value, start, end) for key, value in kwargs.items()})  # fmt: skip
        return [v.value.double().clone() for v in metric.variables]

    whole, first, second = counted(0, count), counted(0, count // 2), counted(count // 2, count)
    metric.reset_state()
    empty = [v.value.double().clone() for v in metric.variables]
    for variable, before in zip(metric.variables, now, strict=True):
        variable.value.copy_(before)
    for all_rows, a, b, none in zip(whole, first, second, empty, strict=True):
        if not torch.allclose(all_rows, a + b - none, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise NotDistributable(
                f"metric {metric.name!r} does not add up: what it counts on two halves of a batch "
                "is not what it counts on the whole, so replicas cannot count their shares; keep "
                "sums in its variables, or compute it in a callback."
            )


def _cut(value: Any, start: int, end: int) -> Any:
    return rows(value, start, end) if isinstance(value, Tensor) and value.dim() else value
