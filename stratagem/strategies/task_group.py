"""What a strategy asks of the processes that work for it, however they work together."""

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
    #: where this process stands in a cluster; None if it is on its own
    place: Place | None
    #: how many replicas there are in all
    size: int
    #: whether this process writes checkpoints and logs, where its place in the cluster does not say
    leads: bool | None

    def start(self) -> Replica:
        """Bring everybody up, unless they are; the replica that this process is."""

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        sent: Sent = None,
        again: Again | None = None,
    ) -> list[Any]:
        """Run `function` on everybody here; `sent` is what the others get instead of `args`.

        With `again` it can be begun again, where replicas may leave and join.
        """

    def report(self, detail: str) -> None:
        """Tell the other tasks why this one ends."""

    def close(self) -> None:
        """End what was started here."""
