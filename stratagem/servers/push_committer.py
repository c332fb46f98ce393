"""Committers that push a worker's gradients to the servers, which decide whether they count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from stratagem.figures.meter import METER
from stratagem.rules.tickets import Ticket
from stratagem.servers.session import Session
from stratagem.training.committer import Commit
from stratagem.training.exchange import GradientExchange
from stratagem.training.replica import Replica
from stratagem.wire.tree import broadcast_tree, gather_tree


class PushCommitter:
    """Pushes the gradient of a ticket, weighted by the loss' denominator among those of the same
    batch."""

    armed = True

    def __init__(self, session: Session, settings: Callable[[], Any] = lambda: None) -> None:
        """`settings` returns the optimizer's settings, which the chief sends with a push."""
        self.session, self._settings = session, settings
        self._chief = session.worker.is_chief
        self._ticket: Ticket | None = None
        self._examples, self._borrowed = 0, False

    def begin(self, ticket: Ticket, examples: int, *, borrowed: bool = False) -> None:
        """Set the ticket of the next commit, and its number of examples.

        `borrowed`: they weigh nothing, so that only the chief's settings count.
        """
        self._ticket, self._examples, self._borrowed = ticket, examples, borrowed

    def commit(self, notes: Sequence[float | Tensor]) -> Commit:
        assert self._ticket is not None
        above, below = (float(note) for note in notes)
        ticket, self._ticket = self._ticket, None
        loss = above / below if below else 0.0
        worker, settings = self.session.worker, self._settings() if self._chief else None
        if self._borrowed:
            worker.finish_stream()
            worker.memory.forget()
            if settings is not None:
                worker.set_settings(settings)
            worker.ask("skip", serial=ticket.serial)
            return Commit(False, (above, below))
        with METER.sending():
            counted = worker.push(ticket, below, loss, self._examples, settings)
        worker.figures.step(self._examples)
        return Commit(counted, (above, below))

    def abandon(self) -> None:
        """Give the ticket back: its gradient would come too late."""
        assert self._ticket is not None
        self.session.worker.abandon(self._ticket)
        self._ticket = None

    def sync(self) -> None:
        """Wait for the newest values."""
        self.session.worker.arrive()

    def close(self) -> None:
        self.session.forget_gradients()


class GroupedCommitter:
    """All-reduces the gradients of a worker's devices; the first device pushes the sum."""

    def __init__(
        self,
        exchange: GradientExchange,
        replica: Replica,
        push: PushCommitter | None,
        adjust: Callable[[Sequence[float]], Sequence[float]] = lambda notes: notes,
    ) -> None:
        """`push`: on the first device. `adjust` gets the summed notes of all devices, may scale the
        sum of the gradients, and returns the notes that are pushed."""
        self._exchange, self._replica, self._push = exchange, replica, push
        self._adjust = adjust

    @property
    def armed(self) -> bool:
        return self._exchange.armed

    @armed.setter
    def armed(self, on: bool) -> None:
        self._exchange.armed = on

    def commit(self, notes: Sequence[float | Tensor]) -> Commit:
        """All-reduce and push. Collective over the worker's devices."""
        added = self._adjust(self._add_up(notes))
        counted = False
        if self._push is not None:
            self._push.session.worker.memory.take_all()
            counted = self._push.commit(added).counted
        return Commit(bool(broadcast_tree(self._replica.collective, counted)), added)

    def _add_up(self, notes: Sequence[float | Tensor]) -> list[float]:
        if not self._exchange.every_backward:
            return [float(note) for note in self._exchange.finish(notes)]
        mine = [float(note) for note in notes]
        everybody = gather_tree(self._replica.collective, mine)  # backward has added the gradients
        return [sum(each) for each in zip(*everybody, strict=True)]

    def sync(self) -> None:
        if self._push is not None:
            self._push.sync()

    def close(self) -> None:
        self._exchange.close()
