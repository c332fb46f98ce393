"""Listening on an address that this machine does not have; waiting for sockets."""

from __future__ import annotations

import fcntl
import logging
import socket
from typing import Any

import pytest

from stratagem.cluster import sockets
from stratagem.cluster.sockets import readable, writable
from stratagem.errors import ClusterError
from tests.clock import SLOWER
from tests.ports import free_ports

ELSEWHERE = "192.0.2.1"  # reserved for documentation


def unknown(*_: object) -> Any:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def elsewhere(*_: object) -> Any:
    return [(socket.AF_INET, (ELSEWHERE, free_ports(1)[0]))]


@pytest.mark.parametrize(
    ("resolve", "words"),
    [(unknown, "Name or service not known"), (elsewhere, "annot assign requested address")],
)
def test_a_loopback_address_is_never_widened(
    monkeypatch: pytest.MonkeyPatch, resolve: Any, words: str
) -> None:
    """It needed no secret; as [::1] where IPv6 is off, or localhost without /etc/hosts."""
    monkeypatch.setattr(sockets, "resolve", resolve)
    for host in ("localhost", "[::1]", "127.0.0.1"):
        with pytest.raises(ClusterError, match=rf"ps 0 cannot listen on .*{words}"):
            sockets.listen(f"{host}:{free_ports(1)[0]}", "ps 0").close()


def test_an_address_that_needed_a_secret_is_widened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "stratagem")
    with sockets.listen(f"{ELSEWHERE}:{free_ports(1)[0]}", "ps 0") as sock:
        assert sock.getsockname()[0] == "0.0.0.0"
    assert "all its interfaces" in caplog.text


def test_readable_takes_descriptors_that_select_does_not() -> None:
    """A program with more than a thousand open files has them."""
    one, other = socket.socketpair()
    far = socket.socket(fileno=fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 1500))
    with one, other, far:
        assert far.fileno() >= 1500
        assert readable([far], 0) == [] and writable(far, 0)
        other.send(b"x")
        assert readable([far, one], 60 * SLOWER) == [far, one]
        far.recv(1)
        other.close()
        assert readable([far], 0) == [far], "its end is something to read"
