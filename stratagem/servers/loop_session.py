"""The training of a custom loop on one worker, and the loop's own writes to weights and state."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable
from stratagem.servers.session import Session
from stratagem.state.change_tracker import KeptState, TensorTracker


class LoopSession(Session):
    """Pushes gradients as they are when the loop calls `step`: it may have clipped them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        #: by variable: the gradient that backward left, and its version
        self._made: dict[int, tuple[Tensor | None, int]] = {}
        #: the version of the last push, and the settings then
        self._version, self._last = -1, list[dict[str, Any]]()
        super().__init__(*args, **options)

    def _hook(self, index: int) -> Any:
        def ready(param: Tensor) -> None:
            self._note(index, param)

        return ready

    def _note(self, index: int, param: Tensor) -> None:
        grad = param.grad
        self._made[index] = grad, 0 if grad is None else grad._version

    def made(self) -> None:
        """Note the all-reduced gradients of several devices as backward's."""
        for index, param in enumerate(self.params):
            self._note(index, param)

    def collect(self) -> None:
        """Copy all gradients to the outbox."""
        if self.plan.parts > 1:
            self._check_whole()
        self.worker.memory.take_all()

    def _check_whole(self) -> None:
        """Refuse gradients of a part of a batch that were changed since backward."""
        for index, param in enumerate(self.params):
            grad = param.grad
            made, version = self._made.get(index, (None, 0))
            if grad is not None and (grad is not made or grad._version != version):
                raise NotDistributable(sentence("servers", "clip in a loop", parts=self.plan.parts))

    def forget_gradients(self) -> None:
        super().forget_gradients()
        self._made.clear()

    def settings_of_update(self) -> list[dict[str, Any]]:
        """Return the optimizer's settings, which must be the same in all parts of a batch."""
        settings, version = self.settings(), self.worker.version
        if self.plan.parts > 1 and version == self._version and settings != self._last:
            raise NotDistributable(
                "the optimizer's settings (its learning rate?) were changed between two parts of "
                "one batch: a scheduler is stepped by batch, and the chief does several parts of "
                f"each, since not all of {self.plan.workers} workers are here; start them all, "
                "or step the scheduler by epoch."
            )
        self._version, self._last = version, settings
        return settings


class LoopWrites:
    """Sends the loop's own writes to the servers, or refuses them."""

    def __init__(self, session: LoopSession) -> None:
        self._session = session
        self._weights, self._closely = TensorTracker(session.params, closely=True), False
        self._state = KeptState(session.optimizer, session.params)

    def mark(self) -> None:
        """Remember the weights, by content, as those of the servers."""
        self._weights.mark(closely=True)

    def begin_batch(self, number: int) -> None:
        """Mark the weights of batch `number` of a pass; sometimes by content, which is slow."""
        self._closely = number & (number - 1) == 0
        self._weights.mark(closely=self._closely)

    def pushed(self) -> None:
        """Mark the weights after a push; without a barrier newer values may be on their way."""
        self._weights.mark(closely=self._closely and self._session.plan.parts > 1)
        self._state.gone_on()

    def bring(self, *, values: bool, in_pass: bool) -> None:
        """Read the optimizer's state, and with `values` the weights, unless the loop wrote them."""
        if values and in_pass:
            self.check_weights()
        elif values and self._session.worker.is_chief:
            self.send()
        elif values:
            values = not self._weights.changes()  # the chief's come with the next pass
        self._session.read_state(values=values)
        if values:
            self._weights.mark(closely=True)
        self._state.mark()

    def send(self) -> None:
        """Between two passes: as the chief, send what was written since the last pass."""
        session, weights = self._session, self._weights
        if not session.worker.is_chief:
            session.worker.memory.take_back()  # the chief's values come
            return
        if written := weights.changes():
            session.worker.memory.take_back()
            session.worker.assign(session.params, written)
            weights.mark(closely=True)
        if changes := self._state.changes():
            session.send_state(changes)
            self._state.mark()

    def check_weights(self) -> None:
        """Refuse weights that were written in the loop."""
        if self._weights.changes():
            raise NotDistributable(sentence("servers", "weights written in a loop"))

    def check_state(self) -> None:
        """Refuse an optimizer's state that was changed in the loop."""
        if self._session.worker.is_chief and self._state.changes():
            raise NotDistributable(sentence("servers", "optimizer state written in a loop"))

    def remove(self) -> None:
        """Give the optimizer a plain state again."""
        self._state.end()
