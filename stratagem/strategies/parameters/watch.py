"""Tells whether somebody has written to what servers keep: weights, and an optimizer's state.

What is written here changes nothing there, so whoever trains asks at times, and sends it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stratagem.state.digest import digest


class Weights:
    """Some tensors, and how they were when they were last looked at."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self.mark(closely=True)

    def mark(self, *, closely: bool) -> None:
        """As they are now is known; `closely`: also what is written past autograd (`p.data`)."""
        self._digests = [digest(t) for t in self._tensors] if closely else None
        self._marks = self._current()

    def _current(self) -> list[tuple[int, int]]:
        return [(t._version, t.data_ptr()) for t in self._tensors]

    def written(self) -> list[int]:
        """The numbers of those that were written to since."""
        now, marks = self._current(), self._marks
        return [i for i, mark in enumerate(now) if mark != marks[i]] if now != marks else []

    def slipped(self) -> list[int]:
        """Of those that were looked at closely, the ones that have changed all the same."""
        if self._digests is None:
            return []
        known = set(self.written())
        return [
            i for i, (t, was) in enumerate(zip(self._tensors, self._digests, strict=True))
            if i not in known and digest(t) != was
        ]  # fmt: skip


class _State(defaultdict[Any, Any]):
    """An optimizer's state that knows whether it was thrown away, though nothing was in it."""

    cleared = False

    def clear(self) -> None:
        self.cleared = True
        super().clear()


class State:
    """The state of torch's optimizer over some parameters, which servers keep."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self._optimizer, self._params = optimizer, params
        self.mark()

    def mark(self) -> None:
        """As it is now is known."""
        self._state = _State(dict, self._optimizer.state)
        self._optimizer.state = self._state
        self._marks = self._current()

    def _current(self) -> list[dict[str, Any]]:
        state = self._optimizer.state
        return [
            {name: (id(v), v._version) if isinstance(v, Tensor) else v
             for name, v in state.get(param, {}).items()}
            for param in self._params
        ]  # fmt: skip

    def changes(self) -> dict[int, dict[str, Any]]:
        """By parameter: what was put in the place of its state since."""
        state, now = self._optimizer.state, self._current()
        everything = state is not self._state or self._state.cleared
        return {
            i: dict(state.get(param, {})) for i, param in enumerate(self._params)
            if everything or now[i] != self._marks[i]
        }  # fmt: skip

    def end(self) -> None:
        """A plain one again."""
        self._optimizer.state = defaultdict(dict, self._optimizer.state)
