"""One's own loop with parameter servers: a loader of tickets, an optimizer that hands in.

    for x, y in loader:              a batch that this worker was dealt, with the newest values
        loss_fn(model(x), y).backward()
        optimizer.step()             the gradients go to the servers; nothing is updated here
        optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from stratagem.data.shard import count_rows
from stratagem.errors import NotDistributable, UsageError
from stratagem.rules.push import Ticket
from stratagem.strategies.parameters.session import Session
from stratagem.strategies.parameters.source import Source, parts_of_indices, parts_of_rows
from stratagem.strategies.parameters.worker import EpochOver, FitOver, Worker
from stratagem.strategies.prepare import Prepared, to_device
from stratagem.strategies.settings import Settings


def prepare_served(
    worker: Worker, device: torch.device, settings: Settings, model: nn.Module,
    optimizer: Optimizer, loader: Any, loss_reduction: str,
) -> Prepared:  # fmt: skip
    """Have `optimizer.step` hand gradients in, and the loader deal out batches."""
    if loss_reduction != "mean":
        raise NotDistributable(
            "a strategy with parameter servers takes the mean of gradients, so the loss must be a "
            'mean over its batch; use loss_reduction="mean".'
        )
    if not isinstance(loader, DataLoader):
        raise NotDistributable(
            f"prepare needs the DataLoader that is trained on, not {type(loader).__name__}: with "
            "parameter servers its batches are dealt out to whoever is free."
        )
    worker.settle()
    model.to(device)
    assert settings.served is not None
    session = Session(worker, model, optimizer, settings.served, wire=settings.wire)
    session.cancels = False  # a loop of the user's own runs its course
    tickets = TicketLoader(session, loader, device)
    handle = optimizer.register_step_pre_hook(tickets.hand_in)

    def end() -> None:
        handle.remove()
        tickets.close()

    worker.at_end = end
    return Prepared(model, optimizer, tickets)


class TicketLoader:
    """Iterates over the batches that this worker is dealt, until the epoch's are all done."""

    def __init__(self, session: Session, loader: DataLoader[Any], device: torch.device) -> None:
        self.session, self.loader, self.device = session, loader, device
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self._epoch = 0
        self._held: tuple[Ticket, int] | None = None
        self._over = session.over is not None

    def __len__(self) -> int:
        """Batches of the whole epoch, however many of them come here."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        worker, session = self.session.worker, self.session
        if self._over:
            return
        self._epoch += 1
        source = self._source() if worker.is_chief else None
        while True:
            work = worker.next(source.fill if source is not None else None)
            if isinstance(work, FitOver):
                session.take_last(work)
                self._over = True
                return
            if isinstance(work, EpochOver):
                worker.report(None)
                if worker.is_chief:
                    worker.gather()
                worker.refresh()
                return
            batch = self._batch(work.payload)
            self._held = (work.ticket, max(count_rows(batch), 0))
            try:
                yield batch if self.device.type == "cpu" else to_device(batch, self.device)
            except GeneratorExit:  # the loop was left
                if worker.at_end is not None:  # and not by an error that ends the training
                    self._let_go()
                    worker.put_back()
                raise
            self._let_go()

    def _let_go(self) -> None:
        """Have somebody else do what the loop has made no step with."""
        if self._held is not None:
            (ticket, _), self._held = self._held, None
            self.session.worker.abandon(ticket)

    def _source(self) -> Source:
        session = self.session
        parts = session.plan.parts
        if isinstance(self.loader.dataset, IterableDataset):
            return Source(session.worker, self._epoch, map(parts_of_rows, self.loader), parts)
        batches: Any = self.loader.batch_sampler
        if batches is None:
            raise NotDistributable(
                "the DataLoader has batch_size=None, so there is no batch to deal out; give it a "
                "batch_size or a batch_sampler."
            )
        return Source(session.worker, self._epoch, map(parts_of_indices, batches), parts)

    def _batch(self, payload: Any) -> Any:
        if "indices" in payload:
            collate: Any = self.loader.collate_fn
            return collate([self.loader.dataset[i] for i in payload["indices"]])
        return payload["rows"]

    def hand_in(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step: the gradients go to the servers, so that the step itself finds none."""
        if self._held is None:
            raise UsageError(
                "optimizer.step() was called outside of the loop over the prepared loader; "
                "gradients belong to a batch that this worker was dealt."
            )
        ticket, examples = self._held
        self._held = None
        session = self.session
        session.worker.push(ticket, float(examples), 0.0, examples, session.settings())
        session.forget_gradients()

    def close(self) -> None:
        self.session.end()
