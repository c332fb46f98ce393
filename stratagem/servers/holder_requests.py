"""The coordinator's requests about servers: which of them hold which shard."""

from __future__ import annotations

from typing import Any

from stratagem.servers.coordinator import Coordinator
from stratagem.servers.requests import CHIEF, WORKER, Peer, request


@request("hold", CHIEF, backups=int)
def hold(coordinator: Coordinator, peer: Peer, backups: int) -> None:
    """Have so many other servers hold each shard, from the next fit on."""
    assert coordinator.holders is not None
    with coordinator.changed:
        coordinator.check()
        coordinator.holders.cover(backups)


@request("holders", WORKER, generation=int, lost=list)
def holders(
    coordinator: Coordinator, peer: Peer, generation: int, lost: list[int]
) -> dict[str, Any]:
    """Say who holds what; the worker, which knows of the servers of a generation, does not reach
    those of `lost` any more."""
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
            "gone": sorted(found.gone),
        }
