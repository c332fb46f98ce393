"""A simulated job with parameter servers: the real coordinator and its ledger, in virtual time.

`servers/coordinator.py` makes all decisions, as in real jobs. This file has only the side of the
chief and of the workers, the time that everything takes, and faults.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

import torch

from stratagem.errors import ReplicaError, ReplicaLost, StratagemError
from stratagem.plan.simulation.scenario import (
    Cut,
    Event,
    Kill,
    Scenario,
    ServerDeath,
    SimulatedRun,
    Stall,
)
from stratagem.plan.simulation.simulated_server import LinkQueue, SimulatedServer, Trainer
from stratagem.plan.simulation.simulated_worker import SimulatedWorker
from stratagem.rules.ledger import Ledger
from stratagem.rules.updates import Synchronous
from stratagem.servers.coordinator import Coordinator
from stratagem.servers.coordinator_requests import deal, finish
from stratagem.servers.participants import Participant
from stratagem.wire.simulated import Clock, Network

_LOW = 4  # more batches are dealt if the queue has tickets for fewer steps
_NOTHING = torch.empty(0, dtype=torch.uint8)


class ServerJob:
    """A simulated job with parameter servers."""

    def __init__(self, scenario: Scenario, trains: Trainer, *, trace: bool = False) -> None:
        self.scenario, self.trains = scenario, trains
        self.clock = Clock()
        self.network = Network(self.clock, scenario.topology)
        answer = scenario.work.fetched * max(scenario.parts)
        self.turns = LinkQueue(
            self.network,
            trains.plan.at_once if scenario.in_turn else inf,
            answer,
            answer * scenario.overhead.server_byte,
            overtakes=any(isinstance(fault, Cut) for fault in scenario.faults),
        )
        self.trace: list[Event] | None = [] if trace else None
        work, first = scenario.work, scenario.topology.host(scenario.workers - 1) + 1
        shards = trains.shards()
        parts = scenario.parts[:1] if scenario.alike and len(shards) == 1 else scenario.parts
        # an order has no answer, so it is half a message: from the coordinator to each other server
        words = [scenario.overhead.server_message / 2 * (n or len(parts) - 1) for n in (0, 1)]
        self.servers = [
            SimulatedServer(
                self.clock, first + i, shard, work.update * part, work.add * part, words[i > 0]
            )
            for i, (part, shard) in enumerate(zip(parts, shards, strict=True))
        ]
        self.coordinator = Coordinator(
            self.servers[0], self.servers[1:], self._end, clock=self.clock
        )
        self.workers = [SimulatedWorker(self, number) for number in range(scenario.workers)]
        self.ledger: Ledger
        self.failure = ""
        self.updates: list[float] = []
        self._parked: dict[int, SimulatedWorker] = {}
        self._in_step = isinstance(scenario.updates, Synchronous)
        self._turn = -1
        self._epoch = self._dealt = self._left = 0
        #: more batches are dealt if the queue has fewer tickets
        self._low = _LOW * max(trains.plan.parts, scenario.workers)

    def run(self) -> SimulatedRun:
        """Simulate the job from the first ticket to the last update."""
        self.coordinator.open(0, self.trains.plan, _NOTHING)
        assert self.coordinator.ledger is not None
        self.ledger = self.coordinator.ledger
        self._next_epoch()
        for worker in self.workers:
            worker.start()
        for fault in self.scenario.faults:
            self.clock.at(fault.at, partial(self._strike, fault))
        with _no_collection():
            self.clock.run()
        if self.coordinator.running and not self.failure:
            self.failure = self._stuck()
        return SimulatedRun(
            max([self.clock.now if self.failure else 0.0, *self.updates]),
            tuple(self.updates),
            self.ledger.recorder.stats(),
            tuple(self.trace or ()),
            self.failure,
        )

    def note(self, what: str, worker: int, *numbers: Any) -> None:
        if self.trace is not None:
            self.trace.append((self.clock.now, what, worker, numbers))

    # --- the chief: the batches of an epoch -------------------------------------------------

    def _next_epoch(self) -> None:
        self._epoch, self._dealt = self._epoch + 1, 0
        self._left = self.trains.batches(self._epoch)
        if self._left:
            self.deal()
        else:
            finish(self.coordinator, None, _NOTHING)
            self.clock.stop()

    def deal(self) -> None:
        """Add some batches of the epoch to the queue if it runs low."""
        if not self._left or (self._dealt and len(self.ledger.states.queue) >= self._low):
            return
        parts = self.trains.plan.parts
        count = min(self._left, max(1, 2 * self._low // parts))
        self._left -= count
        runs, last = [[count, parts]], not self._left
        deal(self.coordinator, None, self._epoch, self._dealt, runs, last)
        self._dealt += count

    # --- the coordinator: tickets -----------------------------------------------------------

    def offer(self, worker: SimulatedWorker, *, likely: bool = False) -> None:
        """Give a worker a ticket, or let it wait; `likely`: do not check first if there is one."""
        if not self.coordinator.running:
            return
        ledger = self.ledger
        answer = None
        if likely or ledger.offer(worker.number) or ledger.over:
            answer = self.coordinator.offer(
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
                self.trains.epoch_over(self._epoch, max([0.0, *self.updates[-1:]]))
                self._next_epoch()
                self.clock.after(0.0, self.changed)  # the other workers wait for a new epoch, too
            self.offer(worker)
        elif "ticket" in told:
            worker.take(told["ticket"], told["epoch"])

    def changed(self) -> None:
        """After a push or a departure: record updates, and let waiting workers go on."""
        ledger, version = self.ledger, self.ledger.version
        updated = len(self.updates) < version
        if updated:
            self._note_updates(version)
            self.deal()
        if self._turn == ledger.turn and (self._left or not ledger.over):
            return
        self._turn = ledger.turn
        for worker in list(self._parked.values()):
            self.offer(worker, likely=updated and self._in_step)

    def _note_updates(self, version: int) -> None:
        servers = self.servers
        made = (
            servers[0].updated if len(servers) == 1 else max(server.updated for server in servers)
        )
        now = max(self.clock.now, made)
        while len(self.updates) < version:
            self.updates.append(now)
            if self.trace is not None:
                self.note("update", -1, len(self.updates))

    # --- faults -----------------------------------------------------------------------------

    def _strike(self, fault: Kill | Stall | Cut | ServerDeath) -> None:
        if isinstance(fault, ServerDeath):
            self._end(ReplicaLost(f"ps {fault.server} is gone, so the job ends", "ps"))
            return
        self.note(type(fault).__name__.lower(), fault.worker)
        struck = [self.workers[number] for number in self.scenario.struck(fault)]
        if isinstance(fault, Cut):
            self.network.cut(struck[0].host)
            self.turns.cut()
            self.clock.after(fault.seconds, partial(self.network.mend, struck[0].host))
        for worker in struck:
            if isinstance(fault, Kill):
                worker.kill(fault.back)
            else:
                worker.interrupt(fault.seconds, cut=isinstance(fault, Cut))

    def leave(self, attendee: Participant) -> None:
        self._parked.pop(attendee.worker, None)
        self.coordinator.leave(attendee)
        self.changed()

    def _end(self, error: ReplicaError) -> None:
        self.failure = str(error)
        self.clock.stop()

    def _stuck(self) -> str:
        if not any(worker.alive for worker in self.workers):
            return "nobody is left to do the work"
        raise StratagemError(
            f"the simulation of seed {self.scenario.seed} stands still: "
            f"{len(self.ledger.states.queue)} tickets are left, and nobody may take one"
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection, which takes longer than the simulation and finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
