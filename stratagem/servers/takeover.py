"""At the coordinator: taking over the shards of a server that dies, until it comes back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from stratagem.cluster.failure import left_behind, server_lost
from stratagem.errors import ReplicaError, ReplicaLost
from stratagem.servers.coordinator import Coordinator
from stratagem.servers.holders import Holders
from stratagem.servers.peers import Peers
from stratagem.servers.requests import CHIEF, WORKER, Peer, request

log = logging.getLogger("stratagem")


class Takeover:
    """Handles servers that die or come back. Thread-safe; `changed` is the coordinator's lock."""

    def __init__(
        self,
        holders: Holders,
        peers: Peers,
        end_job: Callable[[ReplicaError], None],
        changed: threading.Condition,
    ) -> None:
        self.holders, self._peers, self._end_job, self._changed = holders, peers, end_job, changed
        self._one_by_one = threading.Lock()
        holders.lose = self.lose

    def can_lose(self, server: int) -> bool:
        """Return whether every shard of a server is held by another one, too."""
        return server in self.holders.gone or (server > 0 and not self.holders.alone(server))

    def lose(self, server: int) -> bool:
        """Drop a server if others hold its shards, else end the job; return whether it goes on."""
        holders, name = self.holders, f"ps {server}"
        holders.hang_up(server)  # wakes a thread that waits for it with the lock
        with self._changed:
            if server in holders.gone:
                return True
            held = [shard for shard, table in enumerate(holders.table()) if server in table]
            if holders.drop(server):
                self._end_job(server_lost(name))
                return False
            heirs = " and ".join(sorted({holders.heir(shard) for shard in held}))
        text = f"{name} was not reached any more, and"
        self._peers.dismiss(name, left_behind(name, text, ReplicaLost))
        self._peers.say(
            f"{name} is gone; what it held is on {heirs}, too, and training goes on with that. "
            f"Start {name} again: until it is back, the death of another ps may end the job"
        )
        return True

    def heartbeat(self, server: int) -> None:
        """Note a server's new heartbeat, at the start of the job or after a restart."""
        here = [peer for peer in self._peers.present("heartbeat") if peer.server == server]
        if len(here) > 1:  # the process before is dead
            self.lose(server)
        if server in self.holders.gone:
            threading.Thread(
                target=self._come_back, args=(server,), name="stratagem-come-back", daemon=True
            ).start()

    def _come_back(self, server: int) -> None:
        with self._one_by_one:  # it may have died and come back again meanwhile
            if server not in self.holders.gone:
                return
            try:
                lines = self.holders.connect_again(server)
            except (OSError, ReplicaError) as problem:
                log.info("ps %d is gone again: %s", server, problem)
                return
            with self._changed:
                self.holders.take_back(server, lines)
        self._peers.say(f"ps {server} is back, and gets its share of the parameters")

    def is_ready(self, server: int, shard: int) -> None:
        """Note that a server which came back has its shards."""
        with self._changed:
            self.holders.is_ready(server, shard)


@request("hold", CHIEF, backups=int)
def hold(coordinator: Coordinator, peer: Peer, backups: int) -> None:
    """Have `backups` other servers hold each shard from the next fit on."""
    assert coordinator.holders is not None
    with coordinator.changed:
        coordinator.check()
        coordinator.holders.cover(backups)


@request("holders", WORKER, generation=int, lost=list)
def holders(
    coordinator: Coordinator, peer: Peer, generation: int, lost: list[int]
) -> dict[str, Any]:
    """Return which servers hold which shards, to a worker that knows those of `generation` and does
    not reach those in `lost` any more."""
    assert coordinator.holders is not None
    with coordinator.changed:
        coordinator.check()
        coordinator.holders.agreed(generation, lost)
        coordinator.check()
        found = coordinator.holders
        return {
            "generation": found.generation,
            "table": found.table(),
            "since": [found.since.get(i, 0) for i in range(len(found.addresses))],
        }
