"""Tensor parallelism: every process computes a part of each layer, on all rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from stratagem.capabilities import sentence
from stratagem.data.shares import rows, tensors_in, with_tensors
from stratagem.errors import NotDistributable
from stratagem.state.change_tracker import TensorTracker
from stratagem.state.divided_update import DividedUpdate, OwnPart
from stratagem.state.shared_model import SharedTensors
from stratagem.training import setup
from stratagem.training.isolated_run import dry_run
from stratagem.training.layer_graph import LayerGraph, shapes_of, trace
from stratagem.training.led_loop import LedLoop
from stratagem.training.loop_process import Mode
from stratagem.training.replica import Replica
from stratagem.training.settings import TensorParallel
from stratagem.training.stage_plan import alike
from stratagem.training.tensor_plan import make_plan
from stratagem.training.tensor_program import (
    OPENED,
    OwnParts,
    divided_program,
    table,
)
from stratagem.wire.shared_memory import sharing
from stratagem.wire.shared_scratch import SharedScratch
from stratagem.wire.tree import broadcast_tree, gather_tree

log = logging.getLogger("stratagem")

#: rows on which the divided layers are compared with the whole model
TRIED = 5


def check_alike(values: Sequence[float]) -> None:
    """Refuse to go on if processes have computed different values of one batch."""
    first = values[0]
    for value in values:
        near = math.isclose(value, first, rel_tol=1e-4, abs_tol=1e-6) or value == first
        if not near and not (math.isnan(value) and math.isnan(first)):
            raise NotDistributable(
                "processes that divide layers have computed different values of one batch "
                f"({first:.6g} and {value:.6g}): the model or the loss draws numbers that are "
                "not torch's (random, numpy), or depends on the process; draw with torch."
            )


class DividedModel:
    """A traced model with divided layers; `run` is this process' program. Made collectively."""

    def __init__(
        self,
        graph: LayerGraph,
        few: Sequence[Any],
        params: Sequence[nn.Parameter],
        replica: Replica,
        asked: Mapping[str, str],
        group: SharedScratch,
        *,
        kept: Collection[Tensor] = (),
        shared: Collection[Tensor] = (),
    ) -> None:
        """`few`: inputs of some rows, in the graph's order. `kept`: parameters that stay whole;
        `shared`: buffers that lie in shared memory already."""
        self._graph, self._leads = graph, replica.leads
        self._collective = sharing(replica.collective)
        plan = make_plan(graph, replica.count, asked, self._shapes(few), kept)
        #: buffers that are divided; every process has the buffers of all other layers
        self.divided = {b for b in graph.module.buffers() if b in plan.divided}
        self.statistics = SharedTensors(
            [b for b in graph.module.buffers() if b in self.divided and b not in shared],
            self._collective,
        )
        self.parts = OwnParts(plan, params, replica.index, replica.count)
        self.run = divided_program(graph, plan, self.parts, group)
        self._prove(few)
        group.seen = 0.0
        if self._leads:
            level = logging.INFO if asked else logging.WARNING
            told = table(graph, plan, replica.count)
            log.log(level, "layers divided over %d devices:\n%s", replica.count, told)

    @torch.no_grad()
    def _shapes(self, inputs: Sequence[Any]) -> dict[fx.Node, torch.Size]:
        """The shapes of all values; only the first process runs whole layers. Collective."""
        graph, told = self._graph, None
        nodes = list(graph.graph.nodes)
        if self._leads:
            with dry_run(*graph.module.modules()):
                found = shapes_of(graph, inputs)
            told = [list(found[node]) if node in found else None for node in nodes]
        told = broadcast_tree(self._collective, told)
        return {n: torch.Size(shape) for n, shape in zip(nodes, told, strict=True) if shape}

    @torch.no_grad()
    def _prove(self, few: Sequence[Any]) -> None:
        """Refuse a model whose divided layers do not give what its forward gives. Collective."""
        whole: list[Tensor] = []
        module = self._graph.module
        if self._leads:
            names = [str(node.target) for node in self._graph.inputs]
            with dry_run(*module.modules()):
                found = module(**dict(zip(names, few, strict=True)))
                whole = [t.clone() for t in tensors_in([found])]
        self._collective.barrier()  # the first process has restored the shared statistics
        with dry_run(*module.modules()):
            self._collective.barrier()  # all processes have noted the statistics
            divided = [t.clone() for t in tensors_in([self.run(*few)])]
            self._collective.barrier()  # no process restores statistics while another reads them
        same = not self._leads or alike(whole, divided)
        if not all(gather_tree(self._collective, same)):
            raise NotDistributable(
                f"the divided layers of {type(module).__name__} do not give what its forward "
                "gives, so that forward does something that was not seen when it was traced (a "
                "global, a random number, the number of rows); put that part into a submodule of "
                "its own which is not torch's, with a line that depends on values."
            )


# --- Whole passes through layers that are divided over processes, for a custom loop ---------------
#
# All processes run every pass on all rows, with the first one's random numbers. The gradient of a
# part is added to the whole gradient in shared memory, where the loop and the update find it.


@dataclass
class DividedSplit:
    """The divided model for one mode."""

    mode: Mode
    model: DividedModel


class DividedPasses(LedLoop):
    """One process of a tensor-parallel group. Made collectively."""

    def __init__(
        self, replica: Replica, tensor: TensorParallel, model: nn.Module, optimizer: Optimizer
    ) -> None:
        super().__init__(replica, model, optimizer, model.parameters())
        self._asked, self._group = dict(tensor.plan), SharedScratch(self._collective)
        self._places = {param: i for i, param in enumerate(self._params)}
        #: the parts that this process updates, once the model is divided
        self._stepped: list[OwnPart] = []
        self._update: DividedUpdate | None = None
        self._there: list[bool] = []
        self._buffers = list(model.buffers())
        #: buffers written since the last pass; `closely`, since batch_norm bypasses versions
        self._written = TensorTracker(self._buffers, closely=True)
        self._statistics: list[SharedTensors] = []
        self._divided: set[Tensor] = set()

    def _split(self, told: dict[str, Any], x: dict[str, Any] | None = None) -> None:
        mode = Mode(**told)
        self._become(mode)
        graph = trace(self._model, dict.fromkeys(mode.names), OPENED)
        mine = None if x is None else rows(list(x.values()), 0, min(self._rows, TRIED))
        few = broadcast_tree(self._collective, mine)
        given = (graph, few, self._params, self._replica, self._asked, self._group)
        with torch.autocast("cpu", enabled=False):  # the loop's autocast is not sent yet
            model = DividedModel(*given, shared=self._divided)
        if not self._divided <= model.divided:
            raise NotDistributable(
                "a layer whose statistics are divided is computed whole in another mode of the "
                "model (train, eval, frozen); give it the plan 'replicate'."
            )
        self._statistics.append(model.statistics)
        self._divided |= model.divided
        self._splits.append(DividedSplit(mode, model))
        if self._update is None:
            self._stepped = model.parts.own
            self._own()

    def _own(self) -> None:
        setup.align_state(self._optimizer, self._replica)
        self._update = DividedUpdate(self._optimizer, self._stepped, self._collective)

    # --- passes -------------------------------------------------------------------------------

    def _lead_pass(self, at: int, cast: list[Any], dropped: list[int], x: Any) -> tuple[Any, Any]:
        given = [x[name] for name in self._splits[at].mode.names]
        changed = [
            [i, self._buffers[i].detach()]
            for i in self._written.changes()
            if self._buffers[i] not in self._divided
        ]
        told: list[Any] = [at, self._count, cast, dropped, torch.get_rng_state(), changed, given]
        self._commands.tell("forward", *told)
        self._play_forward(*told)
        _, output = self._passes[self._count]
        trained = [tensor.requires_grad for tensor in tensors_in(output)]
        return with_tensors(output, lambda t: t.detach().clone()), trained  # may be written into

    def _play_forward(
        self,
        at: int,
        number: int,
        cast: list[Any],
        dropped: list[int],
        dice: Tensor,
        changed: list[Any],
        given: list[Any],
    ) -> None:
        for each in dropped:
            self._passes.pop(each, None)
        split, self._autocast = self._splits[at], cast
        self._become(split.mode)
        if not self._replica.leads:
            torch.set_rng_state(dice)
            with torch.no_grad():
                for index, value in changed:
                    self._buffers[index].copy_(value)
        with torch.enable_grad(), self._cast():
            self._passes[number] = split.model, split.model.run(*given)
        if self._replica.leads:
            self._written.mark(closely=True)

    def _play_backward(
        self, number: int, there: list[bool], grads: Sequence[Tensor | None]
    ) -> list[int]:
        model, output = self._passes.pop(number)
        for param in self._params:
            param.grad = None
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(tensors_in(output), grads, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        if pairs:
            torch.autograd.backward([each for each, _ in pairs], [each for _, each in pairs])
        with torch.no_grad():
            mine = [self._places[p.param] for p in model.parts.own if self._added(p, there)]
        for param in self._params:  # whole parameters, whose gradient the owner has added
            param.grad = None
        now = {i for i, is_there in enumerate(there) if is_there}
        return sorted(now.union(*gather_tree(self._collective, mine)))

    def _added(self, part: OwnPart, there: list[bool]) -> bool:
        """Add this pass' gradient of a part to the whole one; returns whether there was any."""
        index, gradient = self._places[part.param], part.leaf.grad
        home, part.leaf.grad = self._home(part), None
        if gradient is not None and gradient.layout is not torch.strided:
            raise NotDistributable(sentence("one copy", "sparse gradients in a loop"))
        if gradient is None:
            if not there[index] and part.division is not None:
                home.zero_()  # another process may have a part
            return False
        home.copy_(home + gradient if there[index] else gradient)
        return True

    def _home(self, part: OwnPart) -> Tensor:
        """Where the gradient of a part lies."""
        return part.of(self._lent(self._places[part.param]))

    # --- updates ------------------------------------------------------------------------------

    def _before_update(self, there: list[bool]) -> None:
        self._there = there
        for param in self._params:
            param.grad = None

    def _finish_step(self) -> None:
        assert self._update is not None
        check_alike(gather_tree(self._collective, self._group.seen))
        self._group.seen = 0.0
        for part in self._stepped:
            if self._there[self._places[part.param]]:
                part.leaf.grad = self._home(part)
        self._update.follow_settings()
        self._update.step()
        for part in self._stepped:
            part.leaf.grad = None

    # --- coming apart -------------------------------------------------------------------------

    def take_back(self) -> None:
        super().take_back()
        for statistics in self._statistics:
            statistics.take_back()

    def end(self, *, failed: bool) -> None:
        super().end(failed=failed)
        for statistics in self._statistics:
            statistics.close()
