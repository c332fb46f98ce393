"""A model of which every process computes a part of each layer, on all rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from stratagem.data.shares import tensors_in
from stratagem.errors import NotDistributable
from stratagem.state.shared_model import SharedTensors
from stratagem.training.isolated_run import dry_run
from stratagem.training.layer_graph import LayerGraph
from stratagem.training.replica import Replica
from stratagem.training.tensor_plan import make_plan
from stratagem.training.tensor_program import OwnParts, agree, divided_program, shapes_of, table
from stratagem.wire.shared_memory import sharing
from stratagem.wire.shared_scratch import SharedScratch
from stratagem.wire.tree import broadcast_tree, gather_tree

log = logging.getLogger("stratagem")

#: rows on which it is tried that the divided layers are the model
TRIED = 5


def check_alike(values: Sequence[float]) -> None:
    """Refuse to go on where processes have come apart: these are of one batch."""
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
    """A traced model, divided; `run` is this process' program. Made collectively."""

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
        #: buffers that are divided; those of all other layers every process has
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
        """Of all values; only the first process runs whole layers. Collective."""
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
        self._collective.barrier()  # statistics are shared, and are as they were
        with dry_run(*module.modules()):
            self._collective.barrier()  # everybody has noted them
            divided = [t.clone() for t in tensors_in([self.run(*few)])]
            self._collective.barrier()  # nobody takes back what others still read
        same = not self._leads or agree(whole, divided)
        if not all(gather_tree(self._collective, same)):
            raise NotDistributable(
                f"the divided layers of {type(module).__name__} do not give what its forward "
                "gives, so that forward does something that was not seen when it was traced (a "
                "global, a random number, the number of rows); put that part into a submodule of "
                "its own which is not torch's, with a line that depends on values."
            )
