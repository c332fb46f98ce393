"""The training step of tensor parallelism: each process computes a part of every layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.capabilities import sentence
from stratagem.data.shares import rows
from stratagem.errors import NotDistributable
from stratagem.frontends.adapter import Training
from stratagem.frontends.fit_job import Fit
from stratagem.frontends.sources import Portion
from stratagem.frontends.staged import in_order
from stratagem.frontends.steps import OneDevice
from stratagem.state.divided_update import DividedUpdate
from stratagem.state.optimizer_recipe import check_elementwise
from stratagem.state.shared_model import SharedTensors
from stratagem.training import setup
from stratagem.training.divided_model import (
    TRIED,
    DividedModel,
    check_alike,
)
from stratagem.training.layer_graph import trace
from stratagem.training.replica import Replica
from stratagem.training.tensor_plan import check_plan
from stratagem.training.tensor_program import OPENED, OwnParts
from stratagem.wire.shared_memory import sharing
from stratagem.wire.shared_scratch import SharedScratch
from stratagem.wire.tree import gather_tree


def check(job: Fit, devices: int) -> None:
    """Raise, before anything starts, if divided layers cannot give the result of one device."""
    recipe, tensor = job.recipe, job.settings.tensor
    assert tensor is not None
    if recipe.autocast is torch.float16:
        raise NotDistributable(sentence("divided", "float16"))
    if recipe.jit_compile:
        raise NotDistributable(sentence("divided", "jit_compile"))
    check_elementwise(job.optimizer, "divided")
    job.module.train()
    check_plan(trace(job.module, job.source.known_input(), OPENED), dict(tensor.plan), devices)


class Divided(OneDevice):
    """One process of a tensor-parallel group."""

    def __init__(self, training: Training, replica: Replica) -> None:
        super().__init__(training, replica)
        asked = training.settings.tensor
        assert asked is not None
        self._collective, self._asked = sharing(replica.collective), dict(asked.plan)
        self._group = SharedScratch(self._collective)
        self._whole = list(self._params)
        self._shared = SharedTensors(self._whole, self._collective, returns=False)
        self._statistics: SharedTensors | None = None
        self._update: DividedUpdate | None = None
        self._parts: OwnParts | None = None
        self._modes: list[int] = []
        self._loss = 0.0
        if not replica.leads:
            # outputs are equal in all processes, so that only the first counts them for metrics
            self.take_in = _ignore_outputs

    # --- set-up -------------------------------------------------------------------------------

    def _begin(self, portion: Portion) -> None:
        """Trace the model on the first batch, plan and divide its layers. Collective."""
        replica = self.replica
        graph = trace(self.module, portion.x, OPENED)
        names = [str(node.target) for node in graph.inputs]
        few = in_order(names, rows(portion.x, 0, min(portion.total, TRIED)))
        judged = getattr(self.recipe.loss, "function", None)
        kept = set(judged.parameters()) if isinstance(judged, nn.Module) else set[Tensor]()
        model = DividedModel(graph, few, self._whole, replica, self._asked, self._group, kept=kept)
        self._run, self._parts, self._statistics = model.run, model.parts, model.statistics
        self._params = list(dict.fromkeys([*self._whole, *(p.leaf for p in self._parts.own)]))
        self._update = DividedUpdate(self.optimizer, self._parts.own, self._collective)
        self._collective.forget_mail()  # free the memory of the whole model's messages

    # --- one step -----------------------------------------------------------------------------

    def take(self, portion: Portion, last: bool) -> None:
        modes = [*(part.training for part in self.module.modules()), self.followed()]
        if self._update is None or modes != self._modes:  # a trace is valid for these modes only
            if self._update is not None:
                self._let_go()
                setup.align_state(self.optimizer, self.replica)
            self._begin(portion)
            self._modes = modes
        rng = torch.get_rng_state()  # all processes use the random numbers of rank 0
        self._collective.broadcast(rng)
        if not self.replica.leads:
            torch.set_rng_state(rng)
        super().take(portion, last)

    def backward(self, loss: Tensor) -> None:
        self._loss = float(loss.detach())
        super().backward(loss)

    def update(self) -> None:
        """Clip by the norm over all processes, step, and wait for all processes."""
        assert self._parts is not None and self._update is not None
        self._take_direct_gradients(self._parts)
        leaves = [part.leaf for part in self._parts.own if part.leaf.grad is not None]
        square = 0.0
        if self.recipe.clip_norm is not None:
            squares = (p.grad.double().square().sum() for p in leaves if p.grad is not None)
            square = sum(map(float, squares))
        gathered = gather_tree(self._collective, [self._loss, self._group.seen, square])
        self._group.seen = 0.0
        check_alike([loss for loss, *_ in gathered])
        check_alike([seen for _, seen, _ in gathered])
        self._clip(leaves, math.sqrt(sum(square for *_, square in gathered)))
        self._update.step()
        self.forget_gradients()

    def _take_direct_gradients(self, parts: OwnParts) -> None:
        """Add gradients of divided parameters from outside their layers, such as a penalty's.

        Every process has computed all of such a gradient, and takes its part.
        """
        for part in parts.own:
            if part.division is not None and part.param.grad is not None:
                more = part.division.part(part.param.grad.contiguous(), self.replica.index)
                part.leaf.grad = more if part.leaf.grad is None else part.leaf.grad + more

    def _clip(self, leaves: list[nn.Parameter], norm: float) -> None:
        """Clip like torch's clip_grad_norm_ and clip_grad_value_, by the whole gradient's norm."""
        limit, most = self.recipe.clip_norm, self.recipe.clip_value
        for leaf in leaves:
            assert leaf.grad is not None
            if limit is not None and not norm <= limit:  # also if the norm is NaN
                leaf.grad.mul_(limit / (norm + 1e-6))
            if most is not None:
                leaf.grad.clamp_(-most, most)

    def follow_settings(self) -> None:
        if self._update is not None:
            self._update.follow_settings()

    # --- end ----------------------------------------------------------------------------------

    def take_back(self) -> None:
        self._shared.take_back()
        if self._statistics is not None:
            self._statistics.take_back()

    def close(self) -> None:
        self._collective.barrier()
        self.leave()
        self._collective.barrier()

    def _let_go(self) -> None:
        self.forget_gradients()
        if self._statistics is not None:
            self._statistics.close()

    def leave(self) -> None:
        self._let_go()
        self._shared.close()


def _ignore_outputs(*given: Any, **options: Any) -> None:
    """Ignore the outputs."""
