"""GapAware: a gradient is scaled by how far the weights have moved, in usual step lengths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.rules.tickets import Ticket
from stratagem.servers.client import Assignment
from stratagem.servers.session import Session
from tests.servers.server_threads import ThreadedJob

pytestmark = pytest.mark.timeout(60)


def take(session: Session) -> Ticket:
    work = session.worker.next()
    assert isinstance(work, Assignment)
    return work.ticket


def push(session: Session, ticket: Ticket, gradient: float) -> None:
    session.params[0].grad = torch.tensor([[gradient]])
    session.worker.memory.take_all()
    assert session.worker.push(ticket, 1.0, 0.0, 1)


@pytest.mark.parametrize("memories", [[0.0], [0.5], [0.9], [0.0, 0.5]])
def test_each_policy_forgets_as_it_is_told(memories: list[float]) -> None:
    job = ThreadedJob(1, workers=2)
    updates = sg.Asynchronous(staleness=[sg.GapAware(memory) for memory in memories])
    sessions = []
    for worker in (0, 1):
        module = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        sessions.append(job.begin(module, optimizer, worker=worker, updates=updates))
    chief, other = sessions
    chief.worker.deal(1, 0, [(3, 1)], True)
    late = take(other)
    push(chief, take(chief), 1.0)
    push(chief, take(chief), 3.0)
    push(other, late, 1.0)
    chief.worker.refresh()
    usual = [memory * 1.0 + (1 - memory) * 3.0 for memory in memories]
    factor = 1.0
    for each in usual:
        factor /= 1 + 4 / each
    assert float(chief.params[0].detach()) == pytest.approx(-4 - factor, abs=1e-6)
    chief.end()
    other.end()
    job.close()
