"""The optimizer of one server's pieces, stepped with a gradient for each piece.

Beyond torch's own step it can use another learning rate for one step, update single rows where the
optimizer allows that, and avoid fused kernels where they would fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from stratagem.errors import UsageError
from stratagem.state.optimizer_recipe import OptimizerRecipe, build, settings_of, tuned

#: optimizers whose step is not proportional to the learning rate
_OWN_RATE = {"ASGD", "Rprop", "Adafactor"}


class Steps(Protocol):
    """Interface of an optimizer of any library over one server's pieces."""

    def rows_only(self, piece: int) -> bool:
        """Return whether this piece takes sparse gradients only."""

    def step(self, grads: Sequence[Tensor | None], rate: float) -> dict[int, Tensor | None]:
        """Step; return the pieces that moved, each with its rows or None for all of them."""

    def settings(self) -> list[dict[str, Any]]:
        """Return each group's settings as the user gave them."""

    def set_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Change settings; groups name at least those that change."""

    def states(self) -> list[dict[str, Any]]:
        """Copy the state of every piece."""

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over copies of `states`."""


def stepper_for(
    recipe: OptimizerRecipe, pieces: Sequence[tuple[int, Tensor]], values: Tensor
) -> Steps:
    """Make the optimizer of a recipe; Keras is imported for its own optimizers only."""
    if recipe.library == "keras":
        os.environ.setdefault("KERAS_BACKEND", "torch")
        from stratagem.state.keras_stepper import KerasStepper

        return KerasStepper(recipe, pieces, values)
    return Stepper(recipe, pieces, values)


class Stepper:
    """An optimizer over (variable, tensor) pieces, all of them views of `values`."""

    def __init__(
        self, recipe: OptimizerRecipe, pieces: Sequence[tuple[int, Tensor]], values: Tensor
    ) -> None:
        self.name, self.values = recipe.name, values
        self._pieces = list(pieces)
        self._variables = [list(group["variables"]) for group in recipe.groups]
        self._settings = [settings_of(group) for group in recipe.groups]
        group_of = {v: g for g, variables in enumerate(self._variables) for v in variables}
        #: the group of each piece; None where the optimizer does not have the variable
        self.groups = [group_of.get(variable) for variable, _ in pieces]
        self._make()

    def _make(self) -> None:
        groups = tuple(
            {**settings, "variables": variables}
            for settings, variables in zip(self._settings, self._variables, strict=True)
        )
        self.optimizer = build(OptimizerRecipe("torch", self.name, groups), self._pieces)
        #: groups without fused kernels, which refuse sparse tensors, for pieces that got rows
        self._beside: dict[int, dict[str, Any]] = {}

    def rows_only(self, piece: int) -> bool:
        return self.name == "SparseAdam" and self.groups[piece] is not None

    # --- one step -------------------------------------------------------------------------------

    def step(self, grads: Sequence[Tensor | None], rate: float) -> dict[int, Tensor | None]:
        """Step; return the pieces that moved, each with its rows or None for all of them."""
        moved: dict[int, Tensor | None] = {}
        try:
            for i, grad in enumerate(grads):
                if grad is not None and (group := self.groups[i]) is not None:
                    moved[i] = self._give(i, group, grad)
            with self._rate(rate), self._without_fused_beginners():
                self.optimizer.step()
        finally:
            for _, tensor in self._pieces:
                tensor.grad = None  # its memory may be the caller's
        return moved

    def _give(self, piece: int, group: int, grad: Tensor) -> Tensor | None:
        """Set a piece's gradient; return its rows if only these will move."""
        tensor = self._pieces[piece][1]
        if grad.dtype is not tensor.dtype:
            grad = grad.to(tensor.dtype)
        # A sparse vector is made dense: torch adds it to a view at twice the view's offset.
        if grad.is_sparse and (not grad.dense_dim() or not self._moves_rows_alone(group)):
            grad = grad.to_dense()
        tensor.grad = grad
        if not grad.is_sparse:
            return None
        self._stand_beside(group, tensor)
        return grad.indices()[0]

    def _moves_rows_alone(self, group: int) -> bool:
        settings = self._settings[group]
        if self.name == "SGD":
            return not settings["momentum"] and not settings["weight_decay"]
        if self.name == "SparseAdam":
            return True
        return self.name == "Adagrad" and not settings["weight_decay"]

    def _stand_beside(self, group: int, tensor: Tensor) -> None:
        main = self.optimizer.param_groups[group]
        if main.get("fused") and any(tensor is other for other in main["params"]):
            main["params"] = [other for other in main["params"] if other is not tensor]
            if group not in self._beside:
                self._beside[group] = {**main, "fused": False, "params": []}
                self.optimizer.param_groups.append(self._beside[group])
            self._beside[group]["params"].append(tensor)

    @contextmanager
    def _rate(self, rate: float) -> Iterator[None]:
        if rate == 1.0:
            yield
        elif self.name in _OWN_RATE:
            before = self.values.clone()
            yield
            self.values.copy_(before.lerp_(self.values, rate))
        else:
            with _changed(self.optimizer.param_groups, "lr", lambda lr: lr * rate):
                yield

    @contextmanager
    def _without_fused_beginners(self) -> Iterator[None]:
        """Avoid fused SGD, which fails where only some parameters have momentum yet."""
        mixed = [
            group
            for group in self.optimizer.param_groups
            if self.name == "SGD"
            and group.get("fused")
            and group["momentum"]
            and len(
                {
                    self.optimizer.state.get(p, {}).get("momentum_buffer") is None
                    for p in group["params"]
                    if p.grad is not None
                }
            )
            > 1
        ]
        with _changed(mixed, "fused", lambda fused: False):
            yield

    # --- settings and state -----------------------------------------------------------------------

    def settings(self) -> list[dict[str, Any]]:
        return [dict(settings) for settings in self._settings]

    def set_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if len(groups) != len(self._settings):
            raise UsageError(
                f"settings of {len(groups)} groups came for an optimizer of {len(self._settings)}; "
                "groups cannot be added once training has begun."
            )
        for i, (own, given) in enumerate(zip(self._settings, groups, strict=True)):
            own.update(settings_of(given))
            main = self.optimizer.param_groups[i]
            main.update(tuned(self.name, own, main["params"]))
            if i in self._beside:
                self._beside[i].update({**own, "fused": False})

    def states(self) -> list[dict[str, Any]]:
        """Copy the state of every piece."""
        return [_copy(self.optimizer.state.get(tensor, {})) for _, tensor in self._pieces]

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over copies of `states`; a piece without state starts afresh."""
        self._make()
        for i, ((_, tensor), state) in enumerate(zip(self._pieces, states, strict=True)):
            if self.groups[i] is not None:
                self.optimizer.state[tensor].update(_copy(state, tensor))


def _copy(state: Mapping[str, Any], like: Tensor | None = None) -> dict[str, Any]:
    copied: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            value = value.detach().clone()
            if like is not None and value.dim() and value.is_floating_point():
                value = value.to(like.device, like.dtype)
        copied[key] = value
    return copied


@contextmanager
def _changed(
    groups: Sequence[dict[str, Any]], key: str, change: Callable[[Any], Any]
) -> Iterator[None]:
    """Change a setting of these groups inside the block."""
    before = [group[key] for group in groups]
    for group, value in zip(groups, before, strict=True):
        group[key] = change(value)
    try:
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group[key] = value
