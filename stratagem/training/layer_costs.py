"""The cost of each layer, measured: seconds, and bytes of parameters, activations and outputs.

Layers run one after another on rows of the first batch, each with a graph of its own, so that only
one layer's gradients exist at a time. Equal layers all get the time of the fastest one: the rest
was other work on the machine, and the split should not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from stratagem.data.shares import tensors_in, with_tensors
from stratagem.rules.layer_split import LayerCost
from stratagem.training.gradient_placement import WORTH, is_torchs
from stratagem.training.layer_graph import Layer, LayerGraph, run_node
from stratagem.training.stage import StagePart, tensors_of
from stratagem.wire.device_kinds import kind_of

_ROUNDS = 2
#: bytes of an optimizer's state for each byte of a parameter, and of the gradient
STATES = 3


class _Once(NamedTuple):
    """One layer in one round: seconds in all, of the forward and of deferred weight gradients;
    bytes kept for backward, and sent to later layers; its kind, empty if unknown."""

    seconds: float
    forward: float
    late: float
    kept: int
    like: tuple[str, bool]
    crossing: int


#: the fastest of equal layers, by their kind and whether their inputs require a gradient
_Alike = dict[tuple[str, bool], _Once]


def _fastest(rounds: Sequence[_Once], fixed: int, alike: _Alike) -> LayerCost:
    text, behind = rounds[0].like
    others = [alike[key] for key in ((text, behind), (text, True)) if text and key in alike]
    best = min(*rounds, *others)
    kept, crossing = rounds[0].kept, rounds[0].crossing
    return LayerCost(best.seconds, fixed, kept, crossing, best.forward, best.late)


def held_bytes(graph: LayerGraph) -> list[int]:
    """The bytes of parameters, gradients and optimizer state, by layer."""
    parts = [StagePart(i, [i], layer.nodes) for i, layer in enumerate(graph.layers)]
    used = (tensors_of(graph, part) for part in parts)
    return [sum(t.nbytes * (1 + STATES * t.requires_grad) for t in tensors) for tensors in used]


class LayerMeter:
    """Measures the layers of a graph on some rows; leaves the model as it was."""

    def __init__(self, graph: LayerGraph) -> None:
        self._graph = graph
        self._places = {node: i for i, node in enumerate(graph.inputs)}
        held = [*graph.module.parameters(), *graph.module.buffers()]
        self._place = held[0].device if held else torch.device("cpu")
        # on a CPU the thread's own time: the split must not depend on other work
        self._clock = time.thread_time if self._place.type == "cpu" else time.perf_counter

    def measure(self, inputs: Sequence[Any]) -> list[LayerCost]:
        """The cost of each layer, the fastest of a few rounds."""
        module = self._graph.module
        held = list(dict.fromkeys(module.buffers()))
        before, rng = [b.clone() for b in held], torch.get_rng_state()
        grads = [(p, p.grad) for p in module.parameters()]
        try:
            rounds = [self._round(inputs) for _ in range(_ROUNDS)]
        finally:
            torch.set_rng_state(rng)
            with torch.no_grad():
                for buffer, value in zip(held, before, strict=True):
                    buffer.copy_(value)
            for param, grad in grads:
                param.grad = grad
        fixed = held_bytes(self._graph)
        ordered = sorted((each for times in rounds for each in times), reverse=True)
        alike = {each.like: each for each in ordered}
        return [
            _fastest(times, bytes_held, alike)
            for times, bytes_held in zip(zip(*rounds, strict=True), fixed, strict=True)
        ]

    def _round(self, inputs: Sequence[Any]) -> list[_Once]:
        values: dict[fx.Node, Any] = {}
        last = self._last_uses()
        found = []
        for index, layer in enumerate(self._graph.layers):
            made = self._layer(layer, inputs, values)
            for node in [node for node in values if last[node] <= index]:
                del values[node]
            crossing = sum(t.nbytes for t in tensors_in(list(values.values())))
            found.append(_Once(*made, crossing))
        return found

    def _last_uses(self) -> dict[fx.Node, int]:
        where = {n: i for i, layer in enumerate(self._graph.layers) for n in layer.nodes}
        end = len(self._graph.layers)
        return {
            node: max((where.get(user, end) for user in node.users), default=-1) for node in where
        }

    def _layer(
        self, layer: Layer, inputs: Sequence[Any], values: dict[fx.Node, Any]
    ) -> tuple[float, float, float, int, tuple[str, bool]]:
        """Run one layer forward and backward; returns the fields of `_Once` but `crossing`. Values
        become leaves."""
        known: dict[fx.Node, Any] = {}

        def get(node: fx.Node) -> Any:
            if node in self._places:
                return inputs[self._places[node]]
            if node in values and node not in known:
                known[node] = with_tensors(values[node], _leaf)
            return self._graph.value(node, known)

        place = self._place
        kept: list[int] = []
        started = self._clock()
        with saved_tensors(lambda tensor: kept.append(tensor.nbytes)):
            for node in layer.nodes:
                known[node] = run_node(self._graph.module, node, get)
        kind_of(place).synchronize(place)
        forward = self._clock() - started
        roots = [t for n in layer.nodes for t in tensors_in(known[n]) if t.requires_grad]
        roots = [t for t in roots if t.is_floating_point()]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        kind_of(place).synchronize(place)
        seconds = self._clock() - started
        for param in self._graph.module.parameters():
            param.grad = None
        values.update((node, with_tensors(known[node], Tensor.detach)) for node in layer.nodes)
        late = (seconds - forward) * self._deferred(layer, get)
        return seconds, forward, late, sum(kept), self._like(layer, get)

    def _like(self, layer: Layer, get: Any) -> tuple[str, bool]:
        """A text that is the same for torch's own layers of the same sizes and input shapes, else
        empty; and whether inputs require a gradient, which can only cost more."""
        texts, behind = [], False
        for node in layer.nodes:
            if node.op != "call_module":
                return "", False
            given = [v for each in node.all_input_nodes if isinstance(v := get(each), Tensor)]
            inner = self._graph.module.get_submodule(str(node.target))
            if not is_torchs(inner) or list(inner.children()):
                return "", False
            trained = [p.requires_grad for p in inner.parameters()]
            texts.append(f"{inner} {trained} {inner.training} {[v.shape for v in given]}")
            behind |= any(v.requires_grad for v in given)
        return "; ".join(texts), behind

    def _deferred(self, layer: Layer, get: Any) -> float:
        """The fraction of a backward that is a deferred weight gradient (`AddedGradients`)."""
        for node in layer.nodes:
            called = node.op == "call_module"
            inner = self._graph.module.get_submodule(str(node.target)) if called else None
            if type(inner) is nn.Linear and inner.weight.numel() >= WORTH and node.args:
                x = get(node.args[0])
                if isinstance(x, Tensor) and x.dim() == 2 and inner.weight.requires_grad:
                    return 0.5 if x.requires_grad else 1.0
        return 0.0


def _leaf(tensor: Tensor) -> Tensor:
    """A value of an earlier layer, as the start of this layer's graph."""
    return tensor.detach().requires_grad_().clone() if tensor.is_floating_point() else tensor


@contextmanager
def saved_tensors(see: Callable[[Tensor], object]) -> Iterator[None]:
    """Within, `see` gets every tensor that autograd saves for backward, parameters apart."""

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            see(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
