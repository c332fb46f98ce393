"""What several processes answered, against what one did."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain

from cases import Case, Result, weights
from launches import Failed, Found

#: what float32 may leave between two orders of a sum, as a share of the way that weights went
ROUNDING = 1e-5
_WORSE = ("equal", "different", "error", "hang")


@dataclass(frozen=True)
class Cell:
    """How a case went: `amount` is the difference, or the seconds after which it was ended."""

    status: str
    amount: float = 0.0
    words: str = ""
    way: str = ""

    def __str__(self) -> str:
        if self.status == "equal":
            return f"equal ({self.amount:.0e})" if self.amount else "equal"
        if self.status == "different":
            return f"off by {self.amount:.1%}"
        return f"hangs ({self.amount:.0f} s)" if self.status == "hang" else "error"

    @property
    def badness(self) -> tuple[int, float]:
        return _WORSE.index(self.status), self.amount


def compare(case: Case, one: Found | Failed, found: Found | Failed, way: str = "") -> Cell:
    if isinstance(one, Failed):
        return Cell(one.status, one.seconds, f"on one device: {one.words}", way)
    if isinstance(found, Failed):
        return Cell(found.status, found.seconds, found.words, way)
    amount = distance(case, one[0]["result"], found[0]["result"])
    if amount <= ROUNDING:
        return Cell("equal", amount, "", way)
    return Cell("different", amount, order(case, one, found) if case.task == "order" else "", way)


def distance(case: Case, one: Result, other: Result) -> float:
    """The largest difference of metrics; or of weights, as a share of the way that training on one
    device moved the one that went farthest."""
    worst = 0.0
    for name, values in one.items():
        gaps = [abs(a - b) for a, b in zip(values, other[name], strict=True)]
        if not all(map(math.isfinite, gaps)):
            return math.inf
        moved = 1.0
        if name == "weights":
            start = weights(case.model())["weights"]
            moved = max(abs(a - b) for a, b in zip(values, start, strict=True))
            if moved < 1e-3:
                raise ValueError(f"{case.title}: training did not move the weights")
        worst = max(worst, max(gaps) / moved)
    return worst


def order(case: Case, one: Found, found: Found) -> str:
    """How the order of rows differs from one device's."""
    expected, batches = _batches(case, one), _batches(case, found)
    others = sum(a != b for a, b in zip(expected, batches, strict=True))
    epochs = [batches[i : i + case.steps] for i in range(0, len(batches), case.steps)]
    once = all(sorted(chain(*epoch)) == list(range(case.rows)) for epoch in epochs)
    rows = "every row" if once else "not every row"
    return f"{others} of {len(batches)} batches hold other rows; {rows} once an epoch"


def _batches(case: Case, found: Found) -> list[list[int]]:
    """The rows of each global batch. (What a process read before the training does not count.)"""
    share, steps = case.batch // len(found), case.epochs * case.steps
    read = [each["seen"][-steps * share :] for each in found]
    starts = range(0, steps * share, share)
    return [sorted(chain(*(rows[i : i + share] for rows in read))) for i in starts]
