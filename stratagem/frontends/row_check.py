"""Checks before the first update that shares of a batch add up to the result of one device.

The chief runs a few rows through model and loss as one batch and as two shares. Outputs, loss,
gradients and function metrics must agree to rounding. Otherwise a row's result depends on other
rows, which replicas do not share, and training would differ from one device.

Each of the three runs starts from the same model, which may initialise itself from its first batch.
Each row is missing in one of the shares, so that a row that affects others (by a maximum, say) is
found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stratagem.compat.torch_names import pytree
from stratagem.data.shares import count_rows, rows, same_kind, share
from stratagem.errors import NotDistributable
from stratagem.frontends.adapter import TorchAdapter
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.row_trials import (
    LOSS,
    Outcome,
    Tolerance,
    agree,
    compare_gradients,
    compare_loss,
    compare_outputs,
    copied,
    in_place,
)
from stratagem.frontends.sources import Portion
from stratagem.training.isolated_run import dry_run, norms_by_row, replaced
from stratagem.training.prepare import to_device
from stratagem.training.replica import Replica
from stratagem.wire.tree import broadcast_tree, encode, gather_tree

log = logging.getLogger("stratagem")

#: rows of the two shares: several, since models often treat a single row differently; unequal,
#: since means over something else than rows could agree for equal shares
_SHARES = 3, 2
ENOUGH = sum(_SHARES)


class RowCheck:
    """The check of rows during one call; `before` every batch, on every replica."""

    def __init__(self, module: Any, recipe: Recipe, replica: Replica, verb: str) -> None:
        """`verb`: "fit", "evaluate" or "predict"."""
        self.module, self.replica, self.verb = module, replica, verb
        self.recipe = replace(recipe, jit_compile=False)
        self._schedule = recipe.schedule
        self.open = recipe.check and replica.count > 1
        #: whether all replicas count as the chief does
        self._agreed = False
        parts = (type(part).__module__ for part in module.modules())
        torchs = all(name.startswith("torch.") for name in parts)
        self._own = recipe.loss.own or bool(recipe.metrics.functions) or not torchs
        #: the last share, if it was too small to be split
        self._kept: Any = None

    def before(self, portion: Portion, prepare: Callable[[], None] = lambda: None) -> None:
        """Raise if it is this batch's turn, and the replicas' shares do not add up. Collective.

        `prepare` is called before a check.
        """
        if portion.total < 2:
            return
        replica, schedule = self.replica, self._schedule
        if not self._agreed:  # a replica that has joined since has counted fewer batches
            counted = schedule.passed.get(self.verb, 0)
            schedule.passed[self.verb] = broadcast_tree(replica.collective, counted)
            self._agreed = True
        if schedule.is_due(self.verb, lambda: self._own):
            prepare()
            batch, told = [portion.x, portion.y, portion.weight], None
            if share(portion.total, replica.count, 0)[1] < ENOUGH:
                second = _portable(batch) if replica.index == 1 else None
                told = gather_tree(replica.collective, second)[1]
            self._act(portion.examples, batch, told)
        self._count()

    def alone(self, portion: Portion) -> None:
        """Like `before`, for a worker of servers, which has no other replica's share.

        A share that is too small is kept, and joined with the next one.
        """
        if self._schedule.is_due(self.verb, lambda: self._own):
            batch = [portion.x, portion.y, portion.weight]
            other, self._kept = self._kept, batch
            few = portion.examples < ENOUGH
            if few and other is None:
                return
            self._act(portion.examples, batch, other if few else None)
            self._kept = None
        self._count()

    def after(self) -> None:
        """After the step of this batch: warn if it could not be checked."""
        self._schedule.after()

    def rehearse(self, portion: Portion) -> None:
        """Run a batch through model and loss as a dry run, to warm up a standby's first step."""
        batch = [portion.x, portion.y, portion.weight]
        try:
            self._run(batch, portion.total)
        except Exception as error:  # the step itself may still succeed
            log.debug("a standby could not rehearse: %r", error)

    def _count(self) -> None:
        self._schedule.count(self.verb)
        self.open = self._own

    def _act(self, examples: int, batch: Any, other: Any) -> None:
        """On the chief: make the check, with rows of its share and perhaps of another one."""
        if self.replica.index == 0:
            self._schedule.run(
                self.verb, lambda: self._compare(*self._rows(examples, batch, other))
            )

    def _rows(self, examples: int, batch: Any, other: Any) -> tuple[Any, list[Any]]:
        """Return a few rows as one batch and as two shares.

        If the loss is torch's own, targets that cannot be split are left out, and so is the loss.
        """
        try:
            check_rows(batch, examples)
        except ValueError:
            if self.recipe.loss.own:
                raise
            batch = [batch[0], None, None]
            other = other and [other[0], None, None]
        return few_rows(batch, examples, to_device(other, self.replica.device))

    def _judges(self) -> list[Any]:
        """Return the loss and its function, or the parts of a loss module."""
        loss = self.recipe.loss
        function = getattr(loss, "function", None)
        parts = function.modules() if isinstance(function, torch.nn.Module) else [function]
        return [loss, *parts]

    def _compare(self, whole: Any, parts: list[Any]) -> None:
        total = count_rows(whole)
        one = self._run(whole, total)
        shares = [self._run(each, total) for each in parts]
        tolerance = Tolerance.of(self.replica.device, (one, *shares))
        disturb = partial(self._run, whole, total, disturbed=True)
        agree(partial(self._judge, one, shares), tolerance, one, disturb)

    def _judge(self, one: BatchOutcome, shares: list[BatchOutcome], tolerance: Tolerance) -> None:
        sizes = [run.examples for run in shares]
        compare_outputs(self.verb, one.outputs, [run.outputs for run in shares], tolerance, sizes)
        if one.loss is None:
            return
        below = sum(run.below for run in shares)
        if below:
            values = [run.loss or 0.0 for run in shares]
            largest = max(
                abs(v) / (run.below or 1.0) for v, run in zip(values, shares, strict=True)
            )
            compare_loss(one.loss, sum(values) / below, largest, tolerance, sizes)
            gradients = in_place(one.gradients, [_over(run.gradients, below) for run in shares])
            compare_gradients(LOSS, one.gradients, gradients, tolerance, sizes)
        metrics = [run.metrics for run in shares]
        self.recipe.metrics.check_functions(one.metrics, metrics, tolerance.loss)

    def _run(self, batch: Any, total: int, *, disturbed: bool = False) -> BatchOutcome:
        """Run one batch through model and loss as a dry run."""
        trains = self.verb == "fit"
        function = getattr(self.recipe.loss, "function", None)
        buffers = _buffer_versions(function)
        x, y, weight = batch
        portion = Portion(x, y, weight, count_rows(batch), total)
        with (
            dry_run(*self.module.modules(), *self._judges(), disturbed=disturbed) as journal,
            torch.set_grad_enabled(trains),
            replaced(norms_by_row(self.module.modules()) if trains else []),
        ):
            run = self._forward(portion)
            if _buffer_versions(function) != buffers:
                raise NotDistributable(
                    f"the loss {type(function).__name__} writes into its own buffers, and every "
                    "replica would do so from its own rows; keep them in the model, whose buffers "
                    "are averaged when an epoch ends, or use one device."
                )
        run.epsilon = journal.epsilon
        return run

    def _forward(self, portion: Portion) -> BatchOutcome:
        adapter = TorchAdapter(self.module, None, self.recipe, self.replica)
        with adapter.autocast():
            output, *given = adapter.forward(portion)
        return self._apply_loss(adapter, output, given, portion.examples, portion.total)

    def _apply_loss(
        self, adapter: TorchAdapter, output: Any, given: list[Any], examples: int, total: int
    ) -> BatchOutcome:
        """Compute loss, gradients and metrics for these outputs."""
        loss, (y, weight), outputs = self.recipe.loss, given, pytree.tree_leaves(output)
        run = BatchOutcome(list(map(copied, outputs)), examples=examples)
        if self.verb == "predict" or (y is None and not loss.own):
            return run
        with adapter.autocast():
            if examples == total:
                above, run.below = loss.mean(output, y, weight), 1.0
            else:
                above, below = loss.terms(output, y, weight, examples)
                run.below = examples / total if below is None else float(below)
        if above.requires_grad:
            gradients = torch.autograd.grad(above, self._sources(outputs), allow_unused=True)
            run.gradients = list(map(copied, gradients))
        run.loss = float(above.detach())
        run.metrics = self.recipe.metrics.try_functions(output, y)
        return run

    def _sources(self, outputs: list[Any]) -> list[Tensor]:
        """Return the tensors to differentiate by: the outputs, which are compared as well.

        If an output is a single number (a loss computed by the model), it is the parameters.
        """
        found = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
        if found and all(each.dim() or each.is_leaf for each in found):
            return found
        return [p for p in self.module.parameters() if p.requires_grad]


@dataclass
class BatchOutcome(Outcome):
    """The results of one batch; `loss` is the numerator of its share."""

    examples: int = 0
    below: float = 1.0
    metrics: dict[str, Tensor] = field(default_factory=dict)


def _over(gradients: Sequence[Tensor | None], below: float) -> list[Tensor | None]:
    return [None if each is None else each / below for each in gradients]


def _buffer_versions(loss: Any) -> dict[str, tuple[int, int]]:
    """Return the identity and version of a loss's buffers, which change when it writes to them."""
    named = loss.named_buffers() if isinstance(loss, torch.nn.Module) else ()
    return {name: (id(buffer), buffer._version) for name, buffer in named}


# --- rows ----------------------------------------------------------------------------------------


def few_rows(batch: Any, examples: int, other: Any = None) -> tuple[Any, list[Any]]:
    """Return a few rows of one share, or of two small ones, as one batch and as two shares."""
    size = check_rows(batch, examples)
    if other is not None:
        batch = joined(batch, other)
    first, second = sizes_of(size, check_rows(other) if other is not None else 0)
    few = rows(batch, 0, first + second)
    return few, [rows(few, 0, first), rows(few, first, first + second)]


def sizes_of(first: int, second: int) -> tuple[int, int]:
    """Return the rows of the check's two shares, given the rows of the real shares."""
    if first >= ENOUGH:
        return _SHARES
    if not second:
        return first - first // 3, first // 3
    return min(first, _SHARES[0]), min(second, _SHARES[1])


def check_rows(batch: Any, examples: int | None = None) -> int:
    """Return the number of rows of a batch; raise if a part of it cannot be split by rows."""
    count = count_rows(batch) if examples is None else examples
    for leaf in pytree.tree_leaves(batch):
        if not isinstance(leaf, _LEAVES):
            raise ValueError(f"a {type(leaf).__name__} in a batch of {count} rows")
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) != count:
            raise ValueError(f"a tensor of shape {tuple(leaf.shape)} in a batch of {count} rows")
    return count


_LEAVES = (Tensor, str, bytes, bool, int, float, type(None))


def joined(one: Any, other: Any) -> Any:
    """Concatenate the rows of two shares."""
    if isinstance(one, Tensor):
        return torch.cat([one, other]) if one.dim() else one
    if isinstance(one, dict):
        return same_kind(one, {key: joined(part, other[key]) for key, part in one.items()})
    if isinstance(one, list | tuple):
        if one and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(one)):
            return [*one, *other]
        parts = [joined(*pair) for pair in zip(one, other, strict=True)]
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    return one


def _portable(batch: Any) -> Any:
    """Return the batch if it can be sent to the chief, else None."""
    try:
        encode(batch)
    except NotDistributable:
        return None
    return batch
