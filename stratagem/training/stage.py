"""One device of a pipeline: microbatches forward and backward through its parts.

A received value is a leaf of this device's graph; its gradient goes back to the sender. Every
forward message is answered by one backward message, even an empty one, so that channels stay in
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from stratagem.data.shares import tensors_in, with_tensors
from stratagem.data.streams import mixed
from stratagem.rules.schedules import Op
from stratagem.training.gradient_placement import AddedGradients
from stratagem.training.layer_graph import LayerGraph
from stratagem.wire.collective import Collective
from stratagem.wire.device_kinds import seed_gpu_in_use
from stratagem.wire.tree_channel import open_channels

#: the inputs of one microbatch, in order
Inputs = Sequence[Any]
#: computes the loss of a microbatch from its index and output
Judge = Callable[[int, Any], Tensor]


@dataclass
class Kept:
    """What a microbatch keeps until its backward."""

    #: received tensors, by the part that sent them
    leaves: dict[int, list[Tensor]]
    #: sent tensors, by the part that received them
    sent: dict[int, list[Tensor]]
    loss: Tensor | None


class StageChannels:
    """Channels between the parts of all devices. Made collectively."""

    def __init__(self, parts: Sequence[StagePart], devices: int, collective: Collective) -> None:
        ways = [(part.index, to) for part in parts for to in part.sends]
        self.devices = devices
        slots = 2 * len(parts) + 2
        there = open_channels(collective, [(s % devices, t % devices) for s, t in ways], slots)
        back = open_channels(collective, [(t % devices, s % devices) for s, t in ways], slots)
        self.forward = dict(zip(ways, there, strict=True))
        self.backward = {(t, s): channel for (s, t), channel in zip(ways, back, strict=True)}


class Stage:
    """The parts of one device."""

    def __init__(
        self,
        graph: LayerGraph,
        parts: Sequence[StagePart],
        device: int,
        channels: StageChannels,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        place: torch.device | None = None,
    ) -> None:
        """`place`: the device of its layers; None: the CPU."""
        self._autocast, self._place = autocast, place or torch.device("cpu")
        self.parts, self._channels, self._last = parts, channels, len(parts) - 1
        self._programs: dict[int, fx.GraphModule] = {
            part.index: program(graph, part, last=part.index == self._last)
            for part in parts
            if part.index % channels.devices == device
        }
        #: by part and microbatch, between forward and backward
        self.kept: dict[tuple[int, int], Kept] = {}
        held = (module for each in self._programs.values() for module in each.modules())
        layers = (module for module in held if not isinstance(module, fx.GraphModule))
        self.gradients = AddedGradients(layers)
        #: records an error that ends a pass but not this process; None: errors are raised
        self.notes: Callable[[Exception], Any] | None = None
        #: the record of an error, here or in an earlier part; the pass then computes nothing more
        self.failure: Any = None

    def run(
        self, ops: Iterable[Op], inputs: Sequence[Inputs], seeds: Sequence[int], judge: Judge
    ) -> None:
        """One batch: `inputs` and `seeds` of each microbatch; the first part uses the seeds."""
        self.kept = {}
        self.gradients.forget()
        self.play(ops, inputs, seeds, judge)

    def play(
        self, ops: Iterable[Op], inputs: Sequence[Inputs], seeds: Sequence[int], judge: Judge
    ) -> None:
        """Run some operations of a batch; `kept` holds the results of the earlier ones."""
        for kind, part, m in ops:
            if kind == "F":
                with self._autocast():
                    self._forward(self.parts[part], m, inputs[m], seeds[m], judge)
            else:
                self._backward(self.parts[part], m)
        self.gradients.settle()

    def _forward(self, part: StagePart, m: int, inputs: Inputs, seed: int, judge: Judge) -> None:
        leaves: dict[int, list[Tensor]] = {}
        received: list[Any] = []
        for source in part.receives:
            channel = self._channels.forward[source, part.index]
            message = channel.take()
            self.failure = self.failure or message.get("failure")
            if self.failure is None:
                leaves[source] = []
                enter = partial(self._enter, iter(message["trained"]), leaves[source])
                received += with_tensors(message["values"], enter)
                seed = message["seed"]
            channel.release()
        found = self._computed(part, seed, inputs, received)
        if self.failure is not None:
            for to in part.sends:
                self._channels.forward[part.index, to].post({"failure": self.failure})
            return
        by_name = dict(zip(part.sent, found, strict=False))
        sent: dict[int, list[Tensor]] = {}
        for to, names in part.sends.items():
            values = [by_name[name] for name in names]
            tensors = list(tensors_in(values))
            trained = [tensor.requires_grad for tensor in tensors]
            sent[to] = [tensor for tensor in tensors if tensor.requires_grad]
            message = {"values": values, "trained": trained, "seed": seed}
            self._channels.forward[part.index, to].post(message)
        loss = judge(m, found[-1]) if part.index == self._last else None
        self.kept[part.index, m] = Kept(leaves, sent, loss)

    def _computed(self, part: StagePart, seed: int, inputs: Inputs, received: Sequence[Any]) -> Any:
        """The outputs of a part's layers; None if the pass has failed."""
        try:
            if self.failure is None:
                with self.gradients.forward():
                    given = [inputs[place] for place in part.inputs]
                    return self._programs[part.index](seed, *given, *received)
        except Exception as error:
            if self.notes is None:
                raise
            self.failure = self.notes(error)
        return None

    def _backward(self, part: StagePart, m: int) -> None:
        kept = self.kept.pop((part.index, m))
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        for to, tensors in kept.sent.items():
            channel = self._channels.backward[to, part.index]
            for tensor, gradient in zip(tensors, channel.take(), strict=True):
                if gradient is not None:
                    roots.append(tensor)
                    gradients.append(gradient.to(self._place, copy=True))
            channel.release()
        if kept.loss is not None and kept.loss.requires_grad:
            roots.append(kept.loss)
            gradients.append(None)
        if roots:
            torch.autograd.backward(roots, gradients)
        for source, leaves in kept.leaves.items():
            self._channels.backward[part.index, source].post([leaf.grad for leaf in leaves])

    def _enter(self, trained: Iterator[bool], leaves: list[Tensor], tensor: Tensor) -> Tensor:
        """A copy of a message's tensor; a trained one begins a graph."""
        if not next(trained):
            return tensor.to(self._place, copy=True)
        leaf = tensor.to(self._place).requires_grad_()
        leaves.append(leaf)
        return leaf.clone()  # no leaf, so that a layer may write into it


# --- a model cut into parts -----------------------------------------------------------------------
#
# A value goes straight from the part that computes it to the parts that use it, by its name. Every
# part has the inputs of the model. A parameter that several parts use is owned by the first device
# that uses it.


@dataclass
class StagePart:
    """Some consecutive layers; names are those of values in the graph."""

    index: int
    layers: list[int] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    #: indices of the model's inputs that it uses
    inputs: list[int] = field(default_factory=list)
    #: names of values, by the part that sends or receives them
    receives: dict[int, list[str]] = field(default_factory=dict)
    sends: dict[int, list[str]] = field(default_factory=dict)

    @property
    def sent(self) -> list[str]:
        """The names of all values that it sends, each once."""
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
    for before, after in pairwise(parts):  # every part sends the seed to the next one
        before.sends.setdefault(after.index, [])
        after.receives.setdefault(before.index, [])
    for part in parts:
        part.receives = dict(sorted(part.receives.items()))
        part.sends = dict(sorted(part.sends.items()))
    return parts


def reseed(seed: int, layer: int) -> None:
    """Seed a layer from the microbatch's seed: random numbers do not depend on the split."""
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
