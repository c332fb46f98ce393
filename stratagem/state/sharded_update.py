"""Parameters, optimizer state and gradients once in shared memory, a slice of each for a replica.

As in sliced.py, but there is one row of gradients for all replicas, to which they have added in
turn (wire/ordered_sum.py). A replica's slice of the sum is where its optimizer reads:

    gradients    [ . | . | . ]     parameters [ . | . | . ]     exp_avg [ . | . | . ]
                   ^   ^   ^
                   |   |   replica 2 scales, clips and steps here
                   |   replica 1
                   replica 0
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stratagem.state.sliced import SlicedUpdate

#: elements whose squares are added up at a time: in double precision they take twice the memory
_AT_ONCE = 1 << 18


class ShardedUpdate(SlicedUpdate):
    """One replica's slice of parameters, gradients and state. Made collectively."""

    def _open_sums(self, flat: Tensor) -> Tensor:
        self._sums = flat
        assert self.buckets.apart is not None
        return self.buckets.apart

    def _gradient_memory(self, spans: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
        grads = [self._sums[at : at + size] for at, size in spans]
        self._parts = [part for grad in grads if len(grad) for part in torch.split(grad, _AT_ONCE)]
        return grads

    def _plain_runs(self) -> list[tuple[int, Tensor]]:
        return []

    def _sum(self, scale: float) -> None:
        """They have been added up: scale them, and erase what nobody has written."""
        for piece in self.pieces:
            factors = self.factors.get(piece.index)
            if factors is not None:
                rows = piece.lo // factors.width, piece.hi // factors.width
                factors.add_up(*rows, scale, None, piece.grad)
            elif not self._counts[piece.index]:
                piece.grad.zero_()
            elif scale != 1.0:
                piece.grad.mul_(scale)
