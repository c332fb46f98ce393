"""Train a small model with real gradients in simulated time, on any number of workers.

    data = Data(x, y, batch_size=64, epochs=5)
    trained = train(scenario, module, torch.optim.SGD(module.parameters(), 0.1), loss, data, score)
    trained.curve        [(seconds, updates, score), ...] after each epoch

Gradients are computed on the values that a worker would have; the servers' stores, the optimizer
and all decisions are those of real jobs. Everything happens in one thread, so a seed gives the same
weights again, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer

from stratagem.data.shares import share
from stratagem.errors import NotDistributable, UsageError
from stratagem.plan.simulation.scenario import Scenario, SimulatedRun
from stratagem.plan.simulation.server_job import ServerJob
from stratagem.rules.tickets import Ticket
from stratagem.servers.shard import Shard
from stratagem.servers.training_plan import TrainingPlan
from stratagem.state.optimizer_recipe import describe, elementwise
from stratagem.state.partition import partition

Loss = Callable[[Tensor, Tensor], Tensor]
Score = Callable[[nn.Module], float]


@dataclass(frozen=True, eq=False)
class Data:
    """The examples, which are shuffled for every epoch from the scenario's seed.

    seconds   simulated time after which no other epoch begins
    """

    x: Tensor
    y: Tensor
    batch_size: int
    epochs: int
    seconds: float = inf

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or not len(self.x):
            raise UsageError(f"{len(self.x)} examples and {len(self.y)} targets do not match.")
        if self.batch_size < 1 or self.epochs < 1:
            raise UsageError("batch_size and epochs are at least 1.")

    @property
    def batches(self) -> int:
        """The number of global batches of an epoch."""
        return -(-len(self.x) // self.batch_size)

    def order(self, seed: int, epoch: int) -> Tensor:
        """Return the indices of an epoch's examples, in their order."""
        random = torch.Generator().manual_seed(seed * 100_003 + epoch)
        return torch.randperm(len(self.x), generator=random)


@dataclass(frozen=True)
class TrainedRun:
    """The result of a training: the run in time, and the score after each epoch.

    curve     (seconds, updates, score) of each, the untrained model first
    """

    run: SimulatedRun
    curve: tuple[tuple[float, int, float], ...]

    def seconds_to(self, score: float) -> float | None:
        """Return when an epoch first ended with that score or a higher one; None if never."""
        return next((at for at, _, found in self.curve if found >= score), None)


class SharedModule:
    """A module that all simulated workers use in turn, each with its own values."""

    def __init__(
        self,
        scenario: Scenario,
        module: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        data: Data,
        score: Score | None,
    ) -> None:
        self._scenario, self._module, self._loss, self._data = scenario, module, loss, data
        self._score = score
        self._params = [p for p in module.parameters() if p.requires_grad]
        if not self._params or any(p.dtype != self._params[0].dtype for p in self._params):
            raise NotDistributable("the model needs parameters to train, all of one type.")
        if any(True for _ in module.buffers()):
            raise NotDistributable(
                "the model has buffers (BatchNorm's statistics?), which every simulated worker "
                "would need for itself; use a model without."
            )
        self.plan = _plan(scenario, self._params, optimizer)
        self._start = parameters_to_vector(self._params).detach().clone()
        self._shards = [Shard(i, torch.device("cpu")) for i in range(scenario.servers)]
        self._values: dict[int, Tensor] = {}
        self._outbox: dict[int, Tensor] = {}
        self._names: dict[int, str] = {}
        self._orders: dict[int, Tensor] = {}
        self._seconds = 0.0
        self.curve: list[tuple[float, int, float]] = []
        for shard in self._shards:
            shard.open(self.plan, 0)
            pieces = [self._start[e.lo : e.hi] for e in self.plan.layout.extents[shard.index]]
            shard.store.restore(torch.cat([self._start[:0], *pieces]), None)
        self._note(0.0)

    # --- called by the simulated job --------------------------------------------------------

    def shards(self) -> Sequence[Shard]:
        return self._shards

    def placement(self, worker: int, name: str) -> None:
        """Allocate memory for a worker's values and gradients."""
        self._values[worker], self._outbox[worker] = self._start.clone(), self._start.clone()
        self._names[worker] = name
        for shard in self._shards:
            shard.share(name, self._values[worker], self._outbox[worker])

    def fetch(self, worker: int, server: int, have: int) -> int:
        header, _ = self._shards[server].fetch(self._names[worker], have, 0)
        return int(header["version"])

    def gradient(self, worker: int, epoch: int, ticket: Ticket) -> tuple[float, float, int]:
        rows = self._rows(epoch, ticket)
        self._take_on(self._values[worker])
        self._module.zero_grad(set_to_none=True)
        self._module.train()
        outbox = self._outbox[worker].zero_()
        if not len(rows):
            return 0.0, 0.0, 0
        loss = self._loss(self._module(self._data.x[rows]), self._data.y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        grads = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in self._params]
        )
        at = 0
        for extents in self.plan.layout.extents:
            for e in extents:
                outbox[at : at + e.hi - e.lo] = grads[e.lo : e.hi]
                at += e.hi - e.lo
        return float(len(rows)), float(loss.detach()), len(rows)

    def batches(self, epoch: int) -> int:
        more = epoch <= self._data.epochs and self._seconds < self._data.seconds
        return self._data.batches if more else 0

    def epoch_over(self, epoch: int, seconds: float) -> None:
        self._orders.pop(epoch, None)
        self._seconds = seconds
        self.finish()
        self._note(seconds)

    # --- inside -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Put the servers' values into the module."""
        values = torch.empty_like(self._start)
        for shard in self._shards:
            extents = self.plan.layout.extents[shard.index]
            for e, view in zip(extents, shard.store.views, strict=True):
                values[e.lo : e.hi] = view.detach().reshape(-1)
        self._take_on(values)

    def _rows(self, epoch: int, ticket: Ticket) -> Tensor:
        if epoch not in self._orders:
            self._orders[epoch] = self._data.order(self._scenario.seed, epoch)
        size = self._data.batch_size
        batch = self._orders[epoch][ticket.batch * size : (ticket.batch + 1) * size]
        lo, hi = share(len(batch), ticket.parts, ticket.part)
        return batch[lo:hi]

    @torch.no_grad()
    def _take_on(self, values: Tensor) -> None:
        at = 0
        for p in self._params:
            p.copy_(values[at : at + p.numel()].view_as(p))
            at += p.numel()

    def _note(self, seconds: float) -> None:
        if self._score is not None:
            self._module.eval()
            with torch.no_grad():
                score = float(self._score(self._module))
            self.curve.append((seconds, self._shards[0].store.version, score))


def train(
    scenario: Scenario,
    module: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    data: Data,
    score: Score | None = None,
) -> TrainedRun:
    """Train a module in simulated time; `score` (higher is better) is taken after each epoch.

    `data` decides the number of steps, not the scenario. Servers update as the optimizer does; its
    own state is not changed.
    """
    trainer = SharedModule(scenario, module, optimizer, loss, data, score)
    run = ServerJob(replace(scenario, steps=data.batches), trainer, trace=True).run()
    trainer.finish()
    return TrainedRun(run, tuple(trainer.curve))


def _plan(scenario: Scenario, params: Sequence[nn.Parameter], optimizer: Optimizer) -> TrainingPlan:
    recipe = describe(optimizer, params)
    shapes = tuple(tuple(p.shape) for p in params)
    pieces = partition(
        shapes, params[0].dtype.itemsize, scenario.servers, None, whole=not elementwise(recipe)
    )
    return TrainingPlan(
        shapes,
        str(params[0].dtype).removeprefix("torch."),
        pieces,
        recipe,
        scenario.updates,
        scenario.workers,
        scenario.servers,
    )
