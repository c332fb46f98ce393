"""Checks that shares of a batch add up to the result of one device, for a step of a Keras model.

As for torch models (frontends/row_check.py): a few rows go through the model's step as one batch
and as two shares. Outputs, the gradients of every backward pass and the counts of the metrics must
agree to rounding.
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
)
from stratagem.state.change_tracker import MODULE_ATTRIBUTES, AttributeTracker
from stratagem.training.prepare import to_device
from stratagem.training.replica import Replica

_VERBS = {"train_step": "train", "test_step": "evaluate", "predict_step": "predict"}


def check_step(
    model: Any, step: str, data: Any, replica: Replica, count: int, *, apart: bool = False
) -> bool:
    """Raise if `count` shares of this batch do not add up; `apart`: workers have whole batches, and
    only their metrics must add up. Leaves no trace; returns False if the dry run fails."""
    total = count_rows(data)
    first, second = (end - start for start, end in (share(total, count, i) for i in (0, 1)))
    sizes = list(sizes_of(first, second))
    if not all(sizes):
        return True  # a single row
    few = rows(data, 0, sum(sizes))
    few = few if replica.device.type == "cpu" else to_device(few, replica.device)
    batches = [few, rows(few, 0, sizes[0]), rows(few, sizes[0], sum(sizes))]
    if apart and not judged_by_own(model, step):
        return True
    try:
        _Check(Bench(model, step), replica, batches, sizes, apart).run()
    except StratagemError:
        raise
    except Exception as error:
        say_untried(error)
        return False
    return True


@dataclass
class _Check:
    """Compares dry runs of some rows as one batch and as shares."""

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
        if alone.noted:  # once more, with the divisors of the second share
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
    """Compare the loss of the whole with the weighted sum of the shares' losses."""
    whole, *shares = losses
    parts = [loss * weight for loss, weight in zip(shares, weights, strict=True)]
    size = max(map(abs, parts))
    compare_loss(whole, sum(parts), size, tolerance, sizes)


def _judge(model: Any) -> str:
    """Name the user's method that computes the loss, if there is one."""
    for name in ("train_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            return f"{LOSS} of {name}"
    return LOSS


# --- whose code judges the rows ------------------------------------------------------------------


def judged_by_own(model: Any, step: str) -> bool:
    """Whether the user's own code computes a loss or a metric of the rows."""
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
    """Whether a loss or a metric is Keras' own, and so is the function that it wraps."""
    if judge is None or isinstance(judge, str):
        return True
    made = judge if callable(judge) and hasattr(judge, "__name__") else type(judge)
    inside = getattr(judge, "fn", None) or getattr(judge, "_fn", None)
    return str(getattr(made, "__module__", "")).startswith("keras.") and _is_kerass(inside)


# --- which batches have rows tried before their step ----------------------------------------------


class CheckSchedule:
    """Chooses the batches that are checked: the first of each kind of step and, if the step, the
    loss or a metric is the user's own, the 2nd, 4th, 8th, ... and any with a kind of value that no
    checked row has had, since a mask may come later. Otherwise a call with the same model and kind
    of data as an earlier one need not check again."""

    def __init__(self, model: Any, passed: PassedTrials | None = None) -> None:
        self.model, self._passed = model, passed or PassedTrials()
        self._seen: dict[str, int] = {}
        #: by step: the number of the batch that is checked next
        self._next: dict[str, float] = {}
        #: by step: the kinds of values that checked rows have had
        self._tried: dict[str, set[Kind]] = {}

    def anew(self) -> CheckSchedule:
        """Return the schedule of the next call, which knows the passed trials."""
        return CheckSchedule(self.model, self._passed)

    def before(self, step: str, data: Any, examples: int, check: Callable[[Any], bool]) -> None:
        """Before every step: call `check`, which takes the first rows of its batch, if it is this
        batch's turn. `check` returns False if the rows could not be tried."""
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
    """Return the kinds of values in a batch; none on a GPU, which would have to be waited for."""
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
    """Return the first row with a value of this kind."""
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
