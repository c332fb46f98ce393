"""What a loss is divided by: numbers that replicas exchange, and the reading of usual losses."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.training.loss_terms import TOLERANCE, Term, read_count
from stratagem.training.row_axis import only_input

_MEAN = 1  # among torch's reductions
_SCALES = ("MulBackward0", "DivBackward0")


class Reading(NamedTuple):
    """How one replica's loss was weighed; the numbers are added up over the replicas, by share."""

    #: what the gradient was multiplied by at the loss
    factor: float | Tensor = 1.0
    #: how far apart the factors of several terms are
    spread: float | Tensor = 0.0
    #: hashes of the loss' form unless it is the one at the first pass, and of the number of values
    #: in a row unless replicas have agreed on that; replicas must have the same
    mark: float = 0.0
    #: 1 where the replica has trained something that was not prepared, and asks for the others
    beside: float | Tensor = 0.0

    #: the weight of the share's value for each of its rows, where several are averaged
    weight: float | Tensor = 1.0
    #: whether the loss is a sum, and nothing else
    summed: bool = False

    def notes(self) -> list[float | Tensor]:
        if type(self.factor) is float and self[:4] == (1.0, 0.0, 0.0, 0.0):
            return AS_ROWS
        return [self.factor, self.spread, self.mark, self.mark * self.mark, self.beside]


BY_ROWS = Reading()
#: the notes of a gradient that weighs as much as its rows, as most do: factor, spread, mark, mark²,
#: beside
AS_ROWS: list[float | Tensor] = [1.0, 0.0, 0.0, 0.0, 0.0]
#: how many numbers a reading adds to the gradients
NOTES = len(AS_ROWS)


def largest(notes: Tensor, before: Tensor | None) -> Tensor:
    """Return the largest notes of several passes; of marks, how far they are apart in one pass."""
    notes = notes.clone()
    notes[3].sub_(notes[2].square())
    notes[2].zero_()
    return notes if before is None else torch.maximum(before, notes)


REMEDY = (
    "Use a mean over rows (or a loss with a value for each row); or say what this replica divides "
    "by: strategy.backward(loss, count=n) in place of loss.backward(); or, where the loss is a sum "
    'or a mean over rows all the same, prepare(..., loss_reduction="sum") or "mean".'
)


#: several batches that weigh unlike
SEVERAL = (
    "fetch each batch when its turn comes, and keep none; or give the model itself (model(x), not "
    "a part of it: model.encoder(x)) the very tensors that the loader yields; or give the loader "
    "drop_last=True: several batches of different sizes are in hand, and it cannot be told of "
    "which of them this loss is."
)


class UsualLoss:
    """A mean of torch's own in which all passes of a loop end: it is read without its graph.

    Passes 8, 16, 32, ... are read in full all the same.
    """

    def __init__(self) -> None:
        #: its name, the number of values in a row, and the unit in which replicas count them
        self._known: tuple[str, float, float] | None = None
        #: the class of its node; the reading of each pass that leaves no value out
        self._node: type[Any] = type(None)
        self._whole, self._counted = BY_ROWS, False
        #: of its form
        self.mark = 0.0

    def learn(self, loss: Tensor, term: Term, rows: int, unit: float, mark: float) -> None:
        """Note the only term of a pass that was read in full."""
        node, name = term.node, term.node.name()
        plain = node is loss.grad_fn and hasattr(node, "_saved_reduction") and not term.picked
        known = plain and not name.startswith("Multi")
        self._known = (name, term.full / rows, unit) if known else None
        self._node = type(node) if known and term.full == unit * rows else type(None)
        self._whole, self._counted = Reading(mark=mark, weight=unit), term.counted
        self.mark = mark

    def reading(self, loss: Tensor, rows: int, passes: int) -> Reading | None:
        """Return the reading where all values of `rows` rows weigh the same, so that nothing is
        multiplied; else None, and `term` has the factor."""
        node: Any = loss.grad_fn
        if type(node) is not self._node or passes <= 4 or not passes & (passes - 1) or not rows:
            return None
        if node is None or node._saved_reduction != _MEAN:
            return None
        if self._counted:
            total = node._saved_total_weight
            count = float(total) if total.is_cpu else 0.0  # not to wait for the device
            full = node._saved_target.numel()  # half of the rows may weigh twice as much
        else:
            count = full = node._saved_self.numel()
        return self._whole if count == full == self._whole.weight * rows else None

    def term(self, loss: Tensor, rows: int, passes: int) -> tuple[Term, float] | None:
        """Return the only term of a loss over `rows` rows, and its unit; None: read the graph."""
        node: Any = loss.grad_fn
        if self._known is None or passes <= 4 or not passes & (passes - 1) or not rows:
            return None
        name, per_row, unit = self._known
        if node is None or node.name() != name or node._saved_reduction != _MEAN:
            return None
        counted = name.startswith("NllLoss")
        full = (node._saved_target if counted else node._saved_self).numel()
        if full != per_row * rows:
            return None
        count = read_count(node._saved_total_weight) if counted else float(full)
        return Term(node, "mean", count, full, counted=counted), unit


class PushWeights:
    """How much the gradients of one batch weigh that a worker pushes to servers."""

    def __init__(self, *, grouped: bool) -> None:
        #: whether the worker's devices all-reduce their gradients before the first one pushes
        self.grouped = grouped
        #: what the losses of the batch were divided by, for each pass, in the units below
        self.totals: list[float] = []
        #: values in a row, by pass and kind of mean, at the first batch of this worker
        self._units: dict[str, float] = {}
        #: that of the first mean of the batch: other workers have other units, if rows are padded
        self._unit: float | None = None

    def begin(self) -> None:
        """Begin a ticket."""
        self.totals, self._unit = [], None

    def unit(self, name: str, values: float) -> float:
        """Return the unit of a mean over `values` values in a row."""
        unit = self._units.setdefault(f"{len(self.totals)} {name}", values)
        self.use(unit)
        return unit

    def use(self, unit: float) -> None:
        """Note the unit of a mean of this batch."""
        if self._unit is None:
            self._unit = unit

    def of_batch(self) -> tuple[float, float]:
        """Return how much the gradients weigh for each row, which all passes must agree on, in
        this worker's unit, and the unit."""
        totals, unit = self.totals or [1.0], self._unit or 1.0
        self.begin()
        refuse_spread(max(abs(each - totals[0]) for each in totals))
        return totals[0], unit


def refuse_spread(spread: float) -> None:
    """Refuse terms of one loss whose factors differ by more than rounding."""
    if spread > TOLERANCE:
        raise NotDistributable(
            "the loss adds up terms that are divided by different counts (ignored targets or "
            "class weights in one of them, rows in another; tasks of several sizes), so that no "
            "single weight fits a share. With mirrored replicas call strategy.backward(term, "
            "count=n) for each of the terms, with retain_graph=True for all but the last, or, for "
            "a mean over tasks, strategy.backward(loss, count=tasks); with servers use sg.Model."
        )


def refuse_other_rows(terms: Sequence[Term], units: Sequence[float | None], rows: int) -> None:
    """Refuse means over other rows than these, where it is known how many values a row has."""
    means = [term for term in terms if term.kind == "mean"]
    for unit, term in zip(units, means, strict=True):
        if unit is not None and term.full != unit * rows:
            raise NotDistributable(SEVERAL)


# --- hooks on the nodes of a loss ---------------------------------------------


def times(factor: float | Tensor) -> Callable[[Any], Any]:
    """Return a prehook that multiplies the gradients."""
    return lambda grads: tuple(g if g is None else g * factor for g in grads)


def zeros(gradients: Any, _: Any) -> Any:
    """A hook that replaces the gradients by zeros."""
    return tuple(g if g is None else torch.zeros_like(g) for g in gradients)


def zeroed(node: Any) -> list[Any]:
    """Have the gradients be 0 at a node, and just below, where a division by 0 makes NaN."""
    handles = [node.register_hook(zeros)]
    while (node := only_input(node)) is not None and node.name() in _SCALES:
        handles.append(node.register_hook(zeros))
    return handles


class TrainedLosses:
    """What losses weighed in their backward passes, as long as the loop keeps them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], float, Reading]] = {}

    def note(
        self, losses: Sequence[Tensor], share: float, reading: Reading
    ) -> weakref.ref[Tensor] | None:
        """Remember a single loss; return a reference to it."""
        if len(losses) != 1:
            return None
        at, known = id(losses[0]), self._known
        found = weakref.ref(losses[0], lambda _: known.pop(at, None))
        known[at] = found, share, reading
        return found

    def weight(self, value: object) -> tuple[float, bool] | None:
        """Return what a share's loss weighed, and whether it is a sum; None if it is not known."""
        loss, share, reading = self._known.get(id(value), (lambda: None, 0.0, None))
        if reading is None or loss() is not value:
            return None
        return share * float(reading.weight), reading.summed
