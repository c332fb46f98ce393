"""What a backward pass of a custom loop tells the other replicas, and how it is read at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stratagem.training.loss_terms import Term, read_count
from stratagem.training.row_axis import only_input

_MEAN = 1  # among torch's reductions
_SCALES = ("MulBackward0", "DivBackward0")


class Reading(NamedTuple):
    """What a backward pass of one replica tells the others; the numbers are added up by share."""

    #: what the gradient was multiplied by at the loss
    factor: float | Tensor = 1.0
    #: how far apart the factors of several terms are
    spread: float | Tensor = 0.0
    #: where no unit was agreed on: a mark of the number of values in a row, and its square
    mark: float = 0.0

    #: of the share's value, for each of its rows, where several are averaged
    weight: float | Tensor = 1.0
    #: whether the loss is a sum, and nothing else
    summed: bool = False

    def notes(self) -> list[float | Tensor]:
        if type(self.factor) is float and self[:3] == (1.0, 0.0, 0.0):
            return AS_ROWS
        return [self.factor, self.spread, self.mark, self.mark * self.mark]


BY_ROWS = Reading()
#: the notes of a gradient that weighs as much as its rows, as most do
AS_ROWS: list[float | Tensor] = [1.0, 0.0, 0.0, 0.0]
#: how many numbers replicas tell each other
NOTES = len(AS_ROWS)


class UsualLoss:
    """One of torch's losses, a mean, that a loop has ended in for some passes: it is read without
    looking further down, but for passes 8, 16, 32, ..., which are read in full."""

    def __init__(self) -> None:
        #: its name, how many values a row of it has, and in what unit replicas count them
        self._known: tuple[str, float, float] | None = None
        #: the class of its node; what all passes tell that leave no value out
        self._node: type[Any] = type(None)
        self._whole, self._counted = BY_ROWS, False

    def learn(self, loss: Tensor, term: Term, rows: int, unit: float) -> None:
        """A pass was read in full, and this is its only term."""
        node, name = term.node, term.node.name()
        plain = node is loss.grad_fn and hasattr(node, "_saved_reduction") and not term.picked
        known = plain and not name.startswith("Multi")
        self._known = (name, term.full / rows, unit) if known else None
        self._node = type(node) if known and term.full == unit * rows else type(None)
        self._whole, self._counted = Reading(weight=unit), term.counted

    def reading(self, loss: Tensor, rows: int, passes: int) -> Reading | None:
        """What the other replicas are told, where no value of `rows` rows is left out or weighs
        more than another: nothing is multiplied then. None: see `term`."""
        node: Any = loss.grad_fn
        if type(node) is not self._node or passes <= 4 or not passes & (passes - 1) or not rows:
            return None
        if node is None or node._saved_reduction != _MEAN:
            return None
        if self._counted:
            total = node._saved_total_weight
            count = float(total) if total.is_cpu else 0.0  # not to wait for the device
            full = node._saved_target.numel()  # half of the rows may weigh twice as much
        else:
            count = full = node._saved_self.numel()
        return self._whole if count == full == self._whole.weight * rows else None

    def term(self, loss: Tensor, rows: int, passes: int) -> tuple[Term, float] | None:
        """The only term of a loss over `rows` rows, and its unit; None where it is to be read."""
        node: Any = loss.grad_fn
        if self._known is None or passes <= 4 or not passes & (passes - 1) or not rows:
            return None
        name, per_row, unit = self._known
        if node is None or node.name() != name or node._saved_reduction != _MEAN:
            return None
        counted = name.startswith("NllLoss")
        full = (node._saved_target if counted else node._saved_self).numel()
        if full != per_row * rows:
            return None
        count = read_count(node._saved_total_weight) if counted else float(full)
        return Term(node, "mean", count, full, counted=counted), unit


# --- what is done to gradients at a node of the loss ---------------------------------------------


def times(factor: float | Tensor) -> Callable[[Any], Any]:
    """Multiply what comes in."""
    return lambda grads: tuple(g if g is None else g * factor for g in grads)


def zeros(gradients: Any, _: Any) -> Any:
    """Let nothing out."""
    return tuple(g if g is None else torch.zeros_like(g) for g in gradients)


def zeroed(node: Any) -> list[Any]:
    """Nothing counts: what is divided by 0 here or just below is no number, and is to be 0."""
    handles = [node.register_hook(zeros)]
    while (node := only_input(node)) is not None and node.name() in _SCALES:
        handles.append(node.register_hook(zeros))
    return handles
