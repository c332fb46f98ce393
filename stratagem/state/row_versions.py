"""Which rows of a piece changed since a version, and to what.

A table holds the version of every row's last change. Most who ask are a few versions behind, so
the rows of the last updates are also kept as they came, with the values that they got: however many
ask for those, they are looked up once. Whoever takes them one after the other is current.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

_RECENT = 64  # updates are kept, while they are no more than
_ROOM = 0.5  # of the piece's rows: copies must not take more memory than it does
_MANY = 16  # updates and more may name the same rows again and again

#: rows, and what they became; None: what they are by now
Change = tuple[Tensor, Tensor | None]


class RowVersions:
    """The changes of the rows of one piece; versions only grow."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._table = torch.zeros(rows, dtype=torch.int64, device=device)
        self._recent: deque[tuple[int, Tensor, Tensor]] = deque()
        self._kept = 0  # rows in them
        self._forgotten = 0  # the version of the last change that is in the table alone

    def note(self, version: int, rows: Tensor, piece: Tensor) -> None:
        """These rows changed, and this is the version after it, and the piece."""
        self._table[rows] = version
        rows = rows.clone()  # they may be a part of memory for all that came
        self._recent.append((version, rows, piece.index_select(0, rows)))
        self._kept += len(rows)
        while len(self._recent) > _RECENT or self._kept > _ROOM * len(self._table):
            self._forgotten, forgotten, _ = self._recent.popleft()
            self._kept -= len(forgotten)

    def since(self, version: int) -> list[Change]:
        """The rows that changed after `version`, in the order of changes."""
        if version < self._forgotten:
            return [((self._table > version).nonzero().flatten(), None)]
        changes: list[Change] = [
            (rows, new) for changed, rows, new in self._recent if changed > version
        ]
        if len(changes) <= _MANY:
            return changes
        return [(torch.unique(torch.cat([rows for rows, _ in changes])), None)]
