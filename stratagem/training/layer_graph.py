"""A module as a sequence of layers: traced by torch.fx with torch's own layers as leaves.

Containers are gone into. A module of the user's that cannot be traced (an `if` on values, say)
stays whole, as one layer; where that is the model itself, the line in the way is named.
"""

from __future__ import annotations

import inspect
import linecache
import operator
import os
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from stratagem.compat.torch_names import MODULE_HOOKS
from stratagem.errors import NotDistributable, UsageError

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: operators that write into their first argument, beside methods and functions named `..._`
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "iand", "ior", "ixor", "ipow", "imatmul")
#: by type of torch's own layers, a function that computes the same by their inner layers
Opened = Mapping[type[nn.Module], Callable[..., Any]]
_NONE: Opened = {}


@dataclass
class Layer:
    """Consecutive nodes that stay together: a layer, and the functions after it."""

    name: str
    nodes: list[fx.Node] = field(default_factory=list)


@dataclass
class LayerGraph:
    """The model in layers, in the order in which they run."""

    module: nn.Module
    graph: fx.Graph
    #: the placeholders for the inputs in a batch
    inputs: list[fx.Node]
    layers: list[Layer]
    output: fx.Node
    #: tensors that forward creates, by their names in the graph
    constants: dict[str, Any] = field(default_factory=dict)

    def look_up(self, path: str) -> Any:
        """A module, parameter, buffer or constant by its name."""
        if path in self.constants:
            return self.constants[path]
        owner, _, name = path.rpartition(".")
        return getattr(self.module.get_submodule(owner), name)

    def value(self, node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
        """The value of a node: a parameter, buffer or constant, or one of `known`."""
        return self.look_up(str(node.target)) if node.op == "get_attr" else known[node]

    def first_of(self, name: str) -> int:
        """The first layer of a module, by the module's name."""
        for index, layer in enumerate(self.layers):
            paths = (path for node in layer.nodes for path in _paths(node))
            if any(path == name or path.startswith(f"{name}.") for path in paths):
                return index
        known = [layer.name for layer in self.layers]
        close = get_close_matches(name, known, 3) or known[:8]
        raise UsageError(
            f"split names {name!r}, and the model has no layer of that name in its forward; there "
            f"are, among others, {', '.join(map(repr, close))}."
        )


class _LayerTracer(fx.Tracer):
    """Keeps track of the module being traced, so that one which cannot be traced is named."""

    def __init__(self, whole: set[str], opened: Opened) -> None:
        super().__init__()
        self.whole, self.opened = whole, opened
        self.inside: list[str] = []
        #: the innermost module that was being traced when an error was raised
        self.failed: str | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.whole or is_hooked(m):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        plain = isinstance(m, nn.TransformerEncoder) and len(args) == 1 and not kwargs
        opened = run_encoder if plain else self.opened.get(type(m))
        if opened is not None and not is_hooked(m):
            return opened(m, *args, **kwargs)
        self.inside.append(self.path_of_module(m))
        try:
            with _without_effects(m):
                return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.failed is None:
                self.failed = self.inside[-1]
            raise
        finally:
            self.inside.pop()


class _SideEffect(Exception):
    """A forward that does more than compute; a traced forward would do that only once."""


@contextmanager
def _without_effects(module: nn.Module) -> Iterator[None]:
    """Raise if a module's forward sets attributes of it, writes into its tensors, or draws random
    numbers by itself; attributes are put back."""
    rng, before, seen = _rng_state(), dict(vars(module)), _sizes(module)
    written = _versions(module)
    try:
        yield
        if _sizes(module) != seen:
            raise _SideEffect("it sets attributes of the module")
        if _versions(module) != written:
            raise _SideEffect("it writes into a buffer what does not depend on its inputs")
        if _rng_state() != rng:
            raise _SideEffect("it draws random numbers that are not of its inputs' shape")
    finally:
        vars(module).clear()
        vars(module).update(before)


def _sizes(module: nn.Module) -> dict[str, Any]:
    """The identity and length of every attribute, to find replaced or grown ones."""
    kinds = (list, dict, set)
    return {
        name: (id(value), len(value) if isinstance(value, kinds) else 0)
        for name, value in vars(module).items()
    }


def _versions(module: nn.Module) -> list[int]:
    """The version of each tensor of a module, plain attributes included."""
    plain = (value for value in vars(module).values() if isinstance(value, torch.Tensor))
    tensors = (*module.parameters(), *module.buffers(), *plain)
    return [each._version for each in tensors if not is_lazy(each) and not each.is_inference()]


@contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    """Undo what tracing writes into buffers: running writes it again."""
    plain = [b for b in module.buffers() if not is_lazy(b) and not b.is_inference()]
    before = [(each, each._version, each.clone()) for each in plain]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, value in before:
                if buffer._version != version:
                    buffer.copy_(value)


def _rng_state() -> Any:
    _, keys, place, *_ = np.random.get_state()
    drawn = torch.get_rng_state().numpy().tobytes(), np.asarray(keys).tobytes(), place
    return drawn, random.getstate()


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks: it stays whole, since they would run while it is traced."""
    return any(getattr(module, kind, None) for kind in MODULE_HOOKS)


def trace(module: nn.Module, x: Any = None, opened: Opened = _NONE) -> LayerGraph:
    """The layers of a module; `x` is what batches give it, if that is known. `opened`: kinds of
    torch's layers that are gone into, and the layers that each consists of."""
    if is_hooked(module):
        raise NotDistributable(
            f"the model ({type(module).__name__}) has forward or backward hooks itself, which see "
            "it as a whole, and a pipeline runs its layers; put the hooks on layers."
        )
    given = _given(module, x)
    whole: set[str] = set()
    before = set(vars(module))
    while True:
        tracer = _LayerTracer(whole, opened)
        try:
            with _kept_buffers(module), _without_effects(module):
                graph = tracer.trace(module, given or None)
                read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
                made = [
                    name for name in vars(module) if name in read - before
                ]  # fx puts them there
                constants = {name: vars(module).pop(name) for name in made}
            break
        except Exception as error:
            if tracer.failed is None:
                raise _in_the_way(module, error) from error
            whole.add(tracer.failed)  # it stays whole
    found = _layered(module, graph, given)
    found.constants = constants
    return found


def _given(module: nn.Module, x: Any) -> dict[str, Any]:
    """Defaults of the arguments of forward that a batch does not contain."""
    parameters = inspect.signature(module.forward).parameters.values()
    odd = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if odd:
        raise NotDistributable(
            f"forward of {type(module).__name__} takes {odd[0]}, so its inputs are not known when "
            "it is split; name its arguments."
        )
    if isinstance(x, dict):
        present = set(x)
    elif isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        present = {p.name for p in list(parameters)[: len(x)]}
    else:
        present = {p.name for p in list(parameters)[:1]}
    needed = {p.name for p in parameters if p.default is p.empty}
    return {p.name: p.default for p in parameters if p.name not in present | needed}


def _in_the_way(module: nn.Module, error: Exception) -> NotDistributable:
    """The error that names the user's line which cannot be traced."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_TORCH, _OURS, "<frozen"))]
    where = f"forward of {type(module).__name__}"
    if own:
        line = own[-1].line or linecache.getline(own[-1].filename, own[-1].lineno or 0).strip()
        where = f"line {own[-1].lineno} of {os.path.basename(own[-1].filename)}, `{line}`,"
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, _SideEffect):
        return NotDistributable(
            f"the model cannot be split into stages: forward of {type(module).__name__} does more "
            f"than compute ({reason}), which each stage would have to do; put that into a "
            "submodule, which stays whole on one stage."
        )
    return NotDistributable(
        f"the model cannot be split into stages: {where} depends on values, which are known only "
        f"when it runs ({reason}); put that line into a submodule, which stays whole on one "
        "stage, or make the model an nn.Sequential."
    )


def _layered(module: nn.Module, graph: fx.Graph, given: dict[str, Any]) -> LayerGraph:
    inputs: list[fx.Node] = []
    names = inspect.signature(module.forward).parameters
    for node in list(graph.nodes):
        if node.op != "placeholder":
            continue
        if str(node.target) in names and str(node.target) not in given:
            inputs.append(node)
        else:
            _erase(graph, node)
    for node in reversed(list(graph.nodes)):  # what is taken apart, and not used
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)
    _follow_in_place(module, graph)
    layers: list[Layer] = []
    waiting: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if _begins(node):
            layers.append(Layer(_paths(node)[0], waiting))
            waiting = []
        (layers[-1].nodes if layers else waiting).append(node)
    if not layers:
        layers.append(Layer(type(module).__name__, waiting))
    (output,) = (node for node in graph.nodes if node.op == "output")
    return LayerGraph(module, graph, inputs, layers, output)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase an argument that a batch does not contain, and fx' assertions about it."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


def _begins(node: fx.Node) -> bool:
    """Whether a layer begins with this node: a module, or a function of a parameter."""
    if node.op == "call_module":
        return True
    return any(each.op == "get_attr" for each in node.all_input_nodes)


def _paths(node: fx.Node) -> Sequence[str]:
    """The paths of a node's module and of the modules around it."""
    stack = [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]
    own = [str(node.target)] if node.op == "call_module" else []
    held = [str(each.target) for each in node.all_input_nodes if each.op == "get_attr"]
    return [*own, *held, *reversed(stack)] or [node.name]


def _follow_in_place(module: nn.Module, graph: fx.Graph) -> None:
    """Let readers of a value after an in-place write read the writer's result: another stage has
    another copy of the value."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node, place in order.items():
        written = node.args[0] if node.args else None
        if isinstance(written, fx.Node) and _writes(module, node):
            later = {user for user in written.users if order[user] > place}
            written.replace_all_uses_with(node, later.__contains__)


def _writes(module: nn.Module, node: fx.Node) -> bool:
    """Whether a node writes into its first argument."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name in _IN_PLACE or (name.endswith("_") and not name.startswith("__")):
        return True
    if node.op == "call_function" and inspect.isfunction(node.target):
        bound = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs)
        return bound.arguments.get("inplace") is True
    return False


# --- running a graph ------------------------------------------------------------------------------


def run_node(module: nn.Module, node: fx.Node, get: Callable[[fx.Node], Any]) -> Any:
    """The value of a node; `get` returns those of its arguments."""
    args = fx.node.map_arg(node.args, get)
    kwargs = fx.node.map_arg(node.kwargs, get)
    if node.op == "call_module":
        return module.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def values_of(graph: LayerGraph, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """The values of all nodes for these inputs, computed layer by layer."""
    known: dict[fx.Node, Any] = dict(zip(graph.inputs, inputs, strict=True))

    def get(node: fx.Node) -> Any:
        return graph.value(node, known)

    for layer in graph.layers:
        for node in layer.nodes:
            known[node] = run_node(graph.module, node, get)
    known[graph.output] = fx.node.map_arg(graph.output.args[0], get)
    return known


def run_graph(graph: LayerGraph, inputs: Sequence[Any]) -> Any:
    """The output of the whole model, computed layer by layer."""
    return values_of(graph, inputs)[graph.output]


def shapes_of(graph: LayerGraph, inputs: Sequence[Any]) -> dict[fx.Node, torch.Size]:
    """The shapes of all tensors of a graph for these inputs."""
    found = values_of(graph, inputs)
    return {node: value.shape for node, value in found.items() if isinstance(value, torch.Tensor)}


def run_encoder(
    encoder: Any,
    src: Any,
    mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: Any = None,
) -> Any:
    """What an nn.TransformerEncoder computes in training: its layers, one after another."""
    for layer in encoder.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
    return src if encoder.norm is None else encoder.norm(src)
