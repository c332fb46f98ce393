"""What was read of a loss apart from its counts, by which replicas notice that theirs differ.

A share's own count may hide in a form that one device has, too: `loss * len(x) / n`, a guard for a
mask that is empty here and not there, a constant that is taken for a count. The form and the
numbers of a loss are compared in full at the first pass, later by a hash in the notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isclose, isfinite
from typing import Any
from zlib import crc32

from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.state.change_tracker import digest
from stratagem.training.loss_reading import REMEDY
from stratagem.training.loss_terms import TOLERANCE, Term, is_own_count
from stratagem.training.replica import Share

_FORMS = 64  # kept at most: numbers may change at every step


class LossForms:
    """The forms of one replica's losses."""

    def __init__(self) -> None:
        #: at the first pass of all replicas
        self._agreed = ""
        self._marks: dict[Any, float] = {}
        #: the rows of a share, and the numbers of its loss, by the kinds of its terms
        self._numbers: dict[Any, tuple[int, list[float]]] = {}

    def mark_of(self, terms: Sequence[Term], share: Share) -> float:
        """Return a number of its own for each form, 0 for the agreed one; of so few bits that its
        square is exact.

        Refuses a loss that is multiplied by a count of this replica's rows.
        """
        form = tuple([(t.node.name(), t.kind, t.computed, t.numbers) for t in terms])
        mark = self._marks.get(form)
        if mark is None:
            text = _text_of(terms)
            mark = 0.0 if self._agrees(text, terms) else (crc32(text.encode()) % 4095 + 1) / 4096
            if share.examples < share.total:
                self._refuse_counts(terms, share.examples, share.total)
                if len(self._marks) > _FORMS:
                    self._marks.clear()
                self._marks[form] = mark
        return mark

    def _agrees(self, text: str, terms: Sequence[Term]) -> bool:
        """Also a loss that has overflowed, which its gradients tell."""
        return text == self._agreed or not all(isfinite(n) for t in terms for n in t.numbers)

    def _refuse_counts(self, terms: Sequence[Term], rows: int, total: int) -> None:
        terms = [term for term in terms if term.kind != "fixed"]
        numbers = [number for term in terms for number in term.numbers]
        kinds = tuple((term.node.name(), term.kind) for term in terms)
        before, then = self._numbers.get(kinds, (0, []))
        self._numbers[kinds] = rows, numbers
        for i, number in enumerate(numbers):
            if before:  # does it grow as the rows?
                grown = before != rows and number != then[i]
                found = grown and isclose(number * before, then[i] * rows, rel_tol=TOLERANCE)
            else:  # a divisor may be how often gradients are accumulated
                found = i % 2 == 0 and _is_count(number, terms, rows, total)
            if found:
                raise _own_count(number, rows)

    def describe(
        self, terms: Sequence[Term], constants: Sequence[Tensor], share: Share, *, said: bool
    ) -> list[Any]:
        """Return what replicas compare at their first pass.

        `said`: the user has said what the loss is divided by, so its form does not matter.
        """
        digests = [digest(each) for each in constants]
        if said or not share.announced:
            return ["", [], *digests]
        rows, total = share.examples, share.total
        for number in (float(each) for each in constants if each.numel() == 1):
            if _is_count(number, terms, rows, total):
                raise _own_count(number, rows)
        unseen = [None if is_own_count(term, total) else float(term.count) for term in terms]
        return [_text_of(terms), unseen, *digests]

    def agree(self, found: Sequence[Any]) -> None:
        """Compare the descriptions of all replicas that have rows."""
        if not found:
            return
        self._agreed = found[0][0]
        self._marks.clear()
        for (text, unseen, *constants), (other, also_unseen, *others) in pairwise(found):
            if text != other:
                several = text.count(" + ") != other.count(" + ")
                tasks = "For a mean over tasks: strategy.backward(loss, count=tasks). " * several
                raise NotDistributable(
                    f"one replica's loss is {text}, another one's {other}: is a number in it a "
                    f"count of its own rows, tokens or tasks, or a mask empty? {tasks}{REMEDY}"
                )
            for a, b in zip(unseen, also_unseen, strict=True):
                if a == b is not None:
                    raise NotDistributable(
                        f"the loss is a sum over rows divided by a tensor that is {a:g} on more "
                        "than one replica; whether that number belongs to the share or to the "
                        f"whole batch cannot be seen. {REMEDY}"
                    )
            if any(a != b for a, b in zip(constants, others, strict=False)):
                raise NotDistributable(
                    "what the loss sums up or averages over rows is multiplied or divided by a "
                    "tensor that is another one on each replica: computed from its rows? " + REMEDY
                )


def _is_count(number: float, terms: Sequence[Term], rows: int, total: int) -> bool:
    """Whether a factor is the number of this replica's rows, or of the values in a term.

    Where shares are unequal, so are their numbers, and replicas notice.
    """
    if rows == total or total % rows:
        return False
    counts: set[float] = {rows, *(t.full for t in terms)}
    counts |= {t.count for t in terms if not isinstance(t.count, Tensor)}
    return number != 1.0 and number in counts


def _own_count(number: float, rows: int) -> NotDistributable:
    return NotDistributable(
        f"the loss is multiplied or divided by {number:g}, which seems to count this replica's "
        f"rows ({rows}) or their values and not the batch's; a mean times it is a sum. {REMEDY}"
    )


def _text_of(terms: Sequence[Term]) -> str:
    return " + ".join(
        f"{term.numbers[0]:.9g} * {term.kind} ({term.node.name()})"
        + f" / {term.numbers[1]:.9g}" * (term.numbers[1] != 1.0)
        + " / a tensor" * term.computed
        for term in terms
    )
