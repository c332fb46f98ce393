"""Which rows of a piece changed since a version.

A table holds the version of every row's last change. Most who ask are a few versions behind, so
the rows of the last updates are also kept as they came: to look through those costs what changed,
not what there is.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

_RECENT = 64


class RowVersions:
    """The changes of the rows of one piece; versions only grow."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._table = torch.zeros(rows, dtype=torch.int64, device=device)
        self._recent: deque[tuple[int, Tensor]] = deque()
        self._forgotten = 0  # the version of the last change that is in the table alone

    def note(self, version: int, rows: Tensor) -> None:
        """These rows changed, and this is the version after it."""
        self._table[rows] = version
        self._recent.append((version, rows))
        if len(self._recent) > _RECENT:
            self._forgotten = self._recent.popleft()[0]

    def since(self, version: int) -> Tensor:
        """The rows that changed after `version`, in order."""
        if version < self._forgotten:
            return (self._table > version).nonzero().flatten()
        parts = [rows for changed, rows in self._recent if changed > version]
        if not parts:
            return self._table[:0]
        rows: Tensor = torch.unique(torch.cat(parts))
        return rows
