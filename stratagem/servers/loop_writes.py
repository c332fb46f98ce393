"""What a custom loop writes by itself: weights and the optimizer's state, which servers keep."""

from __future__ import annotations

from stratagem.errors import NotDistributable
from stratagem.servers.loop_session import LoopSession
from stratagem.state.change_tracker import KeptState, TensorTracker


class LoopWrites:
    """Sends the loop's own writes to the servers, or refuses them."""

    def __init__(self, session: LoopSession) -> None:
        self._session = session
        self._weights, self._closely = TensorTracker(session.params, closely=True), False
        self._state = KeptState(session.optimizer, session.params)

    def mark(self) -> None:
        """Take the weights as they are, by their content, for those of the servers."""
        self._weights.mark(closely=True)

    def begin_batch(self, number: int) -> None:
        """Mark the weights of batch `number` of a pass; by content now and then, which is slow."""
        self._closely = number & (number - 1) == 0
        self._weights.mark(closely=self._closely)

    def pushed(self) -> None:
        """Mark the weights after a push: without a barrier newer values may be on their way."""
        self._weights.mark(closely=self._closely and self._session.plan.parts > 1)

    def brought(self, *, values: bool) -> None:
        """Mark the optimizer's state, and with `values` the weights, as read from the servers."""
        self._weights.mark(closely=values)
        self._state.mark()

    def send(self) -> None:
        """Between two passes: the chief sends what was written since the last pass."""
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

    def check_weights(self, *, stepped: bool) -> None:
        """In the loop: send weights that were written before the step, refuse all others."""
        session = self._session
        if not (written := self._weights.changes()):
            return
        slipped = self._weights.slipped()
        if slipped or stepped or session.plan.workers > 1:
            raise NotDistributable(
                "weights were written in the loop "
                + (
                    "past autograd (p.data)"
                    if slipped
                    else "after optimizer.step()"
                    if stepped
                    else "while several workers go through it"
                )
                + ", and with servers the new values come with the next batch; write them between "
                "two epochs, or (with one worker) at the beginning of the loop's body, under "
                "torch.no_grad()."
            )
        session.worker.memory.take_back()
        session.worker.assign(session.params, written)
        self._weights.mark(closely=False)

    def check_state(self) -> None:
        """Refuse an optimizer's state that was changed in the loop."""
        if self._session.worker.is_chief and self._state.changes():
            raise NotDistributable(
                "the optimizer's state was changed in the loop, and the servers, which have it, "
                "have gone on meanwhile; change it between two epochs."
            )

    def end(self) -> None:
        """Give the optimizer a plain state again."""
        self._state.end()
