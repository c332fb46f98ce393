"""Sparse gradients on several servers, some without rows, equal one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import stratagem as sg
from stratagem.servers import transfers
from stratagem.servers.client import Assignment, EpochOver
from stratagem.servers.session import Session
from tests.served_support import apart
from tests.servers.server_threads import ThreadedJob

pytestmark = pytest.mark.timeout(90)

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.5),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
}
WAYS = ("shared memory", "sockets", "couriers")


@pytest.fixture(scope="module")
def threaded() -> Iterator[dict[int, ThreadedJob]]:
    made = {n: ThreadedJob(n) for n in range(1, 5)}
    yield made
    for threads in made.values():
        threads.close()


class Tables(nn.Module):
    """Sparse tables, and maybe a dense layer; a batch may use a table or not."""

    def __init__(self, rows: Sequence[int], width: int, dense: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(n, width, sparse=True) for n in rows)
        self.dense = nn.Linear(width, 2) if dense else None

    def forward(self, batch: Sequence[Tensor | None]) -> Tensor:
        total = torch.zeros(())
        if self.dense is not None:
            total = total + self.dense(torch.ones(self.dense.in_features)).pow(2).sum()
        for table, ids in zip(self.tables, batch, strict=True):
            if ids is not None:
                found = table(ids)
                total = total + (found if self.dense is None else self.dense(found)).pow(2).sum()
        return total


def on_one_device(module: nn.Module, optimizer: Any, batches: Sequence[Any]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        module(batch).backward()
        optimizer.step()


def take(session: Session) -> Assignment:
    work = session.worker.next()
    assert isinstance(work, Assignment)
    return work


def hand_in(session: Session, work: Assignment, batch: Any) -> bool:
    session.worker.begin_backward()
    session.module(batch).backward()
    kept = session.worker.push(work.ticket, 1.0, 0.0, 1)
    session.forget_gradients()
    return kept


def with_servers(session: Session, batches: Sequence[Any]) -> None:
    session.worker.deal(1, 0, [(len(batches), 1)], True)
    for batch in batches:
        assert hand_in(session, take(session), batch)
    assert isinstance(session.worker.next(), EpochOver)
    session.end()


@st.composite
def jobs(draw: Any) -> tuple[list[int], list[Any]]:
    """Draw table lengths, and batches that touch few rows, none, or no table."""
    rows = draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))

    def ids(length: int) -> Any:
        some = st.lists(st.integers(0, length - 1), max_size=6)
        low = st.lists(st.integers(0, (length - 1) // 4), max_size=4)
        return st.one_of(some, low, st.none())

    batches = []
    for _ in range(draw(st.integers(1, 5))):
        drawn = [draw(ids(length)) for length in rows]
        if all(each is None for each in drawn):
            drawn[0] = []
        batches.append([None if d is None else torch.tensor(d, dtype=torch.long) for d in drawn])
    return rows, batches


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    job=jobs(),
    servers=st.integers(1, 4),
    cut=st.booleans(),
    width=st.integers(1, 3),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    dense=st.booleans(),
    way=st.sampled_from(WAYS),
)
def test_as_on_one_device(
    threaded: dict[int, ThreadedJob],
    monkeypatch: pytest.MonkeyPatch,
    job: Any,
    servers: int,
    cut: bool,
    width: int,
    name: str,
    dense: bool,
    way: str,
) -> None:
    rows, batches = job
    dense = dense and name != "sparse adam"
    threads = threaded[servers]
    threads.workers[0].lines.near = way == "shared memory"
    monkeypatch.setattr(transfers, "_MUCH", 0 if way == "couriers" else 1 << 30)
    alone, spread = Tables(rows, width, dense), Tables(rows, width, dense)
    on_one_device(alone, OPTIMIZERS[name](alone.parameters()), batches)
    partitioner = sg.FixedShards(servers) if cut else None
    with torch.random.fork_rng():
        session = threads.begin(
            spread, OPTIMIZERS[name](spread.parameters()), partitioner=partitioner
        )
    with_servers(session, batches)
    largest = max(float(p.abs().max()) for p in alone.parameters() if p.numel())
    assert apart(alone, spread) < 1e-6 * (10 + largest)


@pytest.mark.parametrize("near", [True, False])
def test_what_was_dropped_or_given_up_leaves_nothing_behind(near: bool) -> None:
    """The rows of a dropped gradient may still be in a slot, or wait to be sent."""
    threads = ThreadedJob(2, workers=2)
    sessions = []
    for i, worker in enumerate(threads.workers):
        worker.lines.near = near
        module = Tables([8], 1, True)
        rule = sg.Asynchronous(staleness=[sg.Drop(older_than=0)])
        sessions.append(
            threads.begin(
                module,
                torch.optim.SGD(module.parameters(), lr=0.1),
                worker=i,
                updates=rule,
                partitioner=sg.FixedShards(2),
            )
        )
    alone = Tables([8], 1, True)
    first, second = [torch.arange(8)], [None]  # rows, and something dense only
    chief, other = sessions
    chief.worker.deal(1, 0, [(5, 1)], False)
    held = take(other)
    assert hand_in(chief, take(chief), second)
    assert not hand_in(other, held, first)  # it is an update old
    given_up = take(other)
    other.module(first).backward()  # type: ignore[no-untyped-call]
    other.forget_gradients()
    other.worker.abandon(given_up.ticket)
    chief.worker.put_back()
    assert hand_in(other, take(other), second)
    on_one_device(alone, torch.optim.SGD(alone.parameters(), lr=0.1), [second, second])
    other.worker.put_back()
    chief.end()
    other.end()
    assert apart(chief.module, alone) < 1e-6
    threads.close()


class Words(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(rows, 8, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).mean(1)


@pytest.mark.parametrize("shared", ["1", "0"])
def test_ids_that_only_some_servers_have(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In real processes: ids of the first quarter only, then of the last."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    rows = 20_000
    dice = torch.Generator().manual_seed(1)
    low = torch.randint(0, rows // 4, (64, 3), generator=dice)
    labels = torch.randint(0, 8, (128,), generator=dice)
    ids = torch.cat([low, low + 3 * rows // 4])
    strategy = sg.ParameterServerStrategy(
        sg.LocalCluster(workers=1, ps=4), partitioner=sg.FixedShards(4)
    )
    try:
        for name, optimizer in OPTIMIZERS.items():
            made = []
            for where in (None, strategy):
                model = sg.Model(Words(rows), where)
                model.compile(optimizer, "cross_entropy")
                model.fit(ids, labels, batch_size=16, epochs=1, shuffle=False, verbose=0)
                made.append(model.module)
            assert apart(*made) < 1e-5, name
            assert apart(made[1], Words(rows)) > 1e-3
    finally:
        strategy.close()
