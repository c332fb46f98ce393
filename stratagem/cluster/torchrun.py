"""torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

Every rank is a worker, rank 0 the chief. Only the chief's address can be reached: torchrun does
not tell where the other ranks are, so theirs are labels (node1:29504), there to name a task.
Nodes with different numbers of processes therefore see different labels.
"""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.cluster.parsing import MAX_PORT, MAX_TASKS, join, number, port, wrong
from stratagem.cluster.spec import ClusterSpec, Place, Task

EXAMPLE = "MASTER_ADDR=10.0.0.1"


def detect(environ: Mapping[str, str]) -> Place | None:
    """The place of this rank, if RANK and WORLD_SIZE are set."""
    if not environ.get("RANK") or not environ.get("WORLD_SIZE"):
        return None
    size = number(environ, "WORLD_SIZE", 1, MAX_TASKS)
    why = f"WORLD_SIZE is {size}"
    rank = number(environ, "RANK", 0, size - 1, why=why)
    per_node = number(environ, "LOCAL_WORLD_SIZE", 1, size, default=1, why=why)
    local_rank = None
    if environ.get("LOCAL_RANK"):
        local_rank = number(environ, "LOCAL_RANK", 0, size - 1, why=why)
    spec = ClusterSpec(
        {"worker": _addresses(environ, size, per_node)}, where="MASTER_ADDR", example=EXAMPLE
    )
    return Place(spec, Task("worker", rank), "torchrun", local_rank)


def _addresses(environ: Mapping[str, str], size: int, per_node: int) -> list[str]:
    master = environ.get("MASTER_ADDR", "").strip()
    if not master:
        raise wrong("not set, though RANK is; it must be rank 0's host", "MASTER_ADDR", EXAMPLE)
    first = port(environ, _beside(number(environ, "MASTER_PORT", 1, MAX_PORT)))
    hosts = (master if rank < per_node else f"node{rank // per_node}" for rank in range(size))
    # Ports wrap round, and stay distinct: there are at least as many of them as tasks.
    return [join(host, (first + rank - 1) % MAX_PORT + 1) for rank, host in enumerate(hosts)]


def _beside(master_port: int) -> int:
    """A port next to MASTER_PORT, which torchrun's own store occupies."""
    return master_port + 1 if master_port < MAX_PORT else master_port - 1
