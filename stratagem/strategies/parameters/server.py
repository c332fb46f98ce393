"""A ps task: keeps one shard of the parameters and serves the workers until the job ends.

The first server is the lead, too. Each connection has a thread of its own, and says first what it
is: a worker at work, the pulse of a task, or the lead with orders.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stratagem.cluster.patience import Patience as Waiting
from stratagem.cluster.pulse import BEAT, OVERSLEPT, STALL
from stratagem.cluster.waiting import FIRST
from stratagem.errors import (
    ReplicaError,
    ReplicaLost,
    ReplicaMissing,
    ReplicaStalled,
    StratagemError,
    UsageError,
)
from stratagem.rules.push import Push
from stratagem.strategies.agreement import Patience
from stratagem.strategies.parameters.lead import Attendee, Lead
from stratagem.strategies.parameters.plan import Plan
from stratagem.strategies.parameters.pulse import PulseThread
from stratagem.strategies.parameters.reach import reach
from stratagem.strategies.parameters.shard import Order, Shard
from stratagem.strategies.parameters.trouble import error_of, failed, headline, lost, note_of
from stratagem.wire.segment import host_identity
from stratagem.wire.tcp import Connection, Frame, Listener
from stratagem.wire.tree import decode, encode

log = logging.getLogger("stratagem")

TREE_LIMIT = 1 << 36  # bytes of optimizer state, of a report, of a batch
LINGER = 10.0  # seconds that the others may take to leave after a failure
KNOWS_BETTER = 1.0  # seconds until the pulse knows why a connection has closed

Answer = tuple[Mapping[str, Any], Sequence[Tensor]]
OK: Answer = ({}, ())


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


@dataclass
class FarServer:
    """Another server, as the lead commands it."""

    name: str
    connection: Connection

    def order(self, order: Order) -> None:
        try:
            self.connection.send({"order": order})
        except OSError as problem:
            raise lost(self.name) from problem

    def answer(self) -> float:
        try:
            frame = self.connection.receive()
        except OSError as problem:
            raise lost(self.name) from problem
        if frame is None:
            raise lost(self.name)
        return float(frame.header["value"])


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
        self.failure: ReplicaError | None = None
        self._far: list[FarServer] = []
        self._pulse: PulseThread | None = None
        self._guests: list[Guest] = []
        self._ending: float | None = None
        self._fell = threading.Event()
        self._chief_came = False
        self._lock = threading.Lock()

    # --- the job ------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until the chief has said that the job is done; raises why it cannot be done."""
        listener = Listener(self.addresses[self.index], self.secret, self.name, self._welcome)
        try:
            self._meet_the_others()
            self._stay()
        finally:
            listener.close()
            if self._pulse is not None:
                self._pulse.stop()
            for guest in self._present():
                guest.connection.close()
            for server in self._far:
                server.connection.close()
        if self.failure is not None:
            raise self.failure

    def _meet_the_others(self) -> None:
        """The lead reaches the others to command them; they reach it to be felt."""
        tasks = [(f"ps {i}", address) for i, address in enumerate(self.addresses)]
        limit = self.patience.arrive
        if self.index == 0:
            hello = {"hello": "lead", "name": self.name}
            found = reach(tasks[1:], self.secret, hello, limit)
            self._far = [FarServer(name, c) for (name, _), c in zip(tasks[1:], found, strict=True)]
            self.lead = Lead(self.shard, self._far, self._fail)
            return
        hello = {"hello": "pulse", "name": self.name}
        (beats,) = reach(tasks[:1], self.secret, hello, limit)
        self._pulse = PulseThread(beats, self.patience.answer, self._fail)

    def _stay(self) -> None:
        waiting = Waiting(self.patience.arrive, FIRST)
        before = time.monotonic()
        while not self._over():
            time.sleep(BEAT / 2)
            now = time.monotonic()
            if now - before > BEAT + OVERSLEPT:
                self._overslept(now - before)
            before = now
            if not self._chief_came:
                self._await_chief(waiting)
            if self.lead is not None:
                self._feel_pulses(now)

    def _await_chief(self, waiting: Waiting) -> None:
        text = (
            f"the chief has not come to {self.name} within {waiting.waited:.0f} s; start it with "
            "the same cluster and the same STRATAGEM_SECRET."
        )
        if waiting.over:
            self._fail(ReplicaMissing(text, "chief"))
        elif waiting.due() and self.lead is not None:
            self._tell_pulses({"say": f"waiting for the chief, {waiting.waited:.0f} s"})

    def _over(self) -> bool:
        if self._ending is None:
            return False
        left = [guest for guest in self._present() if guest.role == "worker"]
        linger = LINGER if self.failure is not None else max(LINGER, self.patience.answer)
        return not left or time.monotonic() > self._ending + linger

    def _fail(self, failure: ReplicaError) -> None:
        """The job cannot go on: tell everybody, and end."""
        with self._lock:
            if self._ending is not None:
                return
            self._ending = time.monotonic()
        self.failure = self.shard.failure = failure
        self._fell.set()
        log.warning("%s", headline(failure))
        if self._pulse is not None:
            self._pulse.last_words(failure)
        if self.lead is not None:
            self.lead.failure = failure
            self._tell_pulses(note_of(failure))
            for server in self._far:
                server.connection.close()  # wakes a thread that waits for it, lock in hand
            self.lead.fail(failure)

    # --- guests -------------------------------------------------------------------------------

    def _present(self) -> list[Guest]:
        with self._lock:
            return list(self._guests)

    def _welcome(self, connection: Connection) -> None:
        """In a thread of its own: hear who it is, then serve it until it goes."""
        try:
            frame = connection.receive()
        except OSError as problem:
            log.info("%s has hung up: %s", connection.peer, problem)
            return
        if frame is None:
            return
        hello = frame.header
        guest = Guest(
            connection, str(hello.get("hello")), str(hello.get("name")), str(hello.get("token")),
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
        with self._lock:
            self._chief_came = self._chief_came or guest.chief
            self._guests.append(guest)
        try:
            serve(guest)
        except OSError as problem:
            log.info("%s has hung up: %s", guest.name, problem)
        except Exception:  # a mistake of ours: nobody may wait for what will not come
            self._fail(failed(self.name, traceback.format_exc()))
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
                    header, body = note_of(error), ()
                connection.send(header, body)
        except OSError as problem:
            why = str(problem)
        self._gone(guest, why)

    def _gone(self, guest: Guest, why: str) -> None:
        """A worker's connection has ended, or ought to have."""
        if self.lead is not None and guest.attendee is not None:
            self.lead.leave(guest.attendee)
        if guest.said_bye:
            if guest.chief:
                with self._lock:
                    self._ending = self._ending or time.monotonic()
                if self.lead is not None:
                    self.lead.close()
        elif guest.chief:
            # It may have gone because it noticed before us that another has; the lead asks first.
            self._fell.wait(KNOWS_BETTER * (0.5 if self.lead is not None else 1.0))
            self._fail(ReplicaLost(
                f"{guest.name}, the chief, is gone ({why}), so the job ends. Start it again from "
                "the last checkpoint.", guest.name,
            ))  # fmt: skip
        elif self.lead is not None and self._ending is None and not guest.dismissed:
            guest.dismissed = True
            self._say(f"{guest.name} is gone ({why}); the others go on without it")

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
                order = frame.header["order"]
                value = self.shard.obey(order)
                if order[0] == "leave":
                    self._dismiss(order[1])
                if value is not None:
                    guest.connection.send({"value": value})
        except OSError as problem:
            log.info("the lead does not command any more: %s", problem)
        if self._ending is None and self._pulse is not None:
            self._fail(self._pulse.explain(KNOWS_BETTER) or lost("ps 0"))

    # --- pulses -------------------------------------------------------------------------------

    def _beat(self, guest: Guest) -> None:
        """A task's pulse: a word every half second, both ways."""
        words: StratagemError | None = None
        try:
            while (frame := guest.connection.receive()) is not None:
                guest.heard = time.monotonic()
                if frame.header.get("bye"):
                    return
                if "dying" in frame.header:
                    words = error_of(frame.header["dying"])
                guest.connection.send({"beat": 1})
        except OSError as problem:
            log.info("no pulse of %s: %s", guest.name, problem)
        guest.silent = False  # it is dead, or was dismissed
        if self._ending is not None:
            return
        if guest.worker < 0:
            self._fail(words if isinstance(words, ReplicaError) else lost(guest.name))
            return
        for other in self._of(guest):
            self._gone(other, "its process has ended")
            other.connection.close()

    def _of(self, pulse: Guest) -> list[Guest]:
        """The work of the process whose pulse this is."""
        return [g for g in self._present() if g.role == "worker" and g.token == pulse.token]

    def _feel_pulses(self, now: float) -> None:
        """Name who is silent, give up who is silent too long. Takes no lock that others hold."""
        for pulse in self._present():
            if pulse.role != "pulse" or self._ending is not None:
                continue
            silence = now - pulse.heard
            if silence > self.patience.answer:
                self._give_up(pulse, silence)
            elif silence > STALL and not pulse.silent:
                self._hush(pulse, True)
                means = _SILENCE["ps" if pulse.worker < 0 else "worker"]
                self._say(f"{pulse.name} has been silent for {silence:.0f} s {means}")
            elif silence <= STALL and pulse.silent:
                self._hush(pulse, False)
                self._say(f"{pulse.name} is heard again")

    def _hush(self, pulse: Guest, silent: bool) -> None:
        pulse.silent = silent
        for guest in self._of(pulse):
            if guest.attendee is not None:
                guest.attendee.silent = silent

    def _give_up(self, pulse: Guest, silence: float) -> None:
        text = f"{pulse.name} has been silent for {silence:.0f} s and is given up"
        if pulse.worker < 0 or pulse.chief:
            self._fail(ReplicaStalled(
                f"{text}, so the job ends: its machine, or the network between, hangs. The last "
                "checkpoint is whole; start the job again from there.", pulse.name,
            ))  # fmt: skip
            return
        self._dismiss(pulse.token, ReplicaStalled(
            f"{text}; the others have gone on without it. Start it again to take part.", pulse.name
        ))  # fmt: skip
        self._say(f"{text}; the others do its work", {"given up": pulse.name})

    def _dismiss(self, token: str, why: ReplicaError | None = None) -> None:
        """A process counts no more; it is told why when it listens again."""
        guests = [guest for guest in self._present() if guest.token == token]
        for guest in sorted(guests, key=lambda guest: guest.role != "pulse"):
            guest.dismissed, guest.silent = True, False
            if guest.attendee is not None:
                guest.attendee.gone = True
            if guest.role == "pulse" and why is not None:
                self._tell(guest, note_of(why))
            guest.connection.close()  # its own thread sees to the rest

    def _overslept(self, seconds: float) -> None:
        """This process itself was stopped: nobody else was silent meanwhile."""
        now = time.monotonic()
        for guest in self._present():
            guest.heard = min(now, guest.heard + seconds)

    def _say(self, text: str, more: Mapping[str, Any] | None = None) -> None:
        """Have the chief say it, too: that is where a person looks."""
        log.warning("%s", text)
        silent = [g.name for g in self._present() if g.role == "pulse" and g.silent]
        self._tell_pulses({"say": text, "silent": silent, **(more or {})}, chief=True)

    def _tell_pulses(self, note: Mapping[str, Any], chief: bool = False) -> None:
        for guest in self._present():
            if guest.role == "pulse" and (guest.chief or not chief):
                self._tell(guest, note)

    def _tell(self, guest: Guest, note: Mapping[str, Any]) -> None:
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
        return handle(self, guest, frame)

    def _open(self, guest: Guest, frame: Frame) -> Answer:
        plan = Plan.from_json(frame.header["plan"])
        self.shard.open(plan, int(frame.header["fit"]))
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
        self.shard.sit(guest.token, frame.header["memory"], int(frame.header["fit"]))
        return OK

    def _stage(self, guest: Guest, frame: Frame) -> Answer:
        self._take_gradient(guest, frame)
        return OK

    def _take_gradient(self, guest: Guest, frame: Frame) -> None:
        """A gradient onto the worker's desk; rows of sparse ones beside it."""
        if not frame.size:
            return
        desk = self.shard.find(guest.token)
        if desk is None:  # of a fit that is over
            guest.connection.skip(TREE_LIMIT)
            return
        into: list[Tensor] = []
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
        if desk.targets is None:
            dense = frame.size - sum(tensor.nbytes for tensor in into)
            desk.filled = dense // desk.gradient.itemsize
            into.insert(0, desk.gradient[: max(0, desk.filled)])
        guest.connection.read_into(into)
        for piece, numbers, _ in rows:
            length = len(self.shard.store.views[piece])
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

        guest.attendee = Attendee(
            guest.worker, guest.name, guest.token, partial(self._tell, guest),
            int(frame.header["fit"]),
        )  # fmt: skip
        before = self.lead.attendees.get(guest.worker)
        answer = self.lead.join(guest.attendee)
        if before is not None and before.seat != guest.token:
            self._dismiss(before.seat, ReplicaLost(
                f"another process has taken the place of {guest.name}, and this one counts no "
                "more. Has it been started twice?", guest.name,
            ))  # fmt: skip
        return answer

    def _leave(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        if guest.attendee is not None:
            self.lead.leave(guest.attendee)
        return OK

    def _clear(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        self.lead.clear(guest.attendee)
        return OK

    def _next(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        told = frame.header
        return self.lead.next(_member(guest), told["epoch"], told["have"], told["feeds"])

    def _push(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        self._take_gradient(guest, frame)
        told = frame.header
        push = Push(guest.worker, int(told["serial"]), int(told["version"]), float(told["weight"]))
        return self.lead.push(_member(guest), push, told), ()

    def _abandon(self, guest: Guest, frame: Frame) -> Answer:
        assert self.lead is not None
        self.lead.abandon(_member(guest), int(frame.header["serial"]))
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
        self.lead.report(_member(guest), int(frame.header["epoch"]), tree)
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
        self._fail(failed(guest.name, str(frame.header["text"])))
        return OK


def _member(guest: Guest) -> Attendee:
    if guest.attendee is None:
        raise UsageError(f"{guest.name} asks for work, but has not joined a training")
    return guest.attendee


#: what the silence of a task means for the others
_SILENCE = {
    "ps": "(stopped, or its machine hangs?); everybody waits for it",
    "worker": "(stopped, or its machine hangs?); the others go on as far as the rule lets them",
}


_REQUESTS: dict[str, Callable[[Server, Guest, Frame], Answer]] = {
    "open": Server._open, "sit": Server._sit, "stage": Server._stage, "fetch": Server._fetch,
    "restored": Server._restored, "bye": Server._bye, "assign": Server._assign,
    "host": Server._host,
}  # fmt: skip
_LEADS: dict[str, Callable[[Server, Guest, Frame], Answer]] = {
    "begin": Server._begin, "clear": Server._clear, "leave": Server._leave,
    "enter": Server._enter, "join": Server._join, "next": Server._next,
    "push": Server._push, "abandon": Server._abandon, "deal": Server._deal,
    "report": Server._report, "so far": Server._so_far, "gather": Server._gather,
    "settings": Server._settings, "snapshot": Server._snapshot, "finish": Server._finish,
    "failed": Server._failed,
}  # fmt: skip
