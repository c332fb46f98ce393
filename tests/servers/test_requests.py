"""The table of requests: permitted senders, and types of arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.servers import coordinator_requests  # noqa: F401  (fills the table)
from stratagem.servers.requests import CHIEF, MEMBER, REQUESTS
from tests.servers.server_threads import ThreadedJob

pytestmark = pytest.mark.timeout(60)

VALUES: list[Any] = [1, True, "text", [], {}]


def test_requests_that_are_refused() -> None:
    """Requests not from the chief, before joining, or with wrong arguments; the job goes on."""
    job = ThreadedJob(1, workers=2)
    other = job.workers[1]
    for name, request in REQUESTS.items():
        kinds = request.arguments
        told = {key: next(v for v in VALUES if isinstance(v, kinds[key])) for key in kinds}
        if request.sender is CHIEF:
            with pytest.raises(sg.UsageError, match="for the chief alone"):
                other.ask(name, **told)
        if request.sender is MEMBER:
            with pytest.raises(sg.UsageError, match="has not joined a training"):
                other.ask(name, **told)
        for key, kind in kinds.items():
            wrong = next(v for v in VALUES if not isinstance(v, kind))
            with pytest.raises(sg.UsageError, match=f"with {key}=.*must be"):
                other.ask(name, **{**told, key: wrong})
    assert other.ask("so far")[0] == {"loss": 0.0, "examples": 0}
    module = nn.Linear(2, 1)
    session = job.begin(module, torch.optim.SGD(module.parameters(), lr=0.1))
    session.end()
    job.close()
    assert job.servers[0].failure is None
