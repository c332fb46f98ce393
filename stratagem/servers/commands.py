"""The coordinator's orders, which every server gets in the same sequence."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from stratagem.cluster.failure import failed
from stratagem.errors import ReplicaError
from stratagem.rules.tickets import Push, Update, Verdict
from stratagem.rules.updates import Asynchronous
from stratagem.servers.shard import Order
from stratagem.servers.training_plan import TrainingPlan


class OwnShard(Protocol):
    """The coordinator's own shard."""

    changed: threading.Condition
    failure: ReplicaError | None

    def training(self) -> TrainingPlan:
        """Return the plan of the present or last fit."""

    def obey(self, order: Order) -> Any:
        """Carry out an order."""

    def fetch(self, placement: str, have: int, after: int) -> tuple[dict[str, Any], list[Tensor]]:
        """Return the newest values, for a worker that has version `have`."""


class OtherShard(Protocol):
    """Another server, as the coordinator commands it."""

    def order(self, order: Order) -> None:
        """Send an order; the server carries it out after all earlier ones."""

    def answer(self) -> float:
        """Return the number that the last order asked for."""


class Commands:
    """Has the coordinator's decisions carried out on all shards; called under its lock."""

    def __init__(
        self, shard: OwnShard, far: Sequence[OtherShard], end_job: Callable[[ReplicaError], None]
    ) -> None:
        self._shard, self._far, self._end_job = shard, list(far), end_job
        #: how many orders the fit has had; a request that needs their effect waits for as many
        self.given = 0

    def begin(self, plan: TrainingPlan) -> None:
        """Begin a fit with this plan."""
        self.given, self._plan = 0, plan
        policies = plan.updates.staleness if isinstance(plan.updates, Asynchronous) else ()
        self._gaps = [(each, each.step_norm()) for each in policies if each.needs_gap]

    def give(self, order: Order) -> None:
        """Send an order to every other server, and carry it out here."""
        try:
            self.given += 1
            for server in self._far:
                server.order(order)
            self._shard.obey(order)
        except Exception as error:
            raise self._ended(error) from error

    def ask(self, order: Order) -> list[float]:
        """Send an order, and wait for the number that each server answers."""
        try:
            self.given += 1
            for server in self._far:
                server.order(order)
            mine = float(self._shard.obey(order))
            return [mine, *(server.answer() for server in self._far)]
        except Exception as error:
            raise self._ended(error) from error

    def _ended(self, error: Exception) -> ReplicaError:
        """End the job: an order that only some servers carry out spoils the parameters."""
        failure = error
        if not isinstance(failure, ReplicaError):
            failure = failed("ps 0", traceback.format_exc())
        self._end_job(failure)
        return failure

    # --- gradients --------------------------------------------------------------------------

    def take_in(
        self, placement: str, push: Push, verdict: Verdict, used: Any, update: Update | None
    ) -> None:
        """Add a gradient that counts, and apply the update that it completes, if any."""
        factor = verdict.factor * self._gap_factor(placement) if self._gaps else verdict.factor
        if update is not None and len(update.pushes) == 1 and self._plan.clip.norm is None:
            self.give(["one", placement, factor, update.rate, used])
            self._measure_step()
            return
        self.give(["add", placement, factor * push.weight, used])
        if update is not None:
            self.apply(update)

    def apply(self, update: Update) -> None:
        """Apply the sum of gradients as an update, clipped by the norm over all shards."""
        scale = 1.0 / update.divisor if update.divisor else 0.0
        limit = self._plan.clip.norm
        if limit is not None:
            norm = sum(self.ask(["norm", scale])) ** 0.5
            if not norm <= limit:  # also if it is NaN
                scale *= limit / (norm + self._plan.clip.margin)
        self.give(["apply", scale, update.rate])
        self._measure_step()

    def _measure_step(self) -> None:
        if self._gaps:
            norm = sum(self.ask(["step"])) ** 0.5
            for _, usual in self._gaps:
                usual.add(norm)

    def _gap_factor(self, placement: str) -> float:
        factor = 1.0
        for policy, usual in self._gaps:
            gap = sum(self.ask(["distance", placement])) ** 0.5
            factor *= policy.gap_factor(gap, usual.value)
        return factor
