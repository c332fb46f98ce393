"""Members of a collective that meet among themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stratagem.wire.collective import Collective
from stratagem.wire.segment import Segment
from stratagem.wire.shared_memory import SharedMemoryCollective, sharing
from stratagem.wire.torch_dist import TorchCollective
from stratagem.wire.tree import gather_tree


def subgroup(collective: Collective, groups: Sequence[Sequence[int]]) -> Collective:
    """The one of these groups of ranks that this member is in. Collective over all of them.

    Whoever waits there is told of trouble as it would be in the whole collective.
    """
    (ranks,) = (group for group in groups if collective.rank in group)
    if isinstance(collective, TorchCollective):
        return _among(collective, tuple(ranks))
    whole, own = sharing(collective), None
    if collective.rank == ranks[0]:
        own = Segment(SharedMemoryCollective.control_size(len(ranks)))
    handles = gather_tree(collective, None if own is None else own.handle)
    control = own or Segment.attach(handles[ranks[0]])
    collective.barrier()  # nobody lets go of what the others are about to map

    def watch(rank: int, seconds: float) -> None:
        whole.look(ranks[rank], seconds)

    names = [whole.names[rank] for rank in ranks]
    place = list(ranks).index(collective.rank)
    return SharedMemoryCollective(place, len(ranks), control, watch, names)


def _among(collective: TorchCollective, ranks: tuple[int, ...]) -> TorchCollective:
    """Connected once, and kept with the whole."""
    if ranks not in collective.parts:
        meeting = collective.meeting
        names = tuple(meeting.names[rank] for rank in ranks)
        store = meeting.store.within("-".join(map(str, ranks)))
        meeting = replace(meeting, store=store, names=names)
        place, size = ranks.index(collective.rank), len(ranks)
        made = TorchCollective(place, size, collective.backend, meeting, collective.membership)
        collective.parts[ranks] = made
    return collective.parts[ranks]
