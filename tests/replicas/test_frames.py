"""Messages between a process and the helpers that it started."""

from __future__ import annotations

import socket

import pytest

from stratagem.replicas import pipe_frames


@pytest.mark.parametrize("heard", [True, False])
def test_the_other_side_is_gone(heard: bool) -> None:
    """Also when it left without reading what it was sent: the system calls that a reset."""
    here, there = socket.socketpair()
    pipe_frames.send(here, b"the answer")
    if heard:
        assert pipe_frames.receive(there) == b"the answer"
    there.close()
    assert pipe_frames.receive(here) is None
    assert pipe_frames.PipeReader(here).receive(lambda: None) is None
    here.close()
