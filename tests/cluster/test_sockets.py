"""Listening on an address that this machine does not have."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from stratagem.cluster import sockets
from stratagem.errors import ClusterError
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
