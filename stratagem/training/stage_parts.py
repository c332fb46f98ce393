"""A model cut into parts: what each of them runs, what it is given, and what it hands on.

A value that a later part needs, also one over the next part, goes straight from where it is made to
where it is used, by its name. Inputs of the model are known to every part. Parameters that several
parts use stay one: the first device that uses it owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx, nn

from stratagem.data.streams import mixed
from stratagem.training.layer_graph import LayerGraph
from stratagem.wire.device_kinds import seed_gpu_in_use


@dataclass
class StagePart:
    """Some neighbouring layers; names are those of values in the graph."""

    index: int
    layers: list[int] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    #: the inputs of the model that it uses, by their place
    inputs: list[int] = field(default_factory=list)
    #: by the part that they come from, or go to
    receives: dict[int, list[str]] = field(default_factory=dict)
    sends: dict[int, list[str]] = field(default_factory=dict)

    @property
    def sent(self) -> list[str]:
        """Everything that it hands on, once."""
        return list(dict.fromkeys(name for names in self.sends.values() for name in names))


def cut(graph: LayerGraph, firsts: Sequence[int]) -> list[StagePart]:
    """The parts that begin with these layers."""
    parts = [StagePart(i) for i in range(len(firsts))]
    home: dict[fx.Node, int] = {}
    for index, layer in enumerate(graph.layers):
        part = parts[sum(first <= index for first in firsts) - 1]
        part.layers.append(index)
        part.nodes += layer.nodes
        home |= dict.fromkeys(layer.nodes, part.index)
    home[graph.output] = len(parts) - 1
    places = {node: i for i, node in enumerate(graph.inputs)}
    for node in graph.graph.nodes:
        if node not in home:
            continue
        to = parts[home[node]]
        for value in node.all_input_nodes:
            if value in places:
                if places[value] not in to.inputs:
                    to.inputs.append(places[value])
            elif value in home and home[value] != to.index:
                come = to.receives.setdefault(home[value], [])
                if value.name not in come:
                    come.append(value.name)
                    parts[home[value]].sends.setdefault(to.index, []).append(value.name)
    for before, after in pairwise(parts):  # the seed goes along
        before.sends.setdefault(after.index, [])
        after.receives.setdefault(before.index, [])
    for part in parts:
        part.receives = dict(sorted(part.receives.items()))
        part.sends = dict(sorted(part.sends.items()))
    return parts


def reseed(seed: int, layer: int) -> None:
    """Random numbers of a layer follow from those of the microbatch, wherever it is cut."""
    number = mixed(seed, layer)
    torch.default_generator.manual_seed(number)
    seed_gpu_in_use(number)


def program(graph: LayerGraph, part: StagePart, *, last: bool) -> fx.GraphModule:
    """The part as a module of (seed, its inputs, what it receives), which returns what it sends
    and, if it is the last, the output of the model."""
    made = fx.Graph()
    seed = made.placeholder("seed")
    known: dict[fx.Node, fx.Node] = {}
    for place in part.inputs:
        known[graph.inputs[place]] = made.placeholder(f"input_{place}")
    by_name = {node.name: node for node in graph.graph.nodes}
    for names in part.receives.values():
        for name in names:
            known[by_name[name]] = made.placeholder(f"received_{name}")

    def found(node: fx.Node) -> fx.Node:
        if node not in known:  # a parameter or buffer
            assert node.op == "get_attr"
            known[node] = made.node_copy(node)
        return known[node]

    for index in part.layers:
        made.call_function(reseed, (seed, index))
        for node in graph.layers[index].nodes:
            known[node] = made.node_copy(node, found)
    sent = [found(by_name[name]) for name in part.sent]
    if last:
        sent.append(fx.node.map_arg(graph.output.args[0], found))  # type: ignore[arg-type]
    made.output(tuple(sent))
    named = (str(n.target) for n in made.nodes if n.op in ("call_module", "get_attr"))
    return fx.GraphModule({name: graph.look_up(name) for name in named}, made)


def tensors_of(graph: LayerGraph, part: StagePart) -> set[torch.Tensor]:
    """The parameters and buffers that a part uses."""
    module, found = graph.module, set()
    for node in part.nodes:
        if node.op == "call_module":
            inner: nn.Module = module.get_submodule(str(node.target))
            found.update([*inner.parameters(), *inner.buffers()])
        for value in node.all_input_nodes:
            if value.op == "get_attr":
                held = graph.look_up(str(value.target))
                if isinstance(held, torch.Tensor):
                    found.add(held)
    return found
