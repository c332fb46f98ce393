"""What a simulated job does besides taking time: nothing, or real training."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from stratagem.errors import ReplicaError
from stratagem.plan.simulation.scenario import Scenario
from stratagem.rules.push import Ticket
from stratagem.state.partition import Piece
from stratagem.state.recipe import OptimizerRecipe
from stratagem.strategies.parameters.parties import Near
from stratagem.strategies.parameters.plan import Plan
from stratagem.strategies.parameters.shard import Order


class Trains(Protocol):
    """What the office asks of it."""

    plan: Plan

    def shards(self) -> Sequence[Near]:
        """The data of each server, the lead's first; of one, if all of them do the same."""

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


class _Alone(type(threading.RLock())):  # type: ignore[misc]
    """A lock that nobody else wants, as quick as one can be; it stands for a condition."""

    def notify_all(self) -> None:
        """Nobody waits."""


class Weightless:
    """A shard that counts its updates and keeps no values."""

    def __init__(self) -> None:
        self.changed: threading.Condition = _Alone()
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
        self._shards = [Weightless() for _ in range(1 if scenario.alike else scenario.servers)]
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
