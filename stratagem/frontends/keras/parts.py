"""One part of a batch that several workers share, without meeting each other.

A server makes sum(w g) / sum(w) of the parts' gradients. A part's loss is left as Keras computes it
from its rows alone, and w is what that loss was divided by: the number of examples, or what a mask
or the sample weights leave of them. That is the gradient of the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch

from stratagem.data.shard import rows, share
from stratagem.errors import NotDistributable
from stratagem.strategies.replica import Replica, Share


class Part:
    """The part that a worker has in hand."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.device: torch.device = replica.device
        self.is_chief = replica.is_chief
        #: of the batch: what the part has of it, and what this device has
        self.examples = self.total = 1
        self.share = Share(1, 1, 1.0)
        #: for each loss so far: what it was divided by, None for the number of examples
        self._divisors: list[float | None] = []

    def begin(self, examples: int, total: int) -> None:
        self.examples, self.total = examples, total
        self.share.set(examples, total)
        self._divisors = []

    @property
    def whole(self) -> bool:
        """Whether it is a batch by itself."""
        return self.examples == self.total

    @property
    def plain(self) -> bool:
        """Whether one device has a batch by itself, so that nothing is to be made exact."""
        return self.whole

    def rows(self, data: Any) -> Any:
        """What this device has of the part."""
        return data

    def divided(self, by: float | None) -> float | None:
        """Note what a loss is divided by; returns its factor, None if there was nothing in it."""
        self._divisors.append(by)
        return 1.0 if by is None or by else None

    def weight(self, model: Any) -> float:
        """What the gradient of this part weighs among those of its batch."""
        own = [by for by in self._divisors if by is not None]
        if self.whole or not own:
            return float(self.examples)
        added = any(getattr(layer, "_losses", None) for layer in model._flatten_layers())
        if len(self._divisors) > 1 or added:
            raise NotDistributable(
                "the model has several losses, and one of them is divided by a mask or by the "
                "sample weights, so the parts of a batch do not weigh the same for each; use "
                "Asynchronous(), whose workers get whole batches, or MirroredStrategy."
            )
        return own[0]


class Shared(Part):
    """A part that several devices of a worker share; they do meet.

    A device's gradient counts with its share of the part's examples.
    """

    def begin(self, examples: int, total: int) -> None:
        super().begin(examples, total)
        start, end = share(examples, self.replica.count, self.replica.index)
        self.replica.share.set(end - start, examples)
        self.share.set(end - start, total)

    @property
    def plain(self) -> bool:
        return False

    def rows(self, data: Any) -> Any:
        start, end = share(self.examples, self.replica.count, self.replica.index)
        return rows(data, start, end) if end > start else rows(data, 0, 1)

    def divided(self, by: float | None) -> float | None:
        """Collective where a sum is needed."""
        if by is None:
            return super().divided(None)
        mine = by if self.share.examples else 0.0
        sums = self.replica.all_gather(torch.tensor(mine, dtype=torch.float64))
        total = float(torch.stack(sums).sum())
        if super().divided(total) is None or not mine:
            return None
        return mine / total * self.examples / self.share.examples


def refuse_mask_in_weights() -> None:
    """A mask and sample weights together, of which weighted metrics see a factor of the batch."""
    raise NotDistributable(
        "this batch has a mask and sample weights, which Keras multiplies with a factor of the "
        "whole batch, and a worker has a part of it; use Asynchronous(), whose workers get whole "
        "batches, or MirroredStrategy."
    )
