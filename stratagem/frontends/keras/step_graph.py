"""One training step of a Keras model as a graph of operators, and the program that runs it.

Before a graph is used it predicts a step; the step runs as Keras has it, and must give the same."""

from __future__ import annotations

import operator
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch import Tensor
from torch.fx.node import map_arg

from stratagem.compat.torch_names import TENSOR_HOOKS, OpOverload, copy_all, scripted, traced
from stratagem.frontends.keras.step_loop import SMALL, PlannedUpdate, StepLoop
from stratagem.state.keras_stepper import is_plain


class StepGraph:
    """The graph of a step on batches of one shape."""

    def __init__(
        self, model: Any, own: Callable[[Any], Any], data: Any, tensors: list[Tensor]
    ) -> None:
        self._model, self._own, self._data = model, own, data
        self._variables = list(model.trainable_variables)
        self._weights: list[Tensor] = [v.value for v in self._variables]
        beside = [*model.non_trainable_variables, *model.metrics_variables]
        self._beside = list({id(v): v for v in beside}.values())
        self._held = [*self._weights, *(v.value for v in self._beside)]
        #: numbers of the weights with a gradient, states that are written, names of the logs
        self._used: list[int] = []
        self._written: list[Tensor] = []
        #: on a worker of parameter servers: receives the loss before the gradients
        self._listener = model._loss_tracker.__dict__.get("update_state")
        self._rows = len(tensors[0])
        self._names: list[str] = []
        inputs = [*self._held, *tensors]
        self._operators = traced(self._step, inputs)
        _refuse(self._operators)
        trim(self._operators)
        self._graph: Any = scripted(self._operators, inputs)
        self._data = None
        self._predicted: Sequence[Tensor] = ()
        #: a program of several steps, if there is one, and how many it may make at once
        self.loop: StepLoop | None = None
        self.at_once = 1
        self._only_reads = False

    def _step(self, *tensors: Tensor) -> list[Tensor]:
        """Run Keras' step on these values; the model keeps its own."""
        count, states = len(self._weights), tensors[len(self._weights) :][: len(self._beside)]
        weights = [t.detach().requires_grad_() for t in tensors[:count]]
        data = _packed(self._data, iter(tensors[count + len(states) :]))
        values = [
            *zip(self._variables, weights, strict=True),
            *zip(self._beside, states, strict=True),
        ]
        given, losses, tracker = [], [], self._model._loss_tracker

        def note(loss: Tensor, sample_weight: Any = None) -> Any:
            losses.append(loss.detach())
            return type(tracker).update_state(tracker, loss, sample_weight=sample_weight)

        with (
            _overlaid(self._model.optimizer, "apply", lambda grads, _: given.extend(grads)),
            _overlaid(tracker, "update_state", note),
            torch.enable_grad(),
            keras.StatelessScope(state_mapping=values) as scope,
        ):
            logs = self._own(data)
        self._used = [i for i, grad in enumerate(given) if grad is not None]
        news = [scope.get_current_value(v) for v in self._beside]
        heard = {id(v) for v in tracker.variables if self._listener is not None}
        pairs = enumerate(zip(news, states, self._beside, strict=True))
        changed = [i for i, (new, old, v) in pairs if new is not old and id(v) not in heard]
        self._written = [self._beside[i].value for i in changed]
        self._names = list(logs)
        gradients = [given[i].contiguous() for i in self._used]
        results = [each.detach() for each in logs.values()]
        return [*gradients, *(news[i] for i in changed), *results, losses[0]]

    def run(
        self, tensors: list[Tensor], update: PlannedUpdate | None = None
    ) -> dict[str, Tensor] | None:
        """Make the step: gradients, states, update; returns the logs, or None, with nothing done,
        if the graph fails."""
        weights = self._weights
        for weight in weights:
            weight.grad = None
        with torch.no_grad():
            try:
                found = self._graph(*self._held, *tensors)
            except RuntimeError:  # a label out of bounds
                if self._only_reads:
                    return None
                raise
            gradients, news, logs = self._split(found)
            copy_all(self._written, news)
            if self._listener is not None:
                self._listener(logs[-1], sample_weight=self._rows)
            self._hand_in(gradients)
            given = [weight.grad for weight in weights]
            if update is None or not update.apply(given):
                self._model.optimizer.apply(given, self._variables)
        return dict(zip(self._names, logs, strict=False))

    def unread(self) -> dict[str, None]:
        """Return the names of the logs, where no callback reads the values."""
        return dict.fromkeys(self._names)

    def _hand_in(self, gradients: list[Tensor]) -> None:
        """Hand gradients to the optimizer, through backward if the weights have hooks."""
        used = [self._weights[i] for i in self._used]
        if any(getattr(weight, kind) for weight in used for kind in TENSOR_HOOKS):
            with torch.enable_grad():
                _Handed.apply(gradients, *used).backward()  # type: ignore[no-untyped-call]
        else:
            for weight, gradient in zip(used, gradients, strict=True):
                weight.grad = gradient

    def _split(self, found: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        first, second = len(self._used), len(self._used) + len(self._written)
        return list(found[:first]), list(found[first:second]), list(found[second:])

    # --- the comparison with Keras' step -------------------------------------------------------

    def predict(self, tensors: list[Tensor]) -> None:
        """Run the graph on the next batch, twice: TorchScript optimizes it after the first run."""
        inputs = [*self._held, *tensors]
        writes = [each._version for each in inputs]
        with torch.no_grad():
            for _ in range(2):
                self._predicted = self._graph(*inputs)
        self._only_reads = writes == [each._version for each in inputs]
        if _overlap(self._predicted[: len(self._used)], self._held):
            raise ValueError("gradients share memory")

    def looped(self, tensors: list[Tensor], update: PlannedUpdate | None) -> StepLoop | None:
        """Return a program of several steps that has predicted the next one; None if the update is
        not planned, weights are large, or a step writes into tensors of another."""
        count = len(self._used) + len(self._written)
        given, gradients = self._predicted[:count], self._predicted[: len(self._used)]
        whole = len(self._used) == len(self._weights) and is_plain(gradients)
        if update is None or not self._only_reads or not whole:
            return None
        large = sum(each.nbytes for each in self._held) > SMALL  # frozen ones, too
        here = all(each.device.type == "cpu" for each in self._held)
        if large or not here or _overlap(given, self._held):
            return None
        (output,) = (node for node in self._operators.graph.nodes if node.op == "output")
        output.args = (output.args[0][:count],)  # a step in the loop computes no logs
        step = scripted(self._operators, [*self._held, *tensors])
        loop = StepLoop(step, self._weights, self._held, self._written)
        loop.predict(tensors, update)
        return loop

    @contextmanager
    def listening(self) -> Iterator[dict[int, Tensor]]:
        """Collect the gradients of a step as backward makes them, before an all-reduce."""
        found: dict[int, Tensor] = {}

        def hook(index: int) -> Callable[[Tensor], None]:
            return lambda grad: found.__setitem__(index, grad.clone())

        weights: list[Any] = list(self._weights)
        hooks = [weight.register_hook(hook(i)) for i, weight in enumerate(weights)]
        try:
            yield found
        finally:
            for each in hooks:
                each.remove()

    def was_right(self, gradients: dict[int, Tensor], logs: Any) -> bool:
        """Whether Keras' step has done what was predicted."""
        if sorted(gradients) != self._used or list(logs) != self._names:
            return False
        real = [gradients[i] for i in self._used] + self._written + list(logs.values())
        predicted, self._predicted = self._predicted, ()
        return all(_same(a, b) for a, b in zip(real, predicted[:-1], strict=True))


@contextmanager
def _overlaid(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object, which may have been replaced already."""
    before = owner.__dict__.get(name)
    owner.__dict__[name] = function
    try:
        yield
    finally:
        del owner.__dict__[name]
        if before is not None:
            owner.__dict__[name] = before


class _Handed(torch.autograd.Function):
    """Sends computed gradients through backward, so that hooks see them."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.gradients = gradients
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        handed, ctx.gradients = (None, *ctx.gradients), None
        return handed


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and bool(torch.equal(a.detach(), b))


def _refuse(graph: Any) -> None:
    """Raise if the next step may need another graph."""
    for node in graph.graph.nodes:
        tags = node.target.tags if isinstance(node.target, OpOverload) else ()
        if torch.Tag.nondeterministic_seeded in tags:
            raise ValueError(f"{node.target} draws random numbers")
        if torch.Tag.data_dependent_output in tags or _sized_by_values(node, tags):
            raise ValueError(f"values decide how large the result of {node.target} is")
        literal = all("lift_fresh" in str(user.target) for user in node.users)
        if node.op == "get_attr" and not literal:
            raise ValueError("a tensor that is no state of the model takes part")


def _sized_by_values(node: Any, tags: Any) -> bool:
    """Whether values decide on the size of a result; indexing does so with masks only."""
    if torch.Tag.dynamic_output_shape not in tags or node.target is not torch.ops.aten.index.Tensor:
        return torch.Tag.dynamic_output_shape in tags
    kinds = [each.meta["tensor_meta"].dtype for each in node.args[1] if each is not None]
    return torch.bool in kinds or torch.uint8 in kinds


def _overlap(gradients: Sequence[Tensor], held: Sequence[Tensor]) -> bool:
    """Whether a gradient shares memory with another tensor."""
    places = [(*_place(each), True) for each in gradients]
    places += [(*_place(each), False) for each in held]
    end_of_all = end_of_gradients = 0
    for start, end, is_gradient in sorted(place for place in places if place[0] < place[1]):
        if start < (end_of_all if is_gradient else end_of_gradients):
            return True
        end_of_all = max(end_of_all, end)
        end_of_gradients = max(end_of_gradients, end) if is_gradient else end_of_gradients
    return False


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's memory and the one after the last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in pairs)
    first = tensor.data_ptr()
    return first, first + (reach * tensor.element_size() if tensor.numel() else 0)


def _packed(data: Any, tensors: Iterator[Tensor]) -> Any:
    """Rebuild the structure of `data` around these tensors."""
    if isinstance(data, dict):
        return {name: _packed(each, tensors) for name, each in data.items()}
    if isinstance(data, list | tuple):
        return type(data)([_packed(each, tensors) for each in data])
    return None if data is None else next(tensors)


# --- a shorter graph with the same bits -----------------------------------------------------------


_aten = torch.ops.aten
#: operators whose result depends on the shape of the argument alone
_SHAPED = (_aten.ones_like.default, _aten.zeros_like.default, _aten.full_like.default)
#: how torch records `detach`: since 2.15 as the latter
_DETACHES = (_aten.detach.default, _aten.alias.default)
#: on Linux there torch computes products with transposed matrices in Arm's library, which takes
#: 80 us and more and uses threads of its own
_ARM = platform.machine() == "aarch64"
#: multiplications of a product that is faster with a copy of the matrix
_SMALL = 1 << 18


def trim(graph: Any) -> None:
    """Fold constants and join common subexpressions.

    Not in a graph that writes into tensors in place: there the same operator on the same tensors
    may give another result.
    """
    if _ARM:
        _copy_transposed(graph)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    if not all(_is_pure(node) for node in nodes):
        return
    _fold(graph, nodes)
    _join(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _copy_transposed(graph: Any) -> None:
    """Copy the transposed matrix of small products, where that gives the same bits."""
    for node in list(graph.graph.nodes):
        if node.target is not _aten.mm.default or node.args[1].target is not _aten.t.default:
            continue
        left, right = (each.meta["val"] for each in node.args)
        if left.numel() * right.shape[1] > _SMALL or not left.is_contiguous():
            continue
        if _same_bits(left, right):
            form = {"memory_format": torch.contiguous_format}
            with graph.graph.inserting_before(node):
                copy = graph.graph.call_function(_aten.clone.default, (node.args[1],), form)
            node.args = (node.args[0], copy)
    graph.recompile()


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether products of such shapes are the same with a copied matrix, by a trial."""
    dice = torch.Generator().manual_seed(0)
    for _ in range(4):
        a = torch.randn(left.shape, generator=dice)
        b = torch.randn(right.shape[::-1], generator=dice).t()
        if not torch.equal(a @ b, a @ b.contiguous()):
            return False
    return left.dtype is torch.float32 and left.device.type == "cpu"


def _is_pure(node: Any) -> bool:
    if isinstance(node.target, OpOverload):
        return not node.target._schema.is_mutable
    return node.target is operator.getitem  # one result of an operator that has several


def _fold(graph: Any, nodes: list[Any]) -> None:
    """Replace operators on literals by their results."""
    values = {n: getattr(graph, n.target) for n in graph.graph.nodes if n.op == "get_attr"}
    for node in nodes:
        returned = any(user.op == "output" for user in node.users)  # and may be written to
        inputs = () if node.target in _SHAPED else node.all_input_nodes
        if returned or not all(each in values for each in inputs):
            continue
        given = (node.args, node.kwargs)
        args, kwargs = map_arg(given, lambda n: values[n] if n in values else _empty(n))
        found = node.target(*args, **kwargs)
        if isinstance(found, Tensor):
            values[node] = found
    for number, (node, value) in enumerate(values.items()):
        users = [user for user in node.users if user not in values]
        if node.op == "get_attr" or not users:
            continue
        name = f"literal_{number}"
        graph.register_buffer(name, value)
        with graph.graph.inserting_before(node):
            literal = graph.graph.get_attr(name)
        for user in users:
            user.replace_input_with(node, literal)


def _empty(node: Any) -> Tensor:
    """Return an empty tensor of the shape of the node's result."""
    like = node.meta["val"]
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _join(graph: Any) -> None:
    """Join equal operators on equal arguments; drop `detach`."""
    known: dict[tuple[Any, str, str], Any] = {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _DETACHES:
            node.replace_all_uses_with(node.args[0])
            continue
        first = known.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
