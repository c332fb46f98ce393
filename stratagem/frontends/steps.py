"""One training step on one replica, in forms that give the same result.

OneDevice    one replica: the loop that one would write by hand
Searching    one replica with LBFGS, which asks for the loss several times a step
Replicated   gradients all-reduced, every replica updates its own copy
Sliced       CPU replicas of one machine: parameters shared, each updates its slice
Pushed       a worker of servers, which update; in server_steps.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.data.shares import share
from stratagem.frontends.adapter import TorchAdapter, Training
from stratagem.frontends.epoch_sums import LossSum
from stratagem.frontends.sources import Portion
from stratagem.state.factors import Factors, worth_factoring
from stratagem.state.sliced import SlicedUpdate
from stratagem.training import setup, sync_batchnorm
from stratagem.training.exchange import GradientExchange, open_exchange
from stratagem.training.gradient_placement import PlacedGradients, is_kept, is_unseen
from stratagem.training.replica import Replica
from stratagem.wire.shared_memory import sharing


class OneDevice(TorchAdapter):
    """One replica; and what the loop asks of every form that updates here.

    keep              an update begins that may have to be done again
    sync              after an update: replicas come together, if they do now and then; collective
    follow_settings   the optimizer's settings have changed
    take_back         somebody has changed weights, or given them other memory
    meet              bring replicas together that may have gone apart; collective
    bring_home        have whole parameters and optimizer state where others look; collective
    close             take hooks and shared memory away; collective
    leave             the same after a failure, alone; memory that was shared stays where it is
    """

    def __init__(self, training: Training, replica: Replica) -> None:
        super().__init__(training.module, training.optimizer, training.recipe, replica)
        self.tally = LossSum()
        #: takes in outputs and targets for the metrics
        self.take_in: Callable[..., None] = training.recipe.metrics.update
        #: whether `keep` does anything here
        self.keeps = replica.is_chief
        #: called before an update, where all replicas make one
        self.before_commit: Callable[[], None] = lambda: None
        #: how often attributes of the module have changed
        self.followed: Callable[[], int] = lambda: 0
        self._waiting = 0

    @property
    def keeper(self) -> GradientExchange | None:
        """Where gradients go, and something may be kept for later steps, where they travel."""
        return None

    @property
    def settled(self) -> bool:
        """Whether no gradient waits for those of other batches."""
        return not self._waiting

    def take(self, portion: Portion, last: bool) -> None:
        """Train on one share; `last` means that accumulated gradients must be applied now."""
        recipe = self.recipe
        with self.autocast():
            output, y, weight = self.forward(portion)
            loss = recipe.loss.mean(output, y, weight)
        self.backward(loss if recipe.accumulate == 1 else loss / recipe.accumulate)
        if recipe.metrics:
            self.take_in(output, y)
        self.tally.add(loss, portion.total)
        self._waiting += 1
        if last or self._waiting == recipe.accumulate:
            self._waiting = 0
            self.before_commit()
            self.update()

    def keep(self) -> None:
        return None  # what breaks off has not been applied

    def meet(self) -> None:
        return None

    sync = bring_home = follow_settings = take_back = meet

    def close(self) -> None:
        self.leave()

    def leave(self) -> None:
        self.forget_gradients()  # of batches that were to be added up with others


class Searching(OneDevice):
    """One replica with an optimizer that evaluates the loss several times a step."""

    def take(self, portion: Portion, last: bool) -> None:
        seen: list[tuple[Any, Any]] = []

        def evaluate() -> Tensor:
            self.forget_gradients()
            with self.autocast():
                output, y, weight = self.forward(portion)
                loss = self.recipe.loss.mean(output, y, weight)
            loss.backward()  # type: ignore[no-untyped-call]
            self.clip()
            if not seen:  # later evaluations are trials on the way to the next weights
                seen.append((output, y))
            return loss

        loss: Any = self.optimizer.step(evaluate)  # type: ignore[arg-type]
        self.forget_gradients()
        if self.recipe.metrics:
            self.take_in(*seen[0])
        self.before_commit()
        self.tally.add(loss, portion.total)


class Dealt(OneDevice):
    """A share of each batch: backward of this share's part of the global loss."""

    def __init__(self, training: Training, replica: Replica) -> None:
        super().__init__(training, replica)
        #: whether a share without rows takes part with a borrowed one, since layers meet
        self._borrows = False
        self._pair: Tensor | None = None

    def take(self, portion: Portion, last: bool) -> None:
        recipe = self.recipe
        self._waiting += 1
        apply = last or self._waiting == recipe.accumulate
        self.replica.share.set(portion.examples, portion.total, float(portion.examples > 0))
        self.arm(apply)
        numerator, denominator = self._gradients(portion)
        if recipe.accumulate > 1:
            self._count_now(portion, numerator, denominator)
        if portion.total < self.replica.count and not self._borrows:
            setup.take_iterated(self.module, self.replica)  # some had no rows, and no forward
        if apply:
            self._waiting = 0
            # Gradients of earlier, non-empty shares count even when this last share is empty.
            if recipe.accumulate > 1:
                self.replica.share.weight = 1.0
            self.before_commit()
            self._finish(portion, numerator, denominator)

    def _gradients(self, portion: Portion) -> tuple[Any, Any]:
        """Backward of this share's part of the global loss; returns what it adds to the notes."""
        recipe = self.recipe
        if portion.examples == 0 and not self._borrows:
            self._divisor(portion, 0.0)
            return 0.0, 0.0
        with self.autocast():
            output, y, weight = self.forward(portion)
            count = max(portion.examples, 1)  # a share without examples has borrowed one
            numerator, denominator = recipe.loss.terms(output, y, weight, count)
        scale = 1.0 / recipe.accumulate
        if denominator is not None:
            scale /= self._divisor(portion, denominator if portion.examples else 0.0)
        if portion.examples == 0:
            scale = 0.0
        self.backward(numerator * scale)
        if portion.examples == 0:
            return 0.0, 0.0
        if recipe.metrics:
            self.take_in(output, y, part=portion.examples < portion.total)
        if denominator is None:
            return numerator.detach(), float(portion.examples) / portion.total
        return numerator.detach(), denominator

    def _divisor(self, portion: Portion, denominator: Any) -> float:
        """What the sum of numerators is divided by before backward."""
        if self.recipe.loss.counted and self.recipe.accumulate > 1:
            # Micro-batches are added up before anything travels, so each needs its own count.
            return self._add_up(float(denominator), 0.0)[0] or 1.0  # as per_target
        return float(portion.total)

    def _add_up(self, *numbers: float) -> list[float]:
        """Two numbers, summed over the replicas. Collective."""
        if self._pair is None:
            doubles = any(p.dtype is torch.float64 for p in self._params)
            kind = torch.float64 if doubles else torch.float32
            self._pair = self.replica.collective.buffer(2, kind, self.device)
        self._pair.copy_(torch.tensor(numbers, dtype=torch.float64))
        self.replica.collective.all_reduce(self._pair).wait()
        return self._pair.tolist()

    def _count_now(self, portion: Portion, numerator: Any, denominator: Any) -> None:
        above, below = self._add_up(float(numerator), float(denominator))
        self.tally.add(ratio(above, below), portion.total)

    def arm(self, apply: bool) -> None:
        """Before a backward pass: whether its gradients make an update, with those before."""

    def _finish(self, portion: Portion, numerator: Any, denominator: Any) -> None:
        """Bring gradients together and update."""
        raise NotImplementedError


class Replicated(Dealt):
    """Several replicas with a copy of the parameters each."""

    #: where gradients of linear layers are made
    placed_gradients = PlacedGradients

    def __init__(self, training: Training, replica: Replica) -> None:
        super().__init__(training, replica)
        module, optimizer, recipe, settings = training
        self._borrows = self._sync_norm = settings.sync_batchnorm
        self._unsync = sync_batchnorm.install(module, replica, self._sync_norm)
        named = list(module.named_parameters())
        try:
            self.committer: GradientExchange = open_exchange(named, replica, settings, notes=2)
        except BaseException:
            self._unsync()
            raise
        self.committer.optimizer = optimizer
        buckets = self.committer.buckets
        homes = () if recipe.jit_compile else zip(buckets.params, buckets.views, strict=True)
        self._placed = self.placed_gradients(module, homes)

    @property
    def keeper(self) -> GradientExchange | None:
        return self.committer

    def arm(self, apply: bool) -> None:
        self.committer.armed = apply

    def forward(self, portion: Portion) -> tuple[Any, Any, Any]:
        with self._placed.forward():
            return super().forward(portion)

    def backward(self, loss: Tensor) -> None:
        with self._placed.backward():
            super().backward(loss)

    def _finish(self, portion: Portion, numerator: Any, denominator: Any) -> None:
        notes = self.committer.commit([numerator, denominator]).notes
        if self.recipe.accumulate == 1:
            if self.recipe.loss.counted:
                self.committer.buckets.scale(per_target(portion, notes))
            self.tally.add(notes[0] / notes[1], portion.total)
        self.update()

    def update(self) -> None:
        super().update()
        self.committer.sync()

    def leave(self) -> None:
        self.committer.close()
        self._unsync()


class Sliced(Replicated):
    """CPU replicas of one machine: one set of parameters, each replica updates its slice."""

    sliced_update = SlicedUpdate

    def __init__(self, training: Training, replica: Replica) -> None:
        super().__init__(training, replica)
        self._elastic = training.settings.elastic
        buckets = self.committer.buckets
        factored = self._factored(buckets.params)
        try:
            shared = sharing(replica.collective)
            self.sliced = self.sliced_update(self.optimizer, buckets, shared, factored)
        except BaseException:  # somebody has died meanwhile
            Replicated.leave(self)
            raise
        self._factors = self.sliced.factors
        # later only somebody's own code could hook into nodes, and there are no factors with that
        watched = any(map(is_kept, buckets.params)) if self._factors else False
        self._by_weight: dict[Tensor, Factors] = (
            {} if watched else {buckets.params[i]: factors for i, factors in self._factors.items()}
        )

    def _factored(self, params: Sequence[nn.Parameter]) -> list[int]:
        """Weights of which replicas tell each other the factors of the gradient.

        Not where somebody's own code runs before the update: it would find no gradient there.
        """
        recipe = self.recipe
        if recipe.accumulate > 1 or recipe.loss.own or recipe.metrics.own:
            return []
        at: dict[Tensor, int] = {p: i for i, p in enumerate(params)}
        weights = self._placed.weights()
        return [at[w] for w in weights if worth_factoring(w, self.replica.count)]

    def _gradients(self, portion: Portion) -> tuple[Any, Any]:
        mine = share(portion.total, self.replica.count, self.replica.index)
        for factors in self._factors.values():
            factors.expect(*mine)
        if self._by_weight:
            unseen = is_unseen(self.committer.buckets.params)
            self._placed.factors = self._by_weight if unseen else {}
        return super()._gradients(portion)

    def _finish(self, portion: Portion, numerator: Any, denominator: Any) -> None:
        self.committer.stage([numerator, denominator], self._factors)
        above, below = self.sliced.add_up()
        scale, at_once = 1.0, self.recipe.accumulate == 1
        if at_once and self.recipe.loss.counted and below:
            scale = portion.total / below  # as per_target
        self.sliced.step(scale, self.recipe.clip_norm, self.recipe.clip_value)
        if at_once:
            self.tally.add(ratio(above, below), portion.total)
        self.forget_gradients()

    def follow_settings(self) -> None:
        self.sliced.follow_settings()

    def take_back(self) -> None:
        self.sliced.take_back()

    def keep(self) -> None:
        if self.keeps:  # the chief, whose state all others take, or who may be the chief next
            self.sliced.keep()

    def close(self) -> None:
        self.sliced.close()
        super().leave()

    def leave(self) -> None:
        super().leave()
        if self._elastic:
            self.sliced.leave()


def ratio(above: float, below: float) -> float:
    """A loss; where nothing counts it is no number, as on one device."""
    return above / below if below else math.nan


def per_target(portion: Portion, notes: Any) -> Tensor:
    """From a mean over all rows to one over the targets that count; where none does, gradients are
    zero as they are, which is torch's answer, too."""
    counted = notes[1]
    total = torch.full_like(counted, portion.total)  # a number / a tensor is not the nearest one
    return torch.where(counted == 0, torch.ones_like(counted), total / counted)
