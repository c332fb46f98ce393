"""One training step on one replica, in forms that give the same result.

    Solo         one replica: the loop that one would write by hand
    Searching    one replica with LBFGS, which asks for the loss several times a step
    Replicated   gradients all-reduced, every replica updates its own copy
    Sliced       CPU replicas of one machine: parameters shared, each updates its slice
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.data.shard import share
from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.feeds import Portion
from stratagem.frontends.losses import Loss
from stratagem.frontends.metrics import MetricSet
from stratagem.frontends.outputs import with_row
from stratagem.frontends.proof import Proof
from stratagem.state.factors import Factors, worth_factoring
from stratagem.state.sliced import SlicedUpdate, can_slice
from stratagem.strategies import setup, sync_batchnorm
from stratagem.strategies.at_home import AtHome, is_kept, is_unseen
from stratagem.strategies.exchange import GradientExchange
from stratagem.strategies.prepare import to_device
from stratagem.strategies.replica import Replica
from stratagem.strategies.settings import Settings
from stratagem.wire.shared_memory import SharedMemoryCollective

_NO_CAST = nullcontext()


@dataclass
class Recipe:
    """How a model is trained: what `compile` was told."""

    loss: Loss
    metrics: MetricSet
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    autocast: torch.dtype | None = None
    jit_compile: bool = False


class Tally:
    """The loss over all examples so far; losses stay on the device until somebody asks."""

    _KEEP = 256

    def __init__(self) -> None:
        self.examples = 0
        self._sum = 0.0
        self._losses: list[Tensor] = []
        self._totals: list[int] = []

    def add(self, loss: Tensor, total: int) -> None:
        self._losses.append(loss.detach())
        self._totals.append(total)
        self.examples += total
        if len(self._losses) == self._KEEP:
            self._fold()

    def _fold(self) -> None:
        if self._losses:
            losses = torch.stack(self._losses).double().cpu()
            self._sum += float(losses @ torch.tensor(self._totals, dtype=torch.float64))
            self._losses.clear()
            self._totals.clear()

    def mean(self) -> float:
        self._fold()
        return self._sum / self.examples if self.examples else float("nan")


class Step(Protocol):
    """What the loop asks of any of them."""

    tally: Tally
    #: with precision="float16"
    scaler: Any

    def take(self, portion: Portion, last: bool) -> None:
        """Train on one share; `last` means that accumulated gradients must be applied now."""

    def follow_settings(self) -> None:
        """The optimizer's settings have changed."""

    def take_back(self) -> None:
        """Somebody has changed weights, or given them other memory."""

    def close(self) -> None:
        """Take hooks and shared memory away. Collective."""

    def leave(self) -> None:
        """Take hooks away after a failure, alone; memory that was shared stays where it is."""


class Solo:
    """One replica; also the forward half of the other two."""

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | None, recipe: Recipe, replica: Replica
    ) -> None:
        self.module, self.recipe = module, recipe
        if optimizer is not None:  # evaluation has none
            self.optimizer = optimizer
            # clipping looks at all of them, so none may keep a gradient that others do not have
            held = [p for group in optimizer.param_groups for p in group["params"]]
            self._params = list(dict.fromkeys([*module.parameters(), *held]))
        self.replica = replica
        self.device = replica.device
        self._run: nn.Module = torch.compile(module) if recipe.jit_compile else module  # type: ignore[assignment]
        self.tally = Tally()
        self._elsewhere = self.device.type != "cpu"
        half = recipe.autocast is torch.float16
        self.scaler: Any = torch.amp.GradScaler(self.device.type) if half else None
        if self.scaler is not None:  # it makes its scale at the first loss; empty shares have none
            self.scaler.scale(torch.zeros((), device=self.device))
        self._waiting = 0

    def forward(self, portion: Portion) -> tuple[Any, Any, Any]:
        """Outputs, targets and sample weights of a share, on the device."""
        x, y, weight = portion.x, portion.y, portion.weight
        if self._elsewhere:
            x, y, weight = to_device((x, y, weight), self.device)
        output = call(self._run, x)
        return output if portion.examples > 1 else with_row(output, y), y, weight

    def autocast(self) -> Any:
        if self.recipe.autocast is None:
            return _NO_CAST
        return torch.autocast(self.device.type, self.recipe.autocast)

    def take(self, portion: Portion, last: bool) -> None:
        recipe = self.recipe
        with self.autocast():
            output, y, weight = self.forward(portion)
            loss = recipe.loss.mean(output, y, weight)
        self.backward(loss if recipe.accumulate == 1 else loss / recipe.accumulate)
        if recipe.metrics:
            recipe.metrics.update(output, y)
        self.tally.add(loss, portion.total)
        self._waiting += 1
        if last or self._waiting == recipe.accumulate:
            self._waiting = 0
            self.update()

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip(self) -> None:
        recipe = self.recipe
        if recipe.clip_norm is None and recipe.clip_value is None:
            return
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), recipe.clip_norm)
        if recipe.clip_value is not None:
            nn.utils.clip_grad_value_(self.module.parameters(), recipe.clip_value)

    def update(self) -> None:
        """Clip, step, forget the gradients."""
        self.clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """What `optimizer.zero_grad()` does, without its profiling hooks."""
        for param in self._params:
            param.grad = None

    def follow_settings(self) -> None:
        return None

    def take_back(self) -> None:
        return None

    def close(self) -> None:
        self.leave()

    def leave(self) -> None:
        self.forget_gradients()  # of batches that were to be added up with others


class Searching(Solo):
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
            self.recipe.metrics.update(*seen[0])
        self.tally.add(loss, portion.total)


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
        self.tally.add(torch.tensor(above, dtype=torch.float64) / below, portion.total)

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
        notes = self.sliced.add_up()
        scale = 1.0
        if self.recipe.accumulate == 1:
            if self.recipe.loss.counted:
                scale = float(_per_target(portion, notes))
            self.tally.add(notes[0] / notes[1], portion.total)
        self.sliced.step(scale, self.recipe.clip_norm, self.recipe.clip_value)
        self.forget_gradients()

    def follow_settings(self) -> None:
        self.sliced.follow_settings()

    def take_back(self) -> None:
        self.sliced.take_back()

    def close(self) -> None:
        self.sliced.close()
        super().close()


def _per_target(portion: Portion, notes: Tensor) -> Tensor:
    """From a mean over all rows to one over the targets that count; where none does, gradients are
    zero as they are, which is torch's answer, too."""
    counted = notes[1]
    total = torch.full_like(counted, portion.total)  # a number / a tensor is not the nearest one
    return torch.where(counted == 0, torch.ones_like(counted), total / counted)


def choose(
    module: nn.Module, optimizer: Optimizer, recipe: Recipe, replica: Replica, settings: Settings
) -> Step:
    """The form of step that these replicas can use. Collective."""
    searches = isinstance(optimizer, torch.optim.LBFGS)
    if searches and (recipe.accumulate > 1 or recipe.autocast is torch.float16):
        raise UsageError(
            'LBFGS evaluates the loss several times a step, so accumulate and precision="float16" '
            "cannot go with it; leave them out, or use another optimizer."
        )
    if replica.count == 1:
        return (Searching if searches else Solo)(module, optimizer, recipe, replica)
    if searches:
        raise NotDistributable(
            "LBFGS evaluates the loss several times a step, which replicas cannot follow; use "
            "another optimizer, or one device."
        )
    plain = settings.wire in (None, "float32") and settings.op != "auto"
    shared = isinstance(replica.collective, SharedMemoryCollective)
    params = [p for p in module.parameters() if p.requires_grad]
    half = recipe.autocast is torch.float16
    if plain and shared and not half and params and can_slice(optimizer, params):
        return Sliced(module, optimizer, recipe, replica, settings)
    return Replicated(module, optimizer, recipe, replica, settings)


def call(module: nn.Module, x: Any) -> Any:
    """Several inputs come as a tuple or list, named ones as a dict; a NamedTuple (a
    PackedSequence, say) is one."""
    if isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        return module(*x)
    if isinstance(x, dict):
        return module(**x)
    return module(x)

