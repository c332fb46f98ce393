"""A ps task: keeps one shard of the parameters and serves the workers until the job ends.

The first server is the lead, too. Each connection has a thread of its own, and says first what it
is: a worker at work, the pulse of a task, or the lead with orders.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stratagem.cluster.pulse import BEAT, OVERSLEPT, STALL
from stratagem.errors import ReplicaError, ReplicaLost, ReplicaMissing, StratagemError, UsageError
from stratagem.rules.push import Push
from stratagem.strategies.agreement import Patience
from stratagem.strategies.parameters.lead import Attendee, Lead
from stratagem.strategies.parameters.plan import Plan
from stratagem.strategies.parameters.reach import reach
from stratagem.strategies.parameters.shard import Order, Shard
from stratagem.wire.segment import host_identity
from stratagem.wire.tcp import Connection, Frame, Listener
from stratagem.wire.tree import decode, encode

log = logging.getLogger("stratagem")

TREE_LIMIT = 1 << 36  # bytes of optimizer state, of a report, of a batch
LINGER = 10.0  # seconds that the others may take to leave after the chief

Answer = tuple[Mapping[str, Any], Sequence[Tensor]]
OK: Answer = ({}, ())


@dataclass
class Guest:
    """One connection and who is at its other end."""

    connection: Connection
    role: str
    name: str
    worker: int = -1
    chief: bool = False
    said_bye: bool = False


@dataclass
class FarServer:
    """Another server, as the lead commands it."""

    name: str
    connection: Connection

    def order(self, order: Order) -> None:
        try:
            self.connection.send({"order": order})
        except OSError as problem:
            raise self._gone() from problem

    def answer(self) -> float:
        frame = self.connection.receive()
        if frame is None:
            raise self._gone()
        return float(frame.header["value"])

    def _gone(self) -> ReplicaLost:
        return lost(self.name)


def lost(name: str) -> ReplicaLost:
    return ReplicaLost(
        f"{name} is gone, and a share of the parameters with it, so the job ends. Its own output "
        "says why; the last checkpoint is whole. Start the job again from there.", name,
    )  # fmt: skip


@dataclass
class Server:
    """One ps task of a job."""

    index: int
    addresses: Sequence[str]
    secret: bytes
    patience: Patience = field(default_factory=Patience)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.name = f"ps {self.index}"
        self.shard = Shard(self.index, self.device)
        self.lead: Lead | None = None
        self._guests: list[Guest] = []
        self._pulses: dict[str, float] = {}
        self._watch: dict[int, Guest] = {}
        self._ending: float | None = None
        self._came = False
        self._lock = threading.Lock()

    # --- the job ------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until the chief has said that the job is done, or cannot be done."""
        listener = Listener(self.addresses[self.index], self.secret, self.name, self._welcome)
        try:
            if self.index == 0:
                self.lead = Lead(self.shard, self._reach_others())
            self._stay()
        finally:
            listener.close()
            for guest in list(self._guests):
                guest.connection.close()
            if self.lead is not None:
                for server in self.lead.far:
                    server.connection.close()  # type: ignore[attr-defined]

    def _reach_others(self) -> list[FarServer]:
        others = [(f"ps {i}", a) for i, a in enumerate(self.addresses) if i]
        hello = {"hello": "lead", "name": self.name}
        found = reach(others, self.secret, hello, self.patience.arrive)
        return [FarServer(name, c) for (name, _), c in zip(others, found, strict=True)]

    def _stay(self) -> None:
        begun = before = time.monotonic()
        while not self._over(begun):
            time.sleep(BEAT / 2)
            now = time.monotonic()
            if now - before > BEAT + OVERSLEPT:
                self._overslept(now - before)
            before = now
            if self.lead is not None:
                self._feel_pulses(now)

    def _over(self, begun: float) -> bool:
        if not self._came and time.monotonic() - begun > self.patience.arrive:
            raise ReplicaMissing(
                f"nobody came to {self.name} within {self.patience.arrive:.0f} s; start the chief "
                "and the workers with the same cluster and the same STRATAGEM_SECRET.", "chief",
            )  # fmt: skip
        if self._ending is None:
            return False
        with self._lock:
            left = [g for g in self._guests if g.role == "worker"]
        return not left or time.monotonic() > self._ending + LINGER

    # --- guests -------------------------------------------------------------------------------

    def _welcome(self, connection: Connection) -> None:
        """In a thread of its own: hear who it is, then serve it until it goes."""
        frame = connection.receive()
        if frame is None:
            connection.close()
            return
        hello = frame.header
        guest = Guest(
            connection, str(hello.get("hello")), str(hello.get("name")),
            int(hello.get("worker", -1)), bool(hello.get("chief")),
        )  # fmt: skip
        serve = {
            "worker": self._work, "pulse": self._beat, "lead": self._follow, "visitor": self._show,
            "audience": self._let_watch,
        }.get(guest.role)  # fmt: skip
        if serve is None:
            raise UsageError(f"{connection.peer} says that it is a {guest.role!r}")
        while self.index == 0 and self.lead is None:
            time.sleep(0.01)  # the other servers are still being reached
        self._came = True
        with self._lock:
            self._guests.append(guest)
        try:
            serve(guest)
        finally:
            with self._lock:
                self._guests.remove(guest)
            connection.close()

    def _work(self, guest: Guest) -> None:
        """Answer a worker's requests one by one."""
        why = "its connection closed without a goodbye"
        try:
            connection = guest.connection
            while not guest.said_bye and (frame := connection.receive()) is not None:
                try:
                    header, body = self._answer(guest, frame)
                except StratagemError as error:
                    header, body = _refusal(error), ()
                connection.send(header, body)
        except OSError as problem:
            why = str(problem)
        finally:
            self._gone(guest, why)

    def _gone(self, guest: Guest, why: str) -> None:
        self.shard.leave(guest.worker)
        if guest.said_bye:
            if guest.chief:
                self._ending = self._ending or time.monotonic()
        elif guest.chief:
            self._fail(ReplicaLost(
                f"{guest.name}, the chief, is gone ({why}), so the job ends. Start it again from "
                "the last checkpoint.", guest.name,
            ))  # fmt: skip
        elif self.lead is not None and self._ending is None:
            log.warning("%s is gone (%s); the others go on without it", guest.name, why)
            self._say(f"{guest.name} is gone ({why}); the others go on without it")
        if self.lead is not None:
            self.lead.leave(guest.worker)
        self._watch.pop(guest.worker, None)

    def _fail(self, failure: ReplicaError) -> None:
        """The job cannot go on: tell everybody, and end."""
        if self._ending is not None:
            return
        log.warning("%s", failure)
        self.shard.failure = failure
        if self.lead is not None:
            self.lead.fail(failure)
            self._tell_pulses({"failed": str(failure), "who": failure.who})
        self._ending = time.monotonic()

    def _let_watch(self, guest: Guest) -> None:
        """The evaluator stays until the job is over: the end of the connection tells it."""
        while guest.connection.receive() is not None:
            continue

    def _show(self, guest: Guest) -> None:
        """Somebody wants to see the books."""
        guest.connection.send({"stats": self.lead.stats() if self.lead is not None else {}})

    def _follow(self, guest: Guest) -> None:
        """Carry out the lead's orders."""
        try:
            while (frame := guest.connection.receive()) is not None:
                if "end" in frame.header:
                    guest.said_bye = True
                    continue
                value = self.shard.obey(frame.header["order"])
                if value is not None:
                    guest.connection.send({"value": value})
        finally:
            if self._ending is None and not guest.said_bye:
                self._fail(lost("ps 0"))

    # --- pulses -------------------------------------------------------------------------------

    def _beat(self, guest: Guest) -> None:
        """A task's pulse: a word every half second, both ways."""
        key = f"{guest.name}"
        self._pulses[key] = time.monotonic()
        try:
            while (frame := guest.connection.receive()) is not None:
                self._pulses[key] = time.monotonic()
                if frame.header.get("bye"):
                    guest.said_bye = True
                    return
                guest.connection.send({"beat": 1})
        finally:
            self._pulses.pop(key, None)
            if not guest.said_bye and guest.worker < 0 and self._ending is None:
                self._fail(lost(guest.name))

    def _feel_pulses(self, now: float) -> None:
        assert self.lead is not None
        for attendee, guest in self._attending():
            heard = max(attendee.heard, self._pulses.get(guest.name, 0.0))
            silence = now - heard
            if silence > self.patience.answer:
                text = f"{guest.name} has been silent for {silence:.0f} s and is given up"
                log.warning("%s", text)
                self._say(text)
                self.lead.leave(guest.worker)
                guest.connection.close()
            elif silence > STALL and not attendee.silent:
                attendee.silent = True
                text = (
                    f"{guest.name} has been silent for {silence:.0f} s (stopped, or its machine "
                    "hangs?); the others go on as far as the rule lets them"
                )
                log.warning("%s", text)
                self._say(text)
                with self.lead.changed:
                    self.lead.changed.notify_all()
            elif silence <= STALL:
                attendee.silent = False

    def _attending(self) -> list[tuple[Attendee, Guest]]:
        assert self.lead is not None
        with self.lead.changed:
            return [
                (attendee, self._watch[worker])
                for worker, attendee in self.lead.attendees.items() if worker in self._watch
            ]  # fmt: skip

    def _overslept(self, seconds: float) -> None:
        """This process itself was stopped: nobody else was silent meanwhile."""
        now = time.monotonic()
        for name, heard in list(self._pulses.items()):
            self._pulses[name] = min(now, heard + seconds)
        if self.lead is not None:
            for attendee in list(self.lead.attendees.values()):
                attendee.heard = min(now, attendee.heard + seconds)

    def _say(self, text: str) -> None:
        """Have the chief say it, too: that is where a person looks."""
        self._tell_pulses({"say": text}, chief=True)

    def _tell_pulses(self, note: Mapping[str, Any], chief: bool = False) -> None:
        with self._lock:
            pulses = [g for g in self._guests if g.role == "pulse" and (g.chief or not chief)]
        for guest in pulses:
            try:
                guest.connection.send(note)
            except OSError as problem:
                log.info("%s does not listen: %s", guest.name, problem)

    # --- requests -----------------------------------------------------------------------------

    def _answer(self, guest: Guest, frame: Frame) -> Answer:
        name = str(frame.header.get("t"))
        handle = _REQUESTS.get(name) or (_LEADS.get(name) if self.lead is not None else None)
        if handle is None:
            raise UsageError(f"{self.name} does not know what {name!r} asks for")
        if self.lead is not None and (found := self.lead.attendees.get(guest.worker)):
            found.heard = time.monotonic()
        return handle(self, guest, frame)

    def _open(self, guest: Guest, frame: Frame) -> Answer:
        plan = Plan.from_json(frame.header["plan"])
        self.shard.open(plan)
        with self.shard.changed:
            store = self.shard.store
            values = torch.empty(store.count, dtype=plan.dtype)
            states = None
            size = values.nbytes
            if frame.size == size:
                guest.connection.read_into([values])
            else:
                tree = torch.empty(int(frame.header["states"]), dtype=torch.uint8)
                guest.connection.read_into([values, tree])
                states = decode(tree)
            store.restore(values, states)
        return OK

    def _sit(self, guest: Guest, frame: Frame) -> Answer:
        self.shard.sit(guest.worker, frame.header["memory"])
        return OK

    def _stage(self, guest: Guest, frame: Frame) -> Answer:
        self._take_gradient(guest, frame)
        return OK

    def _take_gradient(self, guest: Guest, frame: Frame) -> None:
        """A gradient onto the worker's desk; rows of sparse ones beside it."""
        if not frame.size:
            return
        desk = self.shard.desk(guest.worker)
        into: list[Tensor] = [] if desk.targets is not None else [desk.gradient]
        plan = self.shard.plan
        assert plan is not None
        rows: list[tuple[int, Tensor, Tensor]] = []
        for piece, count in frame.header.get("rows", ()):
            view = self.shard.store.views[piece]
            if not 0 <= count <= 1 << 40:
                raise UsageError("a gradient of a negative number of rows")
            numbers = torch.empty(count, dtype=torch.int64)
            values = torch.empty((count, *view.shape[1:]), dtype=plan.wire_dtype)
            rows.append((piece, numbers, values))
            into += [numbers, values]
        guest.connection.read_into(into)
        for piece, numbers, _ in rows:
            length = len(self.shard.store.views[piece])
            if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < length:
                raise UsageError(f"a gradient of rows that piece {piece} does not have")
        desk.rows = rows

    def _fetch(self, guest: Guest, frame: Frame) -> Answer:
        return self.shard.fetch(guest.worker, frame.header["have"], frame.header["after"])

    def _restored(self, guest: Guest, frame: Frame) -> Answer:
        """A snapshot that the lead has ordered."""
        taken = self.shard.snapshot(frame.header["number"], frame.header["after"])
        tree = encode(taken.states)
        return {"version": taken.version, "states": tree.numel()}, [taken.values.cpu(), tree]

    def _assign(self, guest: Guest, frame: Frame) -> Answer:
        plan = self.shard.plan
        if plan is None:
            raise UsageError("no training is under way here")
        values = torch.empty(plan.layout.loads[self.index], dtype=plan.dtype)
        guest.connection.read_into([values])
        self.shard.assign(values)
        return OK

    def _host(self, guest: Guest, frame: Frame) -> Answer:
        return {"host": host_identity()}, ()

    def _bye(self, guest: Guest, frame: Frame) -> Answer:
        guest.said_bye = True
        return OK

    # --- requests to the lead -----------------------------------------------------------------

    def _begin(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None and self.shard.plan is not None
        beside = guest.connection.read(TREE_LIMIT)
        self.lead.open(int(frame.header["fit"]), self.shard.plan, beside)
        return OK

    def _enter(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        return self.lead.enter(int(frame.header["fit"]))

    def _join(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None

        def tell(note: Mapping[str, Any]) -> None:
            try:
                guest.connection.send(note)
            except OSError as problem:
                log.info("%s does not listen: %s", guest.name, problem)

        self._watch[guest.worker] = guest
        self.lead.join(guest.worker, Attendee(guest.name, tell))
        return OK

    def _next(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        told = frame.header
        return self.lead.next(guest.worker, told["epoch"], told["have"], bool(told["feeds"]))

    def _push(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        self._take_gradient(guest, frame)
        told = frame.header
        push = Push(guest.worker, int(told["serial"]), int(told["version"]), float(told["weight"]))
        return self.lead.push(push, told), ()

    def _abandon(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        self.lead.abandon(guest.worker, int(frame.header["serial"]))
        return OK

    def _deal(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        parcels: list[Tensor] = []
        if frame.size:
            whole = guest.connection.read(TREE_LIMIT)
            parcels = list(torch.split(whole, frame.header["sizes"]))
        return self.lead.deal(frame.header, parcels), ()

    def _report(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        tree = guest.connection.read(TREE_LIMIT)
        self.lead.report(guest.worker, int(frame.header["epoch"]), tree)
        return OK

    def _gather(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        return self.lead.gather()

    def _so_far(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        return self.lead.so_far(), ()

    def _settings(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        self.lead.settings(frame.header["groups"])
        return OK

    def _snapshot(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        return {"after": self.lead.snapshot(int(frame.header["number"]))}, ()

    def _finish(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        self.lead.finish(guest.connection.read(TREE_LIMIT))
        return OK

    def _failed(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        self.lead.failed(guest.name, str(frame.header["text"]))
        return OK


def _refusal(error: StratagemError) -> dict[str, Any]:
    return {"error": type(error).__name__, "text": str(error), "who": getattr(error, "who", "")}


_REQUESTS: dict[str, Callable[[Server, Guest, Frame], Answer]] = {
    "open": Server._open, "sit": Server._sit, "stage": Server._stage, "fetch": Server._fetch,
    "restored": Server._restored, "bye": Server._bye, "assign": Server._assign,
    "host": Server._host,
}  # fmt: skip
_LEADS: dict[str, Callable[[Server, Guest, Frame], Answer]] = {
    "begin": Server._begin, "enter": Server._enter, "join": Server._join, "next": Server._next,
    "push": Server._push, "abandon": Server._abandon, "deal": Server._deal,
    "report": Server._report, "so far": Server._so_far, "gather": Server._gather,
    "settings": Server._settings, "snapshot": Server._snapshot, "finish": Server._finish,
    "failed": Server._failed,
}  # fmt: skip
