"""Helpers that drive a ledger, for the tests of the rules."""

from __future__ import annotations

from collections.abc import Iterable

from stratagem.rules.ledger import Ledger
from stratagem.rules.tickets import Push, Ticket, Update, Verdict
from stratagem.rules.updates import Updates


def ledger(updates: Updates, workers: int, batches: int = 0, parts: int = 1) -> Ledger:
    """A ledger with its workers, and an epoch that is dealt and closed if `batches` is given."""
    made = Ledger(updates, workers=workers)
    for worker in range(workers):
        made.join(worker)
    for batch in range(batches):
        made.deal(batch, parts)
    if batches:
        made.close_epoch()
    return made


def take(book: Ledger, worker: int) -> Ticket:
    """Take a ticket, which must be there."""
    ticket = book.take(worker)
    assert ticket is not None, f"worker {worker} was refused"
    return ticket


def push(
    book: Ledger, worker: int, version: int | None = None, weight: float = 1.0
) -> tuple[Verdict, Update | None]:
    """Push the ticket that the worker holds, then try the gate."""
    ticket = book.holds(worker)
    assert ticket is not None, f"worker {worker} holds nothing"
    at = book.version if version is None else version
    verdict = book.push(Push(worker, ticket.serial, at, weight))
    return verdict, book.ripe()


def drain(book: Ledger, workers: Iterable[int]) -> list[Update]:
    """Let these workers take and push until the epoch is over; other workers stand still."""
    workers = list(workers)
    updates = [update] if (update := book.ripe()) else []
    while not book.over:
        moved = False
        for worker in workers:
            if book.take(worker) is not None:
                moved = True
                _, update = push(book, worker)
                updates += [update] if update else []
        assert moved, "nobody may act and the epoch is not over"
    return updates
