"""CPU replicas of a Keras model that share one set of weights, gradients and optimizer slots.

Weights, the optimizer's slots and the sum of the gradients lie in shared memory. A gradient is
added to the sum as soon as backward has made it, and freed; then each replica makes the optimizer
step of some of the variables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from stratagem.errors import UsageError
from stratagem.frontends.keras.driver import Call
from stratagem.frontends.keras.on_replicas import OnReplicas
from stratagem.frontends.keras.refusals import check_shards
from stratagem.frontends.keras.replica_steps import ReplicaSteps
from stratagem.frontends.keras.stage_variables import slots, square, update
from stratagem.state.partition import place
from stratagem.state.shared_model import SharedTensors
from stratagem.training.exchange import GradientExchange, open_exchange
from stratagem.training.sharded_exchange import ShardedExchange
from stratagem.wire.shared_memory import sharing
from stratagem.wire.tree import gather_tree


class OnShards(OnReplicas):
    """The chief's side of a model whose replicas share weights."""

    def start(self, call: Call) -> Any:
        if call.trains:
            model = self._driver.model
            collective = self._driver.strategy.replica_group.start().collective
            check_shards(model, shared=collective.shares_memory)
        return super().start(call)


class ShardSteps(ReplicaSteps):
    """Runs the chief's verbs on one replica."""

    _shared: SharedTensors | None = None

    def _exchange(self, named: Sequence[tuple[str, Any]]) -> GradientExchange:
        """Open the committer, and move variables and slots to shared memory. Collective."""
        model, replica = self.adapter.model, self.adapter.replica
        check_shards(model, shared=True)
        collective = sharing(replica.collective)
        self._variables = list(model.trainable_variables)
        params = [v.value for v in self._variables]
        self._shared = SharedTensors([*params, *slots(model.optimizer)], collective)
        homes = place([p.numel() for p in params], replica.count)
        self._mine = [i for i, home in enumerate(homes) if home == replica.index]
        return open_exchange(named, replica, replace(self.settings, committer=ShardedExchange))

    @contextmanager
    def _reducing(self, exchange: GradientExchange) -> Iterator[None]:
        """Add the gradients of a training step into the one sum; update the variables in parts."""
        assert isinstance(exchange, ShardedExchange)
        optimizer, share = self.adapter.model.optimizer, self.adapter.replica.share
        weight, share.weight = share.weight, 1.0  # the loss is scaled instead of the gradients
        own = optimizer.__dict__
        own["scale_loss"] = lambda loss: loss * weight
        own["apply"] = lambda *_: self._apply(exchange)
        exchange.begin_step()
        exchange.armed = True
        try:
            yield
        finally:
            exchange.armed, share.weight = False, weight
            del own["scale_loss"], own["apply"]

    def _apply(self, exchange: ShardedExchange) -> None:
        """Update the variables of this replica when the sum is complete. Collective."""
        optimizer, collective = self.adapter.model.optimizer, self.adapter.replica.collective
        exchange.end_pass()
        told = gather_tree(collective, exchange.used())  # after this the sum is complete
        used = [any(each) for each in zip(*told, strict=True)]
        if not any(used):
            raise UsageError("no variable of the model has a gradient; is its loss a constant?")
        views = exchange.buckets.views
        gradients = [views[i] if used[i] else None for i in self._mine]
        norm = 0.0
        if optimizer.global_clipnorm:
            norm = math.sqrt(sum(gather_tree(collective, square(gradients))))
        update(optimizer, gradients, [self._variables[i] for i in self._mine], norm)
        collective.barrier()

    def close(self) -> None:
        super().close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None


OnShards.form = ShardSteps
