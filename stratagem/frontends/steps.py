"""One training step on one replica, in classes that all give the result of one device.

OneDevice    `take`: forward, backward, update, as in a loop written by hand
  Searching    overrides `take`: LBFGS evaluates the loss several times a step
  Dealt        overrides `take`: backward of a share (`_gradients`), then `_finish`
    Replicated   defines `_finish`: all-reduce, then every replica updates its own copy
      Sliced       overrides `_finish`: CPU replicas of one machine, each updates its slice
Others: Apart (apart.py), SharedSet and FullySharded (sharded_steps.py), Staged (staged.py), Divided
(divided.py); Pushed and Grouped (server_steps.py), where servers update.
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
    """The step of a single replica, and the interface of every step that updates here.

    keep              before an update that may have to be done again: keep the parameters
    sync              after an update: meet, if it is time (`sync=`); collective
    follow_settings   after the optimizer's settings have changed
    take_back         after a callback has written weights, or given them other memory
    meet              average replicas that have trained apart; collective
    bring_home        gather whole parameters and optimizer state into the module; collective
    close             remove hooks and shared memory; collective
    leave             the same after a failure, without the other replicas
    """

    def __init__(self, training: Training, replica: Replica) -> None:
        super().__init__(training.module, training.optimizer, training.recipe, replica)
        self.tally = LossSum()
        #: updates the metrics with outputs and targets
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
        """The exchange that may hold something back for later steps; None without an exchange."""
        return None

    @property
    def settled(self) -> bool:
        """Whether no accumulated gradient waits for an update."""
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
        return None  # a step that breaks off has not been applied

    def meet(self) -> None:
        return None

    sync = bring_home = follow_settings = take_back = meet

    def close(self) -> None:
        self.leave()

    def leave(self) -> None:
        self.forget_gradients()  # of an unfinished accumulation


class Searching(OneDevice):
    """The step of a single replica whose optimizer evaluates the loss several times."""

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
    """The step of a replica with a share of each batch, up to the update (`_finish`)."""

    def __init__(self, training: Training, replica: Replica) -> None:
        super().__init__(training, replica)
        #: whether an empty share runs a borrowed row, since layers (SyncBatchNorm) are collective
        self._borrows = False
        self._pair: Tensor | None = None

    def take(self, portion: Portion, last: bool) -> None:
        recipe = self.recipe
        self._waiting += 1
        apply = last or self._waiting == recipe.accumulate
        self.replica.share.set(portion.examples, portion.total, float(portion.examples > 0))
        self.arm(apply)
        numerator, denominator = self._gradients(portion)
        self.tally.own.add(numerator)
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
        """Run backward of this share's part of the global loss; returns numerator, denominator."""
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
        """The number by which the numerator is divided before backward."""
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
        """Called before backward: whether its gradients complete an update."""

    def _finish(self, portion: Portion, numerator: Any, denominator: Any) -> None:
        """Reduce the gradients and update."""
        raise NotImplementedError


class Replicated(Dealt):
    """The step of replicas that all-reduce, each with a copy of the parameters."""

    #: where gradients of linear layers are made
    placed_gradients = PlacedGradients

    def __init__(self, training: Training, replica: Replica) -> None:
        super().__init__(training, replica)
        module, optimizer, recipe, settings = training
        self._sync_norm = settings.sync_batchnorm
        self._borrows = self._sync_norm or sync_batchnorm.weighs_statistics(module)
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
    """The step of CPU replicas that share one set of parameters, each updating its slice."""

    sliced_update = SlicedUpdate

    def __init__(self, training: Training, replica: Replica) -> None:
        super().__init__(training, replica)
        self._elastic = training.settings.elastic
        buckets = self.committer.buckets
        factored = self._factored(buckets.params)
        try:
            shared = sharing(replica.collective)
            self.sliced = self.sliced_update(self.optimizer, buckets, shared, factored)
        except BaseException:  # another replica has died meanwhile
            Replicated.leave(self)
            raise
        self._factors = self.sliced.factors
        # hooks on autograd nodes come from user code only, and with hooks there are no factors
        watched = any(map(is_kept, buckets.params)) if self._factors else False
        self._by_weight: dict[Tensor, Factors] = (
            {} if watched else {buckets.params[i]: factors for i, factors in self._factors.items()}
        )

    def _factored(self, params: Sequence[nn.Parameter]) -> list[int]:
        """The weights whose gradients replicas exchange as factors.

        None where user code runs before the update: it would find no gradient.
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
        if self.keeps:  # the chief, whose state all replicas take, or its possible successor
            self.sliced.keep()

    def close(self) -> None:
        self.sliced.close()
        super().leave()

    def leave(self) -> None:
        super().leave()
        if self._elastic:
            self.sliced.leave()


def ratio(above: float, below: float) -> float:
    """A loss from its terms; NaN where no target counts, as on one device."""
    return above / below if below else math.nan


def per_target(portion: Portion, notes: Any) -> Tensor:
    """The factor from a mean over all rows to a mean over the targets that count; 1 where none
    counts, since the gradients are zero then, as torch's are."""
    counted = notes[1]
    total = torch.full_like(counted, portion.total)  # a number / a tensor is not the nearest one
    return torch.where(counted == 0, torch.ones_like(counted), total / counted)
