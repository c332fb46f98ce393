"""What a loss is divided by, read from the autograd graph at its root.

A custom loop hands over one number. On one device that number is a sum over the rows of the batch,
divided by some count; a replica has the sum and the count of its share. The graph still knows both:

    loss = ce + 0.1 * kl      Add ─┬─ NllLoss       a mean over the 37 targets that are not ignored
                                   └─ Mul ── Mean   a mean over 50 rows

The walk goes down through nodes without a row axis, which are a handful, to the reductions over
rows, and looks a few nodes further, so it can be done at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isclose, prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from stratagem.training.loss_weights import operand, weights_on
from stratagem.training.row_axis import (
    CURVED,
    JOINS,
    LINEAR,
    SUMS,
    RowAxis,
    dims_of,
    only_input,
    sizes_of,
)

_WHYS = {
    "mixed": "the loss compares rows with a sum or mean over rows, which is the share's",
    "single": "the loss takes rows by their place in the batch, and those of a share have "
    "other places (stack a value for each row, and take the mean of all)",
    "ranked": "the loss ranks the rows, and a share's are not ranked as in the batch",
    "free": "the loss is a function of a sum or mean over rows, and those of the shares "
    "do not add up to that of the batch",
}


#: how far rounding takes a number from 1 in fp32
TOLERANCE = 1e-6


class Doubt(Exception):
    """The shares of a loss do not add up to the loss of the batch, or may not."""


class Scale(NamedTuple):
    """What a term is multiplied and divided by on the way from the loss."""

    #: by Python's numbers; None: not divided
    divided: float | None = None
    times: float = 1.0
    #: divided by a computed tensor, from a mask for instance; multiplied by such tensors
    computed: float | None = None
    factors: tuple[Tensor, ...] = ()
    #: the computed divisors that are the count of a sum; under anything else replicas must have
    #: the same
    counts: tuple[Tensor, ...] = ()


@dataclass(slots=True)
class Term:
    """One summand of a loss, and what it is divided by on this replica."""

    #: the node of the graph at which the gradient of the term enters
    node: Any
    #: "fixed" has no rows in it: a penalty on weights
    kind: Literal["mean", "sum", "fixed", "unknown"]
    #: what a mean is divided by; a tensor if the value is still on the device
    count: float | Tensor = 1.0
    #: what it would be divided by if no row were left out
    full: int = 1
    #: whether a mask has picked the values that are averaged
    picked: bool = False
    #: whether some targets may be left out of the count, or weigh more than others
    counted: bool = False
    #: what a sum is divided by, unless that is a count of the share's rows
    divisor: float | None = None
    #: whether the divisor was computed
    computed: bool = False
    #: whether Python's number by which it is divided was read as a count
    explained: bool = False
    #: Python's numbers by which it is multiplied and divided, where the divisor is no count
    numbers: tuple[float, float] = (1.0, 1.0)
    #: of a sum with a computed divisor: what is added up, and in what shape
    values: tuple[Any, Sequence[int]] | None = None
    #: whether the divisor is a whole number by its type, as the count of a mask is, or a mask has
    #: picked the values
    whole: bool = False


class Terms(NamedTuple):
    """All summands, and the tensors by which they are multiplied: replicas must have the same."""

    terms: list[Term]
    constants: list[Tensor]


def terms_of(loss: Tensor, rows: int | None, total: int | None, *, doubts: bool = True) -> Terms:
    """Return the summands of a loss over `rows` of the `total` rows of a batch, where known.

    Raises Doubt where one is no mean and no sum over rows, unless `doubts` is False.
    """
    node = loss.grad_fn
    if node is None:
        return Terms([], [])
    if loss.numel() != 1:
        return Terms([Term(node, "unknown")], [])
    return _Reader(rows, total, doubts).read(node, loss)


class _Reader:
    def __init__(self, rows: int | None, total: int | None, doubts: bool) -> None:
        self.rows, self.total, self._doubts = rows, total, doubts
        self._axis = RowAxis(rows)
        self._constants: list[Tensor] = []
        self._terms: list[Term] = []
        #: nodes without a row axis that are still to be read, with their scale, and the product
        #: with a learned weight around them, at which their gradient enters
        self._todo: list[tuple[Any, Scale, Any]] = []

    def read(self, root: Any, loss: Tensor) -> Terms:
        self._todo = [(root, Scale(), None)]
        while self._todo:
            self._visit(*self._todo.pop())
        terms = self._terms
        if any(term.divisor is not None for term in terms):
            means = {float(term.count): term for term in terms if term.kind == "mean"}
            terms = [t if t.divisor is None else self._settled(t, means, loss) for t in terms]
        return Terms(terms, self._constants)

    def _visit(self, node: Any, scale: Scale, at: Any) -> None:
        name = node.name()
        if hasattr(node, "_saved_reduction"):
            self._add(self._loss_function(node, name, scale, at), scale)
            return
        inputs = [each for each, _ in node.next_functions if each is not None]
        if name in SUMS or (name in JOINS and all(map(self._axis.is_free, inputs))):
            self._todo += [(each, scale, at) for each in reversed(inputs)]
        elif name in LINEAR and len(inputs) == 1 and self._axis.is_free(inputs[0]):
            self._todo.append((inputs[0], scale, at))
        elif name in ("MulBackward0", "DivBackward0", "DivBackward1"):
            self._scaled(node, name, inputs, scale, at)
        elif name.startswith(("MeanBackward", "SumBackward")):
            self._reduced(node, name, inputs[0], scale, at)
        elif self._axis.is_fixed(node):
            self._add(Term(at or node, "fixed"), scale)
        elif name in CURVED:
            self._doubt(
                node,
                f"the loss is a function ({name.partition('Backward')[0].lower()}) of a sum or "
                "mean over rows, and those of the shares do not add up to that of the batch",
            )
        else:
            self._add(Term(at or node, "unknown"), scale)

    def _add(self, term: Term, scale: Scale) -> None:
        if term.kind != "sum":
            self._constants += scale.counts
        by = 1.0 if scale.divided is None or term.explained else scale.divided
        term.numbers = (scale.times, by)
        self._terms.append(term)

    def _doubt(self, node: Any, why: str) -> None:
        if self._doubts:
            raise Doubt(why)
        self._terms.append(Term(node, "unknown"))

    # --- products and quotients -----------------------------------------------------------------

    def _scaled(self, node: Any, name: str, inputs: list[Any], scale: Scale, at: Any) -> None:
        data = inputs if len(inputs) == 1 else [i for i in inputs if not self._axis.is_fixed(i)]
        if not data:
            self._add(Term(at or node, "fixed"), scale)
            return
        divided = name != "MulBackward0"
        if len(data) > 1 or (divided and data[0] is not node.next_functions[0][0]):
            self._doubt(
                node,
                "the loss is a product or a quotient of two numbers that both depend on the rows, "
                "and those of the shares do not add up to that of the batch",
            )
            return
        if len(inputs) > 1:  # a learned weight, whose gradient depends on the rows, too
            at = at or node
        else:
            scale = self._times(scale, operand(node), divided)
        self._todo.append((data[0], scale, at))

    def _times(self, scale: Scale, number: Any, divided: bool) -> Scale:
        if number is None:
            return scale
        if isinstance(number, Tensor) and number.numel() > 1:
            self._constants.append(number)
            return scale
        if isinstance(number, Tensor) and not _is_plain_number(number):
            if not divided:
                return scale._replace(factors=(*scale.factors, number))
            if float(number) > 1:  # a mean by a sum of weights is no mean by their mean
                scale = scale._replace(counts=(*scale.counts, number))
            return scale._replace(computed=(scale.computed or 1.0) * float(number))
        if divided:
            return scale._replace(divided=(scale.divided or 1.0) * float(number))
        return scale._replace(times=scale.times * float(number))

    def _within(self, below: Any, scale: Scale) -> Scale:
        """Add to a scale what values are multiplied and divided by just before the reduction."""
        for _ in range(8):
            if below is None or below.name() not in ("MulBackward0", "DivBackward0"):
                break
            number = operand(below)
            if isinstance(number, Tensor) and number.numel() == 1 and self._is_for_all(number):
                scale = self._times(scale, number, below.name() == "DivBackward0")
            below = only_input(below)
        return scale

    def _is_for_all(self, number: Tensor) -> bool:
        """Whether a number is the same for all values; it may belong to a share's only row."""
        return not number.dim() or self.rows != 1

    # --- reductions -----------------------------------------------------------------------------

    def _reduced(self, node: Any, name: str, below: Any, scale: Scale, at: Any) -> None:
        if self._axis.is_fixed(below):
            self._add(Term(at or node, "fixed"), scale)
            return
        if self._axis.found_in(below) == "free":
            self._todo.append((below, scale, at))  # the rows are reduced further down
            return
        self._refuse_mixed(below)
        sizes = sizes_of(node)
        dims = dims_of(node, len(sizes))
        if sizes and self._axis.of(sizes) not in dims:
            self._add(Term(at or node, "unknown"), scale)
            return
        scale = self._within(below, scale)
        if name.startswith("Sum"):
            self._add(self._sum(at or node, sizes, scale, below), scale)
            return
        count = prod(sizes[d] for d in dims)
        picked = self._axis.is_picked(below)
        self._add(self._mean(at or node, float(count), count, scale, picked=picked), scale)

    def _loss_function(self, node: Any, name: str, scale: Scale, at: Any) -> Term:
        """Read one of torch's loss functions, whose node says how it was reduced."""
        self._refuse_mixed(only_input(node), "free")
        values, at = node._saved_self, at or node
        if node._saved_reduction == 2:
            return self._sum(at, tuple(values.shape), scale, node)
        if name.startswith("NllLoss"):
            full, count = node._saved_target.numel(), read_count(node._saved_total_weight)
            picked = self._axis.is_picked(only_input(node))
            return self._mean(at, count, full, scale, picked=picked, counted=True)
        if name.startswith("Multi"):
            length = len(values) if values.dim() else 1
            return self._mean(at, float(length), length, scale)
        if self._doubts and _is_stretched(values, node._saved_target):
            raise Doubt(
                "the loss compares outputs and targets of unlike shapes, so torch repeats both and "
                "every row meets every other, also those of other replicas (give both the same "
                "shape: y[:, None], or output.squeeze(1))",
            )
        full, picked = values.numel(), self._axis.is_picked(only_input(node))
        return self._mean(at, float(full), full, scale, picked=picked)

    def _mean(
        self,
        node: Any,
        count: float | Tensor,
        full: int,
        scale: Scale,
        *,
        picked: bool = False,
        counted: bool = False,
    ) -> Term:
        self._constants += scale.factors
        if scale.computed is not None:  # by the mean of a mask
            return Term(node, "mean", count * scale.computed, full, True, True)
        return Term(node, "mean", count, full, picked, counted)

    def _sum(self, node: Any, sizes: Sequence[int], scale: Scale, below: Any) -> Term:
        """Read a sum; one that is divided by the number of its values is a mean."""
        computed = scale.computed
        for factor in scale.factors:
            if 0 < abs(float(factor)) <= 1:
                computed = (computed or 1.0) / float(factor)
            else:  # the scale of a GradScaler
                self._constants.append(factor)
        if computed is not None:
            found = Term(node, "sum", divisor=computed, computed=True, values=(below, sizes))
            found.whole = not any(each.is_floating_point() for each in scale.counts)
            found.whole = found.whole or self._axis.is_picked(below)
            return found
        rows = self.rows if self.rows is not None else (sizes[0] if sizes else 1)
        counts = {prod(sizes[: i + 1]) for i in range(len(sizes))} | {rows}
        if len(sizes) > 2:
            counts.add(prod(sizes) // max(sizes[1], 1))  # classes on axis 1
        by, whole = scale.divided, self.total if self.total != rows else None
        if by is not None and by in counts and by % rows == 0 and by != whole:
            return Term(node, "mean", by, int(by), explained=True)
        if by is not None and (by != 1.0 or (rows > 1 and self._has_mask(below))):  # max(n, 1)?
            return Term(node, "sum", divisor=by, explained=True)
        if self._hides_count(abs(1 / scale.times) if scale.times else 1.0, counts, rows):
            return Term(node, "sum", divisor=1 / scale.times)
        return Term(node, "sum")

    def _has_mask(self, below: Any) -> bool:
        return self._axis.is_picked(below) or next(weights_on(below), None) is not None

    def _hides_count(self, by: float, counts: set[int], rows: int) -> bool:
        """Whether a factor of a sum may be 1 divided by some count of rows."""
        if by in (1.0, 2.0) or rows == self.total:
            return False
        wholes = {self.total * count // rows for count in counts} if self.total else set()
        some = {count for count in counts | wholes if count % rows == 0}
        return any(isclose(by, times * count, rel_tol=1e-6) for count in some for times in (1, 2))

    def _settled(self, term: Term, means: dict[float, Term], loss: Tensor) -> Term:
        """Settle what a sum is whose divisor is no count of this share's rows."""
        by = term.divisor
        assert by is not None
        for count, mean in means.items():
            # label smoothing with ignored targets or class weights: torch divides both sums alike
            if isclose(by, count, rel_tol=TOLERANCE):
                return replace(mean, node=term.node, numbers=term.numbers)
        if term.computed:  # the sum of a mask
            if by == 1.0 and float(loss.detach()) == 0.0:
                why = "the loss of this share is 0 and is divided by 1, which may stand for 0"
                self._doubt(term.node, f"{why} (`mask.sum().clamp(min=1)`?)")
            return replace(term, kind="mean", count=by, picked=True, counted=True)
        if not self._doubts:
            return Term(term.node, "unknown")
        raise Doubt(
            f"the loss is a sum over rows divided by {by:g}, and this replica has {self.rows} of "
            f"the batch's {self.total} rows; whether that number belongs to the share or to the "
            "whole batch cannot be seen"
        )

    # --- values that mix rows -------------------------------------------------------------------

    def _refuse_mixed(self, below: Any, *more: str) -> None:
        if below is None or not self._doubts:
            return
        found = self._axis.found_in(below)
        if found in ("mixed", "single", "ranked", *more):
            raise Doubt(_WHYS[found])


def _is_stretched(values: Tensor, target: Tensor) -> bool:
    """Whether broadcasting has paired each row's target with the outputs of every row."""
    if values.dim() < 2 or values.shape != target.shape or len(target) < 2:
        return False
    return target.stride(0) == 0 and 0 in values.stride()[1:]


def _is_plain_number(number: Tensor) -> bool:
    """Whether torch made the tensor from a Python number: it does not take part in promotion."""
    other = torch.tensor(1, dtype=torch.int8 if number.dtype is torch.int64 else torch.float16)
    return torch.result_type(number, other) is other.dtype


def read_count(count: Tensor) -> float | Tensor:
    """Return a count as a number, unless that means waiting for the device."""
    return float(count) if count.device.type == "cpu" else count
