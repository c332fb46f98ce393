"""The kinds of metrics: named ones, torchmetrics objects and plain functions."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torchmetrics
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassConfusionMatrix,
    MulticlassExactMatch,
    MulticlassStatScores,
)

from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.losses import Meaning, examples

log = logging.getLogger("stratagem")

#: these take the largest value of a row, so that logits and probabilities give the same
_BY_RANK = (MulticlassConfusionMatrix, MulticlassExactMatch, MulticlassStatScores)

#: makes a metric for a number of classes (0: none) and the loss's view of the outputs
Maker = Callable[[int, Meaning], torchmetrics.Metric]


def accuracy(classes: int, meaning: Meaning) -> torchmetrics.Metric:
    """Return the metric for the name "accuracy"."""
    if classes > 1:
        return ClassAccuracy(classes, meaning.ignored)
    return (LogitAccuracy if meaning.logits else BinaryAccuracy)(validate_args=False)


class ClassAccuracy(torchmetrics.Metric):
    """Accuracy of outputs with a value for each class.

    Targets are class numbers, or probabilities of which the largest counts; batches may differ in
    this. torchmetrics' MulticlassAccuracy does not take probabilities as targets, and to ignore
    targets it waits for the GPU.
    """

    higher_is_better = True
    is_differentiable = False
    full_state_update = False
    right: torch.Tensor
    counted: torch.Tensor

    def __init__(self, classes: int, ignored: int | None) -> None:
        super().__init__()
        self.num_classes, self.ignored = classes, ignored
        self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("counted", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        found, ignored = output.argmax(1), self.ignored
        if target.shape == output.shape:
            target, ignored = target.argmax(1), None
        if found.shape != target.shape:
            raise UsageError(
                '"accuracy" by name looks for the largest value along the second dimension of the '
                f"outputs, and of {tuple(output.shape)} that does not fit targets of shape "
                f"{tuple(target.shape)}; give a function that compares them: lambda output, "
                "target: (output.argmax(-1) == target).float(), say."
            )
        if ignored is None:  # not +=, since setting an attribute of a module is slow
            self.right.add_((found == target).sum())
            self.counted.add_(target.numel())
        else:
            counts = target != ignored
            self.right.add_(((found == target) & counts).sum())
            self.counted.add_(counts.sum())

    def compute(self) -> torch.Tensor:
        return self.right / self.counted


class LogitAccuracy(BinaryAccuracy):
    """Binary accuracy of logits.

    torchmetrics takes values for probabilities if all of an update are within 0 and 1, which may
    happen by chance in a share of few rows.
    """

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        super().update((preds > 0).long(), target)


#: makers, which are called when the first output shows the number of classes
_NAMED: dict[str, Maker] = {
    "accuracy": accuracy,
    "acc": accuracy,
    "mae": lambda *_: torchmetrics.MeanAbsoluteError(),
    "mse": lambda *_: torchmetrics.MeanSquaredError(),
}


class FunctionMetric(torchmetrics.MeanMetric):
    """A plain function of (output, target), averaged over examples."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(nan_strategy="disable")
        self.function = function

    def update(self, output: Any, target: Any) -> None:  # type: ignore[override]
        value = torch.as_tensor(self.function(output, target)).detach().float()
        # One value per example, since MeanMetric ignores weights with nan_strategy="disable".
        super().update(value if value.dim() else value.expand(max(1, examples(output, target))))


@torch.no_grad()
def counted(name: str, metric: FunctionMetric, output: Any, target: Any) -> torch.Tensor | None:
    """Return the number of values that a function gives, and their mean; None if it fails."""
    fresh = FunctionMetric(copy.copy(metric.function)).to(metric.device)
    try:
        fresh.update(output, target)
    except Exception as error:
        log.warning(
            'the metric "%s" cannot be tried on a part of a batch (%s: %s), so its number is taken '
            "for the mean over the rows, unchecked.",
            name,
            type(error).__name__,
            error,
        )
        return None
    return torch.stack([torch.as_tensor(fresh.weight), fresh.compute()]).double()


def check_function(
    name: str, whole: torch.Tensor, parts: Sequence[torch.Tensor], rounding: float
) -> None:
    """Raise if the function's values for parts of the rows do not add up to its value for all."""
    number = sum(part[0] for part in parts)
    mean = sum(part[0] * part[1] for part in parts if part[0]) / number
    together = torch.stack([torch.as_tensor(number), torch.as_tensor(mean)]).to(whole)
    if not torch.allclose(whole, together, rtol=rounding, atol=1e-6, equal_nan=True):
        raise NotDistributable(
            f'the metric "{name}" returns one number that is not the mean over the rows, or '
            "several that are not those of its rows, so the shares of replicas do not add up to "
            "the value of one device; return a value for each row, give a torchmetrics metric that "
            "counts what is needed (such as MeanSquaredError(squared=False)), or use one device."
        )


def asking(metrics: Iterable[torchmetrics.Metric]) -> list[torchmetrics.Metric]:
    """Return those of torchmetrics' own metrics that guess whether outputs are logits."""
    parts = {id(part): part for metric in metrics for part in metric.modules()}
    return [
        part
        for part in parts.values()
        if isinstance(part, torchmetrics.Metric)
        and type(part).__module__.startswith("torchmetrics.classification.")
        and not isinstance(part, _BY_RANK)
    ]


@contextmanager
def from_logits(parts: Sequence[torchmetrics.Metric]) -> Iterator[None]:
    """Turn logits into probabilities in every update of these metrics."""
    plain = [part.update for part in parts]

    def update(part: Any, whole: Callable[..., Any], preds: Any, *args: Any, **named: Any) -> None:
        if preds.is_floating_point():
            several = type(part).__name__.startswith("Multiclass")
            preds = preds.softmax(1) if several else preds.sigmoid()
        whole(preds, *args, **named)

    try:
        for part, whole in zip(parts, plain, strict=True):
            vars(part)["update"] = partial(update, part, whole)
        yield
    finally:
        for part, whole in zip(parts, plain, strict=True):
            vars(part)["update"] = whole


def listed(metrics: Any) -> list[tuple[str, torchmetrics.Metric | Maker]]:
    """Return the user's metrics by name; those that are made later as their makers."""
    if isinstance(metrics, Mapping):
        given = [(str(name), metric) for name, metric in metrics.items()]
    elif isinstance(metrics, Sequence) and not isinstance(metrics, str):
        given = [("", metric) for metric in metrics]
    else:
        given = [("", metrics)]
    pairs = [pair for name, metric in given for pair in _members(name, metric)]
    return [(name, _NAMED[m] if isinstance(m, str) else m) for name, m in pairs]


def _members(name: str, metric: Any) -> list[tuple[str, Any]]:
    """Return a metric with its name, or the members of a collection with theirs."""
    if not isinstance(metric, torchmetrics.MetricCollection):
        return [(name or _name(metric), _checked(metric))]
    # Copy the states: members of a used collection share one, which would count twice.
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
    if isinstance(metric, type):
        raise UsageError(
            f"the metric {metric.__name__} is a class; give an instance of it: "
            f"{metric.__name__}(...)."
        )
    if callable(metric):
        return FunctionMetric(metric)
    raise UsageError(f"{metric!r} is no metric; give a name, a torchmetrics metric or a function.")


def _name(metric: Any) -> str:
    if isinstance(metric, str):
        return metric
    name = getattr(metric, "__name__", type(metric).__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
