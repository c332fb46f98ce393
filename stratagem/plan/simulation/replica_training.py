"""Replicas as threads of one process, under any `wire=` and `sync=`: real gradients, codecs and
committers, bytes counted and time simulated.

    trained = train_replicas(scenario, module, optimizer, loss, data, wire=sg.Int8())
    trained = train_replicas(scenario, module, optimizer, loss, data, sync=sg.DiLoCo(20))

A replica's clock goes on while it computes; whoever talks to others waits for the last of them, and
for what a ring over links of the scenario's rate and latency takes. What travels while training
goes on is waited for when it is needed.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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


class InTurn(threading.Barrier):
    """A barrier of threads of which one goes at a time: they do not fight for the interpreter."""

    def __init__(self, parties: int) -> None:
        super().__init__(parties)
        self.turn = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        self.turn.release()
        try:
            return super().wait(timeout)
        finally:
            self.turn.acquire()


class ThreadCollective(Collective):
    """One of the threads; counts what a ring over sockets would send, and the time that takes."""

    runs_beside = True

    def __init__(
        self, rank: int, boards: list[list[Any]], barrier: threading.Barrier, topology: Topology
    ) -> None:
        self.rank, self.size, self._barrier = rank, len(boards[0]), barrier
        self._topology = topology
        #: what replicas tell each other, in turn: the last round is read while the next is written
        self._boards, self._round = boards, 0
        #: what this replica has sent, its clock, and when its link has nothing more to send
        self.bytes, self.seconds, self._free = 0.0, 0.0, 0.0

    def _told(self, mine: Any) -> list[Any]:
        board = self._boards[self._round % 2]
        self._round += 1
        board[self.rank] = mine
        self._barrier.wait(_PATIENCE)
        return list(board)

    def _sent(self, mine: Any, size: float, messages: int) -> list[Any]:
        """What all send. Counts it; when it is there the link is free again."""
        self.bytes += size
        told = self._told((max(self.seconds, self._free), mine))
        begun = max(clock for clock, _ in told)  # whoever is last is waited for
        self._free = begun + size / self._topology.rate + messages * self._topology.latency
        return [each for _, each in told]

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
        flats = self._sent(flat, 2 * others / self.size * flat.nbytes, 2 * others)
        there, total = self._free, None
        if self.rank == 0:  # one adds up for all, in one order: a seed gives the same bits again
            total = flat.clone()
            for other in flats[1:]:
                total.add_(other)
        flat.copy_(self._told(total)[0])
        return Pending(lambda: self._wait(there))

    def swap(self, rows: Tensor) -> Tensor:
        told = self._sent(rows.clone(), rows.nbytes * (self.size - 1) / self.size, 1)
        self._wait(self._free)
        return torch.stack([each[self.rank] for each in told])

    def collect(self, row: Tensor) -> Tensor:
        told = self._sent(row.clone(), row.nbytes * (self.size - 1), 1)
        self._wait(self._free)
        return torch.stack(told)

    def trade(self, flat: Tensor, receivers: Sequence[int], senders: Sequence[int]) -> list[Tensor]:
        told = self._sent(flat.clone(), flat.nbytes * len(receivers), 1)
        self._wait(self._free)
        return [told[rank] for rank in senders]

    def gather_bytes(self, data: Tensor) -> list[Tensor]:
        told = self._told((self.seconds, data.clone()))
        self._wait(max(clock for clock, _ in told))
        return [each for _, each in told]  # a few numbers, which cost nothing but the wait

    def broadcast_bytes(self, data: Tensor | None, source: int = 0) -> Tensor:
        found: Tensor = self._told(data)[source]
        return found

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        tensor.copy_(self._told(tensor.clone())[source])

    def barrier(self) -> None:
        self._told(None)


def all_at_once(count: int, topology: Topology, act: Callable[[ThreadCollective], T]) -> list[T]:
    """Have each of `count` replicas do it; in turn from one thing that they do together to the
    next, since threads that fight for the interpreter take longer."""
    boards: list[list[Any]] = [[None] * count, [None] * count]
    barrier = InTurn(count)

    def one(rank: int) -> T:
        with barrier.turn:
            try:
                return act(ThreadCollective(rank, boards, barrier, topology))
            except BaseException:
                barrier.abort()
                raise

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


class SimulatedReplica:
    """One thread's model, and where its gradients go: the committer of real replicas."""

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
        """Begin a batch of so many rows; returns the first of this replica's, and the end."""
        lo, hi = share(rows, self.collective.size, self.collective.rank)
        self._replica.share.set(hi - lo, rows, float(hi > lo))
        return lo, hi

    def update(self) -> None:
        """One update from the gradients that the parameters have: of this share, a part of all."""
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
    """Train a module on replicas in simulated time; `score` is taken of the chief's, each epoch.

    The data say how many steps there are. The module ends with the chief's weights.
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
