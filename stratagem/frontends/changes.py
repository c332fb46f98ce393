"""What callbacks have changed on the chief, which the other replicas are to follow, or refuse.

    weights            and buffers, also through `.data`
    traits             numbers and switches of the model (traits.py)
    optimizer's state  of which each replica has its own: refused
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.frontends import traits
from stratagem.state.digest import digest


class Changes:
    """A model between two moments at which all replicas have the same.

    Args:
        model: None where nobody changes anything.
        own: whether there is code among the callbacks that is not ours.
    """

    def __init__(self, model: Any, *, own: bool) -> None:
        self._model, self._own = model, own
        #: whether nobody has to follow; whether all replicas read the chief's very parameters
        self.alone = self.in_common = False
        self._marks: list[Any] = []
        self._traits: traits.Traits | None = None
        self._state: list[Any] = []

    def settle(self) -> None:
        """Whatever the model is now is known to every replica."""
        self._marks = self._current_marks()
        self._traits = self._current_traits()
        self._state = self._current_state()

    def _current_state(self) -> list[Any]:
        """What tells whether somebody has changed the optimizer's state.

        What all replicas share may be written to, but not replaced.
        """
        if self._model is None or not self._own or self.alone or self._model.optimizer is None:
            return []
        state = self._model.optimizer.state
        return [
            (name, id(v), 0 if self.in_common else v._version) if isinstance(v, Tensor)
            else (name, v)
            for group in self._model.optimizer.param_groups for param in group["params"]
            for name, v in state.get(param, {}).items()
        ]  # fmt: skip

    def check_state(self) -> None:
        """Refuse a change of the optimizer's state, which other replicas have for themselves."""
        if self._state != self._current_state():
            raise NotDistributable(
                "a callback changed the optimizer's state (model.load does that, too), which the "
                "other replicas do not follow; do it before fit, or change the weights alone: "
                "model.module.load_state_dict(...)."
            )

    def _current_marks(self) -> list[Any]:
        """What tells whether somebody has written: `t.data` has no version, so its content must."""
        if self._model is None or self.alone:
            return []
        params = list(self._model.module.parameters())
        buffers = list(self._model.module.buffers())
        marks: list[Any] = [(t._version, t.data_ptr()) for t in params + buffers]
        if self._own:
            marks += [digest(t) for t in (buffers if self.in_common else params + buffers)]
        return marks

    def weights_changed(self) -> bool:
        """Whether a callback wrote into the weights since they were settled."""
        return self._marks != self._current_marks()

    def written(self) -> list[Tensor]:
        """The parameters and buffers that a callback wrote into since they were settled."""
        if self._model is None or not self.weights_changed():
            return []
        params, buffers = list(self._model.module.parameters()), self._model.module.buffers()
        state = [*params, *buffers]
        before, now = self._marks, self._current_marks()
        if len(before) != len(now) or len(now) not in (len(state), 2 * len(state)):
            return state
        each = range(0, len(now), len(state))
        return [t for i, t in enumerate(state) if any(before[i + k] != now[i + k] for k in each)]

    def _current_traits(self) -> traits.Traits | None:
        """Only callbacks of one's own change them."""
        if self._model is None or not self._own or self.alone:
            return None
        return traits.look(self._model.module, self._model.loss)

    def new_traits(self) -> list[Any]:
        """What a callback changed in the model besides weights, since it was settled."""
        now = self._current_traits()
        return [] if now is None or self._traits is None else traits.changes(self._traits, now)
