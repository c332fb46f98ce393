"""`loss.backward()` in a custom loop: what the loss is divided by is read before gradients flow.

The gradient of the global batch is  sum of n_r g_r / sum of n_r,  where replica r divides its loss
by n_r. Shares weigh by their rows, w_r = rows_r / rows. The gradient of replica r is multiplied by
f_r = n_r / (rows_r * unit) at the loss, and the sum of all w_r f_r, which travels with the
gradients, divides the result. Any unit is right that is the same on all replicas; with the number
of values in a row, on which they agree at the first pass, both factors are mostly 1 and cost
nothing. A summed loss is multiplied by 1 / w_r.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import NotDistributable, UsageError
from stratagem.training.batch_shares import shares_of
from stratagem.training.hints import warn_without_loader
from stratagem.training.loss_forms import LossForms, Pass
from stratagem.training.loss_reading import (
    BY_ROWS,
    REMEDY,
    PushWeights,
    Reading,
    TrainedLosses,
    UsualLoss,
    refuse_other_rows,
    refuse_spread,
    times,
    zeroed,
    zeros,
)
from stratagem.training.loss_terms import TOLERANCE, Doubt, Term, terms_of
from stratagem.training.meetings import save_whole_files
from stratagem.training.prepared_models import PreparedModels
from stratagem.training.replica import Replica, replica_of_loop
from stratagem.wire.tree import gather_tree

log = logging.getLogger("stratagem")


class LossReader:
    """Reads the losses of one replica's custom loops; all replicas arrive at the same state.

    Before an all-reduce a factor multiplies the gradient at the loss, and `settle` divides the sum;
    a worker that pushes by itself notes it in `pushes`, since the servers weigh.
    """

    def __init__(self, replica: Replica, reduction: str | None) -> None:
        self._replica = weakref.ref(replica)
        self.share, self._batches = replica.share, shares_of(replica)
        #: how many backward passes there were
        self.passes = 0
        #: as the user said: "mean", "sum", or None
        self.reduction = reduction
        #: with servers
        self.pushes: PushWeights | None = None
        #: with `sync=`: what the whole gradient is multiplied by
        self.scale: Callable[[], float] | None = None
        #: the latest pass, and its loss; replicas add readings up together with the gradients
        self.reading = BY_ROWS
        self.loss: weakref.ref[Tensor] | None = None
        self.trained = TrainedLosses()
        self.is_reading = False
        #: gathers a value from all replicas
        self.gather: Callable[[Any], list[Any]] = partial(gather_tree, replica.collective)
        #: given by the user in place of what can be read
        self._count: float | None = None
        #: values in a row, by the kind of mean; the same on all replicas once they have agreed
        self._units: dict[str, float] = {}
        self._warned = self._agreed = False
        self._usual, self._forms = UsualLoss(), LossForms(replica.count)
        self.prepared = PreparedModels(replica)
        #: of the latest pass: what replicas compare of its form
        self._mark = 0.0

    @property
    def _weighs_at_servers(self) -> bool:
        return self.pushes is not None and not self.pushes.grouped

    @contextmanager
    def divided_by(self, count: float) -> Iterator[None]:
        """Take losses of backward passes in the block as divided by `count`."""
        self._count = count
        try:
            yield
        finally:
            self._count = None

    def read(self, losses: Sequence[Tensor], backward: Callable[[], None]) -> None:
        """Run `backward` with factors on the terms of its losses that make shares add up."""
        if self.prepared.leave_out(losses, self._batches.rows):
            backward()  # another model's, which this replica may train alone
            return
        self._batches.find(losses)
        if self._count is None:
            self._batches.refuse_single_rows()
        self.is_reading = self._batches.in_backward = True
        self.passes += 1
        if self.passes & (self.passes - 1) == 0:
            self.prepared.refuse_forgotten(losses, self._batches.rows)
            self.prepared.look_for_hooks()
        handles: list[Any] = []
        try:
            self.reading = self._weigh(losses, handles)
            if self._forms.is_new:
                self.prepared.refuse_forgotten(losses, self._batches.rows)
            if self.prepared.beside.were_trained():
                self.reading = self.reading._replace(beside=1.0)
            if self.pushes is not None and not self.pushes.grouped:
                refuse_spread(float(self.reading.spread))
                self.pushes.totals.append(float(self.reading.factor))
            self.loss = self.trained.note(losses, self.share.weight, self.reading)
            if self.scale is not None:
                self._apply_scale(self.scale(), losses, handles)
            for (
                exchange
            ) in self.prepared.present():  # whether a sum is divided depends on all replicas
                exchange.keep_earlier()
            backward()
            self._batches.backward_over()
        finally:
            self.is_reading = self._batches.in_backward = False
            for handle in handles:
                handle.remove()

    def _apply_scale(self, scale: float, losses: Sequence[Tensor], handles: list[Any]) -> None:
        nodes = {each.grad_fn for each in losses if each.grad_fn is not None}
        for node in nodes if scale != 1.0 else ():
            handles.append(node.register_prehook(times(scale)))
            if not scale:
                handles.append(node.register_hook(zeros))

    def _weigh(self, losses: Sequence[Tensor], handles: list[Any]) -> Reading:
        share = self.share
        if self._weighs_at_servers and share.examples == share.total:
            return BY_ROWS  # the whole batch
        borrowed = share.announced and not share.examples
        said, self._mark = self._count is not None or self.reduction is not None, 0.0
        plain = not said and share.announced and len(losses) == 1
        if plain:
            seen = losses[0], share.examples, self.passes
            if (reading := self._usual.reading(*seen)) is not None:
                return reading
            if (usual := self._usual.term(*seen)) is not None:
                self._mark = self._usual.mark
                return self._single(*usual, handles)
        if (count := self._count) is not None:
            constants: list[Tensor] = []
            terms = [
                Term(each.grad_fn, "mean", count, round(count) or 1, counted=True)
                for each in losses
                if each.grad_fn is not None
            ]
        else:
            terms, constants = self._terms(losses, doubts=self.reduction is None and not borrowed)
        if self.reduction == "sum":
            terms = [t if t.kind == "fixed" else Term(t.node, "sum") for t in terms]
        names = self._names(terms)
        if not self._agreed and not self._weighs_at_servers:
            self._agreed = True
            self._agree(names, terms, constants)
        if not self._batches.is_sure:
            refuse_other_rows(terms, [self._units.get(name) for name in names], share.examples or 1)
        if borrowed:
            return BY_ROWS  # of borrowed rows: they weigh nothing
        if not said and share.announced:
            now = Pass(self.passes, self._batches.version, losses[0].is_cpu)
            self._mark = self._forms.mark_of(terms, constants, share, now)
        if len(names) == 1 == len(terms) and (unit := self._units.get(names[0])) is not None:
            if plain and not constants:
                self._usual.learn(losses[0], terms[0], share.examples, unit, self._mark)
            return self._single(terms[0], unit, handles)
        found, reading = self._factors(terms, names)
        self._apply(found, handles)
        return reading

    def _single(self, only: Term, unit: float, handles: list[Any]) -> Reading:
        """Weigh a loss that is one mean, whose unit all replicas know."""
        weight = only.count / self.share.examples
        self._apply([(only, weight / unit)], handles)
        return Reading(weight / unit, 0.0, self._mark, weight=weight)

    def _names(self, terms: list[Term]) -> list[str]:
        """Name the means, alike on all replicas, so that they can agree on a unit for each."""
        if self._count is not None:
            return [_DECLARED] * len(terms)
        return [f"{term.node.name()} {i}" for i, term in enumerate(terms) if term.kind == "mean"]

    def _agree(self, names: list[str], terms: list[Term], constants: list[Tensor]) -> None:
        """At the first pass of all replicas: agree on units, and compare what else was read."""
        rows = self.share.examples
        means = [term for term in terms if term.kind == "mean"]
        mine = [[name, term.full / rows] for name, term in zip(names, means, strict=True) if rows]
        told = self._count is not None or self.reduction is not None
        look = self._forms.describe(terms, constants, self.share, said=told) if rows else None
        everybody = self.gather([mine, look])
        values: dict[str, list[float]] = {}
        for name, value in (pair for units, _ in everybody for pair in units):
            values.setdefault(name, []).append(value)
        self._units = {name: fmean(each) or 1.0 for name, each in values.items()}
        self._forms.agree([each for _, each in everybody if each is not None])

    def _terms(self, losses: Sequence[Tensor], *, doubts: bool) -> tuple[list[Term], list[Tensor]]:
        share = self.share
        known = (share.examples or 1, share.total) if share.announced else (None, None)
        try:
            found = [terms_of(loss, *known, doubts=doubts) for loss in losses]
        except Doubt as doubt:
            raise NotDistributable(f"{doubt}. {REMEDY}") from None
        terms = [term for each in found for term in each.terms]
        odd = next((term for term in terms if term.kind == "unknown"), None)
        if odd is not None and doubts and not self._warned:
            self._warned = True
            say = log.warning if (by := self._replica()) is None or by.is_chief else log.debug
            say(
                "the loss ends in %s, which cannot be read, and is taken for a mean over rows. "
                'If it is one, all is well, and prepare(..., loss_reduction="mean") says so; if '
                'it is a sum, loss_reduction="sum"; if not, strategy.backward(loss, count=n) '
                "says what it is divided by.",
                "torch.compile" if "Compiled" in odd.node.name() else odd.node.name(),
            )
        return terms, [constant for each in found for constant in each.constants]

    def _factors(
        self, terms: list[Term], names: list[str]
    ) -> tuple[list[tuple[Term, float | Tensor]], Reading]:
        """Return what the gradient of each term is multiplied by."""
        share, mark = self.share, self._mark
        found: list[tuple[Term, float | Tensor]] = []
        named = iter(names)
        for term in terms:
            if term.kind != "mean":
                continue
            name = next(named)
            unit = self._units.get(name, 1.0 if self._count is not None else None)
            if unit is None:
                self._refuse_for_servers(term)
                unit = term.full / share.examples or 1.0
                mark += unit * _GOLDEN % 1
                if self._weighs_at_servers and self.is_reading and self.pushes is not None:
                    unit = self.pushes.unit(name, unit)
            found.append((term, term.count / (share.examples * unit)))
        factors: list[Any] = [factor for _, factor in found]
        factors += [1.0 for term in terms if term.kind in ("sum", "unknown")]
        base = factors[0] if factors else 1.0
        spread = max((abs(factor - base) for factor in factors), default=0.0)
        found += [(term, base) for term in terms if term.kind == "fixed"]
        whole = share.total / share.examples
        if self.pushes is not None and self.pushes.grouped:
            whole /= share.part or 1.0
        found += [(term, whole) for term in terms if term.kind == "sum"]
        summed = bool(terms) and all(term.kind in ("sum", "fixed") for term in terms)
        weight = base
        if len(terms) == 1 and terms[0].kind == "mean":
            weight = terms[0].count / share.examples
        return found, Reading(base, spread, mark, weight=weight, summed=summed)

    def _apply(self, found: Sequence[tuple[Term, float | Tensor]], handles: list[Any]) -> None:
        """Have each term multiplied; a node that stands in the loss twice is one node."""
        done: dict[Any, float | Tensor] = {}
        for term, factor in found:
            if self._weighs_at_servers and term.kind != "sum":
                continue
            if term.node in done:
                refuse_spread(abs(float(done[term.node]) - float(factor)))
                continue
            done[term.node] = factor
            if isinstance(factor, Tensor) or factor != 1.0:
                handles.append(term.node.register_prehook(times(factor)))
            if not isinstance(factor, Tensor) and factor == 0.0:
                handles += zeroed(term.node)

    def _refuse_for_servers(self, term: Term) -> None:
        if self._weighs_at_servers and (term.picked or term.full % self.share.examples):
            raise NotDistributable(
                "the loss is a mean over a number of values that is no multiple of the rows, and "
                "servers weigh the parts of a batch by their rows. " + REMEDY
            )

    def weight_of(self, value: Tensor | float) -> tuple[float, bool]:
        """Return how much a share's value weighs for each of its rows, and whether it is a sum."""
        if not isinstance(value, Tensor) or value.grad_fn is None:
            return 1.0, False
        try:
            terms, _ = self._terms([value], doubts=False)
        except RuntimeError:
            raise UsageError(
                "strategy.mean is given a part of a loss whose backward() is over, so what it is "
                "divided by can no longer be read; ask before backward(), or say "
                "strategy.mean(value, count=n)."
            ) from None
        _, reading = self._factors(terms, self._names(terms))
        return float(reading.weight), reading.summed

    def settle(self, notes: Sequence[float]) -> float:
        """Return the divisor of the sum of all gradients, given the sum of all readings."""
        if self.passes == 1 and not self.share.announced and (replica := self._replica()):
            loss = self.loss() if self.loss is not None else None
            warn_without_loader(replica, None if loss is None else float(loss.detach()))
        total, spread, mark, square, beside = notes
        if beside > 1 - TOLERANCE and self.pushes is None and self.scale is None:
            self.prepared.beside.compare(self.gather)
        self.prepared.beside.forget()
        if spread:
            refuse_spread(spread)
        if square - mark * mark > TOLERANCE:
            raise NotDistributable(
                "the losses of the replicas differ in form (a guard for an empty mask?), in a "
                "number that multiplies or divides them (a share's own count?), or in how many "
                "values a row has (packed sequences, graphs?). " + REMEDY
            )
        if self.pushes is not None:
            self.pushes.use(next(iter(self._units.values()), 1.0))
            self.pushes.totals.append(total)
        return total


_DECLARED = "declared"
#: spreads whole numbers over 0 .. 1
_GOLDEN = 0.6180339887498949


# --- where backward is called -----------------------------------------------------------------

_plain = torch.autograd.backward


def reader_of(replica: Replica) -> LossReader | None:
    """Return the reader of this replica's losses; None before anything is prepared."""
    return replica.loop.reader  # type: ignore[no-any-return]


def read_losses(replica: Replica, reduction: str | None) -> LossReader:
    """Begin to read the losses of this replica's backward passes."""
    check_reduction(reduction)
    reader = reader_of(replica)
    if reader is None:
        reader = replica.loop.reader = LossReader(replica, reduction)
        save_whole_files()
        torch.autograd.backward = _backward
    if reduction is not None and reader.reduction not in (None, reduction):
        raise UsageError(
            f"loss_reduction={reduction!r} here and {reader.reduction!r} in an earlier prepare of "
            "this loop; leave it out, or give both the same."
        )
    reader.reduction = reduction or reader.reduction
    # another model may have another kind of loss: replicas agree anew at the next pass
    reader._agreed, reader._usual = False, UsualLoss()
    return reader


def check_reduction(reduction: str | None) -> None:
    """Refuse an unknown `loss_reduction`."""
    if reduction not in (None, "mean", "sum"):
        raise UsageError(f'loss_reduction={reduction!r}; it is "mean" or "sum".')


def _backward(tensors: Any, *args: Any, **options: Any) -> None:
    """Replace torch.autograd.backward, which Tensor.backward calls, too."""
    replica = replica_of_loop()
    reader = None if replica is None else reader_of(replica)
    if reader is None or reader.is_reading:
        _plain(tensors, *args, **options)
        return
    losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    reader.read(losses, partial(_plain, tensors, *args, **options))
