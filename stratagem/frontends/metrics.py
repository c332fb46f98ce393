"""Metrics are torchmetrics objects, whose states are joined over replicas when they are read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stratagem.data.shares import map_parts
from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.epoch_sums import (
    counts_of,
    own_counts,
    refuse_means,
    take_counts,
)
from stratagem.frontends.losses import Meaning
from stratagem.replicas.zygote import ZygoteProcess
from stratagem.training.replica import Replica, current_replica
from stratagem.wire.tree import gather_tree

if TYPE_CHECKING:
    import torchmetrics

    from stratagem.frontends.metric_kinds import Maker


class MetricSet:
    """The metrics of one model, by name."""

    def __init__(self, metrics: Any, meaning: Meaning = Meaning()) -> None:  # noqa: B008
        """`meaning`: how the loss interprets the outputs."""
        self.meaning = meaning
        #: whether there was an update since the last reset
        self.counted = False
        self._makers: dict[str, Maker] = {}
        self._metrics: dict[str, torchmetrics.Metric] = {}
        for name, metric in _with_names(metrics):
            if name in self._makers or name in self._metrics:
                raise UsageError(f'two metrics are called "{name}"; give them names: a dict.')
            kept: dict[str, Any] = self._metrics if isinstance(metric, nn.Module) else self._makers
            kept[name] = metric
        #: functions that failed on a few rows, so that they cannot be checked
        self._untried: list[str] = []
        #: metrics that guess from the values of an update whether they are logits
        self._guessing: list[torchmetrics.Metric] = []
        self._find_guessing()

    @property
    def names(self) -> list[str]:
        return [*self._metrics, *self._makers]

    @property
    def own(self) -> bool:
        """Return whether one of the metrics runs user code."""
        parts = (part for metric in self._metrics.values() for part in metric.modules())
        return any(_runs_own(type(part)) for part in parts)

    def __bool__(self) -> bool:
        return bool(self._makers or self._metrics)

    def rises(self, name: str) -> bool | None:
        """Return whether a higher value of a metric is better; None if unknown."""
        found = {each.lower(): metric for each, metric in self._metrics.items()}.get(name)
        return getattr(found, "higher_is_better", None)

    def _find_guessing(self) -> None:
        if self._metrics and self.meaning.logits is not False:
            from stratagem.frontends.metric_kinds import asking

            self._guessing = asking(self._metrics.values())

    def update(self, output: Any, target: Any, *, part: bool = False) -> None:
        """Update with these rows; `part`: other replicas have the rest of the batch."""
        if self._makers:
            _check_tensors(next(iter(self._makers)), output, target)
            self._make(_classes_in(output, target, self.meaning), output.device)
        if part and self._guessing and self.meaning.logits is None:
            raise _not_known(self._guessing[0])
        self.counted = True
        with torch.no_grad(), self._from_logits():
            for metric in self._metrics.values():
                metric.update(_detached(output), target)

    def _from_logits(self) -> AbstractContextManager[None]:
        if not self._guessing or not self.meaning.logits:
            return nullcontext()
        from stratagem.frontends.metric_kinds import from_logits

        return from_logits(self._guessing)

    @property
    def functions(self) -> dict[str, Any]:
        """Return the metrics that are plain functions and can be checked on a few rows."""
        functions = {name: each for name, each in self._metrics.items() if _is_function(each)}
        return {name: each for name, each in functions.items() if name not in self._untried}

    def try_functions(self, output: Any, target: Any) -> dict[str, Tensor]:
        """Return what each function counts for these rows, for `check_functions`."""
        found = {}
        for name, metric in self.functions.items():
            from stratagem.frontends.metric_kinds import counted

            values = counted(name, metric, _detached(output), target)
            if values is None:
                self._untried.append(name)
            else:
                found[name] = values
        return found

    def check_functions(
        self, whole: dict[str, Tensor], parts: list[dict[str, Tensor]], rounding: float
    ) -> None:
        """Raise if a function's values for parts of the rows do not add up to its value for all."""
        for name in self.functions:
            from stratagem.frontends.metric_kinds import check_function

            check_function(name, whole[name], [part[name] for part in parts], rounding)

    def _make(self, classes: int, device: torch.device) -> None:
        for name, maker in self._makers.items():
            self._metrics[name] = maker(classes, self.meaning).to(device)
        self._makers = {}
        self._find_guessing()

    def compute(self, replica: Replica) -> dict[str, float]:
        """Return the values over all examples of all replicas. Collective."""
        if replica.count > 1:
            return self.merged(gather_tree(replica.collective, self.progress()), replica.device)
        return _values(self._metrics)

    def merged(
        self,
        counted: Sequence[dict[str, Any]],
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> dict[str, float]:
        """Return the values for several replicas' `progress`, without changing the counts here."""
        if not counted:
            return dict.fromkeys(self.names, math.nan)
        chosen = [each for each in counted if each["any"]]
        if chosen and self._makers:
            self._make(max(int(each["classes"]) for each in chosen), device)
        parts = _counting(self._metrics)
        before = [(own_counts(part), part._to_sync) for part in parts]
        # not on copies, since a MinMaxMetric remembers the values that it computes
        try:
            for part, *each in zip(parts, *(each["counted"] for each in chosen), strict=True):
                part._computed, part._to_sync = None, False
                if each:
                    take_counts(part, each, last=True)
            return _values(self._metrics)
        finally:
            for part, (own, part._to_sync) in zip(parts, before, strict=True):
                take_counts(part, [own])

    def progress(self, *, copied: bool = True) -> dict[str, Any]:
        """Return this replica's counts in the current epoch, for `go_on` and `merged`."""
        counts = counts_of if copied else own_counts
        counted = [counts(part) for part in _counting(self._metrics)]
        return {"classes": _known_classes(self._metrics), "counted": counted, "any": self.counted}

    def go_on(self, saved: Sequence[dict[str, Any]], replica: Replica) -> None:
        """Load saved counts.

        Each replica loads its own, or the first one all counts if the number of replicas changed.
        """
        alike = len(saved) == replica.count
        chosen = [saved[replica.index]] if alike else [each for each in saved if each["any"]]
        self.counted = bool(chosen) and (alike or replica.leads) and chosen[0]["any"]
        if not self.counted:
            return
        if self._makers:
            self._make(max(int(each["classes"]) for each in chosen), replica.device)
        counts = zip(*(each["counted"] for each in chosen), strict=True)
        for part, each in zip(_counting(self._metrics), counts, strict=True):
            take_counts(part, each)

    def reset(self) -> None:
        self.counted = False
        for metric in self._metrics.values():
            metric.reset()

    def to(self, device: torch.device) -> None:
        """Move the metrics to a replica's device; raise if they cannot be joined over replicas."""
        for metric in self._metrics.values():
            if current_replica().count > 1:
                metric_parts(metric)
            metric.to(device)


def refuse_means_of(metrics: MetricSet) -> None:
    """Raise if a metric's states are averaged over replicas, since these do not add up."""
    refuse_means(_counting(metrics._metrics))


def _counting(metrics: Mapping[str, torchmetrics.Metric]) -> list[torchmetrics.Metric]:
    return [part for metric in metrics.values() for part in metric_parts(metric)]


def _known_classes(metrics: Mapping[str, torchmetrics.Metric]) -> int:
    known = next((m for m in metrics.values() if hasattr(m, "num_classes")), None)
    return 0 if known is None else int(getattr(known, "num_classes"))  # noqa: B009


def _classes_in(output: Any, target: Any, meaning: Meaning) -> int:
    """Return the number of classes; 0 if outputs and targets are compared elementwise."""
    several = output.dim() > 1 if meaning.classes else output.dim() > target.dim()
    return int(output.shape[1]) if several else 0


def _values(metrics: Mapping[str, torchmetrics.Metric]) -> dict[str, float]:
    with warnings.catch_warnings():
        # If no replica had a row, metrics compute before any update, which is no error here.
        warnings.filterwarnings("ignore", message=".*was called before the ``update``.*")
        values = [_flat(name, metric.compute()) for name, metric in metrics.items()]
    return {name: number for each in values for name, number in each.items()}


def metric_parts(metric: nn.Module) -> list[torchmetrics.Metric]:
    """Return the metric and the metrics inside it that have states.

    Raises if one of them has no states to join, or is a wrapper that is not exact over shares.
    """
    from torchmetrics import Metric
    from torchmetrics.wrappers.abstract import WrapperMetric

    counting = []
    for part in metric.modules():
        if isinstance(part, WrapperMetric):
            _check_wrapper(part)
        elif isinstance(part, Metric):
            _check_states(part)
            counting.append(part)
    return counting


def _check_states(metric: torchmetrics.Metric) -> None:
    """Raise if a metric counts in plain attributes, which are not joined over replicas."""
    from torchmetrics import Metric

    made_of = any(isinstance(part, Metric) for part in metric.modules() if part is not metric)
    if metric._defaults or made_of or not _runs_own(type(metric)):
        return
    kind = type(metric).__name__
    raise NotDistributable(
        f"the metric {kind} has no states that could be joined, so its value would be that of one "
        'replica\'s examples; declare what it counts: self.add_state("right", torch.tensor(0), '
        'dist_reduce_fx="sum"), or use one device.'
    )


def _check_wrapper(wrapper: torchmetrics.Metric) -> None:
    """Raise for wrappers with states or random numbers; others are as exact as what they wrap."""
    from torchmetrics.wrappers import BootStrapper

    borrowed = [getattr(part, "_defaults", None) for part in wrapper.children()]
    own = bool(wrapper._defaults) and not any(wrapper._defaults is each for each in borrowed)
    if not own and not isinstance(wrapper, BootStrapper):
        return
    raise NotDistributable(
        f"the metric {type(wrapper).__name__} looks at batches one by one, of which replicas have "
        "shares, so its value would not be that of one device; give the metric that it wraps, or "
        "use one device."
    )


def _flat(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        parts = [_flat(f"{name}_{key}", part) for key, part in value.items()]
        return {key: number for part in parts for key, number in part.items()}
    if isinstance(value, Tensor) and value.numel() > 1:
        return {f"{name}_{i}": float(part) for i, part in enumerate(value.reshape(-1))}
    try:
        return {name: float(value)}
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f'the metric "{name}" returns a {type(value).__name__} that is no number, so it cannot '
            "be logged; give one that returns a number, a tensor or a dict of them (AUROC, where "
            "ROC returns a curve), or compute it from the outputs of predict."
        ) from error


def _detached(tree: Any) -> Any:
    return tree.detach() if isinstance(tree, Tensor) else map_parts(_detached, tree)


def _check_tensors(name: str, output: Any, target: Any) -> None:
    """Raise unless outputs and targets are tensors, which metrics by name compare."""
    if isinstance(output, Tensor) and isinstance(target, Tensor):
        return
    what, odd = ("targets", target) if isinstance(output, Tensor) else ("outputs", output)
    told = "there are no targets" if odd is None else f"the {what} are a {type(odd).__name__}"
    raise UsageError(
        f'the metric "{name}" compares one tensor of outputs with one of targets, and {told}; give '
        "a function that picks what is compared, {"
        f'"{name}": lambda output, target: (output[0].argmax(1) == target).float()'
        "}, say, or a torchmetrics metric of your own that does."
    )


def _not_known(metric: nn.Module) -> NotDistributable:
    return NotDistributable(
        f"the metric {type(metric).__name__} takes outputs for probabilities where all of a batch "
        "are within 0 and 1, else for logits; a replica sees a share of the batch, and this loss "
        "does not tell. Say it: compile(..., from_logits=True) or from_logits=False."
    )


def _is_function(metric: nn.Module) -> bool:
    return type(metric).__name__ == "FunctionMetric"


def _runs_own(kind: type[Any]) -> bool:
    """Return whether a metric class runs user code, not only torchmetrics' or ours."""
    ours = ("torchmetrics.", "torch.", "stratagem.")
    return not kind.__module__.startswith(ours) or kind.__name__ == "FunctionMetric"


def _with_names(metrics: Any) -> list[tuple[str, Any]]:
    """Return metrics, or their makers, by name.

    Importing torchmetrics takes seconds, so only a model with metrics imports it, and followers
    import it at the same time.
    """
    if metrics is None:
        return []
    ZygoteProcess.prepare("torchmetrics")
    from stratagem.frontends.metric_kinds import listed

    return listed(metrics)
