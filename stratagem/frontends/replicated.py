"""Steps of several replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.data.shard import share
from stratagem.frontends.feeds import Portion
from stratagem.frontends.proof import Proof
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.solo import Solo
from stratagem.state.factors import Factors, worth_factoring
from stratagem.state.sliced import SlicedUpdate
from stratagem.strategies import setup, sync_batchnorm
from stratagem.strategies.at_home import AtHome, is_kept, is_unseen
from stratagem.strategies.exchange import GradientExchange
from stratagem.strategies.replica import Replica
from stratagem.strategies.settings import Settings
from stratagem.wire.shared_memory import SharedMemoryCollective


class Replicated(Solo):
    """Several replicas with a copy of the parameters each."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, recipe: Recipe, replica: Replica,
        settings: Settings,
    ) -> None:  # fmt: skip
        super().__init__(module, optimizer, recipe, replica)
        self._sync_norm = settings.sync_batchnorm
        self._pair: Tensor | None = None
        self._proof = Proof(recipe.loss, replica)
        self._unsync = sync_batchnorm.install(module, replica, self._sync_norm)
        reducer = setup.choose_reducer(list(module.parameters()), replica, settings)
        self.exchange = GradientExchange(
            list(module.named_parameters()), replica, reducer, notes=2
        )
        buckets = self.exchange.buckets
        homes = () if recipe.jit_compile else zip(buckets.params, buckets.views, strict=True)
        self._at_home = AtHome(module, homes)

    def take(self, portion: Portion, last: bool) -> None:
        recipe = self.recipe
        self._waiting += 1
        apply = last or self._waiting == recipe.accumulate
        self.replica.share.set(portion.examples, portion.total, float(portion.examples > 0))
        self.exchange.armed = apply
        numerator, denominator = self._gradients(portion)
        if recipe.accumulate > 1:
            self._count_now(portion, numerator, denominator)
        if apply:
            self._waiting = 0
            # Gradients of earlier, non-empty shares count even when this last share is empty.
            if recipe.accumulate > 1:
                self.replica.share.weight = 1.0
            self._finish(portion, numerator, denominator)
        if portion.total < self.replica.count and not self._sync_norm:
            setup.take_iterated(self.module, self.replica)  # some had no rows, and no forward

    def _gradients(self, portion: Portion) -> tuple[Any, Any]:
        """Backward of this share's part of the global loss; returns what it adds to the notes."""
        recipe = self.recipe
        if portion.examples == 0 and not self._sync_norm:
            self._divisor(portion, 0.0)
            return 0.0, 0.0
        with self.autocast():
            output, y, weight = self.forward(portion)
            count = max(portion.examples, 1)  # a share without examples has borrowed one
            numerator, denominator = recipe.loss.terms(output, y, weight, count)
            if self._proof.open:
                self._proof.settle(portion, output, y, numerator)
        scale = 1.0 / recipe.accumulate
        if denominator is not None:
            scale /= self._divisor(portion, denominator if portion.examples else 0.0)
        if portion.examples == 0:
            scale = 0.0
        self.backward(numerator * scale)
        if portion.examples == 0:
            return 0.0, 0.0
        if recipe.metrics:
            recipe.metrics.update(output, y)
        if denominator is None:
            return numerator.detach(), float(portion.examples) / portion.total
        return numerator.detach(), denominator

    def forward(self, portion: Portion) -> tuple[Any, Any, Any]:
        with self._at_home.forward():
            return super().forward(portion)

    def backward(self, loss: Tensor) -> None:
        with self._at_home.backward():
            super().backward(loss)

    def _divisor(self, portion: Portion, denominator: Any) -> float:
        """What the sum of numerators is divided by before backward."""
        if self.recipe.loss.counted and self.recipe.accumulate > 1:
            # Micro-batches are added up before anything travels, so each needs its own count.
            return self._add_up(float(denominator), 0.0)[0] or float("nan")
        return float(portion.total)

    def _add_up(self, *numbers: float) -> list[float]:
        """Two numbers, summed over the replicas. Collective."""
        if self._pair is None:
            kind = self.exchange.buckets.notes.dtype
            self._pair = self.replica.collective.buffer(2, kind, self.device)
        self._pair.copy_(torch.tensor(numbers, dtype=torch.float64))
        self.replica.collective.all_reduce(self._pair).wait()
        return self._pair.tolist()

    def _count_now(self, portion: Portion, numerator: Any, denominator: Any) -> None:
        above, below = self._add_up(float(numerator), float(denominator))
        self.tally.add(_ratio(above, below), portion.total)

    def _finish(self, portion: Portion, numerator: Any, denominator: Any) -> None:
        notes = self.exchange.finish([numerator, denominator])
        if self.recipe.accumulate == 1:
            if self.recipe.loss.counted:
                self.exchange.buckets.scale(_per_target(portion, notes))
            self.tally.add(notes[0] / notes[1], portion.total)
        self.update()

    def leave(self) -> None:
        self.exchange.close()
        self._unsync()


class Sliced(Replicated):
    """CPU replicas of one machine: one set of parameters, each replica updates its slice."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, recipe: Recipe, replica: Replica,
        settings: Settings,
    ) -> None:  # fmt: skip
        super().__init__(module, optimizer, recipe, replica, settings)
        assert isinstance(replica.collective, SharedMemoryCollective)
        buckets = self.exchange.buckets
        factored = self._factored(buckets.params)
        self.sliced = SlicedUpdate(optimizer, buckets, replica.collective, factored)
        self._factors = self.sliced.factors
        # later only somebody's own code could hook into nodes, and there are no factors with that
        watched = any(map(is_kept, buckets.params)) if self._factors else False
        self._by_weight: dict[Tensor, Factors] = {} if watched else {
            buckets.params[i]: factors for i, factors in self._factors.items()
        }  # fmt: skip

    def _factored(self, params: Sequence[nn.Parameter]) -> list[int]:
        """Weights of which replicas tell each other the factors of the gradient.

        Not where somebody's own code runs before the update: it would find no gradient there.
        """
        recipe = self.recipe
        if recipe.accumulate > 1 or recipe.loss.own or recipe.metrics.own:
            return []
        at: dict[Tensor, int] = {p: i for i, p in enumerate(params)}
        weights = self._at_home.weights()
        return [at[w] for w in weights if worth_factoring(w, self.replica.count)]

    def _gradients(self, portion: Portion) -> tuple[Any, Any]:
        mine = share(portion.total, self.replica.count, self.replica.index)
        for factors in self._factors.values():
            factors.expect(*mine)
        if self._by_weight:
            unseen = is_unseen(self.exchange.buckets.params)
            self._at_home.factors = self._by_weight if unseen else {}
        return super()._gradients(portion)

    def _finish(self, portion: Portion, numerator: Any, denominator: Any) -> None:
        self.exchange.stage([numerator, denominator], self._factors)
        above, below = self.sliced.add_up()
        scale = 1.0
        if self.recipe.accumulate == 1:
            if self.recipe.loss.counted and below:
                scale = portion.total / below  # as _per_target
            self.tally.add(_ratio(above, below), portion.total)
        self.sliced.step(scale, self.recipe.clip_norm, self.recipe.clip_value)
        self.forget_gradients()

    def follow_settings(self) -> None:
        self.sliced.follow_settings()

    def take_back(self) -> None:
        self.sliced.take_back()

    def close(self) -> None:
        self.sliced.close()
        super().close()


def _ratio(above: float, below: float) -> float:
    """A loss; where nothing counts it is no number, as on one device."""
    return above / below if below else math.nan


def _per_target(portion: Portion, notes: Tensor) -> Tensor:
    """From a mean over all rows to one over the targets that count; where none does, gradients are
    zero as they are, which is torch's answer, too."""
    counted = notes[1]
    total = torch.full_like(counted, portion.total)  # a number / a tensor is not the nearest one
    return torch.where(counted == 0, torch.ones_like(counted), total / counted)
