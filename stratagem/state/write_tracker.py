"""Which tensors were written to since the last look: weights, and an optimizer's state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stratagem.state.digest import digest


class WriteTracker:
    """Tells which of some tensors were written to since the mark, or given other memory."""

    def __init__(self, tensors: Sequence[Tensor] = (), *, closely: bool = False) -> None:
        self._tensors = tensors
        self.mark(closely=closely)

    def mark(self, tensors: Sequence[Tensor] | None = None, *, closely: bool = False) -> None:
        """Take the tensors as they are now for known; `closely`: also their content, so that
        `slipped` sees what is written past autograd (`p.data`)."""
        self._tensors = self._tensors if tensors is None else tensors
        self._digests = [digest(t) for t in self._tensors] if closely else None
        self._marks = {id(t): (t._version, t.data_ptr()) for t in self._tensors}

    def written(self, tensors: Sequence[Tensor] | None = None) -> list[int]:
        """The positions of those that were written to since; one that was not there at the mark
        counts if it was written to at all."""
        known = self._marks
        return [
            i
            for i, t in enumerate(self._tensors if tensors is None else tensors)
            if known.get(id(t), (0, t.data_ptr())) != (t._version, t.data_ptr())
        ]

    def slipped(self) -> list[int]:
        """Of those that were marked closely, the ones that have changed without being written."""
        if self._digests is None:
            return []
        known = set(self.written())
        return [
            i
            for i, (t, was) in enumerate(zip(self._tensors, self._digests, strict=True))
            if i not in known and digest(t) != was
        ]


class _State(defaultdict[Any, Any]):
    """An optimizer's state that knows whether it was thrown away, though nothing was in it."""

    cleared = False

    def clear(self) -> None:
        self.cleared = True
        super().clear()


class TrackedState:
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
            {
                name: (id(v), v._version) if isinstance(v, Tensor) else v
                for name, v in state.get(param, {}).items()
            }
            for param in self._params
        ]

    def changes(self) -> dict[int, dict[str, Any]]:
        """By parameter: what was put in the place of its state since."""
        state, now = self._optimizer.state, self._current()
        everything = state is not self._state or self._state.cleared
        return {
            i: dict(state.get(param, {}))
            for i, param in enumerate(self._params)
            if everything or now[i] != self._marks[i]
        }

    def end(self) -> None:
        """A plain one again."""
        self._optimizer.state = defaultdict(dict, self._optimizer.state)
