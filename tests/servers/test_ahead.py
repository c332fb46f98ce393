"""The ticket that comes with the answer to a push, if values or workers change before its use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import stratagem as sg
from stratagem.cluster.membership import Membership
from stratagem.rules.stats import Stats
from stratagem.servers import participants
from stratagem.servers.client import Assignment, EpochOver
from stratagem.servers.loop_session import LoopSession
from stratagem.servers.session import Session
from stratagem.servers.ticket_loop import TicketLoader
from stratagem.training.loss_reading import PushWeights
from stratagem.training.replica import Replica
from stratagem.training.settings import Served
from stratagem.wire.collective import Alone
from tests.replicas.scripts import wait_for
from tests.servers.fault_support import Counter, balanced, by_one
from tests.servers.server_threads import ThreadedJob

pytestmark = pytest.mark.timeout(60)

ROWS = 12
FRESH = "stratagem.servers.client._FRESH"


@pytest.fixture(autouse=True)
def _in_no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not refetch values unless a test asks for it, even on a slow machine."""
    monkeypatch.setattr(FRESH, 1e9)


@pytest.fixture
def join() -> Iterator[Callable[[int], Session]]:
    """Join two servers in threads of this process as one of their workers."""
    job = ThreadedJob(2, workers=0)

    def take_part(index: int, updates: Any = None, kind: type[Session] = Session) -> Session:
        counter = Counter(ROWS)
        served = Served(updates or sg.Asynchronous(), sg.FixedShards(2), workers=2, servers=2)
        job.workers.append(job.client(index))
        return kind(job.workers[-1], counter, by_one(counter.parameters()), served)

    yield take_part
    job.close()
    wait_for(lambda: not any(server.peers.present() for server in job.servers))  # nor any thread


def take(session: Session, wanted: int | None = None) -> Assignment:
    work = session.worker.next()
    assert isinstance(work, Assignment) and wanted in (None, work.ticket.batch)
    return work


def hand_in(session: Session, work: Assignment) -> None:
    """Push the gradient of a batch, which is one row, and lowers its weight by one."""
    row = torch.tensor([work.ticket.batch])
    session.module(row).sum().div(24).backward()
    assert session.worker.push(work.ticket, 1.0, 0.0, 1)
    session.forget_gradients()


def counts(session: Session) -> Tensor:
    return -session.module.get_parameter("weight").detach()[:, 0].clone()


def books(session: Session) -> Stats:
    stats = session.worker.stats()
    assert stats is not None and balanced(stats)
    return stats


def is_over(session: Session) -> bool:
    return isinstance(session.worker.next(), EpochOver)


@pytest.mark.parametrize("shared", ["1", "0"])
def test_it_comes_with_the_newest_values(
    join: Any, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    chief = join(0)
    asked: list[Any] = []
    call = chief.worker.lines.call

    def noted(i: int, told: Any, body: Any = ()) -> Any:
        asked.append(told["t"])
        return call(i, told, body)

    monkeypatch.setattr(chief.worker.lines, "call", noted)
    chief.worker.deal(1, 0, [(3, 1)], True)
    for batch in range(3):
        work = take(chief, batch)
        assert (counts(chief) == (torch.arange(ROWS) < batch)).all()
        hand_in(chief, work)
    assert is_over(chief)
    assert asked == ["deal", "next", "next"]  # the first ticket, and the end
    chief.end()


def test_values_are_fetched_anew_after_a_pause(join: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other workers make updates during a slow callback."""
    chief, other = join(0), join(1)
    chief.worker.deal(1, 0, [(6, 1)], True)
    hand_in(chief, take(chief, 0))  # has 1 in hand now
    for batch in (2, 3, 4):
        hand_in(other, take(other, batch))
    monkeypatch.setattr(FRESH, -1.0)
    other.worker.refresh()  # so that its last update has reached both servers
    hand_in(chief, take(chief, 1))
    chief.worker.refresh()
    hand_in(other, take(other, 5))
    assert is_over(chief) and is_over(other)
    assert books(chief).staleness == {0: 6}
    chief.end()
    assert (counts(chief)[:6] == 1).all()


def test_weights_that_are_assigned_put_it_back(join: Any) -> None:
    """The gradient would be of the old weights, so the ticket is given back."""
    chief = join(0)
    chief.worker.deal(1, 0, [(3, 1)], True)
    hand_in(chief, take(chief, 0))
    with torch.no_grad():
        chief.module.get_parameter("weight").fill_(-10.0)
    chief.worker.assign(chief.params)
    assert books(chief).requeued == 1
    for batch in (1, 2):
        work = take(chief, batch)
        assert (counts(chief)[2:] == 10).all()
        hand_in(chief, work)
    assert is_over(chief)
    chief.end()
    assert counts(chief)[:4].tolist() == [10, 11, 11, 10]


def test_one_that_dies_gives_it_back(join: Any) -> None:
    chief, other = join(0), join(1)
    chief.worker.deal(1, 0, [(4, 1)], True)
    hand_in(other, take(other, 0))  # has 1 in hand now
    other.worker.close(goodbye=False)
    wait_for(lambda: books(chief).requeued == 1)
    for batch in (1, 2, 3):
        hand_in(chief, take(chief, batch))
    assert is_over(chief)
    chief.end()
    assert (counts(chief)[:4] == 1).all()


def test_a_training_that_is_ended_early_puts_it_back(join: Any) -> None:
    chief, other = join(0), join(1)
    chief.worker.deal(1, 0, [(4, 1)], True)
    hand_in(other, take(other, 0))  # has 1 in hand now
    hand_in(chief, take(chief, 2))  # and 3
    chief.end()
    stats = books(chief)
    assert (stats.applied, stats.requeued) == (2, 1)
    work = take(other, 1)
    row = torch.tensor([work.ticket.batch])
    other.module(row).sum().backward()
    assert not other.worker.push(work.ticket, 1.0, 0.0, 1)
    other.end()
    assert counts(chief)[:4].tolist() == [1, 0, 1, 0]


def test_a_snapshot_brings_newer_values_than_it(join: Any) -> None:
    """The next gradient has the version of the snapshot's values."""
    chief, other = join(0), join(1)
    chief.worker.deal(1, 0, [(4, 1)], True)
    hand_in(chief, take(chief, 0))  # has 1 in hand now
    hand_in(other, take(other, 2))
    chief.read_state()
    assert counts(chief)[2] == 1
    hand_in(chief, take(chief, 1))
    hand_in(other, take(other, 3))
    assert books(chief).staleness == {0: 3, 1: 1}
    assert is_over(chief) and is_over(other)
    chief.end()


def ticket_loader(session: LoopSession, rows: Any) -> TicketLoader:
    replica = Replica(0, 1, torch.device("cpu"), "worker", Alone(), Membership.alone())
    return TicketLoader(session, rows, replica, PushWeights(grouped=False))


def loop(session: LoopSession) -> Iterator[Tensor]:
    """Run a custom loop over single rows."""
    rows: Any = DataLoader(range(ROWS), batch_size=1)  # type: ignore[arg-type]
    tickets = ticket_loader(session, rows)
    session.worker.at_end = tickets.close
    for row in tickets:
        session.module(row).sum().div(24).backward()
        tickets.hand_in(session.optimizer, (), {})
        yield row


@pytest.mark.parametrize("stepped", [True, False])
def test_a_loop_that_is_left_gives_it_back(join: Any, stepped: bool) -> None:
    """Otherwise the other workers would wait for the ticket at the end of the epoch."""
    chief, other = join(0, kind=LoopSession), join(1, kind=LoopSession)
    mine = loop(chief)
    next(mine)
    if stepped:
        theirs = loop(other)
        next(theirs)
        theirs.close()
        del theirs  # Python 3.12 keeps what a closed generator has in hand until then
    else:
        rows: Any = DataLoader(range(ROWS), batch_size=1)  # type: ignore[arg-type]
        other.worker.at_end = lambda: None
        for _ in ticket_loader(other, rows):
            break
    assert books(chief).requeued == 1
    other.worker.at_end = None
    other.worker.memory.close()
    other.worker.ask("leave")
    assert sum(1 for _ in mine) == ROWS - 1 - stepped
    chief.worker.settle()
    assert (counts(chief) == 1).all()


def test_in_step_there_is_none(join: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers wait for the version that the push itself may make."""
    monkeypatch.setattr(participants, "GATHERING", 0.0)  # nobody else comes
    monkeypatch.setattr(participants, "BUSY", 0.0)
    chief = join(0, sg.Synchronous())
    chief.worker.deal(1, 0, [(2, 1)], True)
    hand_in(chief, take(chief, 0))
    assert chief.worker._ahead is None
    hand_in(chief, take(chief, 1))
    assert is_over(chief)
    chief.end()


def test_one_that_wakes_when_all_is_over_has_the_last_values(join: Any) -> None:
    """The loop fetches the last values, so that the model has the result."""
    chief, other = join(0, kind=LoopSession), join(1, kind=LoopSession)
    mine = loop(chief)
    next(mine)
    theirs = loop(other)
    next(theirs)
    for _ in mine:  # but for the batch that the other has in hand now
        if books(chief).applied == ROWS - 1:
            break
    chief.worker.settle()
    assert len(list(theirs)) == 1  # it counts no more
    assert (counts(other) == counts(chief)).all() and counts(other).sum() == ROWS - 1
