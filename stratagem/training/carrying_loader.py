"""A loader whose batches carry their share, for loops that have several in hand."""

from __future__ import annotations

from typing import Any

from stratagem.data.loader import LoaderWrapper
from stratagem.training.batch_shares import shares_of
from stratagem.training.replica import Replica


class CarryingLoader(LoaderWrapper):
    """Has each batch carry its share."""

    def __init__(self, loader: Any, replica: Replica, *, nested: bool) -> None:
        """`nested`: the loop may stand within that of another loader."""
        super().__init__(loader)
        self._replica, self._nested = replica, nested

    def __iter__(self) -> Any:
        batches, this_pass = shares_of(self._replica), object()
        share, count, uneven, number = self._replica.share, self._replica.count, False, 0
        loop = self._replica.loop
        before = batches.latest if self._nested else None
        try:
            for batch in self.loader:
                batches.fetched(batch, this_pass)
                number += 1
                uneven = uneven or share.total % count > 0
                loop.inner_over = False
                yield batch
            batches.latest, loop.inner_over = before, before is not None
            loop.uneven = uneven or (loop.inner_over and share.total % count > 0)
        finally:
            batches.latest = before or batches.latest
            batches.end(this_pass, 0 if self._nested else number)
