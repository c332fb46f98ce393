"""The running sums of an epoch: the loss, and the counts of metrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stratagem.errors import NotDistributable

if TYPE_CHECKING:
    import torchmetrics

log = logging.getLogger("stratagem")

#: so many tensors stay on the device until they are read
_KEEP = 256


class LossSum:
    """The mean loss over all examples so far; losses stay on the device until they are read."""

    def __init__(self) -> None:
        self.examples = self.count = 0
        #: the number, from 1 on, of the first loss that is not finite, as far as losses are read
        self.broken: int | None = None
        #: the part of each loss that this replica's rows made
        self.own = FirstBroken()
        self._sum = 0.0
        self._losses: list[Tensor] = []
        self._totals: list[int] = []

    def add(self, loss: Tensor | float, total: int) -> None:
        self.examples += total
        self.count += 1
        if not isinstance(loss, Tensor):
            self._sum += loss * total
            if self.broken is None and not math.isfinite(loss):
                self.broken = self.count
            return
        self._losses.append(loss.detach())
        self._totals.append(total)
        if len(self._losses) == _KEEP:
            self._fold()

    def _fold(self) -> None:
        if self._losses:
            losses = torch.stack(self._losses).double().cpu()
            self._sum += float(losses @ torch.tensor(self._totals, dtype=torch.float64))
            if self.broken is None and not math.isfinite(self._sum):
                bad = (~losses.isfinite()).nonzero().flatten().tolist()
                self.broken = self.count - len(losses) + bad[0] + 1 if bad else None
            self._losses.clear()
            self._totals.clear()

    def mean(self) -> float:
        self._fold()
        return self._sum / self.examples if self.examples else float("nan")

    def total(self) -> list[Any]:
        """Return the sum of losses times examples, and the number of examples."""
        self._fold()
        return [self._sum, self.examples]

    def state(self) -> dict[str, Any]:
        """Return the sums, for `load_state`."""
        losses = torch.stack(self._losses).cpu() if self._losses else None
        found = {"examples": self.examples, "sum": self._sum, "losses": losses}
        return found | {"totals": list(self._totals), "count": self.count, "broken": self.broken}

    def load_state(self, state: dict[str, Any], device: torch.device | None = None) -> None:
        """Continue from these sums; losses are not folded earlier, to get the same bits."""
        self.examples, self._sum = int(state["examples"]), float(state["sum"])
        self._losses = []
        if state["losses"] is not None:
            self._losses = list(state["losses"].to(device).unbind())
        self._totals = list(state["totals"])
        self.count, self.broken = int(state.get("count", 0)), state.get("broken")
        self.own = FirstBroken(self.count)


class FirstBroken:
    """Finds the first number that is not finite; tensors stay on the device until they are read."""

    def __init__(self, count: int = 0) -> None:
        """`count`: how many numbers came before."""
        self._count, self._first = count, 0
        self._waiting: list[Tensor | float] = []

    def add(self, value: Tensor | float) -> None:
        self._waiting.append(value)
        if len(self._waiting) == _KEEP:
            self.first()

    def first(self) -> int | None:
        """Return the number, from 1 on, of the first that is not finite, if there is one."""
        if not self._first:
            tensors = [each for each in self._waiting if isinstance(each, Tensor)]
            read = iter(torch.stack(tensors).tolist() if tensors else ())
            for i, each in enumerate(self._waiting, self._count + 1):
                if not math.isfinite(next(read) if isinstance(each, Tensor) else each):
                    self._first = i
                    break
        self._count += len(self._waiting)
        self._waiting.clear()
        return self._first or None


def warn_of_broken(value: float, epoch: int, step: int | None, owners: Sequence[str]) -> None:
    """Warn that the loss of a step (from 1 on) is not finite; `owners`: whose rows made it."""
    at = f"epoch {epoch + 1}" if step is None else f"step {step} of epoch {epoch + 1}"
    rows = f", made by rows of {' and '.join(owners)}" if owners else ""
    log.warning(
        "the loss became %s in %s%s; training goes on: look at these rows, at the learning rate "
        "and at clipping, or end such a training by a callback.",
        value,
        at,
        rows,
    )


# --- the counts of a metric, as plain tensors -----------------------------------------------------


def counts_of(metric: torchmetrics.Metric) -> dict[str, Any]:
    """Return a copy of a metric's own states; a list that grows with every update is one tensor."""
    from torchmetrics.utilities.data import dim_zero_cat

    states = {}
    for name, value in metric.metric_state.items():
        grows = metric._reductions[name] is dim_zero_cat and isinstance(value, list) and value
        states[name] = _copied([dim_zero_cat(value)] if grows else value)
    return {"updates": int(metric._update_count), "states": states}


def own_counts(metric: torchmetrics.Metric) -> dict[str, Any]:
    """Return a metric's states without a copy; the metric must be given other states next."""
    return {"updates": int(metric._update_count), "states": dict(metric.metric_state)}


def take_counts(
    metric: torchmetrics.Metric, saved: Sequence[dict[str, Any]], *, last: bool = False
) -> None:
    """Load the states of one or several metrics, joined as if one metric had counted everything.

    `last`: the metric is only computed after this, so states without a reduction may be stacked
    into one tensor, as torchmetrics does.
    """
    metric._update_count = sum(int(each["updates"]) for each in saved)
    for name in metric._defaults:
        values = [_on(each["states"][name], metric.device) for each in saved]
        if len(values) == 1:
            joined = values[0]
        elif isinstance(values[0], list):
            joined = [tensor for value in values for tensor in value]
        else:
            joined = _reduced(metric, name, values, last)
        setattr(metric, name, joined)


def _reduced(metric: torchmetrics.Metric, name: str, values: list[Tensor], last: bool) -> Tensor:
    reduce: Any = metric._reductions[name]
    if reduce is None and last:
        return torch.stack(values)
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
    """Raise if a metric's states are averaged over replicas."""
    for metric in metrics:
        kinds = [getattr(each, "__name__", "") for each in metric._reductions.values() if each]
        if any("mean" in kind for kind in kinds):
            raise NotDistributable(
                f"the metric {type(metric).__name__} averages over replicas, and where they may "
                "leave and join its counts must add up; give one that sums, or leave elastic out."
            )
