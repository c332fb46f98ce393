"""Where process groups exchange their addresses: the job's own connections, not a port.

torch's key-value store listens for whoever connects; keys can be read, overwritten and deleted,
and memory be filled, without a proof of anything. What a group needs at its start fits into notes
of the membership, whose connections have proved the job's secret.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stratagem.cluster.membership import Membership

_Base: Any = dist.Store  # type: ignore[attr-defined]


class MeetingStore(_Base):  # type: ignore[misc]
    """A torch Store over a membership; `name` keeps it apart from others over the same one.

    It has what groups of Gloo and NCCL ask for at their start: set, get, wait and check. Every
    key has one writer.
    """

    def __init__(self, membership: Membership, name: str, limit: timedelta) -> None:
        super().__init__()
        self._membership = membership
        self._name = name
        self._limit = limit

    def within(self, name: str) -> MeetingStore:
        """Another over the same membership, for some of the members."""
        return MeetingStore(self._membership, f"{self._name}/{name}", self._limit)

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"

    def set(self, key: str, value: bytes | str) -> None:
        """Write a value for all members."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._membership.publish(self._key(key), base64.b64encode(data).decode())

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        self.wait([key])
        return base64.b64decode(self._membership.board.read(self._key(key)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these have been written."""
        limit = (timeout or self._limit).total_seconds()
        found = [self._key(key) for key in keys]
        self._membership.board.wait(found, limit, lambda: self._membership.trouble)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these have been written."""
        return self._membership.board.has(self._key(key) for key in keys)
