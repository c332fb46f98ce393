"""Members of a shared-memory collective that meet among themselves."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.wire.segment import Segment
from stratagem.wire.shared_memory import SharedMemoryCollective
from stratagem.wire.tree import gather_tree


def subgroup(
    collective: SharedMemoryCollective, groups: Sequence[Sequence[int]]
) -> SharedMemoryCollective:
    """The one of these groups of ranks that this member is in. Collective over all of them.

    Whoever waits there is told of trouble as it would be in the whole collective.
    """
    (ranks,) = (group for group in groups if collective.rank in group)
    own = None
    if collective.rank == ranks[0]:
        own = Segment(SharedMemoryCollective.control_size(len(ranks)))
    handles = gather_tree(collective, None if own is None else own.handle)
    control = own or Segment.attach(handles[ranks[0]])
    collective.barrier()  # nobody lets go of what the others are about to map

    def watch(rank: int, seconds: float) -> None:
        collective.look(ranks[rank], seconds)

    names = [collective.names[rank] for rank in ranks]
    place = list(ranks).index(collective.rank)
    return SharedMemoryCollective(place, len(ranks), control, watch, names)
