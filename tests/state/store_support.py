"""A model spread over several stores beside the same model under one plain torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.state.optimizer_recipe import OptimizerRecipe, describe, elementwise
from stratagem.state.partition import (
    FixedShards,
    assemble,
    assemble_values,
    cut,
    cut_values,
    partition,
    state_dict,
)
from stratagem.state.store import Store

SHAPES: list[tuple[int, ...]] = [(7, 3), (5,), (), (2, 2, 2), (1, 4)]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def parameters(
    seed: int = 0, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


class Servers:
    """K stores that hold what `params` are, with the optimizer that `make` makes of them."""

    def __init__(
        self,
        params: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        servers: int,
        shards: int = 0,
    ) -> None:
        self.shapes = [tuple(p.shape) for p in params]
        self.recipe: OptimizerRecipe = describe(optimizer, params)
        self.pieces = partition(
            self.shapes,
            4,
            servers,
            FixedShards(shards or servers),
            whole=not elementwise(self.recipe),
        )
        self.own = [[p for p in self.pieces if p.server == s] for s in range(servers)]
        dtype = params[0].dtype
        self.stores = [Store(own, self.shapes, dtype, self.recipe) for own in self.own]
        for own, store in zip(self.own, self.stores, strict=True):
            store.restore(cut_values(params, own).to(dtype), None)

    def flat(self, whole: Sequence[Tensor | None], server: int) -> tuple[Tensor, list[bool]]:
        """Return one server's part of a gradient, garbage where unused, and what is used."""
        filled = [
            torch.full(shape, 1e9) if tensor is None else tensor
            for tensor, shape in zip(whole, self.shapes, strict=True)
        ]
        used = [whole[piece.variable] is not None for piece in self.own[server]]
        return cut_values(filled, self.own[server]).clone(), used

    def each(self, whole: Sequence[Tensor | None], do: Callable[..., Any]) -> None:
        """`do(store, flat gradient, used)` on every server."""
        for i, store in enumerate(self.stores):
            do(store, *self.flat(whole, i))

    def values(self) -> list[Tensor]:
        flats = {i: store.values for i, store in enumerate(self.stores)}
        return assemble_values(self.pieces, flats, self.shapes)

    def states(self) -> dict[int, dict[str, Any]]:
        taken = [
            (p, s)
            for own, store in zip(self.own, self.stores, strict=True)
            for p, s in zip(own, store.snapshot().states, strict=True)
        ]
        return assemble([p for p, _ in taken], [s for _, s in taken], self.shapes)

    def state_dict(self) -> dict[str, Any]:
        now = self.stores[0].settings()
        groups = [
            {**settings, "variables": group["variables"]}
            for group, settings in zip(self.recipe.groups, now, strict=True)
        ]
        return state_dict(self.states(), groups)

    def load(self, whole: dict[int, dict[str, Any]]) -> None:
        for own, store in zip(self.own, self.stores, strict=True):
            store.restore(None, cut(whole, own, self.shapes))


def gradients(
    step: int, shapes: Sequence[tuple[int, ...]] = SHAPES, unused: Sequence[int] = ()
) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1000 + step)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [None if i in unused else tensor for i, tensor in enumerate(drawn)]


def close(ours: Sequence[Tensor], plain: Sequence[Tensor], tolerance: float = 2e-6) -> None:
    for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
        torch.testing.assert_close(
            a, b.detach(), rtol=tolerance, atol=tolerance, msg=lambda m, i=i: f"variable {i}: {m}"
        )
