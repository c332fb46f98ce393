"""Weight gradients of linear layers as their two factors.

The gradient of a linear layer's weight is a product, dy' x, of two thin matrices with a row for
every example. Replicas that share memory need not add up full products: each writes its rows of dy
and x into one table, and multiplies its own slice of the weight for the whole batch at once.

               dy                x                 weight
    replica 0 [ rows of 0 ]     [ rows of 0 ]     [ replica 0 multiplies these rows ]
    replica 1 [ rows of 1 ]     [ rows of 1 ]     [ replica 1 these                  ]

That is the product of one device, cut by rows. Nothing as large as the weight is written or read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stratagem.wire.shared_memory import SharedMemoryCollective, SharedTable, sum_rows

#: the fewest rows of the weight per replica for an efficient product
_ROWS = 16


def worth_factoring(weight: Tensor, replicas: int) -> bool:
    """Return whether a weight has enough rows for factors to pay off."""
    return weight.dim() == 2 and len(weight) >= _ROWS * replicas


def make_factors(weights: Sequence[Tensor], collective: SharedMemoryCollective) -> list[Factors]:
    """Return the factors of some weights, in one piece of shared memory. Made collectively."""
    if not weights:
        return []
    sizes = [_most_rows(w, collective.size) * sum(w.shape) for w in weights]
    flat = collective.table(sum(sizes), torch.float32, rows=1).rows[0]
    marks = collective.table(3 * len(weights), torch.int64).words()
    return [
        Factors(weight, part, [row[3 * i : 3 * i + 3] for row in marks], collective.rank)
        for i, (weight, part) in enumerate(zip(weights, torch.split(flat, sizes), strict=True))
    ]


def _most_rows(weight: Tensor, replicas: int) -> int:
    """Return the largest batch whose factors are no larger than their products."""
    height, width = weight.shape
    return max(1, min(height, replicas * height * width // (height + width)))


class Factors:
    """The factors of one weight's gradient."""

    def __init__(
        self, weight: Tensor, memory: Tensor, marks: Sequence[memoryview], rank: int
    ) -> None:
        """`marks`: three numbers for every replica; `rank` is this one."""
        self.height, self.width = weight.shape
        self.rows = _most_rows(weight, len(marks))
        self._dy = memory[: self.rows * self.height].view(self.rows, self.height)
        self._x = memory[self.rows * self.height :].view(self.rows, self.width)
        #: first row, end, and whether the replica also has a full product
        self._marks, self._mark = marks, marks[rank]
        self._mine = (0, 0)
        #: whether the table has this replica's rows of the present step
        self.kept = False

    def slice(self, rank: int, replicas: int) -> tuple[int, int]:
        """Return the rows of the weight that a replica multiplies."""
        return self.height * rank // replicas, self.height * (rank + 1) // replicas

    def expect(self, start: int, end: int) -> None:
        """Begin a step in which this replica has these examples of the batch."""
        self._mine = (start, end)
        self.kept = False

    def keep(self, dy: Tensor, x: Tensor) -> bool:
        """Write this replica's rows; return False if they are not one per example."""
        start, end = self._mine
        if len(x) != end - start or end > self.rows:
            return False
        self._dy[start:end].copy_(dy)
        self._x[start:end].copy_(x)
        self.kept = True
        return True

    def mark(self, product: bool) -> None:
        """Publish where this replica's gradient lies; call it before replicas meet."""
        self._mark[0], self._mark[1] = self._mine if self.kept else (0, 0)
        self._mark[2] = product

    def add_up(
        self,
        lo: int,
        hi: int,
        scale: float,
        products: tuple[SharedTable, int] | None,
        total: Tensor,
    ) -> None:
        """Write rows lo..hi of the gradient, summed over all replicas, into `total`.

        `products`: the table of full products, and where these rows begin in it; None: `total`
        holds their sum.
        """
        marks = [mark.tolist() for mark in self._marks]
        matrix = total.view(hi - lo, self.width)
        fresh = not any(product for _, _, product in marks)
        if not fresh and products is None:
            total.mul_(scale)
        elif not fresh and products is not None:
            table, start = products
            sum_rows(table, start, [scale * product for _, _, product in marks], total)
        for first, last in _joined([(first, last) for first, last, _ in marks]):
            dy, x = self._dy[first:last, lo:hi].t(), self._x[first:last]
            if fresh:
                torch.mm(dy, x, out=matrix)
                if scale != 1.0:
                    total.mul_(scale)
                fresh = False
            else:
                matrix.addmm_(dy, x, alpha=scale)
        if fresh:
            total.zero_()


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans that touch; they are in order."""
    found: list[tuple[int, int]] = []
    for first, last in spans:
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], last)
        elif last > first:
            found.append((first, last))
    return found
