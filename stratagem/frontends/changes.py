"""What callbacks have changed on the chief, which the other replicas are to follow, or refuse.

    weights            and buffers, also through `.data`
    traits             numbers and switches of the model (traits.py)
    dataset            its numbers and switches, as the model's
    optimizer's state  of which each replica has its own: refused
    arrays             that `fit` was given, of which each replica has a copy: refused
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.frontends import loss_buffers, traits
from stratagem.frontends.feeds import Feed
from stratagem.state.digest import digest
from stratagem.strategies.likeness import some_rows


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
        #: the data of the training
        self.feed: Feed | None = None
        self._marks: list[Any] = []
        self._loss: list[Any] = []
        self._data: list[Any] = []
        self._groups: list[list[int]] = []
        self._traits: traits.Traits | None = None
        self._state: list[Any] = []

    def settle(self) -> None:
        """Whatever the model is now is known to every replica."""
        self._marks, self._loss = self._current_marks(), self._current_loss()
        self._traits = self._current_traits()
        self._state, self._groups = self._current_state(), self._current_groups()
        self._data = self._current_data()

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

    def _current_groups(self) -> list[list[int]]:
        if self._model is None or not self._own or self.alone or self._model.optimizer is None:
            return []
        return [[id(p) for p in group["params"]] for group in self._model.optimizer.param_groups]

    def _current_data(self) -> list[Any]:
        """What tells whether somebody has written into arrays: numpy's have no version."""
        if self._model is None or not self._own or self.alone or self.feed is None:
            return []
        return [
            (t._version, t.data_ptr(), None if (some := some_rows(t)) is None else digest(some))
            for t in self.feed.tensors()
        ]

    def check_data(self) -> None:
        """Refuse a change of the data itself."""
        if self._data != self._current_data():
            raise NotDistributable(
                "a callback wrote into the data that it was called for, and the other replicas "
                "have copies of it; do it between two calls, or give a dataset whose numbers and "
                "switches the callback changes."
            )

    def check_state(self) -> None:
        """Refuse a change of the optimizer's state, which other replicas have for themselves."""
        if self._groups != self._current_groups():
            raise NotDistributable(
                "a callback changed which parameters the optimizer has (add_param_group?), and the "
                "other replicas have optimizers of their own; do it between two fits, or give it "
                "all parameters and switch requires_grad at the beginning of an epoch."
            )
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

    def _current_loss(self) -> list[Any]:
        """The same of what the loss holds, of which each replica has its own."""
        if self._model is None or not self._own or self.alone:
            return []
        held = loss_buffers.weights(self._model.loss)
        return [(t._version, t.data_ptr(), digest(t)) for t in held]

    def loss_changed(self) -> bool:
        """Whether a callback wrote into parameters of the loss since it was settled."""
        return self._loss != self._current_loss()

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
        data = None if self.feed is None else self.feed.dataset
        return traits.look(self._model.module, self._model.loss, data)

    def new_traits(self) -> list[Any]:
        """What a callback changed in model and dataset besides weights, since it was settled."""
        now = self._current_traits()
        return [] if now is None or self._traits is None else traits.changes(self._traits, now)
