"""Gradients that a custom loop accumulates over batches, in step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stratagem.errors import NotDistributable


class Accumulation:
    """The gradients of earlier batches, in `grad`.

    A part of a batch weighs by its examples, and a push weighs like the part of the last batch:
    earlier gradients are scaled to that weight.
    """

    def __init__(self, params: Sequence[Tensor], parts: int) -> None:
        self._params, self._parts = params, parts
        #: whether something lies here, and what share of the last batch was done here
        self._here, self._share = False, 1.0

    def begin(self, examples: int, total: int) -> None:
        """Begin the next batch: this worker has `examples` of its `total`."""
        if self._parts == 1:
            return
        share = examples / max(total, 1)
        if self._here and total < self._parts:
            raise NotDistributable(
                f"gradients are added up over batches, and one of {total} examples has none for "
                f"some of {self._parts} workers, whose gradients would be lost; give the loader "
                "drop_last=True, or another batch_size."
            )
        if self._here and share and share != self._share:
            for param in self._params:
                if param.grad is not None:
                    param.grad.mul_(self._share / share)
        self._share = share

    @property
    def is_here(self) -> bool:
        """Whether there are gradients of earlier batches."""
        return self._here

    def keep(self) -> None:
        """Keep the gradients: the loop made no step."""
        self._here = any(param.grad is not None for param in self._params)

    def drop(self) -> None:
        """Forget the gradients: they were pushed."""
        self._here = False
