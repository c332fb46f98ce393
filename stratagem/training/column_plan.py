"""Plan which part of a model with recurrent layers is cut into chunks of time (`columns=`).

    before     runs once, on the first device: embeddings, convolutions, ...
    columns    recurrent layers, and layers between them that treat every time step by itself; each
               device has some of them, and chunks of time go through the devices like microbatches
    after      runs once, on the last device, on all chunks put together: heads, the loss

A recurrent layer passes its state on to the next chunk, so gradients are not truncated: backward
goes through the chunks from the last one to the first.
"""

from __future__ import annotations

import operator
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from stratagem.errors import NotDistributable, UsageError
from stratagem.rules.layer_split import LayerCost, split_layers
from stratagem.training.layer_graph import LayerGraph
from stratagem.training.stage import StagePart, tensors_of

#: modules that treat every time step by itself
_MOMENTS = (
    *(nn.Linear, nn.Dropout, nn.LayerNorm, nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh),
    *(nn.Sigmoid, nn.LeakyReLU, nn.ELU),
)
_FUNCTIONS = (
    *(operator.add, operator.mul, operator.sub, torch.add, torch.mul, torch.tanh, torch.relu),
    *(F.dropout, F.relu, F.gelu, F.silu, torch.sigmoid),
)
#: machines where oneDNN's recurrent layers are slow
_ARM = ("aarch64", "arm64")


@dataclass
class ColumnOp:
    """An operation on a chunk: a recurrent layer or another node; the names are of values."""

    name: str
    inputs: list[str]
    #: the recurrent layer, if it is one
    layer: nn.RNNBase | None = None
    #: the dropout rate of its output, and the name of its stack
    dropout: float = 0.0
    stack: str = ""
    #: the node, if it is no recurrent layer
    node: fx.Node | None = None
    weights: int = 0


@dataclass
class ColumnPlan:
    """A model in three pieces: before, columns (divided over the devices) and after."""

    graph: LayerGraph
    before: list[fx.Node]
    after: list[fx.Node]
    ops: list[ColumnOp]
    #: the first operation of each device
    firsts: list[int]
    #: the value that the columns begin with, and the axis of time
    entry: fx.Node
    axis: int
    #: by name in the graph, the name of each value in the columns
    names: dict[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        return len(self.firsts)

    def of(self, device: int) -> list[ColumnOp]:
        """Return the operations of a device."""
        return self.ops[self.firsts[device] : [*self.firsts, len(self.ops)][device + 1]]

    def live(self, device: int) -> list[str]:
        """Return the values that a device sends to the next one, or the last device to `after`."""
        made = {self.entry.name, *(op.name for d in range(device + 1) for op in self.of(d))}
        needed = [
            name for d in range(device + 1, self.devices) for op in self.of(d) for name in op.inputs
        ]
        return [name for name in dict.fromkeys([*needed, *self.wanted]) if name in made]

    @property
    def wanted(self) -> list[str]:
        """Names of the columns' values that are used after them."""
        used = (value.name for node in self.after for value in node.all_input_nodes)
        return list(dict.fromkeys(self.names[name] for name in used if name in self.names))

    @property
    def states(self) -> list[str]:
        """Stacks whose last state is used after the columns."""
        stacks = {op.stack for op in self.ops if op.stack}
        found = []
        for node in self.after:
            for value in node.all_input_nodes:
                if value.target is operator.getitem and value.args[1] == 1:
                    found += [n.name for n in value.all_input_nodes if n.name in stacks]
        return list(dict.fromkeys(found))

    def carried(self) -> list[fx.Node]:
        """Return the values from before the columns that are used after them."""
        early = set(self.before)
        used = [value for node in self.after for value in node.all_input_nodes]
        return list(dict.fromkeys(v for v in used if v in early and v.name not in self.names))

    def tensors(self, device: int) -> set[Tensor]:
        """Return the parameters and buffers that a device uses."""
        nodes: list[fx.Node] = []
        if device == 0:
            nodes += self.before
        if device == self.devices - 1:
            nodes += self.after
        own = self.of(device)
        nodes += [op.node for op in own if op.node is not None]
        found = tensors_of(self.graph, StagePart(device, nodes=nodes))
        for op in own:
            if op.layer is not None:
                found.update(op.layer.parameters())
        return found


def plan_columns(graph: LayerGraph, devices: int) -> ColumnPlan:
    """Find the stack of recurrent layers, and divide it over the devices."""
    module = graph.module
    stacks = [n for layer in graph.layers for n in layer.nodes if _recurrent(module, n) is not None]
    if not stacks:
        raise UsageError(
            "columns= cuts recurrent layers (nn.LSTM, nn.GRU, nn.RNN) into chunks of time, and the "
            "model has none; leave columns out, and say microbatches."
        )
    for node in stacks:
        _check(module, node)
    axes = {int(bool(_recurrent(module, n).batch_first)) for n in stacks}  # type: ignore[union-attr]
    nodes = [n for layer in graph.layers for n in layer.nodes]
    first, last = nodes.index(stacks[0]), nodes.index(stacks[-1])
    entry: Any = stacks[0].args[0]
    if len(axes) > 1 or not isinstance(entry, fx.Node):
        raise NotDistributable(
            "the recurrent layers differ in batch_first, so that time is not one axis; make them "
            "alike."
        )
    middle = _Middle(module, entry)
    early, late = nodes[:first], nodes[last + 1 :]
    for node in nodes[first : last + 1]:
        middle.add(node)
    for node in list(late):  # reads of the last stack's output or state
        if middle.reads(node):
            middle.add(node)
            late.remove(node)
    plan = ColumnPlan(
        graph, early, [*late, graph.output], middle.ops, [], entry, axes.pop(), middle.names
    )
    costs = [LayerCost(float(op.weights + 1)) for op in plan.ops]
    layers = sum(op.layer is not None for op in plan.ops)
    firsts = split_layers(costs, devices)
    if firsts is None or layers < devices:
        raise UsageError(
            f"the model has {layers} recurrent layers, and {devices} stages need one each; name "
            "fewer devices."
        )
    plan.firsts = firsts
    return plan


def _recurrent(module: nn.Module, node: fx.Node) -> nn.RNNBase | None:
    if node.op != "call_module":
        return None
    found = module.get_submodule(str(node.target))
    return found if type(found) in (nn.LSTM, nn.GRU, nn.RNN) else None  # type: ignore[return-value]


def _check(module: nn.Module, node: fx.Node) -> None:
    layer = _recurrent(module, node)
    assert layer is not None
    if layer.bidirectional:
        raise NotDistributable(
            f"{str(node.target)!r} is bidirectional: it reads the sequence from its end as well, "
            "so no chunk of time can begin before all of it is there; use microbatches instead of "
            "columns."
        )
    reads = [u.target is operator.getitem and u.args[1] in (0, 1) for u in node.users]
    if not all(reads):
        raise NotDistributable(
            f"what {str(node.target)!r} returns is used as a whole, and columns must know its "
            "output from its state; take them apart: output, state = layer(x)."
        )
    if len(node.args) > 1 or node.kwargs:
        raise NotDistributable(
            f"{str(node.target)!r} is given its first state, which columns do not take yet; let it "
            "begin with zeros, or use microbatches instead of columns."
        )


class _Middle:
    """Collects the operations of the columns."""

    def __init__(self, module: nn.Module, entry: fx.Node) -> None:
        self._module = module
        self.ops: list[ColumnOp] = []
        self.names = {entry.name: entry.name}
        self._stacks: set[fx.Node] = set()

    def reads(self, node: fx.Node) -> bool:
        """Whether a node reads the output or the state of a stack."""
        return node.target is operator.getitem and node.args[0] in self._stacks

    def add(self, node: fx.Node) -> None:
        layer = _recurrent(self._module, node)
        if layer is not None:
            self._add_stack(node, layer)
            return
        if node.target is operator.getitem and node.args[0] in self._stacks:
            (stack,) = node.all_input_nodes
            if node.args[1] == 0:
                self.names[node.name] = self.names[stack.name]
            return
        known = node.op == "call_function" and node.target in _FUNCTIONS
        if node.op == "call_module":
            known = isinstance(self._module.get_submodule(str(node.target)), _MOMENTS)
        inside = all(value.name in self.names for value in node.all_input_nodes)
        if not known or not inside:
            if not node.users:
                return
            raise NotDistributable(
                f"{node.name!r} lies between recurrent layers, and is not known to treat every "
                "moment by itself; columns take linear layers, norms, dropout, activations, sums "
                "and products there; use microbatches instead of columns."
            )
        inputs = [self.names[value.name] for value in node.all_input_nodes]
        self.names[node.name] = node.name
        weights = 0
        if node.op == "call_module":
            inner = self._module.get_submodule(str(node.target))
            weights = sum(p.numel() for p in inner.parameters())
        self.ops.append(ColumnOp(node.name, inputs, node=node, weights=weights))

    def _add_stack(self, node: fx.Node, stack: nn.RNNBase) -> None:
        source: Any = node.args[0]
        if source.name not in self.names:
            raise NotDistributable(
                f"{str(node.target)!r} does not follow the recurrent layer before it, so they are "
                "no stack; use microbatches instead of columns."
            )
        before = self.names[source.name]
        for number in range(stack.num_layers):
            layer = single_layer(stack, number)
            name = f"{node.name}.{number}"
            last = number == stack.num_layers - 1
            op = ColumnOp(name, [before], layer, 0.0 if last else stack.dropout, node.name)
            op.weights = sum(p.numel() for p in layer.parameters())
            self.ops.append(op)
            before = name
        self.names[node.name] = before
        self._stacks.add(node)


def single_layer(stack: nn.RNNBase, number: int) -> nn.RNNBase:
    """Return one layer of a stack, with the stack's own parameters."""
    width = getattr(stack, "proj_size", 0) or stack.hidden_size
    options: dict[str, Any] = {"bias": stack.bias, "batch_first": stack.batch_first}
    if isinstance(stack, nn.LSTM):
        options["proj_size"] = stack.proj_size
    elif isinstance(stack, nn.RNN):
        options["nonlinearity"] = stack.nonlinearity
    size = stack.input_size if number == 0 else width
    with torch.device("meta"):
        kind: Any = type(stack)
        layer: nn.RNNBase = kind(size, stack.hidden_size, 1, **options)
    for name in [name for name, _ in layer.named_parameters()]:
        setattr(layer, name, getattr(stack, f"{name.removesuffix('0')}{number}"))
    return layer.train(stack.training)


@contextmanager
def fast_recurrence() -> Iterator[None]:
    """Within, recurrent layers on ARM use torch's own kernels instead of oneDNN's.

    They take less than half of the time there (benchmarks/columns).
    """
    if platform.machine() not in _ARM:
        yield
        return
    set_flags: Any = torch.backends.mkldnn.set_flags
    others = (None, None, None)  # unchanged
    before, *_ = set_flags(False, *others)
    try:
        yield
    finally:
        set_flags(before, *others)
