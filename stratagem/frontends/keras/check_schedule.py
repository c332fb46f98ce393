"""Which batches of a Keras model have rows tried before their step (row_check.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
from torch import Tensor
from torch.nn import ParameterDict

from stratagem.frontends.keras.dry_step import modules_of
from stratagem.frontends.keras.row_check import judged_by_own
from stratagem.frontends.passed_trials import PassedTrials, kinds_of, look_at

#: attributes that a call sets anew, or that have no part in a trial; modules are in the list
_NOT_TRIED = frozenset({"_modules", "history", "optimizer", "_stratagem"})


class CheckSchedule:
    """The first batch of each kind of step; where the step, the loss or a metric is the user's own,
    the 2nd, 4th, 8th, ... too, and any with a kind of value that no tried row has had: a mask may
    come later. Elsewhere a call that finds everything as an earlier one need not try it again."""

    def __init__(self, model: Any, passed: PassedTrials | None = None) -> None:
        self.model, self._passed = model, passed or PassedTrials()
        self._seen: dict[str, int] = {}
        #: the number of the batch that is tried next; none where it is missing and one was seen
        self._next: dict[str, float] = {}
        #: by step: the kinds of values that tried rows have had
        self._tried: dict[str, set[Kind]] = {}

    def anew(self) -> CheckSchedule:
        """For the next call, which knows what was passed."""
        return CheckSchedule(self.model, self._passed)

    def before(self, step: str, data: Any, examples: int, check: Callable[[Any], bool]) -> None:
        """Asked before every step: have rows of this batch tried, the first of those that it is
        given, if it is its turn; `check` says whether they were."""
        seen = self._seen[step] = self._seen.get(step, 0) + 1
        turn = self._next.get(step, 1)
        if examples < 2 or turn == float("inf"):
            return
        if not judged_by_own(self.model, step):
            self._next[step] = float("inf")
            self._passed.unless_passed(step, partial(_look, self.model, data), lambda: check(data))
            return
        tried = self._tried.setdefault(step, set())
        found = _kinds(data) - tried
        if seen < turn and not found:
            return
        first = sorted({_first(data, kind) for kind in found})
        order = [*first, *(i for i in range(examples) if i not in first)] if found else None
        again = check(data if order is None else keras.tree.map_structure(_ordered(order), data))
        tried |= found
        if seen >= turn or not again:
            self._next[step] = 2 * seen if again else float("inf")


#: the number of a tensor in a batch, and what masks are made of: "zero", "negative" or "nan"
Kind = tuple[int, str]


def _kinds(data: Any) -> set[Kind]:
    """Which are in a batch; on a GPU it would be waited for, so nothing is known there."""
    found = set()
    for i, leaf in enumerate(keras.tree.flatten(data)):
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.numel() and leaf.device.type == "cpu":
            low = float(leaf.min()) if not leaf.is_complex() else 0.0
            if low != low or low < 0:
                found.add((i, "negative" if low < 0 else "nan"))
            if int(leaf.count_nonzero()) < leaf.numel():
                found.add((i, "zero"))
    return found


def _first(data: Any, kind: Kind) -> int:
    """The first row that has it."""
    leaf, (_, name) = keras.tree.flatten(data)[kind[0]], kind
    has = leaf == 0 if name == "zero" else leaf < 0 if name == "negative" else leaf != leaf
    return int(has.reshape(len(leaf), -1).any(1).int().argmax())


def _ordered(order: list[int]) -> Callable[[Any], Any]:
    return lambda leaf: leaf[order] if isinstance(leaf, Tensor) and leaf.dim() else leaf


def _look(model: Any, data: Any) -> list[Any]:
    """Everything that a trial depends on, as far as it can be seen."""
    parts = [each for each in modules_of(model) if not isinstance(each, ParameterDict)]
    losses = keras.tree.flatten(model.loss)
    return [kinds_of(data), look_at([*parts, *losses], "call", but=_NOT_TRIED)]
