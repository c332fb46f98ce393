"""Who computed what: rows that went through the layers of each process, and weights that moved.

A strategy that does nothing gives the answer of one device, too. So the helpers that compare with
one device also look into every process: each replica or worker must have computed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import stratagem as sg

T = TypeVar("T")
Read = Callable[[], Any]


class Watch:
    """Sees every call of a layer in this process, torch's and Keras'."""

    def __init__(self, trained: bool = False, keras: bool = True) -> None:
        self.rows = 0
        #: whether rows count only where a backward pass may follow
        self.trained = trained
        #: how to read each layer's weights, and what they were when it was first called
        self.first: dict[int, list[tuple[Read, Tensor]]] = {}
        self.ends: list[Callable[[], None]] = []
        hook = torch.nn.modules.module.register_module_forward_pre_hook(self._module_called)
        self.ends.append(hook.remove)
        if keras:
            self._watch_keras()

    def _watch_keras(self) -> None:
        try:
            import keras
        except ImportError:  # an optional dependency: without it no layer of its is called
            return
        plain = keras.Layer.__call__

        @wraps(plain)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            result = plain(layer, *args, **kwargs)
            reads = [partial(_value, v) for v in layer.trainable_variables]
            self._called(layer, (*args, *kwargs.values()), reads)
            return result

        keras.Layer.__call__ = call
        self.ends.append(lambda: setattr(keras.Layer, "__call__", plain))

    def _module_called(self, module: nn.Module, args: Any) -> None:
        names = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
        self._called(module, args, [partial(getattr, module, name) for name in names])

    def _called(self, layer: Any, args: Any, reads: list[Read]) -> None:
        if torch.is_grad_enabled() or not self.trained:
            self.rows += _rows(args)
        if id(layer) in self.first:
            return
        weights = [read() for read in reads]
        if weights and all(isinstance(w, Tensor) and not w.is_meta for w in weights):
            copies = [w.detach().clone() for w in weights]
            self.first[id(layer)] = list(zip(reads, copies, strict=True))

    def end(self) -> None:
        for each in self.ends:
            each()

    def moved(self) -> float:
        """How far any weight is from what it was when its layer was first called."""
        pairs = [(read(), first) for each in self.first.values() for read, first in each]
        gaps = [(now.detach().double() - first.double()).abs() for now, first in pairs]
        return max((float(gap.max()) for gap in gaps if gap.numel()), default=0.0)


def _value(variable: Any) -> Any:
    """A Keras variable's tensor."""
    return variable.value


def _rows(args: Iterable[Any]) -> int:
    """Of the first real tensor or array among the arguments."""
    for each in args:
        if isinstance(each, dict):
            each = tuple(each.values())
        if isinstance(each, list | tuple):
            found = _rows(each)
            if found:
                return found
        elif type(each).__module__ != "keras.src.backend.common.keras_tensor":
            shape = getattr(each, "shape", ())
            if len(shape) and not getattr(each, "is_meta", False):
                return int(shape[0])
    return 0


_watch: Watch | None = None


def _begin(trained: bool = False, keras: bool = True) -> None:
    global _watch
    if _watch is not None:
        _watch.end()
    _watch = Watch(trained, keras)


def _end() -> tuple[int, float]:
    global _watch
    if _watch is None:
        return 0, 0.0
    _watch.end()
    found, _watch = (_watch.rows, _watch.moved()), None
    return found


@dataclass(frozen=True)
class Work:
    """What one training took: rows through layers in each process, and how far weights moved."""

    rows: list[int]
    moved: float


def watched(
    play: Callable[[], T],
    where: sg.Strategy | None = None,
    *,
    trained: bool = False,
    keras: bool = True,
) -> tuple[T, Work]:
    """What `play` returned, and what it took on this process or on each one of the strategy.

    trained: count rows only where a backward pass may follow, as in a training's forward passes.
    keras: whether layers of Keras are watched, too, which imports it.
    """

    def everywhere(function: Callable[[], Any]) -> list[Any]:
        return [function()] if where is None else where.run(function)

    everywhere(partial(_begin, trained, keras))
    try:
        result = play()
    except BaseException:
        _end()  # the others may be gone; if not, they begin anew
        raise
    found = everywhere(_end)
    return result, Work([rows for rows, _ in found], max(moved for _, moved in found))


def assert_work(alone: Work, spread: Work, *, shared: bool = True, moves: bool = True) -> None:
    """Every replica did at least a quarter of its fair share, and training moved weights.

    shared: False where one replica rightly has nothing to do, and where replicas were started anew
        in between: what they had counted is gone.
    moves: False where weights rightly stay as they were, or become NaN.
    """
    if shared:
        least = sum(alone.rows) / len(spread.rows) / 4
        assert min(spread.rows) >= least > 0, (
            f"rows through layers: {spread.rows}, on one device {alone.rows}"
        )
    assert (spread.moved > 1e-4) == moves, f"the largest change of a weight is {spread.moved}"
