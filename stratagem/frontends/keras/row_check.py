"""Checks that shares of a batch add up to the result of one device, for a step of a Keras model.

As for torch models (frontends/row_check.py): a few rows go through the model's step as one batch
and as two shares. Outputs, the gradients of every backward pass and the counts of the metrics must
agree to rounding.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.data.shares import count_rows, rows, share
from stratagem.errors import NotDistributable, StratagemError
from stratagem.frontends.keras.dry_step import Bench, Run, Trial
from stratagem.frontends.keras.step_logs import user_metrics
from stratagem.frontends.row_check import sizes_of
from stratagem.frontends.row_trials import (
    KERAS,
    LOSS,
    Tolerance,
    agree,
    compare_gradients,
    compare_loss,
    compare_outputs,
)
from stratagem.training.prepare import to_device
from stratagem.training.replica import Replica

log = logging.getLogger("stratagem")
_VERBS = {"train_step": "train", "test_step": "evaluate", "predict_step": "predict"}


def check_step(
    model: Any,
    step: str,
    data: Any,
    replica: Replica,
    count: int,
    *,
    apart: bool = False,
    reduced: bool = True,
    warns: bool = False,
) -> None:
    """Raise if `count` shares of this batch do not add up; `apart`: workers have whole batches, and
    only their metrics must add up; `reduced`: backward adds gradients up. Leaves no trace.
    `warns`: say that noise is drawn."""
    total = count_rows(data)
    first, second = (end - start for start, end in (share(total, count, i) for i in (0, 1)))
    sizes = list(sizes_of(first, second))
    few = rows(data, 0, sum(sizes))
    few = few if replica.device.type == "cpu" else to_device(few, replica.device)
    batches = [few, rows(few, 0, sizes[0]), rows(few, sizes[0], sum(sizes))]
    check = _Check(Bench(model, step), replica, batches, sizes, apart, reduced)
    check.run(whole=sum(sizes) == total)
    if warns and check.bench.trains and check.tried is not None and check.tried.noise:
        log.warning(
            "train_step draws random numbers (noise, a Sampling layer); as with dropout, each "
            "replica draws its own, so weights are not those of one device. A run can be repeated "
            "from one seed; noise that is drawn with the data is that of one device."
        )


@dataclass
class _Check:
    """Compares dry runs of some rows as one batch and as shares."""

    bench: Bench
    replica: Replica
    #: the whole, and two shares
    batches: list[Any]
    sizes: list[int]
    apart: bool
    reduced: bool
    #: the run of all rows, once it has succeeded
    tried: Run | None = None

    def run(self, *, whole: bool) -> None:
        """`whole`: the rows are all that the batch has."""
        try:
            self._try()
        except StratagemError:
            raise
        except Exception as error:
            if not whole or self.tried is None:
                raise
            raise NotDistributable(
                "give parts that belong together (anchors and positives) as a tuple of arrays with "
                "a row for each example, a larger batch_size where several rows are needed, or use "
                f"one device: replicas share a batch by its first axis, and {self.bench.step} "
                f"takes all {sum(self.sizes)} rows of this one, but not a part of them "
                f"({type(error).__name__}: {error})."
            ) from error

    def _try(self) -> None:
        bench, sizes, (few, *parts) = self.bench, self.sizes, self.batches
        together = parts if self.apart else [few]
        whole = self.tried = bench.run(together)
        shares = [bench.run([p]) for p in parts] if self.apart else self._shares(parts, sizes)
        tolerance = Tolerance.of(self.replica.device, (whole, *shares))

        def compare(tolerance: Tolerance) -> None:
            if not self.apart:
                _compare(bench, whole, shares, sizes, tolerance)
            _compare_counts(bench.model, whole, shares, sizes, tolerance)

        agree(compare, tolerance, whole, lambda: bench.run(together, disturbed=True))
        if not self.apart:
            self._check_states(whole, shares, tolerance)

    def _check_states(self, whole: Run, shares: list[Run], tolerance: Tolerance) -> None:
        """Raise if a step sets a variable to something else than a mean over rows; what it makes of
        gradients is made of the whole's, which an all-reduce gives to every replica."""
        bench, sizes, (few, *parts) = self.bench, self.sizes, self.batches
        try:
            _compare_states(bench, whole, shares, sizes, tolerance)
        except NotDistributable:
            again = self._shares(parts, sizes, whole if self.reduced else None)
            compare = partial(_compare_states, bench, whole, again, sizes)
            agree(compare, tolerance, whole, lambda: bench.run([few], disturbed=True))

    def _shares(self, parts: list[Any], sizes: list[int], reduced: Run | None = None) -> list[Run]:
        (one, two), (first, second) = parts, sizes
        run = partial(self.bench.run, reduced=reduced)
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
        for each in zip(whole.passes, *(run.passes for run in shares), strict=True)
        if len({len(gradients) for gradients in each}) == 1
    ]
    parts = [
        [gradient * run.weight for each in passes for gradient in each[place]]
        for place, run in enumerate(shares, 1)
    ]
    everything = [gradient for each in passes for gradient in each[0]]
    compare_gradients(_judge(bench.model), everything, parts, tolerance, sizes, KERAS)


def _compare_states(
    bench: Bench, whole: Run, shares: list[Run], sizes: list[int], tolerance: Tolerance
) -> None:
    """Raise if a step sets a variable to something else than a mean over rows."""
    for i in sorted({i for run in (whole, *shares) for i in run.moves}):
        variable, still = bench.states[i], torch.zeros((), dtype=torch.float64)
        change, *parts = (run.moves.get(i, still) for run in (whole, *shares))
        mean = sum((r.weight * part for r, part in zip(shares, parts, strict=True)), still)
        size = max(float(each.abs().max()) for each in (change, *parts))
        before = float(variable.value.detach().double().abs().max())
        rounding = tolerance.own * size + 8 * whole.epsilon * before
        if not torch.allclose(change + 0 * mean, mean + 0 * change, 0.0, rounding, equal_nan=True):
            raise NotDistributable(
                f"what train_step sets {variable.path!r} to is not a mean over the rows: "
                f"{sum(sizes)} rows at once change it by up to {float(change.abs().max()):.4g}, "
                f"shares of {' and '.join(map(str, sizes))} by {float(mean.abs().max()):.4g} in "
                "their mean, so replicas cannot make one device's value of theirs; take a mean in "
                "place of a sum or a maximum, clip and round where it is read, count in a metric "
                "(keras.metrics.Sum), or use one device."
            )


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
    losses = [run.loss for run in (whole, *shares) if run.loss is not None]
    if not moved and len(losses) == 3:
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
    compare_loss(whole, sum(parts), size, tolerance, sizes, KERAS)


def _judge(model: Any) -> str:
    """Name the user's method that computes the loss, if there is one."""
    for name in ("train_step", "compute_loss"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            return f"{LOSS} of {name}"
    return LOSS
