"""Gradients that a loop of one's own adds up over batches, in step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stratagem.errors import NotDistributable


class Accumulation:
    """What lies in `grad` from batches before.

    Parts of a batch weigh by their examples, and all that is handed in like the part of the last
    batch: what lies here is brought to that weight.
    """

    def __init__(self, params: Sequence[Tensor], parts: int) -> None:
        self._params, self._parts = params, parts
        #: whether something lies here, and what share of the last batch was done here
        self._here, self._share = False, 1.0

    def begin(self, examples: int, total: int) -> None:
        """The part of the next batch has so many examples of so many."""
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
        """Whether something lies here from batches before."""
        return self._here

    def keep(self) -> None:
        """There was no step: what there is stays."""
        self._here = any(param.grad is not None for param in self._params)

    def drop(self) -> None:
        """It was handed in."""
        self._here = False
