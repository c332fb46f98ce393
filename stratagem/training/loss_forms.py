"""What was read of a loss apart from its counts, by which replicas notice that theirs differ.

A share's own count may hide in a form that one device has, too: `loss * len(x) / n`, a guard for a
mask that is empty here and not there, a constant that is taken for a count. The form and the
numbers of a loss are compared in full at the first pass, later by a hash in the notes. Tensors that
multiply or divide it are part of that hash; those on a device that has to be waited for, at passes
1, 2, 4, 8, ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isclose, isfinite, prod
from typing import Any, NamedTuple
from zlib import crc32

from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.state.change_tracker import digest
from stratagem.training.loss_reading import REMEDY
from stratagem.training.loss_terms import TOLERANCE, Term
from stratagem.training.loss_weights import chain, weights_on
from stratagem.training.replica import Share
from stratagem.training.row_axis import RowAxis

_FORMS = 64  # kept at most: numbers may change at every step


class Pass(NamedTuple):
    """A backward pass: which form it has is asked of the numbers at hand."""

    number: int
    #: tells, by what it returns, whether weights have been updated since an earlier one
    version: Callable[[], int | None]
    on_cpu: bool

    @property
    def is_looked_at(self) -> bool:
        """Whether it is the 1st, 2nd, 4th, 8th ..."""
        return not self.number & (self.number - 1)


class LossForms:
    """The forms of one replica's losses."""

    def __init__(self, count: int) -> None:
        #: of replicas
        self._count = count
        #: at the first pass of all replicas
        self._agreed = ""
        self._marks: dict[Any, float] = {}
        #: the rows of a share, and the numbers of its loss, by the kinds of its terms
        self._numbers: dict[Any, tuple[int, list[float]]] = {}
        #: a divisor that counts accumulated passes or the rows, and the weights' version then
        self._doubtful: tuple[float, int | None] | None = None
        #: whether the terms of the latest loss had not been seen before
        self.is_new = False

    def mark_of(
        self, terms: Sequence[Term], constants: Sequence[Tensor], share: Share, now: Pass
    ) -> float:
        """Return a number of its own for each form, 0 for the agreed one; of so few bits that its
        square is exact.

        Refuses a loss that is multiplied by a count of this replica's rows.
        """
        form = tuple([(t.node.name(), t.kind, t.computed, t.numbers) for t in terms])
        known = mark = self._marks.get(form)
        self.is_new = False
        if self._doubtful is not None:
            self._settle(share.examples, now)
        if mark is None:
            text = _text_of(terms)
            mark = 0.0 if self._agrees(text, terms) else _hash_of(text)
            if share.examples < share.total:
                self._refuse_counts(terms, share, now)
                if len(self._marks) > _FORMS:
                    self._marks.clear()
                self._marks[form] = mark
        if share.examples < share.total:
            if known is None or now.is_looked_at:
                self._refuse_divisors(terms, share)
            _refuse_parts(terms, share.examples)
        if constants and (now.on_cpu or now.is_looked_at):
            self._refuse_constants(constants, terms, share)
            mark = (mark + _hash_of(repr([_value_of(each) for each in constants]))) % 1
        return mark

    def _agrees(self, text: str, terms: Sequence[Term]) -> bool:
        """Also a loss that has overflowed, which its gradients tell."""
        return text == self._agreed or not all(isfinite(n) for t in terms for n in t.numbers)

    def _alike(self, share: Share) -> bool:
        """Whether all shares have as many rows; where they do not, replicas notice."""
        rows, total = share.examples, share.total
        parts = self._count if self._count > 1 else total // rows
        return rows < total == rows * parts

    def _refuse_counts(self, terms: Sequence[Term], share: Share, now: Pass) -> None:
        terms, rows = [term for term in terms if term.kind != "fixed"], share.examples
        means = all(term.kind == "mean" for term in terms)
        numbers = [number for term in terms for number in term.numbers]
        kinds = tuple((term.node.name(), term.kind) for term in terms)
        self.is_new = kinds not in self._numbers
        before, then = self._numbers.get(kinds, (0, []))
        self._numbers[kinds] = rows, numbers
        if before:  # does it grow as the rows?
            for number, old in zip(numbers, then, strict=True):
                grown = before != rows and number != old
                if grown and isclose(number * before, old * rows, rel_tol=TOLERANCE):
                    raise _own_count(number, rows)
        elif means and rows > 1 and self._alike(share):
            if {*numbers[::2]} == {rows}:  # all of the loss, and not one of its terms
                raise _own_count(rows, rows)
            if rows in numbers[1::2]:  # or is it how often gradients are accumulated?
                self._doubtful = rows, now.version()

    def _settle(self, rows: int, now: Pass) -> None:
        """Refuse a doubtful divisor unless this pass adds to gradients of the one before."""
        assert self._doubtful is not None
        (number, version), self._doubtful = self._doubtful, None
        if version != now.version():
            raise _own_count(number, rows)

    def _refuse_constants(
        self, constants: Sequence[Tensor], terms: Sequence[Term], share: Share
    ) -> None:
        rows, single = share.examples, [each for each in constants if each.numel() == 1]
        if rows == share.total or not any(term.kind in ("mean", "sum") for term in terms):
            return
        for each in single:
            counts = not each.is_floating_point()  # as the sum of a mask
            if counts or (1 < rows == float(each) and self._alike(share)):
                raise _own_count(float(each), rows)

    def _refuse_divisors(self, terms: Sequence[Term], share: Share) -> None:
        alike = self._alike(share)
        for term in terms:
            if not _is_own_count(term, share.examples, share.total, alike=alike):
                raise NotDistributable(
                    f"the loss is a sum over rows divided by a tensor ({term.divisor:g} here) that "
                    "is no count of what is added up; whether that number belongs to the share or "
                    f"to the whole batch cannot be seen. {REMEDY}"
                )

    def describe(
        self, terms: Sequence[Term], constants: Sequence[Tensor], share: Share, *, said: bool
    ) -> list[Any]:
        """Return what replicas compare at their first pass.

        `said`: the user has said what the loss is divided by, so its form does not matter.
        """
        digests = [digest(each) for each in constants]
        return ["" if said or not share.announced else _text_of(terms), *digests]

    def agree(self, found: Sequence[Any]) -> None:
        """Compare the descriptions of all replicas that have rows."""
        if not found:
            return
        self._agreed = found[0][0]
        self._marks.clear()
        for (text, *constants), (other, *others) in pairwise(found):
            if text != other:
                several = text.count(" + ") != other.count(" + ")
                tasks = "For a mean over tasks: strategy.backward(loss, count=tasks). " * several
                raise NotDistributable(
                    f"one replica's loss is {text}, another one's {other}: is a number in it a "
                    f"count of its own rows, tokens or tasks, or a mask empty? {tasks}{REMEDY}"
                )
            if any(a != b for a, b in zip(constants, others, strict=False)):
                raise NotDistributable(
                    "what the loss sums up or averages over rows is multiplied or divided by a "
                    "tensor that is another one on each replica: computed from its rows? " + REMEDY
                )


def _is_own_count(term: Term, rows: int, total: int, *, alike: bool) -> bool:
    """Whether a sum is divided by a count of it: of its values, or of the mask or weights on them.

    No share has as many values as the batch has rows, `total`, by chance. Where shares are `alike`,
    and no mask or weights are there, a number that equals the `rows` may be a constant.
    """
    if term.divisor is None or term.values is None:
        return True
    below, sizes = term.values
    counts: list[float] = [prod(sizes[: i + 1]) for i in range(len(sizes))]
    node = next((n for n in chain(below) if n.name().startswith("NllLoss")), None)
    if node is not None:
        targets = node._saved_target != node._saved_ignore_index
        counts += [float(node._saved_total_weight), float(targets.sum())]
    unsure = {total} if term.whole or not alike else {total, rows}
    counts = [count for count in counts if count not in unsure]
    together: Any = 1.0
    for weights in weights_on(below):
        together = together * weights.detach().double()
        for each in (weights.detach().double(), together):
            added = float(each.sum())
            counts += [added, added * prod(sizes) / each.numel()]
    return any(isclose(term.divisor, count, rel_tol=1e-4, abs_tol=1e-4) for count in counts)


def _refuse_parts(terms: Sequence[Term], rows: int) -> None:
    """Refuse a mean over a part of the rows, unless it is multiplied by that part of them."""
    for term in terms:
        if term.kind == "mean" and not term.picked and term.full < rows:
            times, by = term.numbers
            if isclose(times / by, term.full / rows, rel_tol=TOLERANCE):
                continue
            values = (each for each in chain(term.node) if not RowAxis(rows).is_fixed(each))
            if not any(rows in each._input_metadata[0].shape[:1] for each in values):
                raise NotDistributable(
                    f"multiply the loss of a part of the rows by that part (loss * len(part) / "
                    f"len(x)), or give the model all rows at once: this loss is a mean over "
                    f"{term.full} of the {rows} rows here, and one device has other parts, so that "
                    "the gradients of several backward() do not add up to its. Or call "
                    "strategy.backward(loss, count=len(part))."
                )


def _hash_of(text: str) -> float:
    """Return a number between 0 and 1."""
    return (crc32(text.encode()) % 4095 + 1) / 4096


def _value_of(tensor: Tensor) -> Any:
    return float(tensor) if tensor.numel() == 1 else digest(tensor)


def _own_count(number: float, rows: int) -> NotDistributable:
    return NotDistributable(
        f"the loss is multiplied or divided by {number:g}, which seems to count this replica's "
        f"rows ({rows}) or tokens and not the batch's; a mean times such a count is a sum. {REMEDY}"
    )


def _text_of(terms: Sequence[Term]) -> str:
    return " + ".join(
        f"{term.numbers[0]:.9g} * {term.kind} ({term.node.name()})"
        + f" / {term.numbers[1]:.9g}" * (term.numbers[1] != 1.0)
        + " / a tensor" * term.computed
        for term in terms
    )
