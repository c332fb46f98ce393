"""Subgroups of a collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stratagem.wire.collective import Collective
from stratagem.wire.segment import Segment
from stratagem.wire.shared_memory import SharedMemoryCollective, sharing
from stratagem.wire.torch_dist import TorchCollective
from stratagem.wire.tree import gather_tree


def subgroup(collective: Collective, groups: Sequence[Sequence[int]]) -> Collective:
    """Return the collective of the group of ranks that this member is in. Collective over all.

    A wait in it raises on trouble as in the whole collective.
    """
    (ranks,) = (group for group in groups if collective.rank in group)
    if isinstance(collective, TorchCollective):
        return _torch_subgroup(collective, tuple(ranks))
    whole, own = sharing(collective), None
    if collective.rank == ranks[0]:
        own = Segment(SharedMemoryCollective.control_size(len(ranks)))
    handles = gather_tree(collective, None if own is None else own.handle)
    control = own or Segment.attach(handles[ranks[0]])
    collective.barrier()  # no owner unmaps a segment that a peer is about to map

    def watch(rank: int, seconds: float) -> None:
        whole.look(ranks[rank], seconds)

    names = [whole.names[rank] for rank in ranks]
    place = list(ranks).index(collective.rank)
    return SharedMemoryCollective(place, len(ranks), control, watch, names)


def _torch_subgroup(collective: TorchCollective, ranks: tuple[int, ...]) -> TorchCollective:
    """Connect the subgroup once; the whole collective keeps it."""
    if ranks not in collective.parts:
        meeting = collective.meeting
        names = tuple(meeting.names[rank] for rank in ranks)
        store = meeting.store.within("-".join(map(str, ranks)))
        meeting = replace(meeting, store=store, names=names)
        place, size = ranks.index(collective.rank), len(ranks)
        made = TorchCollective(place, size, collective.backend, meeting, collective.membership)
        collective.parts[ranks] = made
    return collective.parts[ranks]
