"""Training steps of `ShardedStrategy`.

SharedSet      CPU replicas of one machine: all tensors are shared in memory
FullySharded   several machines, and GPUs: each replica has its rows, by torch's fully_shard
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable
from stratagem.frontends.adapter import Training
from stratagem.frontends.recipe import Recipe
from stratagem.frontends.sources import Portion
from stratagem.frontends.steps import Dealt, OneDevice, Sliced, ratio
from stratagem.state.optimizer_recipe import check_elementwise
from stratagem.state.sliced import ShardedUpdate
from stratagem.training import sync_batchnorm
from stratagem.training.cross_device import NcclAllReduce
from stratagem.training.gradient_placement import FactoredGradients
from stratagem.training.layer_shards import LayerShards
from stratagem.training.replica import Replica
from stratagem.training.sharded_exchange import ShardedExchange


class SharedSet(Sliced):
    """The step of `Sliced` with one shared set of gradients, to which every backward pass adds."""

    placed_gradients = FactoredGradients
    sliced_update = ShardedUpdate
    committer: ShardedExchange

    def __init__(self, training: Training, replica: Replica) -> None:
        settings = replace(training.settings, committer=ShardedExchange)
        super().__init__(training._replace(settings=settings), replica)

    def arm(self, apply: bool) -> None:
        """Do nothing: backward adds to the shared sum, so no gradient is accumulated here."""

    def _gradients(self, portion: Portion) -> tuple[Any, Any]:
        if self._waiting == 1:
            self.committer.begin_step()
        terms = super()._gradients(portion)
        self.committer.end_pass()
        return terms


class FullySharded(Dealt):
    """The step of a replica that holds its rows of every layer (training/layer_shards.py).

    The gradient of the global loss is a sum over replicas, but fully_shard averages. So each
    share's loss is multiplied by the number of replicas.
    """

    def __init__(self, training: Training, replica: Replica) -> None:
        super().__init__(training, replica)
        self._borrows = True  # gathering parameters is collective, so every replica needs a row
        self.shards = LayerShards(training.module, training.optimizer, replica)
        self._run = self.shards.run
        try:
            synced = training.settings.sync_batchnorm
            self._unsync = sync_batchnorm.install(self._run, replica, synced)
        except BaseException:
            self.shards.leave()
            raise
        self._checked = False

    def take(self, portion: Portion, last: bool) -> None:
        self.shards.leave_home()
        super().take(portion, last)

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.replica.count)

    def _finish(self, portion: Portion, numerator: Any, denominator: Any) -> None:
        gradients = self.shards.gradients()
        has = [float(gradient is not None) for gradient in gradients]
        above, below, *counts = self._sum_over_replicas(
            [float(numerator), float(denominator), *has]
        )
        self._check_counts(counts)
        mine = [gradient for gradient in gradients if gradient is not None]
        if self.recipe.accumulate == 1:
            self.tally.add(ratio(above, below), portion.total)
            if self.recipe.loss.counted and below:
                for gradient in mine:
                    gradient.mul_(portion.total / below)
        self._clip(mine)
        self.shards.step(gradients)

    def _sum_over_replicas(self, numbers: list[float]) -> list[float]:
        kind = torch.float64 if self.shards.doubles else torch.float32
        flat = torch.tensor(numbers, dtype=kind, device=self.device)
        self.replica.collective.all_reduce(flat).wait()
        return flat.tolist()

    def _check_counts(self, counts: list[float]) -> None:
        """Raise if no gradient arrived, or replicas have gradients of different parameters."""
        for piece, count in zip(self.shards.pieces, counts, strict=True):
            if count not in (0.0, self.replica.count):
                raise NotDistributable(
                    f"parameter {piece.name!r} had a gradient on {count:.0f} of "
                    f"{self.replica.count} replicas, and torch's fully_shard cannot add these up; "
                    "use every parameter for every batch, or MirroredStrategy."
                )
        if not self._checked and not any(counts):
            raise NotDistributable(
                "no parameter had a gradient after the first backward pass: the module's forward "
                "does not use the parameters that torch's fully_shard has divided; use "
                "MirroredStrategy."
            )
        self._checked = True

    def _clip(self, gradients: list[Tensor]) -> None:
        recipe = self.recipe
        if recipe.clip_norm is not None:
            squares = sum(float(g.double().square().sum()) for g in gradients)
            norm = self._sum_over_replicas([squares])[0] ** 0.5
            if not norm <= recipe.clip_norm:
                for gradient in gradients:
                    gradient.mul_(recipe.clip_norm / (norm + 1e-6))
        if recipe.clip_value is not None:
            for gradient in gradients:
                gradient.clamp_(-recipe.clip_value, recipe.clip_value)

    def forget_gradients(self) -> None:
        self.shards.forget_gradients()

    def follow_settings(self) -> None:
        self.shards.follow_settings()

    def bring_home(self) -> None:
        self.shards.bring_home()

    def close(self) -> None:
        self.shards.close()
        self._unsync()

    def leave(self) -> None:
        self.shards.leave()
        self._unsync()


def refuse_undivided(
    module: nn.Module, optimizer: Optimizer, recipe: Recipe, replica: Replica
) -> None:
    """Raise if fully_shard, or an optimizer of rows, cannot give the result of one device."""
    refuse_half(recipe)
    check_elementwise(optimizer, "sharded")
    if recipe.jit_compile:
        raise NotDistributable(
            "jit_compile=True goes with ShardedStrategy on the CPUs of one machine only; leave it "
            "out, or use MirroredStrategy."
        )
    sparse = [name for name, part in module.named_modules() if getattr(part, "sparse", False)]
    if sparse:
        raise NotDistributable(sentence("replicas", "sparse gradients"))
    if replica.device.type != "cpu" and replica.ops[0] != NcclAllReduce():
        raise NotDistributable(
            "replicas of ShardedStrategy that share a GPU, or mix kinds of devices, cannot divide "
            "a model; give each replica a GPU of its own."
        )


def refuse_half(recipe: Recipe) -> None:
    """Raise for float16, which needs a gradient scaler."""
    if recipe.autocast is torch.float16:
        raise NotDistributable(sentence("sharded", "float16"))


def refuse_unshared(module: nn.Module, optimizer: Optimizer, recipe: Recipe) -> None:
    """Raise if CPU replicas cannot train the model in slices of one shared set."""
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    refuse_half(recipe)
    for name, param in params.items():
        if param.dtype is not torch.float32:
            raise NotDistributable(
                sentence("sharded", "float64", parameter=name, dtype=param.dtype)
            )
    check_elementwise(optimizer, "sharded")


def sharded_step(training: Training, replica: Replica) -> OneDevice:
    """Return the step: shared memory on the CPUs of one machine, else torch's fully_shard."""
    module, optimizer, recipe, _ = training
    if replica.collective.shares_memory:
        refuse_unshared(module, optimizer, recipe)
        return SharedSet(training, replica)
    refuse_undivided(module, optimizer, recipe, replica)
    return FullySharded(training, replica)
