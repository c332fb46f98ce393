"""Those that the lead deals with: servers, its own shard among them, and workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from stratagem.errors import ReplicaError
from stratagem.strategies.parameters.shard import Order


class Near(Protocol):
    """The lead's own shard."""

    changed: threading.Condition
    failure: ReplicaError | None

    def obey(self, order: Order) -> Any:
        """Carry an order out."""

    def fetch(self, seat: str, have: int, after: int) -> tuple[dict[str, Any], list[Tensor]]:
        """The newest values, for a worker that has version `have`."""


class Far(Protocol):
    """Another server, as the lead commands it."""

    def order(self, order: Order) -> None:
        """Send an order off; it is carried out after all before it."""

    def answer(self) -> float:
        """The number that the last order asked for."""


@dataclass(eq=False)
class Attendee:
    """A worker that takes part in a fit.

    `tell` sends it a word between two answers, if that can be done at once; whether it was.

    Another process may take over the worker's number, after which this one counts no more. The
    seat is the process's own: under it servers keep the gradients that it has laid down.
    """

    worker: int
    name: str
    seat: str
    tell: Callable[[Mapping[str, Any]], bool]
    fit: int
    #: not heard of for a while: stopped, or cut off
    silent: bool = False
    #: given up; set without the lock
    gone: bool = False
