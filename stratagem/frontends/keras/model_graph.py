"""A functional or Sequential Keras model as a row of layers, by its own graph of calls.

Models inside of a model are flattened. A value between two calls is a list of [tensor, mask], so
that masks, which Keras keeps as an attribute of a tensor, are sent between stages, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch
from torch import Tensor, fx, nn

from stratagem.capabilities import sentence
from stratagem.compat.keras_names import Functional
from stratagem.data.shares import rows, share, with_tensors
from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.keras.denominators import BatchPart, made_exact
from stratagem.training.layer_graph import Layer, LayerGraph
from stratagem.training.mesh_grid import MeshGrid

#: the source of a value: a node of the graph, and the number of its result; None for an input
Source = tuple[fx.Node, int | None]


class _CallContext(keras.Layer):  # type: ignore[misc]
    """Stands for the model around a layer, whose sublayers read `training` from it."""

    def __init__(self) -> None:
        super().__init__(name="stage")
        self.built = True

    def call(self, run: Any = None, training: Any = None) -> Any:
        return run()


class OperationCall(nn.Module):
    """One call of a layer or operation in the model."""

    def __init__(self, node: Any, feeds: Sequence[tuple[int, int | None]]) -> None:
        super().__init__()
        self.operation = node.operation
        if isinstance(self.operation, keras.Layer):
            self.operation._track_variables()  # of a copied model torch does not know them yet
        self._node, self._feeds = node, feeds
        self._context = [_CallContext()]  # in a list, so that it does not become a sublayer
        self._seeds = seeds_of(self.operation)

    def forward(self, *values: Any) -> list[Any]:
        known = {}
        for tensor, (place, index) in zip(self._node.input_tensors, self._feeds, strict=True):
            known[id(tensor)] = values[place] if index is None else unpacked(values[place][index])
        args, kwargs = self._node.arguments.fill_in(known)
        kwargs.pop("training", None)  # the model's `training` counts, as in Keras' own call
        self._draw()
        (context,) = self._context
        found = context(run=lambda: self.operation(*args, **kwargs), training=True)
        return [packed(each) for each in keras.tree.flatten(found)]

    def _draw(self) -> None:
        """Seed Keras' generators from torch's, which a stage sets."""
        with torch.no_grad():
            for state in self._seeds:
                state.value[0] = int(torch.randint(2**31 - 1, ()))
                state.value[1] = 0


def seeds_of(operation: Any) -> list[Any]:
    """Return the seed variables of a layer's random generators."""
    if not isinstance(operation, keras.Layer):
        return []
    known = {id(v) for v in operation.weights}
    rest = [v for v in operation.non_trainable_variables if id(v) not in known]
    return [v for v in rest if "seed" in v.path]


def packed(value: Any) -> list[Any]:
    return [value, getattr(value, "_keras_mask", None)]


def unpacked(pair: Sequence[Any]) -> Any:
    value, mask = pair
    if mask is not None:
        value._keras_mask = mask
    return value


def graph_of(model: Any) -> Any:
    """Return the graph of a model's calls; None if they are known only when it runs."""
    sequential = isinstance(model, keras.Sequential)
    found = getattr(model, "_functional", None) if sequential else model
    plain = type(model).call is (keras.Sequential.call if sequential else Functional.call)
    return found if plain and isinstance(found, Functional) else None


def functional(model: Any) -> Any:
    """Return the graph of a model's calls; raise for a model without one or with a custom call."""
    found = graph_of(model)
    if found is None:
        raise NotDistributable(
            f"{model.name!r} ({type(model).__name__}) has a call of its own, or layers whose "
            "shapes are not known beforehand, and a pipeline cuts a model between the calls of "
            "its graph; make it a keras.Sequential or a functional model (keras.Model(inputs, "
            "outputs)), or use a MirroredStrategy."
        )
    return found


def model_inputs(model: Any, x: Any) -> list[Tensor]:
    """Convert a batch to the inputs of the model's graph."""
    found: list[Tensor] = functional(model)._standardize_inputs(x)
    if any(each is None for each in found):
        raise NotDistributable(
            f"{model.name!r} is given None for an optional input, which is not cut into "
            "microbatches; give all inputs, or use a MirroredStrategy."
        )
    return found


def model_output(model: Any, found: Sequence[Any]) -> Any:
    """Return the model's output, from its graph's outputs."""
    outputs = [unpacked(each) for each in found]
    tree = keras.tree.pack_sequence_as(functional(model)._outputs_struct, outputs)
    several = isinstance(tree, list | tuple) and len(tree) > 1
    return tree if several or isinstance(tree, dict) else keras.tree.flatten(tree)[0]


def layer_graph(model: Any) -> LayerGraph:
    """Return the layers of a built model; its output is a list of [tensor, mask]."""
    return _Walk(model).finish()


class _Walk:
    """Writes a model's calls down as an fx graph."""

    def __init__(self, model: Any) -> None:
        self._model, self._graph, self._root = model, fx.Graph(), nn.Module()
        self._layers: list[Layer] = []
        self._waiting: list[fx.Node] = []
        top = functional(model)
        self._inputs = [self._graph.placeholder(f"x{i}") for i in range(len(top.inputs))]
        self._outputs = self._calls(top, [(each, None) for each in self._inputs], ())

    def finish(self) -> LayerGraph:
        if not self._layers:
            raise UsageError(f"{self._model.name!r} has no layer that a pipeline could cut.")
        pick = [self._picked(source) for source in self._outputs]
        output = self._graph.output(pick)
        return LayerGraph(self._root, self._graph, self._inputs, self._layers, output)

    def _calls(self, model: Any, inputs: list[Source], inside: tuple[str, ...]) -> list[Source]:
        """Add every call of one model; returns the sources of its outputs."""
        known: dict[int, Source] = {
            id(each): at for each, at in zip(model.inputs, inputs, strict=True)
        }
        for depth in sorted(model._nodes_by_depth, reverse=True):
            for node in model._nodes_by_depth[depth]:
                if node.is_input or not all(id(each) in known for each in node.input_tensors):
                    continue
                given = [known[id(each)] for each in node.input_tensors]
                made = self._call(node, given, inside)
                known.update((id(each), at) for each, at in zip(node.outputs, made, strict=True))
        return [known[id(each)] for each in model.outputs]

    def _call(self, node: Any, given: list[Source], inside: tuple[str, ...]) -> list[Source]:
        operation, kwargs = node.operation, node.arguments.kwargs
        inner = graph_of(operation) if isinstance(operation, keras.Model) else None
        plain = all(key == "training" or value is None for key, value in kwargs.items())
        if inner is not None and plain and _fits(inner, node.input_tensors):
            return self._calls(inner, given, (*inside, operation.name))
        sources = list(dict.fromkeys(each for each, _ in given))
        feeds = [(sources.index(each), index) for each, index in given]
        name = self._name("/".join((*inside, operation.name)))
        self._root.add_module(name, OperationCall(node, feeds))
        made = self._graph.call_module(name, tuple(sources))
        stack = ["/".join(inside[: i + 1]) for i in range(len(inside))]
        made.meta["nn_module_stack"] = {path: (path, keras.Model) for path in stack}
        self._put(made, name, begins=isinstance(operation, keras.Layer))
        return [(made, i) for i in range(len(node.outputs))]

    def _put(self, node: fx.Node, name: str, *, begins: bool) -> None:
        if begins:
            self._layers.append(Layer(name, self._waiting))
            self._waiting = []
        (self._layers[-1].nodes if self._layers else self._waiting).append(node)

    def _name(self, wanted: str) -> str:
        """Return an unused name: the layer's, with a number from its second call on."""
        name, count = wanted.replace(".", "_"), 1
        while hasattr(self._root, name):
            count += 1
            name = f"{wanted.replace('.', '_')}:{count}"
        return name

    def _picked(self, source: Source) -> Any:
        """Return the fx node of a source, which may be an input of the model."""
        node, index = source
        if index is None:
            return [node, None]
        made = self._graph.call_function(_item, (node, index))
        self._put(made, "", begins=False)
        return made


def _fits(inner: Any, tensors: Sequence[Any]) -> bool:
    """Whether an inner model takes these tensors unchanged."""
    return len(inner.inputs) == len(tensors) and all(
        a.dtype == b.dtype and len(a.shape) == len(b.shape)
        for a, b in zip(inner.inputs, tensors, strict=True)
    )


def _item(results: Sequence[Any], index: int) -> Any:
    return results[index]


# --- microbatches: inputs of the first stage, loss and metrics of the last ------------------------


class MicrobatchPart(BatchPart):
    """A microbatch, whose loss counts with its share of the rows."""

    #: the setting that avoids microbatches
    remedy = "microbatches=1"

    def divided(self, by: float | None) -> float | None:
        if by is None or self.whole:
            return 1.0
        raise NotDistributable(sentence("stages", "divided by a mask", remedy=self.remedy))

    def gathered(self, own: Tensor) -> list[Tensor]:
        if self.whole:
            return [own]
        raise NotDistributable(
            "this batch has a mask and sample weights, which Keras multiplies with a factor of the "
            f"whole batch, and a stage has a microbatch; use {self.remedy}, or a MirroredStrategy."
        )


class StageBatch:
    """The microbatches of a batch, or of the share of one row of a mesh, which may be empty."""

    def __init__(
        self, model: Any, grid: MeshGrid, data: Any, total: int, most: int | None = None
    ) -> None:
        """`most`: the number of microbatches; None: the whole batch is one."""
        self._model, self._data, self._part = model, data, MicrobatchPart(grid.place)
        self._mine = (0, total) if most is None else grid.share(total)
        first, last = self._mine
        self.count = min(most or 1, last - first)
        pieces = (share(last - first, self.count, m) for m in range(self.count))
        self._cuts = [(first + start, first + end) for start, end in pieces]
        self._total = total
        self._losses: list[Tensor] = []
        self._outputs: list[Any] = []
        if grid.count > 1:
            self._part.remedy = "one PipelineStrategy with microbatches=1"

    def inputs(self) -> list[list[Tensor]]:
        """Return the inputs of every microbatch, in the order of the model's inputs."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(self._data)
        whole = model_inputs(self._model, x)
        return [[each[start:end] for each in whole] for start, end in self._cuts]

    def judge(self, m: int, found: Sequence[Any]) -> Tensor:
        """Return a microbatch's part of the batch's loss, without regularisers."""
        start, end = self._cuts[m]
        piece = self._data if end - start == self._total else rows(self._data, start, end)
        _, y, weight = keras.utils.unpack_x_y_sample_weight(piece)
        self._part.begin(end - start, self._total)
        with made_exact(self._part):
            loss = self._model._compile_loss(y, model_output(self._model, found), weight)
        part: Tensor = loss * ((end - start) / self._total)
        self._losses.append(part.detach())
        self._outputs.append(with_tensors(list(found), Tensor.detach))
        return part

    def loss(self) -> float:
        return float(sum(loss.double() for loss in self._losses))

    def count_metrics(self) -> None:
        """Update metrics with the whole batch; rows of a mesh add their counts up later."""
        if not self._outputs:
            return
        first, last = self._mine
        mine = self._data if last - first == self._total else rows(self._data, first, last)
        x, y, weight = keras.utils.unpack_x_y_sample_weight(mine)
        flat = [_joined(each) for each in zip(*self._outputs, strict=True)]
        output = model_output(self._model, flat)
        self._part.begin(last - first, self._total)
        with made_exact(self._part):
            self._model.compute_metrics(x, y, output, sample_weight=weight)


def _joined(pairs: Sequence[Any]) -> list[Any]:
    """Concatenate one output of all microbatches, and its mask."""
    masks = [mask for _, mask in pairs]
    mask = None if any(each is None for each in masks) else torch.cat(masks)
    return [torch.cat([value for value, _ in pairs]), mask]
