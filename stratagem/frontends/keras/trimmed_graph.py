"""A traced step without operators that need not run each time; what is left gives the same bits."""

from __future__ import annotations

import operator
import platform
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_arg

from stratagem.compat.torch_names import OpOverload

_aten = torch.ops.aten
#: what depends on the shape of its argument alone
_SHAPED = (_aten.ones_like.default, _aten.zeros_like.default, _aten.full_like.default)
#: on Linux there: torch gives products with transposed matrices to Arm's library, which takes 80 us
#: and more and wakes its own threads, whatever torch is told
_ARM = platform.machine() == "aarch64"
#: multiplications of a product that is faster with a copy of the matrix
_SMALL = 1 << 18


def trim(graph: Any) -> None:
    """Run what depends on no input now, and what is computed twice once.

    A graph that writes into a tensor in place stays as it is, but for products: then the same
    operator on the same tensors may give something else.
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
    """Small products with transposed matrices take copies, if that gives the same bits."""
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
    """Whether products of such shapes are the same with a copy: both add up in one order."""
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
    """Operators on literals alone; their results become literals."""
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
    """Something of the shape that its result has."""
    like = node.meta["val"]
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _join(graph: Any) -> None:
    """The same operator on the same arguments; a detached tensor is the tensor itself."""
    known: dict[tuple[Any, str, str], Any] = {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            continue
        first = known.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
