"""A ps task: keeps one shard of the parameters and serves the workers until the job ends.

The first server is the lead, too. Each connection has a thread of its own, and says first what it
is: a worker at work, the pulse of a task, or the lead with orders.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stratagem.cluster.pulse import BEAT, OVERSLEPT, STALL
from stratagem.cluster.waiting import FIRST, Wait
from stratagem.errors import (
    ReplicaError,
    ReplicaLost,
    ReplicaMissing,
    ReplicaStalled,
    StratagemError,
    UsageError,
)
from stratagem.strategies.agreement import Patience
from stratagem.strategies.parameters.clerk import Clerk, LeadClerk
from stratagem.strategies.parameters.guest import Guest
from stratagem.strategies.parameters.lead import Lead
from stratagem.strategies.parameters.pulse import KNOWS_BETTER, PulseThread
from stratagem.strategies.parameters.reach import reach
from stratagem.strategies.parameters.shard import Order, Shard
from stratagem.strategies.parameters.trouble import error_of, failed, headline, lost, note_of
from stratagem.wire import lateness
from stratagem.wire.tcp import Connection, Listener
from stratagem.wire.tree import TREE_LIMIT
from stratagem.wire.turns import Turns

log = logging.getLogger("stratagem")

LINGER = 10.0  # seconds that the others may take to leave after a failure
_LEAVES = 2.0  # seconds until threads have noticed that their connections are closed

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
    #: processors for an update that all wait for; None: torch's threads are left as they are
    cores: int | None = None

    def __post_init__(self) -> None:
        self.name = f"ps {self.index}"
        self.shard = Shard(self.index, self.device, self.cores)
        self.lead: Lead | None = None
        self._clerk = Clerk(self.shard)
        self.failure: ReplicaError | None = None
        self._far: list[FarServer] = []
        self._pulse: PulseThread | None = None
        self._guests: list[Guest] = []
        self._ending: float | None = None
        self._fell = threading.Event()
        self._chief_came = False
        self._turns = Turns()
        self._lock = threading.Lock()
        #: how late somebody was when that was last said
        self._named = 0.0

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
            self._see_out()
        if self.failure is not None:
            raise self.failure

    def _see_out(self) -> None:
        """Wait for the threads of guests whose connections are closed: Python does not survive one
        that still frees tensors while the interpreter ends."""
        until = time.monotonic() + _LEAVES
        while self._present() and time.monotonic() < until:
            time.sleep(0.01)

    def _meet_the_others(self) -> None:
        """The lead reaches the others to command them; they reach it to be felt."""
        tasks = [(f"ps {i}", address) for i, address in enumerate(self.addresses)]
        limit = self.patience.arrive
        if self.index == 0:
            hello = {"hello": "lead", "name": self.name}
            found = reach(tasks[1:], self.secret, hello, limit)
            self._far = [FarServer(name, c) for (name, _), c in zip(tasks[1:], found, strict=True)]
            lead = Lead(self.shard, self._far, self._fail, alive=self._alive)
            self._clerk = LeadClerk(self.shard, lead, self._dismiss, self._fail)
            self.lead = lead
            return
        hello = {"hello": "pulse", "name": self.name}
        (beats,) = reach(tasks[:1], self.secret, hello, limit)
        self._pulse = PulseThread(beats, self.patience.answer, self._fail)

    def _stay(self) -> None:
        waiting = Wait(self.patience.arrive, FIRST)
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
                self._feel_work()

    def _await_chief(self, waiting: Wait) -> None:
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
        left = [
            guest for guest in self._present()
            if guest.role == "worker" and not (guest.attendee and guest.attendee.silent)
        ]  # fmt: skip
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

    def _alive(self) -> set[int]:
        """The workers whose processes are heard."""
        pulses = [guest for guest in self._present() if guest.role == "pulse" and not guest.silent]
        return {pulse.worker for pulse in pulses if pulse.worker >= 0}

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
                    header, body = self._clerk.answer(guest, frame)
                except StratagemError as error:
                    connection.skip(TREE_LIMIT)  # what came with a request that is refused
                    header, body = note_of(error), ()
                plan = self.shard.plan
                self._turns.at_once = 1 if plan is None else plan.at_once
                connection.send_in_turn(self._turns, header, body)
        except OSError as problem:
            why = str(problem)
        self._gone(guest, why)

    def _gone(self, guest: Guest, why: str) -> None:
        """A worker's connection has ended, or ought to have."""
        if self.lead is not None and guest.attendee is not None:
            self.lead.leave(guest.attendee, dead=not guest.said_bye)
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
                if order[0] == "bury":
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
        try:
            while (frame := guest.connection.receive()) is not None:
                guest.heard = time.monotonic()
                if frame.header.get("bye"):
                    return
                words = error_of(frame.header["dying"]) if "dying" in frame.header else None
                if isinstance(words, ReplicaError):
                    self._fail(words)  # at once: others will only see that it hangs up
                guest.connection.send({"beat": 1})
        except OSError as problem:
            log.info("no pulse of %s: %s", guest.name, problem)
        guest.silent = False  # it is dead, or was dismissed
        if self._ending is not None:
            return
        if guest.worker < 0:
            self._fail(lost(guest.name))
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
                self._give_up(pulse, f"has been silent for {silence:.0f} s")
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

    def _feel_work(self) -> None:
        """Name who lives, but keeps others waiting; give up who does so too long."""
        assert self.lead is not None
        limit, late = self.patience.step, self.lead.held_up()
        for attendee, seconds in late:
            if seconds >= limit:
                pulses = [g for g in self._present() if g.role == "pulse"]
                for pulse in [pulse for pulse in pulses if pulse.token == attendee.seat]:
                    self._give_up(pulse, f"has kept the others waiting for {seconds:.0f} s")
        longest = max((seconds for _, seconds in late), default=0.0)
        if longest < min(lateness.FIRST, limit / 2):
            self._named = 0.0
        elif longest >= self._named + lateness.AGAIN or not self._named:
            self._named = longest
            names = ", ".join(attendee.name for attendee, _ in late)
            self._say(lateness.late_line(names, longest))

    def _give_up(self, pulse: Guest, what: str) -> None:
        text = f"{pulse.name} {what} and is given up"
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
                guest.tell(note_of(why))
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
                guest.tell(note)


#: what the silence of a task means for the others
_SILENCE = {
    "ps": "(stopped, or its machine hangs?); everybody waits for it",
    "worker": "(stopped, or its machine hangs?); the others go on as far as the rule lets them",
}
