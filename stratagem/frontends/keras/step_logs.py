"""The logs of custom steps: results of metrics, and numbers that are no metric's.

Each replica's metrics count its own rows; their global result is known when the counts have been
added up. So `Sources` notes which metric each log came from, whatever its name, and that metric is
read again then. Any other number is averaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch import Tensor

#: separates the keys of nested dicts
_INSIDE = "\x1f"


def has_own(model: Any, step: str) -> bool:
    """Whether the user's own code decides what this step returns."""
    names = (step, "compute_metrics", "get_metrics_result")
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in names)


def flat(logs: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested logs: a metric's result may be a dict, as that of all metrics of `compile`."""
    found: dict[str, Any] = {}
    for key, value in logs.items():
        inside = flat(value) if isinstance(value, dict) else None
        found |= (
            {key: value}
            if inside is None
            else {f"{key}{_INSIDE}{inner}": each for inner, each in inside.items()}
        )
    return found


def nested(logs: dict[str, Any]) -> dict[str, Any]:
    """Undo `flat`: Keras compares the outer keys with the names of the metrics."""
    found: dict[str, Any] = {}
    for path, value in logs.items():
        *outer, key = path.split(_INSIDE)
        place = found
        for each in outer:
            place = place.setdefault(each, {})
        place[key] = value
    return found


def number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


class Sources:
    """Knows which metric's result each log of one kind of step is."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._results: list[tuple[str, Any]] = []
        #: by log: the results that it may be; empty for a number that is no metric's
        self.known: dict[str, list[str]] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the results that metrics return during a step."""
        self._results = []
        metrics = self._metrics()
        before = [metric.__dict__.get("result") for metric in metrics]
        for place, metric in enumerate(metrics):
            metric.__dict__["result"] = self._noting(place, metric.result)
        try:
            yield
        finally:
            for metric, own in zip(metrics, before, strict=True):
                del metric.__dict__["result"]
                if own is not None:
                    metric.__dict__["result"] = own

    def _metrics(self) -> list[Any]:
        """Return all metrics, in an order that is the same on all replicas."""
        everything = (*self._model.metrics, *user_metrics(self._model))
        return list({id(metric): metric for metric in everything}.values())

    def _noting(self, place: int, plain: Callable[..., Any]) -> Callable[..., Any]:
        def result(*args: Any, **kwargs: Any) -> Any:
            found = plain(*args, **kwargs)
            if not args and not kwargs:  # with arguments it could not be read again
                self._results += flat({str(place): found}).items()
            return found

        return result

    def note(self, logs: dict[str, Any]) -> dict[str, float]:
        """Note a step's logs, before counts of other replicas are added to the metrics.

        A log that is the very object of a result comes from it. One that equals a result (`float`
        of it, say) is taken for it until they differ. Returns the values of all other logs and of
        those that are equal only.
        """
        numbers: dict[str, float] = {}
        for log, value in flat(logs).items():
            same = [
                source
                for source, result in self._results
                if result is value and isinstance(value, Tensor)
            ]
            if not same:
                numbers[log] = number(value)
                same = self._equal_to(numbers[log], self.known.get(log))
            self.known[log] = same
        self._results = []
        return numbers

    def _equal_to(self, value: float, known: list[str] | None) -> list[str]:
        """Return the results with this value among those that a log may be."""
        if known == []:
            return []
        same = [source for source, result in self._results if _equal(result, value)]
        return same if known is None else [source for source in known if source in same]

    def join(self, others: dict[str, list[str]]) -> None:
        """Join the knowledge of another worker."""
        for log, theirs in others.items():
            mine = self.known.get(log, theirs)
            self.known[log] = [source for source in mine if source in theirs]

    def read(self, logs: Any) -> dict[str, Any]:
        """Read the logs that are metrics from the metrics."""
        metrics, found = self._metrics(), {}
        for log in logs:
            if self.known.get(log):
                place = self.known[log][0].partition(_INSIDE)[0]
                found[log] = flat({place: metrics[int(place)].result()})[self.known[log][0]]
        return found


def _equal(result: Any, value: float) -> bool:
    if getattr(result, "shape", ()) != ():  # a number for each class, say
        return False
    found = number(result)
    return found == value or (math.isnan(found) and math.isnan(value))


# --- metrics -----------------------------------------------------------------------------------


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


class MetricStates:
    """The counts of the metrics of one copy of a model; `tracker`: with the loss."""

    def __init__(self, model: Any, *, tracker: bool) -> None:
        self._model = model
        self._apart = None if tracker else getattr(model, "_loss_tracker", None)
        #: by variable: its value after `reset_state`, which a custom metric may leave above 0
        self._bases: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Reset the metrics and note their values."""
        type(self._model).reset_metrics(self._model)
        variables = [v for metric in self._model.metrics for v in metric.variables]
        self._bases = {id(v): v.value.detach().clone() for v in variables}

    def hand_over(self) -> list[list[Tensor]]:
        """Return the counts by metric, and reset all."""
        counts = [
            [v.value.detach() - self._bases.get(id(v), torch.zeros_like(v.value)) for v in each]
            for each in self._variables()
        ]
        self.begin()
        return counts

    @torch.no_grad()
    def add(self, counts: list[list[Tensor]]) -> None:
        """Add the counts of another copy."""
        for variables, parts in zip(self._variables(), counts, strict=True):
            if parts:  # a metric that was never updated may have no variables yet
                for variable, part in zip(variables, parts, strict=True):
                    variable.value.add_(part.to(variable.value.device))

    def _variables(self) -> list[list[Any]]:
        return [metric.variables for metric in self._model.metrics if metric is not self._apart]


def restorer(variables: Callable[[], Iterable[Any]]) -> Callable[[], None]:
    """Copy the values of variables; returns a function that restores them, and zeroes new ones."""
    before = {id(v): (v, v.value.detach().clone()) for v in variables()}

    @torch.no_grad()
    def restore() -> None:
        for variable in variables():
            if id(variable) in before:
                variable.value.copy_(before[id(variable)][1])
            else:
                variable.value.zero_()

    return restore
