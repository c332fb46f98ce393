"""A log of collective operations: written by the first replica, followed by standbys."""

from __future__ import annotations

import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.wire import collective_log
from stratagem.wire.collective_log import KINDS, CollectiveLog, LogFollower, is_ready

pytestmark = pytest.mark.timeout(60)

_ENTRY = st.tuples(
    st.sampled_from(KINDS), st.integers(0, 2**60), st.integers(0, 1), st.binary(max_size=300)
)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@given(st.lists(_ENTRY, max_size=8), st.data())
def test_what_is_written_is_read(
    entries: list[tuple[str, int, int, bytes]], data: st.DataObject
) -> None:
    """Entries are read in order, whenever the reader reads."""
    near, far = socket.socketpair()
    with near, far:
        log = CollectiveLog(8, 0)
        reader = LogFollower(log.handle, far)
        found = []
        for kind, turn, box, content in entries:
            log.write(kind, turn, box, as_tensor(content))
            if data.draw(st.booleans()):
                found.append(reader.next())
        while (entry := reader.next()) is not None:
            found.append(entry)
        got = [(e.kind, e.turn, e.box, e.data.numpy().tobytes()) for e in found if e is not None]
        assert got == entries


def test_an_order_carries_the_state() -> None:
    near, far = socket.socketpair()
    with near, far:
        log = CollectiveLog(8, 1)
        reader = LogFollower(log.handle, far)
        assert not is_ready(near)
        reader.wait(ready=True)
        assert is_ready(near) and near.recv(1)
        log.state = lambda: {"weights": [torch.arange(5.0)], "step": 3}
        order, _segment = log.order(16)
        near.sendall(order)
        reader.wait(ready=True)
        assert reader.order is not None and reader.order.turn == 16
        assert reader.order.state["step"] == 3
        assert torch.equal(reader.order.state["weights"][0], torch.arange(5.0))


def test_a_log_that_grows_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_log, "MOST", 100)
    log = CollectiveLog(0, 0)
    log.write("broadcast", 8, 0, as_tensor(bytes(50)))
    assert log.writes and not log.broken
    log.write("broadcast", 16, 1, as_tensor(bytes(50)))
    assert log.broken and not log.writes
