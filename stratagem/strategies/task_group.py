"""The interface of a strategy to its processes: a replica group, or workers with servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from stratagem.cluster.spec import Place
from stratagem.training.elastic import Again
from stratagem.training.replica import Replica
from stratagem.training.replica_group import Sent


class TaskGroup(Protocol):
    """The workers of one strategy, seen from one process."""

    #: the devices of this process and of those that it starts
    devices: tuple[str, ...]
    #: the place of this process in a cluster; None without one
    place: Place | None
    #: how many replicas there are in all
    size: int
    #: whether this process writes checkpoints and logs; None if its place in the cluster decides
    leads: bool | None

    def start(self) -> Replica:
        """Start all workers that are not running; return the replica that this process is."""

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        sent: Sent = None,
        again: Again | None = None,
    ) -> list[Any]:
        """Run `function` on all workers of this process; `sent` replaces `args` on followers.

        With `again` the call can be begun again after replicas have left or joined.
        """

    def report(self, detail: str) -> None:
        """Tell the other tasks why this task ends."""

    def close(self) -> None:
        """End the processes that were started here."""
