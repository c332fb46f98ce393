"""Train replicas as threads of one process: real gradients and codecs, simulated time.

    trained = train_replicas(scenario, module, optimizer, loss, data, wire=sg.Int8())
    trained = train_replicas(scenario, module, optimizer, loss, data, sync=sg.DiLoCo(20))

Every `wire=` and `sync=` of the strategies works; bytes are counted. Each replica has a clock,
which advances while it computes. A collective waits for the last replica, and for a ring over links
of the scenario's rate and latency. If it overlaps with training, the wait is where its result is
needed.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.cluster.membership import Membership
from stratagem.codecs.wire_choice import Wire, check_wire
from stratagem.data.shares import share
from stratagem.errors import NotDistributable, UsageError
from stratagem.plan.simulation.ring import SimulatedRing
from stratagem.plan.simulation.scenario import Scenario, SimulatedRun
from stratagem.plan.simulation.training import Data, Loss, Score, TrainedRun
from stratagem.rules.cadence import Sync
from stratagem.rules.stats import Stats
from stratagem.strategies.mirrored import meeting
from stratagem.training.exchange import GradientExchange, open_exchange
from stratagem.training.lossy_wire import check_optimizer
from stratagem.training.replica import Replica
from stratagem.training.settings import Settings
from stratagem.wire.collective import Collective, Pending, apply_weight
from stratagem.wire.simulated import Topology

T = TypeVar("T")
_PATIENCE = 300.0


class InTurn:
    """A barrier for threads that run one at a time, in the order of ranks.

    Each thread runs until it meets the others, then the next one runs; the last computes the result
    for all. So a meeting is one switch per thread, and threads do not contend for the interpreter.
    """

    def __init__(self, parties: int) -> None:
        self._gates = [threading.Lock() for _ in range(parties)]
        for gate in self._gates[1:]:
            gate.acquire()
        self._given: list[Any] = [None] * parties
        self._found: Any = None
        self._broken, self._aborting = False, threading.Lock()

    def meet(self, rank: int, mine: Any, find: Callable[[list[Any]], Any]) -> Any:
        """Return `find` of the values of all ranks, in their order; the last rank computes it."""
        self._given[rank] = mine
        if rank == len(self._gates) - 1:
            self._found = find(self._given)
        self.leave(rank)
        self.enter(rank)
        return self._found

    def enter(self, rank: int) -> None:
        """Wait for this rank's turn."""
        if not self._gates[rank].acquire(timeout=_PATIENCE):
            self.abort()
        if self._broken:
            raise threading.BrokenBarrierError

    def leave(self, rank: int) -> None:
        """Pass the turn to the next rank."""
        self._gates[(rank + 1) % len(self._gates)].release()

    def abort(self) -> None:
        """Break the exchange: every waiting thread raises an error."""
        with self._aborting:
            for gate in () if self._broken else self._gates:
                self._broken = True
                if gate.locked():
                    gate.release()


class ThreadCollective(Collective):
    """The collective of one thread: counts the bytes and the seconds of a ring over sockets."""

    runs_beside = True

    def __init__(self, rank: int, size: int, turns: InTurn, topology: Topology) -> None:
        self.rank, self.size, self._turns = rank, size, turns
        self._topology = topology
        #: bytes that this replica has sent, its clock, and the time at which its link is free
        self.bytes, self.seconds, self._free = 0.0, 0.0, 0.0

    def _exchanged(self, mine: Any, find: Callable[[list[Any]], Any] = list) -> Any:
        return self._turns.meet(self.rank, mine, find)

    def _sent(
        self, mine: Any, size: float, messages: int, find: Callable[[list[Any]], Any] = list
    ) -> Any:
        """Return `find` of all ranks' values; the link is busy until they have arrived."""

        def last(told: list[Any]) -> tuple[float, Any]:  # begins with the last rank
            return max(clock for clock, _ in told), find([each for _, each in told])

        self.bytes += size
        begun, found = self._exchanged((max(self.seconds, self._free), mine), last)
        self._free = begun + size / self._topology.rate + messages * self._topology.latency
        return found

    def _wait(self, until: float) -> None:
        self.seconds = max(self.seconds, until)

    def beside(self, work: Callable[[], None]) -> Pending:
        before = self.seconds
        work()
        there, self.seconds = self.seconds, before
        return Pending(lambda: self._wait(there))

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    def all_reduce(self, flat: Tensor, weight: float = 1.0) -> Pending:
        apply_weight(flat, weight)
        others = self.size - 1
        total = self._sent(flat, 2 * others / self.size * flat.nbytes, 2 * others, _sum)
        there = self._free
        flat.copy_(total)
        return Pending(lambda: self._wait(there))

    def swap(self, rows: Tensor) -> Tensor:
        size = rows.nbytes * (self.size - 1) / self.size
        told: Tensor = self._sent(rows, size, 1, partial(torch.stack, dim=1))
        self._wait(self._free)
        return told[self.rank]

    def collect(self, row: Tensor) -> Tensor:
        told: Tensor = self._sent(row, row.nbytes * (self.size - 1), 1, torch.stack)
        self._wait(self._free)
        return told

    def trade(self, flat: Tensor, receivers: Sequence[int], senders: Sequence[int]) -> list[Tensor]:
        told = self._sent(flat.clone(), flat.nbytes * len(receivers), 1)
        self._wait(self._free)
        return [told[rank] for rank in senders]

    def gather_bytes(self, data: Tensor) -> list[Tensor]:
        told = self._exchanged((self.seconds, data.clone()))
        self._wait(max(clock for clock, _ in told))
        return [each for _, each in told]  # a few numbers: only the wait counts

    def broadcast_bytes(self, data: Tensor | None, source: int = 0) -> Tensor:
        found: Tensor = self._exchanged(data)[source]
        return found

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        tensor.copy_(self._exchanged(tensor.clone())[source])

    def barrier(self) -> None:
        self._exchanged(None)


def _sum(flats: list[Tensor]) -> Tensor:
    """Sum in the order of ranks, so that a seed gives the same bits again."""
    total = flats[0].clone()
    for other in flats[1:]:
        total.add_(other)
    return total


def all_at_once(count: int, topology: Topology, act: Callable[[ThreadCollective], T]) -> list[T]:
    """Run `act` on `count` threads, of which one runs at a time (`InTurn`)."""
    turns = InTurn(count)

    def one(rank: int) -> T:
        turns.enter(rank)
        try:
            found = act(ThreadCollective(rank, count, turns, topology))
        except BaseException:
            turns.abort()
            raise
        if rank < count - 1:
            turns.leave(rank)
        return found

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(one, rank) for rank in range(count)]
    errors = [error for each in running if (error := each.exception()) is not None]
    # a broken barrier only means that another thread has failed
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [each.result() for each in running]


class SimulatedReplica:
    """The model of one thread, with the gradient exchange of real replicas."""

    def __init__(
        self,
        collective: ThreadCollective,
        module: nn.Module,
        optimizer: Optimizer,
        wire: Wire,
        sync: Sync | None,
    ) -> None:
        check_wire(wire)
        self.collective, self.module, self.optimizer = collective, module, optimizer
        rank, size = collective.rank, collective.size
        cpu = torch.device("cpu")
        self._replica = Replica(rank, size, cpu, "worker", collective, Membership.alone())
        settings = meeting(Settings(wire=wire), sync)
        check_optimizer(settings, optimizer, self._replica)
        named = list(module.named_parameters())
        self.committer: GradientExchange = open_exchange(named, self._replica, settings, notes=2)
        self.committer.optimizer = optimizer

    def step(self, loss: Callable[[Tensor], Tensor], rows: Tensor) -> None:
        """One update from this replica's share of the rows of a batch; `loss` is a mean."""
        lo, hi = self.begin(len(rows))
        if hi > lo:
            (loss(rows[lo:hi]) * ((hi - lo) / len(rows))).backward()  # type: ignore[no-untyped-call]
        self.update()

    def begin(self, rows: int) -> tuple[int, int]:
        """Begin a batch; returns the first and one-past-last row of this replica's share."""
        lo, hi = share(rows, self.collective.size, self.collective.rank)
        self._replica.share.set(hi - lo, rows, float(hi > lo))
        return lo, hi

    def update(self) -> None:
        """One update from the parameters' gradients: those of this replica's share of the batch."""
        self.committer.commit([0.0, 0.0])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.committer.sync()


def train_replicas(
    scenario: Scenario,
    module: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    data: Data,
    score: Score | None = None,
    *,
    wire: Wire = None,
    sync: Sync | None = None,
) -> TrainedRun:
    """Train a module on replicas in simulated time; `score` evaluates the chief's after each epoch.

    `data` decides the number of steps. At the end the module has the chief's weights.
    """
    if scenario.servers or scenario.faults or scenario.topology.per_host > 1:
        raise UsageError(
            "train_replicas is for workers that all-reduce, each on a host, on a day without "
            "faults: servers=0, per_host=1; with servers use train."
        )
    if any(True for _ in module.buffers()):
        raise NotDistributable("the model has buffers (BatchNorm's statistics?); use one without.")
    copies = [(module, optimizer)]
    copies += [copy.deepcopy((module, optimizer)) for _ in range(scenario.workers - 1)]
    computing = SimulatedRing(replace(scenario, steps=data.batches * data.epochs)).computing()
    curve: list[tuple[float, int, float]] = []
    updates: list[float] = []

    def note(at: ThreadCollective) -> None:
        if at.rank == 0 and score is not None:
            with torch.no_grad():
                curve.append((at.seconds, len(updates), float(score(module))))

    def run(collective: ThreadCollective) -> float:
        mine, own = copies[collective.rank]
        replica = SimulatedReplica(collective, mine, own, wire, sync)
        note(collective)
        for step in range(data.batches * data.epochs):
            epoch, batch = divmod(step, data.batches)
            order = data.order(scenario.seed, epoch + 1)
            rows = order[batch * data.batch_size : (batch + 1) * data.batch_size]
            collective.seconds += float(computing[step, collective.rank])
            replica.step(lambda rows: loss(mine(data.x[rows]), data.y[rows]), rows)
            collective.seconds += scenario.work.update
            if collective.rank == 0:
                updates.append(collective.seconds)
            if batch == data.batches - 1:
                replica.committer.meet()
                note(collective)
        replica.committer.close()
        return collective.seconds

    seconds = max(all_at_once(scenario.workers, scenario.topology, run))
    stats = Stats(received=len(updates), applied=len(updates), updates=len(updates))
    return TrainedRun(SimulatedRun(seconds, tuple(updates), stats), tuple(curve))
