"""Plan how tensor parallelism divides layers: by columns, then by rows, with one sum after them.

    x  whole -> [ columns ] -> divided -> [ activation ] -> divided -> [ rows ] -> sum -> whole

A value stays divided while its users can take a part; else it is gathered, and all processes
compute the same. A tensor that several layers use is divided by all of them in the same way, or not
at all.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from stratagem.data.shares import share
from stratagem.errors import NotDistributable, UsageError
from stratagem.state.divided_update import Division
from stratagem.training.layer_graph import LayerGraph, is_hooked
from stratagem.training.tensor_layers import Norm, Split, divisions, widths


def _named(place: Any, names: str) -> tuple[Any, ...]:
    return tuple(getattr(place, name) for name in names.split())


#: elementwise modules
_MODULES = _named(
    nn,
    "ReLU ReLU6 LeakyReLU ELU CELU SELU GELU SiLU Mish Tanh Sigmoid Softplus Softsign Hardtanh "
    "Hardswish Hardsigmoid Identity",
)
_FUNCTIONS = {
    *_named(F, "relu relu6 leaky_relu elu selu gelu silu mish softplus hardswish tanh sigmoid"),
    *_named(torch, "relu tanh sigmoid abs square"),
}
_METHODS = {"relu", "tanh", "sigmoid", "abs", "square", "contiguous"}
_BINARY = {operator.add, operator.mul, operator.sub, torch.add, torch.mul, torch.sub}
#: modules that treat every channel by itself
_POOLS = _named(
    nn, " ".join(f"{kind}Pool{n}d" for kind in ("Max", "Avg", "AdaptiveAvg") for n in (1, 2, 3))
)
WAYS = ("columns", "rows", "replicate")


@dataclass
class Use:
    """How one node is computed: a call of a layer, or a function between layers."""

    #: "columns", "rows", "norm", "dropout", "part" (the same function on a part), or "whole"
    how: str = "whole"
    #: where the parts of the layer end
    bounds: tuple[int, ...] = ()
    #: how the input and the output are divided; None: whole
    given: Split | None = None
    made: Split | None = None


@dataclass
class TensorPlan:
    """How every node is computed, and how each parameter and buffer is divided."""

    uses: dict[fx.Node, Use] = field(default_factory=dict)
    divided: dict[Tensor, Division] = field(default_factory=dict)


def named_layers(graph: LayerGraph) -> dict[str, nn.Module]:
    """The layers that the model calls, by name."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    return {name: graph.module.get_submodule(name) for name in dict.fromkeys(names)}


def check_plan(graph: LayerGraph, asked: Mapping[str, str], count: int) -> None:
    """Refuse unknown names, and layers that cannot be divided as asked."""
    layers = named_layers(graph)
    for name, how in asked.items():
        if name not in layers:
            close = get_close_matches(name, list(layers), 3) or list(layers)[:8]
            raise UsageError(
                f"plan names {name!r}, and the model calls no layer of that name; there are, among "
                f"others, {', '.join(map(repr, close))}."
            )
        can = widths(layers[name])
        kind = type(layers[name]).__name__
        if how != "replicate" and how not in can:
            ways = " or ".join(map(repr, [*can, "replicate"]))
            raise NotDistributable(
                f"{name!r} is a {kind} that cannot be divided by {how}; its plan can be {ways}."
            )
        if how != "replicate" and is_hooked(layers[name]):
            raise NotDistributable(
                f"{name!r} has hooks, which would see a part of it; take them away, or give it the "
                "plan 'replicate'."
            )
        if how != "replicate" and can[how] < count:
            what = "heads" if isinstance(layers[name], nn.MultiheadAttention) else how
            raise NotDistributable(
                f"{name!r} has {can[how]} {what}, and there are {count} devices to divide them "
                "over; give it the plan 'replicate', or name fewer devices."
            )
    if not any(_ways(layer, count) for layer in layers.values()):
        raise NotDistributable(
            f"no layer that {type(graph.module).__name__} calls can be divided over {count} "
            "devices: linear, embedding, attention and convolution layers of torch can, if they "
            "are wide enough and have no hooks; use a PipelineStrategy or a MirroredStrategy."
        )


def _ways(layer: nn.Module, count: int) -> dict[str, int]:
    if is_hooked(layer):
        return {}
    return {how: width for how, width in widths(layer).items() if width >= count}


def make_plan(
    graph: LayerGraph,
    count: int,
    asked: Mapping[str, str],
    shapes: Mapping[fx.Node, torch.Size],
    kept_whole: Collection[Tensor] = (),
) -> TensorPlan:
    """Plan how the layers of a graph are divided; `shapes` are the shapes of its values."""
    check_plan(graph, asked, count)
    undivided: set[str] = set()
    while True:
        planner = _Planner(graph, count, asked, shapes, undivided)
        plan, conflict = planner.run(), planner.conflict(kept_whole)
        if not conflict:
            return plan
        for name in conflict & {name for name, how in asked.items() if how != "replicate"}:
            raise NotDistributable(
                f"{name!r} shares a parameter with something that does not divide it in the same "
                "way; leave it out of plan, or give all that share it plans that agree."
            )
        undivided |= conflict


class _Planner:
    """One pass over the graph."""

    def __init__(
        self,
        graph: LayerGraph,
        count: int,
        asked: Mapping[str, str],
        shapes: Mapping[fx.Node, torch.Size],
        undivided: Collection[str],
    ) -> None:
        self._graph, self._count, self._asked = graph, count, asked
        self._shapes, self._undivided = shapes, undivided
        self._plan = TensorPlan()
        #: by tensor, the layers that use it and how they divide it
        self._users: dict[Tensor, list[tuple[str, Division | None]]] = {}

    def run(self) -> TensorPlan:
        for node in self._graph.graph.nodes:
            if node.op == "call_module":
                self._plan.uses[node] = self._layer(node)
            elif node.op in ("call_function", "call_method"):
                self._plan.uses[node] = self._function(node)
            elif node.op == "get_attr":
                held = self._graph.look_up(str(node.target))
                if isinstance(held, Tensor):
                    self._users.setdefault(held, []).append(("", None))
        return self._plan

    def conflict(self, kept_whole: Collection[Tensor]) -> set[str]:
        """Layers that divide a tensor in another way than its other users."""
        found: set[str] = set()
        for tensor, users in self._users.items():
            ways = {way for _, way in users} | ({None} if tensor in kept_whole else set())
            if len(ways) > 1:
                found |= {name for name, way in users if way is not None}
        return found

    # --- layers -----------------------------------------------------------------------------

    def _layer(self, node: fx.Node) -> Use:
        name = str(node.target)
        layer = self._graph.module.get_submodule(name)
        use = self._use(node, name, layer)
        ways: dict[str, Division | None] = {}
        if use.how in ("columns", "rows"):
            ways = divisions(layer, use.how, use.bounds)
        elif use.how == "norm":
            tensors = ("weight", "bias", "running_mean", "running_var")
            there = [each for each in tensors if getattr(layer, each) is not None]
            ways = {each: Division((use.bounds[-1],), 0, use.bounds) for each in there}
        for path, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            way = ways.get(path)
            self._users.setdefault(tensor, []).append((name, way))
            if way is not None:
                self._plan.divided[tensor] = way
        return use

    def _use(self, node: fx.Node, name: str, layer: nn.Module) -> Use:
        given, rank = self._given(node), self._rank(node)
        if name in self._undivided or is_hooked(layer):
            return Use()
        if isinstance(layer, nn.MultiheadAttention):
            return self._attention(node, name, layer)
        ways = _ways(layer, self._count)
        if ways and len(node.args) == 1 and not node.kwargs:
            return self._wide(node, layer, ways, self._asked.get(name))
        if given is None or len(node.args) != 1 or node.kwargs:
            return Use()
        if type(layer) in _MODULES:
            return Use("part", given=given, made=given)
        if type(layer) is nn.Dropout:
            return Use("dropout", given=given, made=given)
        if isinstance(layer, Norm) and type(layer).__module__.startswith("torch.nn."):
            fits = given.dim == 1 and given.whole == layer.num_features
            return Use("norm", given.bounds, given, given) if fits else Use()
        if type(layer) in _POOLS and given.dim == 1 and rank > 2:
            return Use("part", given=given, made=given)
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            return self._flat(node, given)
        return Use()

    def _wide(
        self, node: fx.Node, layer: nn.Module, ways: dict[str, int], asked: str | None
    ) -> Use:
        """A linear layer, a convolution or an embedding."""
        given, rank = self._given(node), self._rank(node)
        convolves = not isinstance(layer, nn.Linear | nn.Embedding)
        into = 1 if convolves else self._rank(node.args[0]) - 1
        fits = given is not None and given.dim == into and not isinstance(layer, nn.Embedding)
        fits = fits and "rows" in ways and given is not None and given.whole == ways["rows"]
        how = asked or self._tied(layer, ways) or ("rows" if fits else next(iter(ways)))
        if how == "replicate" or (convolves and rank < 3):
            return Use()
        if how == "columns":
            bounds = _bounds(ways["columns"], self._count)
            return Use(how, bounds, made=Split(1 if convolves else rank - 1, bounds))
        if fits and given is not None:
            return Use(how, given.bounds, given=given)
        bounds = _bounds(ways["rows"], self._count)
        split = None if isinstance(layer, nn.Embedding) else Split(into, bounds)
        return Use(how, bounds, given=split)

    def _tied(self, layer: Any, ways: dict[str, int]) -> str | None:
        """Return how a weight is divided, if another layer has divided it already."""
        known = self._plan.divided.get(layer.weight)
        for how, width in ways.items() if known is not None else ():
            if divisions(layer, how, _bounds(width, self._count))["weight"] == known:
                return how
        return None

    def _attention(self, node: fx.Node, name: str, layer: nn.MultiheadAttention) -> Use:
        """Divide attention by heads, if its weights are not used and the input has batches."""
        ways = _ways(layer, self._count)
        batched = bool(node.args) and self._rank(node.args[0]) == 3
        first = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
        if self._asked.get(name) == "replicate" or not (ways and batched and first):
            return Use()
        return Use("columns", _bounds(layer.num_heads, self._count))

    # --- functions between layers -------------------------------------------------------------

    def _function(self, node: fx.Node) -> Use:
        given, target = self._given(node), node.target
        if given is None:
            return Use()
        if target in _BINARY:
            return self._binary(node, given)
        first_only = all(not isinstance(each, fx.Node) for each in node.args[1:])
        plain = first_only and not any(isinstance(each, fx.Node) for each in node.kwargs.values())
        if plain and (target in _FUNCTIONS or (node.op == "call_method" and target in _METHODS)):
            return Use("part", given=given, made=given)
        if plain and target is F.dropout:
            return Use("dropout", given=given, made=given)
        flat = target is torch.flatten or (node.op == "call_method" and target == "flatten")
        if flat and node.args[1:] == (1,) and not node.kwargs:
            return self._flat(node, given)
        return Use()

    def _binary(self, node: fx.Node, given: Split) -> Use:
        """An operation on two parts divided in the same way, or on a part and a number."""
        other = node.args[1] if len(node.args) == 2 and not node.kwargs else None
        if isinstance(other, int | float):
            return Use("part", given=given, made=given)
        if not isinstance(other, fx.Node):
            return Use()
        use = self._plan.uses.get(other)
        alike = use is not None and use.made == given and self._rank(other) == self._rank(node)
        return Use("part", given=given, made=given) if alike else Use()

    def _flat(self, node: fx.Node, given: Split) -> Use:
        """Flattened channels: the features of one process are adjacent."""
        features = self._shapes[node][-1] if len(self._shapes.get(node, ())) == 2 else 0
        if given.dim != 1 or not features or not self._has_length(node, features):
            return Use()
        each = features // given.whole
        return Use("part", given=given, made=Split(1, tuple(b * each for b in given.bounds)))

    def _has_length(self, node: fx.Node, features: int) -> bool:
        """Whether a flat value always has so many features: only linear layers with as many inputs
        use it, possibly after elementwise functions."""
        for user in node.users:
            called = user.op == "call_module"
            layer = self._graph.module.get_submodule(str(user.target)) if called else None
            if isinstance(layer, nn.Linear):
                if layer.in_features != features:
                    return False
                continue
            passes = type(layer) in (*_MODULES, nn.Dropout) or user.target in _FUNCTIONS
            if not (passes or user.target is F.dropout) or not self._has_length(user, features):
                return False
        return bool(node.users)

    def _rank(self, node: Any) -> int:
        """The number of axes of a value; 0 if it is no tensor."""
        return len(self._shapes.get(node, ())) if isinstance(node, fx.Node) else 0

    def _given(self, node: fx.Node) -> Split | None:
        """Return how the first argument is divided."""
        first: Any = node.args[0] if node.args else None
        use = self._plan.uses.get(first) if isinstance(first, fx.Node) else None
        return use.made if use is not None else None


def _bounds(width: int, count: int) -> tuple[int, ...]:
    return (0, *(share(width, count, rank)[1] for rank in range(count)))
