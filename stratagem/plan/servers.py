"""Simulated parameter servers: the real lead and its ledger, in virtual time.

    worker   ask ----> lead.offer ----> pull shards ----> compute ----> push ----> lead.push
             ^                                                                        |
             +------------------------------------------------------------------------+

What is decided is decided by `strategies/parameters/lead.py`, the same as in real jobs; here are
only the workers' side of it, the time that everything takes, and faults.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from stratagem.errors import ReplicaError, StratagemError
from stratagem.plan.faults import Cut, Kill, ServerDeath, Stall
from stratagem.plan.scenario import Event, Run, Scenario
from stratagem.plan.spread import Draws
from stratagem.rules.push import Push, Ticket
from stratagem.rules.updates import Asynchronous
from stratagem.state.partition import Piece
from stratagem.state.recipe import OptimizerRecipe
from stratagem.strategies.parameters.lead import Attendee, Lead, Near
from stratagem.strategies.parameters.plan import Plan
from stratagem.strategies.parameters.shard import Order
from stratagem.wire.simulated import Action, Clock, Flow, Network, Route

_LOW = 4  # steps' worth of tickets under which more are dealt
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Trains(Protocol):
    """What a job does besides taking time: nothing, or real training."""

    plan: Plan

    def shards(self) -> Sequence[Near]:
        """The data of each server, the lead's first."""

    def seat(self, worker: int, name: str) -> None:
        """A worker has come, under that name."""

    def fetch(self, worker: int, server: int, have: int) -> int:
        """Bring it a server's newest values; their version."""

    def gradient(self, worker: int, epoch: int, ticket: Ticket) -> tuple[float, float, int]:
        """Compute its gradient; weight, loss and examples."""

    def batches(self, epoch: int) -> int:
        """How many global batches an epoch has; 0: there is no such epoch."""

    def epoch_over(self, epoch: int, seconds: float) -> None:
        """All of an epoch has been applied."""


class Weightless:
    """A shard that counts its updates and keeps no values."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failure: ReplicaError | None = None
        self.version = 0

    def obey(self, order: Order) -> float:
        self.version += order[0] in ("one", "apply")
        return 0.0

    def fetch(self, seat: str, have: int, after: int) -> tuple[dict[str, Any], list[Tensor]]:
        return {"version": self.version}, []


class Idle:
    """A job that takes time and does nothing else."""

    def __init__(self, scenario: Scenario) -> None:
        self.plan = timed_plan(scenario)
        self._shards = [Weightless() for _ in range(scenario.servers)]
        self._steps = scenario.steps

    def shards(self) -> Sequence[Near]:
        return self._shards

    def seat(self, worker: int, name: str) -> None:
        """Nothing is kept for it."""

    def fetch(self, worker: int, server: int, have: int) -> int:
        return self._shards[server].version

    def gradient(self, worker: int, epoch: int, ticket: Ticket) -> tuple[float, float, int]:
        return 1.0, 0.0, 1

    def batches(self, epoch: int) -> int:
        return self._steps if epoch == 1 else 0

    def epoch_over(self, epoch: int, seconds: float) -> None:
        """There is nothing to note."""


def timed_plan(scenario: Scenario) -> Plan:
    """The plan of a job without parameters."""
    recipe = OptimizerRecipe("torch", "SGD", ({"lr": 0.1, "variables": [0]},))
    return Plan(
        ((1,),), "float32", (Piece(0, 0, 1, 0),), recipe, scenario.updates, scenario.workers,
        scenario.servers,
    )  # fmt: skip


class Desk:
    """A server in time: it carries orders out one after the other, each takes a while."""

    def __init__(self, clock: Clock, host: int, shard: Near, update: float, add: float) -> None:
        self.host, self.free = host, 0.0
        self.changed = shard.changed
        self.failure: ReplicaError | None = None
        self._clock, self._shard = clock, shard
        self._costs = {"one": update, "apply": update, "add": add}
        self._answer = 0.0

    def obey(self, order: Order) -> float:
        cost = self._costs.get(order[0])
        if cost:
            self.free = max(self.free, self._clock.now) + cost
        self._answer = float(self._shard.obey(order) or 0.0)
        return self._answer

    def fetch(self, seat: str, have: int, after: int) -> tuple[dict[str, Any], list[Tensor]]:
        return self._shard.fetch(seat, have, after)

    def order(self, order: Order) -> None:
        self.obey(order)

    def answer(self) -> float:
        return self._answer


class Office:
    """All of one simulated job."""

    def __init__(self, scenario: Scenario, trains: Trains, *, trace: bool = False) -> None:
        self.scenario, self.trains = scenario, trains
        self.clock = Clock()
        self.network = Network(self.clock, scenario.topology)
        self.trace: list[Event] | None = [] if trace else None
        work, first = scenario.work, scenario.topology.host(scenario.workers - 1) + 1
        self.desks = [
            Desk(self.clock, first + i, shard, work.update * part, work.add * part)
            for i, (part, shard) in enumerate(zip(scenario.parts, trains.shards(), strict=True))
        ]
        self.lead = Lead(self.desks[0], self.desks[1:], self._end, clock=self.clock)
        self.workers = [Worker(self, number) for number in range(scenario.workers)]
        self.failure = ""
        self.updates: list[float] = []
        self._parked: dict[int, Worker] = {}
        self._turn = -1
        self._epoch = self._dealt = self._left = 0

    def run(self) -> Run:
        """From the first ticket to the last update."""
        self.lead.open(0, self.trains.plan, _NOTHING)
        self._next_epoch()
        for worker in self.workers:
            worker.start()
        for fault in self.scenario.faults:
            self.clock.at(fault.at, partial(self._strike, fault))
        with _no_collection():
            while self.lead.running and not self.failure and self.clock.step():
                pass
        if self.lead.running and not self.failure:
            self.failure = self._stuck()
        return Run(
            max([self.clock.now if self.failure else 0.0, *self.updates]), tuple(self.updates),
            self.books.stats(), tuple(self.trace or ()), self.failure,
        )  # fmt: skip

    @property
    def books(self) -> Any:
        return self.lead.ledger

    def note(self, what: str, worker: int, *numbers: Any) -> None:
        if self.trace is not None:
            self.trace.append((self.clock.now, what, worker, numbers))

    # --- the chief: deals out the work ------------------------------------------------------

    def _next_epoch(self) -> None:
        self._epoch, self._dealt = self._epoch + 1, 0
        self._left = self.trains.batches(self._epoch)
        if self._left:
            self.deal()
        else:
            self.lead.finish(_NOTHING)

    def deal(self) -> None:
        """Put up some more batches of the epoch, when those that are up run out."""
        parts = self.trains.plan.parts
        low = _LOW * max(parts, len(self.workers))
        if not self._left or (self._dealt and self.books.left >= low):
            return
        count = min(self._left, max(1, 2 * low // parts))
        self._left -= count
        self.lead.deal(
            {"epoch": self._epoch, "first": self._dealt, "runs": [[count, parts]],
             "last": not self._left}, (),
        )  # fmt: skip
        self._dealt += count

    # --- the lead: what workers get to hear -------------------------------------------------

    def offer(self, worker: Worker) -> None:
        """Give a worker a ticket, or let it wait."""
        if not self.lead.running:
            return
        self.deal()
        answer = self.lead.offer(
            worker.attendee, worker.epoch, worker.have[0], None, worker.asked
        )
        if answer is None:
            self._parked[worker.number] = worker
            return
        self._parked.pop(worker.number, None)
        told = answer[0]
        if "over" in told:
            worker.epoch = told["over"]
            if told["over"] == self._epoch:
                self.trains.epoch_over(self._epoch, max(desk.free for desk in self.desks))
                self._next_epoch()
                self.clock.after(0.0, self.changed)  # the others wait for it, too
            self.offer(worker)
        elif "ticket" in told:
            worker.take(Ticket(*told["ticket"]), told["epoch"])

    def changed(self) -> None:
        """Something was pushed, or somebody went: updates may have been made, others may go on."""
        now = max(self.clock.now, self.desks[0].free)
        while len(self.updates) < self.books.version:
            self.updates.append(now)
            self.note("update", -1, len(self.updates))
        if self._turn == self.books.turn and not self.books.over:
            return
        self._turn = self.books.turn
        for worker in list(self._parked.values()):
            self.offer(worker)

    # --- faults -----------------------------------------------------------------------------

    def _strike(self, fault: Kill | Stall | Cut | ServerDeath) -> None:
        if isinstance(fault, ServerDeath):
            self.failure = f"ps {fault.server} is gone, so the job ends"
            return
        worker = self.workers[fault.worker]
        self.note(type(fault).__name__.lower(), fault.worker)
        if isinstance(fault, Kill):
            worker.die()
            if fault.back is not None:
                self.clock.after(fault.back, worker.start)
        elif isinstance(fault, Stall):
            worker.stall(fault.seconds)
        else:
            self.network.cut(worker.host)
            self.clock.after(fault.seconds, partial(self.network.mend, worker.host))
            self._give_up_after(worker, fault.seconds)

    def _give_up_after(self, worker: Worker, silence: float) -> None:
        """A worker that is silent too long is given up, and starts anew when it can."""
        if silence > self.scenario.patience:
            life = worker.life
            self.clock.after(self.scenario.patience, partial(worker.given_up, life))
            self.clock.after(silence, partial(worker.come_back, life + 1))

    def leave(self, attendee: Attendee) -> None:
        self._parked.pop(attendee.worker, None)
        self.lead.leave(attendee)
        self.changed()

    def _end(self, error: ReplicaError) -> None:
        self.failure = str(error)

    def _stuck(self) -> str:
        if not any(worker.alive for worker in self.workers):
            return "nobody is left to do the work"
        raise StratagemError(
            f"the simulation of seed {self.scenario.seed} stands still: "
            f"{self.books.left} tickets are left, and nobody may take one"
        )


class Worker:
    """One simulated worker: what it does next, and when it has done it."""

    def __init__(self, office: Office, number: int) -> None:
        scenario = office.scenario
        self.office, self.number = office, number
        self.host = scenario.topology.host(number)
        #: grows when its process ends or starts, so that what was meant for the last one is void
        self.life = 0
        self.alive = False
        self.epoch = 0
        self.asked = 0.0
        self.have: list[int] = []
        self.attendee: Attendee
        self._clock = office.clock
        self._draws = Draws(
            scenario.work.compute, scenario.seed, number, scenario.slow.get(number, 1.0)
        )
        self._stalled = 0.0
        #: what it works on; grows with every ticket, so that what belongs to the last is void
        self._ticket: Ticket | None = None
        self._round = 0
        self._pending = 0
        self._looks_ahead = isinstance(scenario.updates, Asynchronous)
        self._lay_routes()

    def _lay_routes(self) -> None:
        office, work = self.office, self.office.scenario.work
        lead = office.desks[0].host
        self._word = Route(office.network, [Flow(self.host, lead, 0.0, 0.0)])
        self._word_back = Route(office.network, [Flow(lead, self.host, 0.0, 0.0)])
        self._pulls = Route(office.network, [
            Flow(host, self.host, work.fetched * theirs, work.fetched * mine)
            for host, theirs, mine in self._shares()
        ])  # fmt: skip
        self._pushes = [
            (ready, Route(office.network, [
                Flow(self.host, host, work.push * part * mine, work.push * part * theirs)
                for host, theirs, mine in self._shares()
            ]))
            for part, ready in work.buckets
        ]  # fmt: skip

    def _shares(self) -> list[tuple[int, float, float]]:
        """By server: its host, its part of the bytes, and how much of them passes this end.

        Servers that are all alike have the same traffic at the same time, so that of one is enough.
        """
        scenario, desks = self.office.scenario, self.office.desks
        if scenario.topology.per_rack or len(set(scenario.parts)) > 1:
            return [(d.host, p, p) for d, p in zip(desks, scenario.parts, strict=True)]
        return [(desks[0].host, scenario.parts[0], 1.0)]

    # --- its process ------------------------------------------------------------------------

    def start(self) -> None:
        """A process comes up and joins the training."""
        if self.alive or not self.office.lead.running:
            return
        self.life += 1
        self.alive, self.epoch, self._ticket = True, 0, None
        self.have = [-1] * len(self.office.desks)
        name = f"worker {self.number} #{self.life}"
        self.attendee = Attendee(self.number, name, name, self._hear, 0)
        self.office.trains.seat(self.number, name)
        self.office.lead.join(self.attendee)
        self.office.note("join", self.number)
        self._ask()
        self.office.changed()

    def die(self) -> None:
        """The process ends; the lead notices at once that its connection is closed."""
        if self.alive:
            self.life += 1
            self.alive = False
            self.office.leave(self.attendee)

    def stall(self, seconds: float) -> None:
        """It stands still; whatever it would do is done afterwards."""
        self._stalled = max(self._stalled, self._clock.now + seconds)
        if self.alive:
            self.office._give_up_after(self, seconds)

    def given_up(self, life: int) -> None:
        if life == self.life:
            self.die()

    def come_back(self, life: int) -> None:
        if life == self.life:
            self.start()

    # --- a step -----------------------------------------------------------------------------

    def _ask(self) -> None:
        self._round += 1
        self.asked = self._clock.now
        self._word.send(self._from_me(partial(self.office.offer, self)))

    def take(self, ticket: Ticket, epoch: int) -> None:
        """A ticket, and with it new values from every server that has some."""
        office = self.office
        self.office.note("take", self.number, ticket.serial)
        self._ticket, self._ticket_epoch = ticket, epoch
        self._round += 1
        before = self.have
        self.have = [
            office.trains.fetch(self.number, i, have) for i, have in enumerate(before)
        ]
        way = self._pulls if self.have != before else self._word_back
        send = partial(way.send, self._mine(self._arrived))
        free = max(desk.free for desk in office.desks)
        if free > self._clock.now:
            self._clock.at(free, send)
        else:
            send()

    def _arrived(self) -> None:
        seconds = self._draws.next()
        self._pending = 1 + len(self._pushes)
        for ready, way in self._pushes:
            if ready < 1.0:
                begin = partial(way.send, self._from_me(self._sent))
                self._clock.after(seconds * ready, self._mine(begin))
        self._clock.after(seconds, self._mine(self._computed))

    def _computed(self) -> None:
        assert self._ticket is not None
        self._result = self.office.trains.gradient(self.number, self._ticket_epoch, self._ticket)
        for ready, way in self._pushes:
            if ready >= 1.0:
                way.send(self._from_me(self._sent))
        self._sent()

    def _sent(self) -> None:
        self._pending -= 1
        if not self._pending:
            self._push()

    def _push(self) -> None:
        """At the lead: all of the gradient has come."""
        office, ticket = self.office, self._ticket
        assert ticket is not None
        office.deal()
        weight, loss, examples = self._result
        push = Push(self.number, ticket.serial, min(self.have), weight)
        ahead = (self.epoch, self.have[0]) if self._looks_ahead else None
        told, _ = office.lead.push(self.attendee, push, {"notes": [loss, examples]}, ahead)
        office.note("push", self.number, ticket.serial, told["tau"], told["kept"])
        self._ticket = None
        self._round += 1
        if "next" in told:
            self.take(Ticket(*told["next"]["ticket"]), told["next"]["epoch"])
        else:
            answered = max(office.desks[0].free, self._clock.now)
            self._clock.at(answered + self._word_back.latency, self._mine(self._ask))
        office.changed()

    # --- too late ---------------------------------------------------------------------------

    def _hear(self, news: Any) -> bool:
        """At the lead: word is sent that the step was made without this worker."""
        if self.office.scenario.cancels and self._ticket is not None:
            self._word_back.send(self._mine(self._stop))
        return True

    def _stop(self) -> None:
        """Give the ticket up, tell the lead, and ask for another."""
        assert self._ticket is not None
        serial = self._ticket.serial
        self._round += 1
        self._word.send(self._from_me(partial(self._abandoned, serial)))

    def _abandoned(self, serial: int) -> None:
        self.office.lead.abandon(self.attendee, serial)
        self.office.note("abandon", self.number, serial)
        self._ticket = None
        self.office.changed()
        self._clock.after(self._word_back.latency, self._mine(self._ask))

    # --- time -------------------------------------------------------------------------------

    def _from_me(self, action: Callable[[], None]) -> Action:
        """Happens elsewhere, if this process and its ticket are still the same then."""
        return partial(self._if_same, self.life, self._round, action)

    def _if_same(self, life: int, round: int, action: Action) -> None:
        if life == self.life and round == self._round:
            action()

    def _mine(self, action: Callable[[], None]) -> Action:
        """Happens here: not while the worker stands still."""
        return partial(self._when_awake, self.life, self._round, action)

    def _when_awake(self, life: int, round: int, action: Action) -> None:
        if self._stalled > self._clock.now:
            self._clock.at(self._stalled, partial(self._when_awake, life, round, action))
        else:
            self._if_same(life, round, action)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing here makes circles, and looking for them takes longer than the simulation."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def served(scenario: Scenario, trains: Trains | None = None, *, trace: bool = False) -> Run:
    """Simulate a job with servers; without something to train only its time."""
    return Office(scenario, trains or Idle(scenario), trace=trace).run()

