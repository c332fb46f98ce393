"""Orders: what every server is told to do, the same and in the same order."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from stratagem.errors import ReplicaError
from stratagem.rules.push import Push, Update, Verdict
from stratagem.rules.updates import Asynchronous
from stratagem.strategies.parameters.parties import Far, Near
from stratagem.strategies.parameters.plan import Plan
from stratagem.strategies.parameters.shard import Order
from stratagem.strategies.parameters.trouble import failed


class Orders:
    """Has the lead's decisions carried out on all shards; called under the lead's lock."""

    def __init__(
        self, shard: Near, far: Sequence[Far], end_job: Callable[[ReplicaError], None]
    ) -> None:
        self._shard, self._far, self._end_job = shard, list(far), end_job
        #: how many orders the fit has seen: who needs their effect waits for as many
        self.given = 0

    def begin(self, plan: Plan) -> None:
        """A fit begins, with this plan."""
        self.given, self._plan = 0, plan
        policies = plan.updates.staleness if isinstance(plan.updates, Asynchronous) else ()
        self._gaps = [(each, each.step_norm()) for each in policies if each.needs_gap]

    def give(self, order: Order) -> None:
        """Have it done, now or soon."""
        try:
            self.given += 1
            for server in self._far:
                server.order(order)
            self._shard.obey(order)
        except Exception as error:
            raise self._ended(error) from error

    def ask(self, order: Order) -> list[float]:
        """Have it done, and wait for the number that each server answers."""
        try:
            self.given += 1
            for server in self._far:
                server.order(order)
            mine = float(self._shard.obey(order))
            return [mine, *(server.answer() for server in self._far)]
        except Exception as error:
            raise self._ended(error) from error

    def _ended(self, error: Exception) -> ReplicaError:
        """What is carried out by halves makes nonsense of the parameters: the job ends."""
        failure = error
        if not isinstance(failure, ReplicaError):
            failure = failed("ps 0", traceback.format_exc())
        self._end_job(failure)
        return failure

    # --- gradients --------------------------------------------------------------------------

    def take_in(
        self, seat: str, push: Push, verdict: Verdict, used: Any, update: Update | None
    ) -> None:
        """A gradient that counts, and the update that it makes ripe, if any."""
        factor = verdict.factor * self._gap_factor(seat) if self._gaps else verdict.factor
        if update is not None and len(update.pushes) == 1 and self._plan.clip.norm is None:
            self.give(["one", seat, factor, update.rate, used])
            self._measure_step()
            return
        self.give(["add", seat, factor * push.weight, used])
        if update is not None:
            self.apply(update)

    def apply(self, update: Update) -> None:
        """Make an update of what was added up, clipped by the norm over all shards."""
        scale = 1.0 / update.divisor if update.divisor else 0.0
        limit = self._plan.clip.norm
        if limit is not None:
            norm = sum(self.ask(["norm", scale])) ** 0.5
            if not norm <= limit:  # or it is no number, and then nothing is
                scale *= limit / (norm + self._plan.clip.margin)
        self.give(["apply", scale, update.rate])
        self._measure_step()

    def _measure_step(self) -> None:
        if self._gaps:
            norm = sum(self.ask(["step"])) ** 0.5
            for _, usual in self._gaps:
                usual.add(norm)

    def _gap_factor(self, seat: str) -> float:
        factor = 1.0
        for policy, usual in self._gaps:
            gap = sum(self.ask(["distance", seat])) ** 0.5
            factor *= policy.gap_factor(gap, usual.value)
        return factor
