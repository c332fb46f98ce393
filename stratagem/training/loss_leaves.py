"""The parameters that a loss reaches: prepared ones, and such as were forgotten."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from stratagem.errors import UsageError


def trains(losses: Sequence[Tensor], ours: Callable[[Tensor], int]) -> bool:
    """Whether losses reach a parameter that `ours` counts; a custom function may hide some."""
    for node in _nodes(losses):
        leaf = getattr(node, "variable", None)
        if isinstance(node, BackwardCFunction) if leaf is None else ours(leaf):
            return True
    return False


def _nodes(losses: Sequence[Tensor]) -> Iterator[Any]:
    """Iterate over the nodes of a graph; those of the last layer's weights mostly come soon."""
    todo: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)
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
