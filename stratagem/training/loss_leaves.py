"""The parameters that a loss reaches: prepared ones, and such as were forgotten."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from stratagem.errors import UsageError


class Reach:
    """Whether losses reach a parameter that `ours` counts; a custom function may hide some.

    Tries the way to the one found last first: the graphs of a model are alike.
    """

    def __init__(self) -> None:
        #: which input to follow at each node
        self._way: list[int] = []

    def __call__(self, losses: Sequence[Tensor], ours: Callable[[Tensor], int]) -> bool:
        return _is_ours(self._follow(losses[0].grad_fn), ours) or self._search(losses, ours)

    def _follow(self, node: Any) -> Any:
        for turn in self._way:
            below = node.next_functions if node is not None else ()
            node = below[turn][0] if turn < len(below) else None
        return node

    def _search(self, losses: Sequence[Tensor], ours: Callable[[Tensor], int]) -> bool:
        above: dict[Any, tuple[Any, int]] = {}
        for node in _nodes(losses, above):
            if _is_ours(node, ours):
                self._way = []
                while node in above:
                    node, turn = above[node]
                    self._way.insert(0, turn)
                return True
        return False


def _is_ours(node: Any, ours: Callable[[Tensor], int]) -> bool:
    leaf = getattr(node, "variable", None)
    return isinstance(node, BackwardCFunction) if leaf is None else ours(leaf) > 0


def _nodes(
    losses: Sequence[Tensor], above: dict[Any, tuple[Any, int]] | None = None
) -> Iterator[Any]:
    """Iterate over the nodes of a graph; those of the last layer's weights mostly come soon.
    `above` gets from where each was reached."""
    todo: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        for turn, (below, _) in enumerate(node.next_functions):
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)
                if above is not None:
                    above[below] = node, turn
        yield node


def forgotten(
    losses: Sequence[Tensor], ours: Callable[[Tensor], int], rows: int | None
) -> Tensor | None:
    """Return a leaf that a loss trains beside those that `ours` counts: a parameter, or another
    tensor that has no axis of `rows`, as inputs have."""
    for node in _nodes(losses):
        leaf = getattr(node, "variable", None)
        # others with hooks are frozen, or of a model that is gone: their hooks say so
        if isinstance(leaf, Tensor) and not ours(leaf) and not leaf._post_accumulate_grad_hooks:
            is_input = not isinstance(leaf, nn.Parameter) and rows in (None, *leaf.shape)
            if not is_input:
                return leaf
    return None


def refuse_unprepared(leaf: Tensor | None) -> None:
    """Refuse a leaf that is trained and was not prepared."""
    if leaf is not None:
        raise UsageError(
            f"prepare {_name(leaf)}, too, since this loss trains it and each replica would "
            "train it on rows of its own: put it and the model into one nn.ModuleList and "
            "prepare that, or call strategy.prepare(module, its_optimizer). If it is not to "
            "be trained, requires_grad_(False) says so."
        )


def _name(param: Tensor) -> str:
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module):
            for name, own in each.named_parameters(recurse=False):
                if own is param:
                    return f"parameter {name!r} of a {type(each).__name__}"
    what = "parameter" if isinstance(param, nn.Parameter) else "trained tensor"
    return f"a {what} of shape {list(param.shape)}"
