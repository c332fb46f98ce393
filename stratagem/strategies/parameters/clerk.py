"""Answers what workers ask of a server, one request after the other on each connection.

    Clerk       of any server: its shard, its desks
    LeadClerk   of the lead: what concerns the job as a whole, too
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from stratagem.errors import ReplicaError, ReplicaLost, UsageError
from stratagem.rules.push import Push
from stratagem.strategies.parameters.guest import Guest
from stratagem.strategies.parameters.lead import Lead
from stratagem.strategies.parameters.parties import Attendee
from stratagem.strategies.parameters.plan import Plan
from stratagem.strategies.parameters.shard import Shard
from stratagem.strategies.parameters.trouble import failed
from stratagem.wire.segment import host_identity
from stratagem.wire.tcp import Frame
from stratagem.wire.tree import TREE_LIMIT, decode, encode

Answer = tuple[Mapping[str, Any], Sequence[Tensor]]
OK: Answer = ({}, ())


class Clerk:
    """What any server answers."""

    known: ClassVar[frozenset[str]] = frozenset(
        {"open", "sit", "stage", "fetch", "restored", "bye", "assign", "assign states", "host"}
    )

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def answer(self, guest: Guest, frame: Frame) -> Answer:
        name = str(frame.header.get("t"))
        if name not in self.known:
            raise UsageError(f"ps {self.shard.index} does not know what {name!r} asks for")
        handle: Callable[[Guest, Frame], Answer] = getattr(self, "_" + name.replace(" ", "_"))
        return handle(guest, frame)

    def _open(self, guest: Guest, frame: Frame) -> Answer:
        plan = Plan.from_json(frame.header["plan"])
        load = plan.layout.loads[self.shard.index]
        if load * plan.dtype.itemsize > frame.size:  # before memory is taken
            raise UsageError(f"{guest.name} announces more values than it sends")
        values, has_states = torch.empty(load, dtype=plan.dtype), "states" in frame.header
        guest.connection.read_into([values], more=has_states)
        states = decode(guest.connection.read(TREE_LIMIT)) if has_states else None
        with self.shard.changed:  # not while it reads: who is to end the job needs that, too
            self.shard.open(plan, int(frame.header["fit"]))
            self.shard.store.restore(values, states)
        return OK

    def _sit(self, guest: Guest, frame: Frame) -> Answer:
        self.shard.sit(guest.token, frame.header["memory"], int(frame.header["fit"]))
        return OK

    def _stage(self, guest: Guest, frame: Frame) -> Answer:
        self._take_gradient(guest, frame)
        return OK

    def _take_gradient(self, guest: Guest, frame: Frame) -> None:
        """A gradient onto the worker's desk; rows of sparse ones beside it.

        A frame without a byte says something, too: no row was touched here, or nothing was used.
        """
        desk = self.shard.find(guest.token)
        if desk is None:  # of a fit that is over
            guest.connection.skip(TREE_LIMIT)
            return
        into: list[Tensor] = []
        rows: list[tuple[int, Tensor, Tensor]] = []
        left = frame.size
        for piece, count in frame.header.get("rows", ()):
            view = desk.views[piece]
            left -= count * (8 + view[:1].numel() * desk.wire.itemsize)
            if count < 0 or left < 0:  # before memory is taken
                raise UsageError(f"{guest.name} announces more rows than it sends")
            numbers = torch.empty(count, dtype=torch.int64)
            values = torch.empty((count, *view.shape[1:]), dtype=desk.wire)
            rows.append((piece, numbers, values))
            into += [numbers, values]
        if desk.targets is None:
            desk.filled = left // desk.gradient.itemsize
            into.insert(0, desk.gradient[: desk.filled])
        guest.connection.read_into(into)
        for piece, numbers, _ in rows:
            length = len(desk.views[piece])
            if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < length:
                raise UsageError(f"a gradient of rows that piece {piece} does not have")
        desk.rows = rows

    def _fetch(self, guest: Guest, frame: Frame) -> Answer:
        return self.shard.fetch(guest.token, frame.header["have"], frame.header["after"])

    def _restored(self, guest: Guest, frame: Frame) -> Answer:
        """A snapshot that the lead has ordered."""
        taken = self.shard.snapshot(frame.header["number"], frame.header["after"])
        tree = encode(taken.states)
        return {"version": taken.version, "states": tree.numel()}, [taken.values.cpu(), tree]

    def _assign(self, guest: Guest, frame: Frame) -> Answer:
        plan = self.shard.plan
        if plan is None:
            raise UsageError("no training is under way here")
        extents, pieces = plan.layout.extents[self.shard.index], frame.header["pieces"]
        count = sum(extents[piece].hi - extents[piece].lo for piece in pieces)
        values = torch.empty(count, dtype=plan.dtype)
        guest.connection.read_into([values])
        self.shard.assign(values, pieces)
        return OK

    def _assign_states(self, guest: Guest, frame: Frame) -> Answer:
        self.shard.assign_states(decode(guest.connection.read(TREE_LIMIT)))
        return OK

    def _host(self, guest: Guest, frame: Frame) -> Answer:
        return {"host": host_identity()}, ()

    def _bye(self, guest: Guest, frame: Frame) -> Answer:
        guest.said_bye = True
        return OK


class LeadClerk(Clerk):
    """What the lead answers besides."""

    known = Clerk.known | {
        "begin", "clear", "leave", "enter", "join", "next", "push", "abandon", "aside", "skip",
        "deal", "enough", "report", "retire", "so far", "gather", "settings", "snapshot", "finish",
        "failed", "set means", "means",
    }  # fmt: skip

    def __init__(
        self, shard: Shard, lead: Lead, in_place_of: Callable[[str, ReplicaError], None],
        fail: Callable[[ReplicaError], None],
    ) -> None:  # fmt: skip
        super().__init__(shard)
        self.lead = lead
        #: told which process another one has replaced, and what to tell it
        self._in_place_of = in_place_of
        self._fail = fail

    def _begin(self, guest: Guest, frame: Frame) -> Answer:
        assert self.shard.plan is not None
        beside = guest.connection.read(TREE_LIMIT)
        self.lead.open(int(frame.header["fit"]), self.shard.plan, beside)
        return OK

    def _enter(self, guest: Guest, frame: Frame) -> Answer:
        return self.lead.enter(int(frame.header["fit"]))

    def _join(self, guest: Guest, frame: Frame) -> Answer:
        guest.attendee = Attendee(
            guest.worker, guest.name, guest.token, guest.offer,
            int(frame.header["fit"]),
        )  # fmt: skip
        with self.lead.changed:
            before = self.lead.attendance.here.get(guest.worker)
            answer = self.lead.join(guest.attendee)
        if before is not None and before.seat != guest.token:
            self._in_place_of(before.seat, ReplicaLost(
                f"another process has taken the place of {guest.name}, and this one counts no "
                "more. Has it been started twice?", guest.name,
            ))  # fmt: skip
        return answer

    def _leave(self, guest: Guest, frame: Frame) -> Answer:
        if guest.attendee is not None:
            self.lead.leave(guest.attendee)
        return OK

    def _clear(self, guest: Guest, frame: Frame) -> Answer:
        self.lead.clear(guest.attendee)
        return OK

    def _next(self, guest: Guest, frame: Frame) -> Answer:
        told = frame.header
        return self.lead.next(
            _member(guest), told["epoch"], told["have"], told["feeds"], bool(told.get("strict"))
        )

    def _push(self, guest: Guest, frame: Frame) -> Answer:
        told = frame.header
        if not told.get("laid"):  # else it came while it was made
            self._take_gradient(guest, frame)
        push = Push(guest.worker, int(told["serial"]), int(told["version"]), float(told["weight"]))
        return self.lead.push(_member(guest), push, told, told.get("next"))

    def _abandon(self, guest: Guest, frame: Frame) -> Answer:
        self.lead.abandon(_member(guest), int(frame.header["serial"]))
        return OK

    def _aside(self, guest: Guest, frame: Frame) -> Answer:
        epoch = int(frame.header["epoch"])
        return self.lead.stand_aside(_member(guest), epoch, chief=guest.chief), ()

    def _enough(self, guest: Guest, frame: Frame) -> Answer:
        self.lead.end_early(_member(guest))
        return OK

    def _skip(self, guest: Guest, frame: Frame) -> Answer:
        self.lead.skip(_member(guest), int(frame.header["serial"]))
        return OK

    def _deal(self, guest: Guest, frame: Frame) -> Answer:
        parcels: list[Tensor] = []
        if frame.size:
            whole = guest.connection.read(TREE_LIMIT)
            parcels = list(torch.split(whole, frame.header["sizes"]))
        return self.lead.deal(frame.header, parcels), ()

    def _report(self, guest: Guest, frame: Frame) -> Answer:
        tree = guest.connection.read(TREE_LIMIT)
        self.lead.report(_member(guest), int(frame.header["epoch"]), tree)
        return OK

    def _set_means(self, guest: Guest, frame: Frame) -> Answer:
        self.lead.set_means(int(frame.header["epoch"]), guest.connection.read(TREE_LIMIT))
        return OK

    def _means(self, guest: Guest, frame: Frame) -> Answer:
        return {}, self.lead.means(_member(guest), int(frame.header["epoch"]))

    def _retire(self, guest: Guest, frame: Frame) -> Answer:
        return self.lead.retire(_member(guest))

    def _gather(self, guest: Guest, frame: Frame) -> Answer:
        return self.lead.gather()

    def _so_far(self, guest: Guest, frame: Frame) -> Answer:
        return self.lead.so_far(), ()

    def _settings(self, guest: Guest, frame: Frame) -> Answer:
        self.lead.settings(frame.header["groups"])
        return OK

    def _snapshot(self, guest: Guest, frame: Frame) -> Answer:
        return {"after": self.lead.snapshot(int(frame.header["number"]))}, ()

    def _finish(self, guest: Guest, frame: Frame) -> Answer:
        self.lead.finish(guest.connection.read(TREE_LIMIT), guest.attendee)
        return OK

    def _failed(self, guest: Guest, frame: Frame) -> Answer:
        self._fail(failed(guest.name, str(frame.header["text"])))
        return OK


def _member(guest: Guest) -> Attendee:
    if guest.attendee is None:
        raise UsageError(f"{guest.name} asks for work, but has not joined a training")
    return guest.attendee
