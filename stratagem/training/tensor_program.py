"""Builds the program of one process from a model's layers and a plan that divides them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from stratagem.state.divided_update import Division, OwnPart
from stratagem.training.layer_graph import LayerGraph, Opened, run_encoder
from stratagem.training.tensor_layers import (
    Crossing,
    DividedDropout,
    Enter,
    Gather,
    Scatter,
    Split,
    divided_layer,
)
from stratagem.training.tensor_plan import TensorPlan, Use
from stratagem.wire.shared_scratch import SharedScratch


class OwnParts:
    """The parts of parameters that one process has, each a leaf of the graph."""

    def __init__(self, plan: TensorPlan, params: Sequence[nn.Parameter], rank: int, count: int):
        self._divided, self._rank = plan.divided, rank
        self._leaves: dict[Tensor, nn.Parameter] = {}
        self.own: list[OwnPart] = []
        #: bytes of parameters that each process updates as a whole
        loads = [0] * count
        for param in params:
            division = plan.divided.get(param)
            if division is not None:
                leaf = nn.Parameter(division.part(param.data, rank), param.requires_grad)
                self._leaves[param] = leaf
                self.own.append(OwnPart(param, division, leaf, rank == 0, rank))
                continue
            owner = loads.index(min(loads))
            loads[owner] += param.nbytes
            if owner == rank:
                self.own.append(OwnPart(param, None, param, True, rank))

    def of(self, tensor: Tensor | None) -> Tensor | None:
        """The part of a tensor that this process computes with, or the tensor if it is whole."""
        if tensor is None:
            return None
        if tensor in self._leaves:
            return self._leaves[tensor]
        division: Division | None = self._divided.get(tensor)
        return tensor if division is None else division.part(tensor.data, self._rank)


class _Builder:
    def __init__(
        self, graph: LayerGraph, plan: TensorPlan, parts: OwnParts, group: SharedScratch
    ) -> None:
        self._graph, self._plan, self._parts, self._group = graph, plan, parts, group
        self.made = fx.Graph()
        self.held: dict[str, Any] = {}
        self._known: dict[fx.Node, fx.Node] = {}
        #: gathered values, and values that have passed `Enter`
        self._whole: dict[fx.Node, fx.Node] = {}
        self._entered: dict[fx.Node, fx.Node] = {}

    def build(self) -> fx.GraphModule:
        for node in self._graph.inputs:
            self._known[node] = self.made.placeholder(str(node.target))
        for layer in self._graph.layers:
            for node in layer.nodes:
                self._known[node] = self._node(node, self._plan.uses[node])
        self.made.output(fx.node.map_arg(self._graph.output.args[0], self.whole))
        return fx.GraphModule(self.held, self.made)

    def call(self, module: nn.Module, *args: fx.Node) -> fx.Node:
        name = f"divided_{len(self.held)}"
        self.held[name] = module
        return self.made.call_module(name, args)

    def whole(self, node: fx.Node) -> fx.Node:
        """The value of a node, gathered if it is divided."""
        if node not in self._known:
            assert node.op == "get_attr"
            self.held[str(node.target)] = self._graph.look_up(str(node.target))
            self._known[node] = self.made.node_copy(node)
        split = self._split(node)
        if split is None:
            return self._known[node]
        if node not in self._whole:
            self._whole[node] = self.call(Crossing(Gather, self._group, split), self._known[node])
        return self._whole[node]

    def _enter(self, node: fx.Node) -> fx.Node:
        if node not in self._entered:
            self._entered[node] = self.call(Crossing(Enter, self._group), self.whole(node))
        return self._entered[node]

    def _split(self, node: fx.Node) -> Split | None:
        use = self._plan.uses.get(node)
        return None if use is None else use.made

    def _node(self, node: fx.Node, use: Use) -> fx.Node:
        if use.how == "whole":
            if node.op == "call_module":
                self.held[str(node.target)] = self._graph.look_up(str(node.target))
            return self.made.node_copy(node, self.whole)
        if use.how == "part":
            if node.op == "call_module":
                self.held[str(node.target)] = self._graph.look_up(str(node.target))
            return self.made.node_copy(node, self._known.__getitem__)
        first: Any = node.args[0]
        if use.how == "dropout":
            assert use.given is not None
            p, active = _dropout(self._graph.module, node)
            return self.call(
                DividedDropout(p, active, use.given, self._group.rank), self._known[first]
            )
        return self._layer(node, use, first)

    def _layer(self, node: fx.Node, use: Use, first: fx.Node) -> fx.Node:
        layer = self._graph.look_up(str(node.target))

        def own(name: str) -> Any:
            owner, _, last = name.rpartition(".")
            return self._parts.of(getattr(layer.get_submodule(owner), last))

        made = divided_layer(layer, use.how, own, self._group, use.bounds)
        if use.how == "norm":
            return self.call(made, self._known[first])
        if isinstance(layer, nn.Embedding):
            return self.call(made, self.whole(first))
        if use.how == "columns":
            name = f"divided_{len(self.held)}"
            self.held[name] = made
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._enter)
            return self.made.call_module(name, args, kwargs)
        if self._split(first) == use.given:
            return self.call(made, self._known[first])
        assert use.given is not None
        return self.call(
            made, self.call(Crossing(Scatter, self._group, use.given), self.whole(first))
        )


def _dropout(module: nn.Module, node: fx.Node) -> tuple[float, Callable[[], bool]]:
    """The rate of a dropout, and whether it is active."""
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        return float(layer.p), lambda: layer.training  # type: ignore[arg-type]
    given = inspect.signature(F.dropout).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    active = bool(given.arguments["training"])
    return float(given.arguments["p"]), lambda: active


def divided_program(
    graph: LayerGraph, plan: TensorPlan, parts: OwnParts, group: SharedScratch
) -> fx.GraphModule:
    """The model as a module of its inputs, which computes this process' part."""
    return _Builder(graph, plan, parts, group).build()


def table(graph: LayerGraph, plan: TensorPlan, count: int) -> str:
    """The plan, a line for each layer with parameters: how it is divided, and what is exchanged."""
    lines = [("layer", "divided by", "MB a device", "crosses")]
    gathered = gathered_layers(graph, plan)
    seen: set[str] = set()
    for node, use in plan.uses.items():
        name = str(node.target)
        if node.op != "call_module" or name in seen:
            continue
        seen.add(name)
        layer = graph.module.get_submodule(name)
        params = dict.fromkeys(layer.parameters())
        if params:
            size = sum(_largest(p, plan.divided.get(p), count) for p in params) / 1e6
            lines.append(
                (name, _word(layer, use), f"{size:.3f}", _crossing(layer, use, node in gathered))
            )
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    rows = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(row.rstrip() for row in rows)


def _largest(param: Tensor, division: Division | None, count: int) -> int:
    """Bytes of the largest part."""
    if division is None:
        return param.nbytes
    return max(division.part(param, rank).nbytes for rank in range(count))


def _word(layer: nn.Module, use: Use) -> str:
    if use.how == "whole":
        return "-"
    if isinstance(layer, nn.MultiheadAttention):
        return "heads"
    if use.how == "norm":
        return "channels"
    return use.how


def _crossing(layer: nn.Module, use: Use, gathered: bool) -> str:
    """The exchanges in forward, and after the comma in backward."""
    attends = isinstance(layer, nn.MultiheadAttention)
    words = []
    if use.how == "rows" or (attends and use.how == "columns"):
        words.append("outputs added up")
    if gathered:
        words.append("outputs gathered")
    if use.how == "columns" and not isinstance(layer, nn.Embedding):
        words.append("gradients of inputs added up")
    return ", ".join(words) or "-"


def gathered_layers(graph: LayerGraph, plan: TensorPlan) -> set[fx.Node]:
    """Layers whose divided output is used whole."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        use = plan.uses.get(node, Use())
        for value in node.all_input_nodes:
            made = plan.uses[value].made if value in plan.uses else None
            if made is None or use.given == made:
                continue
            while plan.uses[value].how != "columns":
                value = value.all_input_nodes[0]
            found.add(value)
    return found


def _encoder_layer(
    layer: Any,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: Any = False,
) -> Any:
    """What an nn.TransformerEncoderLayer computes in training."""

    def attend(x: Any) -> Any:
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask}
        given = {name: mask for name, mask in masks.items() if mask is not None}
        return layer.dropout1(layer.self_attn(x, x, x, need_weights=False, **given)[0])

    def feed(x: Any) -> Any:
        hidden = layer.dropout(layer.activation(layer.linear1(x)))
        return layer.dropout2(layer.linear2(hidden))

    if layer.norm_first:
        x = src + attend(layer.norm1(src))
        return x + feed(layer.norm2(x))
    x = layer.norm1(src + attend(src))
    return layer.norm2(x + feed(x))


#: layers of torch that consist of layers which can be divided
OPENED: Opened = {nn.TransformerEncoderLayer: _encoder_layer, nn.TransformerEncoder: run_encoder}
