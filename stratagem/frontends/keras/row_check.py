"""Whether shares of a batch add up to what one device makes of it, for a step of a Keras model.

As for torch models (frontends/row_check.py), with the model's own step, whoever wrote it: a few
rows go through it as one batch and as two shares. What the model returned, the gradients of every
backward pass and what the metrics have counted must agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import torch
from torch import Tensor
from torch.nn import ParameterDict

from stratagem.data.shares import count_rows, rows, share
from stratagem.errors import NotDistributable, StratagemError
from stratagem.frontends.keras.dry_step import Bench, Run, Trial, modules_of
from stratagem.frontends.keras.step_logs import has_own, user_metrics
from stratagem.frontends.row_check import say_untried, sizes_of
from stratagem.frontends.row_trials import (
    LOSS,
    PassedTrials,
    Tolerance,
    agree,
    compare_gradients,
    compare_loss,
    compare_outputs,
    kinds_of,
    same_rows,
)
from stratagem.state.change_tracker import MODULE_ATTRIBUTES, AttributeTracker
from stratagem.training.prepare import to_device
from stratagem.training.replica import Replica

_VERBS = {"train_step": "train", "test_step": "evaluate", "predict_step": "predict"}


def check_step(
    model: Any, step: str, data: Any, replica: Replica, count: int, *, apart: bool = False
) -> bool:
    """Raise if `count` shares of this batch do not add up; `apart`: workers have whole batches, and
    their metrics must. Leaves no trace; returns False where it cannot be tried."""
    total = count_rows(data)
    first, second = (end - start for start, end in (share(total, count, i) for i in (0, 1)))
    sizes = list(sizes_of(first, second))
    if not all(sizes):
        return True  # a single row
    few = rows(data, 0, sum(sizes))
    few = few if replica.device.type == "cpu" else to_device(few, replica.device)
    batches = [few, rows(few, 0, sizes[0]), rows(few, sizes[0], sum(sizes))]
    forward = needs_forward(model, step)
    if forward and apart:
        return True
    try:
        bench = Bench(model, step)
        if not (forward and _same_rows(bench, replica, batches, sizes)):
            _Check(bench, replica, batches, sizes, apart).run()
    except StratagemError:
        raise
    except Exception as error:
        say_untried(error)
        return False
    return True


def _same_rows(bench: Bench, replica: Replica, batches: list[Any], sizes: list[int]) -> bool:
    """Whether both shares come out as in the whole: every row is missing in one of them."""
    whole, *parts = bench.forward(batches)
    tolerance = Tolerance.of(replica.device, (whole, *parts))
    return (
        not whole.added
        and all(len(part.outputs) == len(whole.outputs) > 0 for part in parts)
        and all(
            same_rows(a, b, start, sum(sizes), tolerance)
            for start, part in zip((0, sizes[0]), parts, strict=True)
            for a, b in zip(whole.outputs, part.outputs, strict=True)
        )
    )


@dataclass
class _Check:
    """Some rows as one batch and as shares."""

    bench: Bench
    replica: Replica
    #: the whole, and two shares
    batches: list[Any]
    sizes: list[int]
    apart: bool

    def run(self) -> None:
        bench, sizes, (few, *parts) = self.bench, self.sizes, self.batches
        together = parts if self.apart else [few]
        whole = bench.run(together)
        shares = [bench.run([p]) for p in parts] if self.apart else self._shares(parts, sizes)
        tolerance = Tolerance.of(self.replica.device, (whole, *shares))

        def compare(tolerance: Tolerance) -> None:
            if not self.apart:
                _compare(bench, whole, shares, sizes, tolerance)
            _compare_counts(bench.model, whole, shares, sizes, tolerance)

        agree(compare, tolerance, whole, lambda: bench.run(together, disturbed=True))

    def _shares(self, parts: list[Any], sizes: list[int]) -> list[Run]:
        (one, two), (first, second), run = parts, sizes, self.bench.run
        alone = Trial(self.replica, first, first + second)
        before = run([one], alone)
        both = Trial(self.replica, second, first + second, alone)
        after = run([two], both)
        if alone.noted:  # once more, now that it is known what the other was divided by
            before = run([one], Trial(self.replica, first, first + second, both))
        return [before, after]


# --- comparing ------------------------------------------------------------------------------------


def _compare(
    bench: Bench, whole: Run, shares: list[Run], sizes: list[int], tolerance: Tolerance
) -> None:
    if all(len(run.outputs) == len(whole.outputs) for run in shares):
        parts = [run.outputs for run in shares]
        compare_outputs(_VERBS[bench.step], whole.outputs, parts, tolerance, sizes)
    passes = [
        each
        for each in zip(whole.gradients, *(run.gradients for run in shares), strict=True)
        if len({len(gradients) for gradients in each}) == 1
    ]
    parts = [
        [gradient * run.weight for each in passes for gradient in each[place]]
        for place, run in enumerate(shares, 1)
    ]
    everything = [gradient for each in passes for gradient in each[0]]
    compare_gradients(_judge(bench.model), everything, parts, tolerance, sizes)


def _compare_counts(
    model: Any, whole: Run, shares: list[Run], sizes: list[int], tolerance: Tolerance
) -> None:
    moved = False
    for metric in user_metrics(model):
        if not metric.variables and metric in whole.given:
            raise NotDistributable(
                f"metric {metric.name!r} keeps what it counts outside of its variables, where the "
                "replicas' counts cannot be added up; use self.add_variable in it."
            )
        counts = [run.counts.get(id(metric), []) for run in (whole, *shares)]
        bases = whole.bases.get(id(metric), [])
        for base, one, *parts in zip(bases, *counts, strict=True):
            moved = moved or bool(one.any())
            rounding = tolerance.own * max(
                1.0, float(torch.stack([base.expand_as(one), *parts]).abs().max())
            )
            if not torch.allclose(one, sum(parts), tolerance.own, rounding, equal_nan=True):
                _refuse(model, metric, counts, sizes, tolerance)
    if not moved and whole.loss is not None and not whole.loss.shape:
        losses = [float(run.loss) for run in (whole, *shares)]
        _compare_losses(losses, [run.weight for run in shares], tolerance, sizes)


def _refuse(
    model: Any, metric: Any, counts: list[list[Tensor]], sizes: list[int], tolerance: Tolerance
) -> None:
    if metric is getattr(model, "_loss_tracker", None):
        above, below = ([float(count[i].sum()) for count in counts] for i in (0, 1))
        losses = [a / b for a, b in zip(above, below, strict=True)]
        weights = [each / sum(below[1:]) for each in below[1:]]
        _compare_losses(losses, weights, tolerance, sizes)
    raise NotDistributable(
        f"metric {metric.name!r} does not add up: what it counts on two shares of a batch is not "
        "what it counts on the whole, so replicas cannot count their shares; keep sums in its "
        "variables, give it values that depend on no other row, or compute it in a callback."
    )


def _compare_losses(
    losses: list[float], weights: list[float], tolerance: Tolerance, sizes: list[int]
) -> None:
    """The whole's and the shares', which are to be added up with these weights."""
    whole, *shares = losses
    parts = [loss * weight for loss, weight in zip(shares, weights, strict=True)]
    size = max(map(abs, parts))
    compare_loss(whole, sum(parts), size, tolerance, sizes)


def _judge(model: Any) -> str:
    """Whose code the loss is."""
    for name in ("train_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            return f"{LOSS} of {name}"
    return LOSS


# --- whose code judges the rows ------------------------------------------------------------------


def judged_by_own(model: Any, step: str) -> bool:
    """Whether code of the user's own makes a loss or a metric of the rows."""
    if step == "predict_step":
        return False
    if has_own(model, step) or type(model).compute_loss is not keras.Model.compute_loss:
        return True
    compiled = getattr(model, "_compile_metrics", None)
    given = [model.loss, *model.metrics]
    if compiled is not None:
        given += [compiled._user_metrics, compiled._user_weighted_metrics]
    return not all(map(_is_kerass, keras.tree.flatten(given)))


def _is_kerass(judge: Any) -> bool:
    """Whether a loss or a metric is Keras' own, also inside of what Keras wraps around it."""
    if judge is None or isinstance(judge, str):
        return True
    made = judge if callable(judge) and hasattr(judge, "__name__") else type(judge)
    inside = getattr(judge, "fn", None) or getattr(judge, "_fn", None)
    return str(getattr(made, "__module__", "")).startswith("keras.") and _is_kerass(inside)


# --- where everything is Keras' own ---------------------------------------------------------------

#: losses and metrics of Keras that give every row a value of its own
_BY_ROW = frozenset(
    f"{kind}_{name}"
    for kind, names in {
        "binary": ("crossentropy", "focal_crossentropy", "accuracy"),
        "categorical": ("crossentropy", "focal_crossentropy", "accuracy", "hinge"),
        "sparse_categorical": ("crossentropy", "accuracy"),
        "mean": ("squared_error", "absolute_error", "squared_logarithmic_error"),
        "mean_absolute": ("percentage_error",),
        "top_k": ("categorical_accuracy",),
        "sparse_top_k": ("categorical_accuracy",),
        "squared": ("hinge",),
        "kl": ("divergence",),
        "log": ("cosh",),
    }.items()
    for name in names
) | {"huber", "hinge", "poisson", "accuracy"}
_NAMED = frozenset({"accuracy", "acc", "crossentropy", "ce"})
#: layers that run the user's code
_HOLDS_OTHERS = frozenset({"Lambda", "TorchModuleWrapper"})


def needs_forward(model: Any, step: str) -> bool:
    """Whether the forward pass says it all: the step and the layers are Keras' own, whose gradients
    follow their outputs, and so are the losses, which give every row a value, and the metrics,
    which add up."""
    if step == "predict_step":
        return True
    compiled = getattr(model, "_compile_metrics", None)
    given = [model.loss]
    if compiled is not None:
        given += [compiled._user_metrics, compiled._user_weighted_metrics]
    return (
        model.compiled
        and not judged_by_own(model, step)
        and all(map(_is_by_row, keras.tree.flatten(given)))
        and all(each in (model._loss_tracker, compiled) for each in model.metrics)
        and all(map(_is_kerass_layer, model._flatten_layers()))
    )


def _is_by_row(judge: Any) -> bool:
    if judge is None or judge in _NAMED:
        return True
    if isinstance(judge, str):
        try:
            judge = keras.losses.get(judge)
        except ValueError:
            return False  # a metric's name
    made = getattr(judge, "fn", None) or getattr(judge, "_fn", None) or judge
    name, axis = getattr(made, "__name__", ""), getattr(judge, "axis", -1)
    return name in _BY_ROW and axis in (-1, None)


def _is_kerass_layer(layer: Any) -> bool:
    kind = type(layer)
    return kind.__module__.startswith("keras.") and kind.__name__ not in _HOLDS_OTHERS


# --- which batches have rows tried before their step ----------------------------------------------


class CheckSchedule:
    """The first batch of each kind of step; where the step, the loss or a metric is the user's own,
    the 2nd, 4th, 8th, ... too, and any with a kind of value that no tried row has had: a mask may
    come later. Elsewhere a call that finds everything as an earlier one need not try it again."""

    def __init__(self, model: Any, passed: PassedTrials | None = None) -> None:
        self.model, self._passed = model, passed or PassedTrials()
        self._seen: dict[str, int] = {}
        #: the number of the batch that is tried next; none where it is missing and one was seen
        self._next: dict[str, float] = {}
        #: by step: the kinds of values that tried rows have had
        self._tried: dict[str, set[Kind]] = {}

    def anew(self) -> CheckSchedule:
        """For the next call, which knows what was passed."""
        return CheckSchedule(self.model, self._passed)

    def before(self, step: str, data: Any, examples: int, check: Callable[[Any], bool]) -> None:
        """Asked before every step: have rows of this batch tried, the first of those that it is
        given, if it is its turn; `check` says whether they were."""
        seen = self._seen[step] = self._seen.get(step, 0) + 1
        turn = self._next.get(step, 1)
        if examples < 2 or turn == float("inf"):
            return
        if not judged_by_own(self.model, step):
            self._next[step] = float("inf")
            self._passed.unless_passed(step, partial(_key, self.model, data), lambda: check(data))
            return
        tried = self._tried.setdefault(step, set())
        found = _kinds(data) - tried
        if seen < turn and not found:
            return
        first = sorted({_first(data, kind) for kind in found})
        order = [*first, *(i for i in range(examples) if i not in first)] if found else None
        again = check(data if order is None else keras.tree.map_structure(_ordered(order), data))
        tried |= found
        if seen >= turn or not again:
            self._next[step] = 2 * seen if again else float("inf")


#: the number of a tensor in a batch, and what masks are made of: "zero", "negative" or "nan"
Kind = tuple[int, str]


def _kinds(data: Any) -> set[Kind]:
    """Which are in a batch; on a GPU it would be waited for, so nothing is known there."""
    found = set()
    for i, leaf in enumerate(keras.tree.flatten(data)):
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.numel() and leaf.device.type == "cpu":
            low = float(leaf.min()) if not leaf.is_complex() else 0.0
            if low != low or low < 0:
                found.add((i, "negative" if low < 0 else "nan"))
            if int(leaf.count_nonzero()) < leaf.numel():
                found.add((i, "zero"))
    return found


def _first(data: Any, kind: Kind) -> int:
    """The first row that has it."""
    leaf, (_, name) = keras.tree.flatten(data)[kind[0]], kind
    has = leaf == 0 if name == "zero" else leaf < 0 if name == "negative" else leaf != leaf
    return int(has.reshape(len(leaf), -1).any(1).int().argmax())


def _ordered(order: list[int]) -> Callable[[Any], Any]:
    return lambda leaf: leaf[order] if isinstance(leaf, Tensor) and leaf.dim() else leaf


def _key(model: Any, data: Any) -> list[Any]:
    """What a trial depends on, as far as that is cheap to see."""
    parts = [each for each in modules_of(model) if not isinstance(each, ParameterDict)]
    judges = [each for each in keras.tree.flatten(model.loss) if hasattr(each, "__dict__")]
    # each compile makes another loss tracker
    compiled = [model.loss, getattr(model, "_loss_tracker", None)]
    seen = AttributeTracker([*parts, *judges], MODULE_ATTRIBUTES - {"training"}, nested=True).seen
    return [kinds_of(data), compiled, parts, seen]
