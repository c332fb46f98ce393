"""One connection to a server, and who is at its other end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stratagem.strategies.parameters.parties import Attendee
from stratagem.wire.tcp import Connection

log = logging.getLogger("stratagem")


@dataclass(eq=False)
class Guest:
    """One connection and who is at its other end.

    The token is that of the process: its pulse and its work have the same, whoever comes in its
    place has another.
    """

    connection: Connection
    role: str
    name: str
    token: str
    worker: int = -1
    chief: bool = False
    said_bye: bool = False
    #: its end has been spoken of
    dismissed: bool = False
    #: as the lead knows this worker, once it has joined
    attendee: Attendee | None = None
    #: when its pulse was last felt, and whether it has been called silent since
    heard: float = field(default_factory=time.monotonic)
    silent: bool = False

    def tell(self, note: Mapping[str, Any]) -> None:
        """A word between two answers; one that does not listen will be found gone."""
        try:
            self.connection.send(note)
        except OSError as problem:
            log.info("%s does not listen: %s", self.name, problem)

    def offer(self, note: Mapping[str, Any]) -> bool:
        """The same for who holds a lock, and may wait for nobody; False: try again later."""
        try:
            return self.connection.offer(note)
        except OSError as problem:
            log.info("%s does not listen: %s", self.name, problem)
            return True
