"""Only peers that prove the secret in time, and speak the same version, are accepted."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import Any

import pytest

from stratagem.cluster import acceptor
from stratagem.cluster.handshake import prove, recv_note, send_note
from stratagem.errors import ClusterError, HandshakeError
from stratagem.wire import tcp
from stratagem.wire.connection import Frame
from stratagem.wire.tcp import Connection, Listener, connect, encrypted, local_address
from tests.clock import PATIENCE, in_time
from tests.cluster.server_proof import demand_proof
from tests.wire.wire_pairs import (
    KINDS,
    SECRET,
    Lines,
    Outcome,
    address_for,
    call,
    eventually,
    free_address,
    listening,
)

pytestmark = pytest.mark.timeout(60)
MB = 1 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_another_secret_is_refused_with_one_line(kind: str, lines: Lines) -> None:
    with listening(kind) as (listener, arrived):
        with pytest.raises(HandshakeError, match="STRATAGEM_SECRET"):
            call(kind, listener.address, b"another")
        eventually(lambda: lines.texts)
        with call(kind, listener.address) as client:
            client.send({"a": 1})
            with arrived.get(timeout=20) as server:
                assert server.receive() == Frame({"a": 1}, 0)
        assert arrived.empty()
    assert [record.levelname for record in lines.records] == ["WARNING"]
    text = lines.texts[0]
    assert SECRET.decode() not in text and SECRET.hex() not in text


def test_a_silent_stranger_is_cut_off_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    monkeypatch.setattr(acceptor, "GREETING", 0.5)
    with listening() as (listener, arrived):
        host, port = listener.address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            start = time.monotonic()
            eventually(lambda: listener._door._count)
            monkeypatch.setattr(acceptor, "GREETING", PATIENCE)  # for the next connections
            with call("tcp", listener.address), arrived.get(timeout=20):
                in_time(time.monotonic() - start, 0.4)
            stranger.settimeout(20)
            assert stranger.recv(1) == b""
            in_time(time.monotonic() - start, 2)
            eventually(lambda: lines.texts)
    assert len(lines.texts) == 1 and "without a word" in lines.texts[0]


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_silence_after_the_proof_is_cut_off_too(
    kind: str, monkeypatch: pytest.MonkeyPatch, lines: Lines
) -> None:
    monkeypatch.setattr(tcp, "GREETING", 1.0)
    with listening(kind) as (listener, arrived):
        host, port = listener.address.split(":")
        with socket.create_connection((host, int(port))) as member:
            prove(member, SECRET, limit=20)
            if kind == "tls":
                recv_note(member, 20)
                send_note(member, {"wire": 1, "tls": True})
            else:
                assert recv_note(member, 20) == {"wire": 1, "tls": False}
            member.settimeout(20)
            assert member.recv(1) == b""
            eventually(lambda: lines.texts)
    assert arrived.empty() and len(lines.texts) == 1


@pytest.mark.parametrize(
    ("note", "match"),
    [
        ({"wire": 2, "tls": False}, "version 2"),
        ({"refused": "no"}, "version None"),
        ({"wire": 1, "tls": True}, "does not encrypt"),
        ({"wire": 1}, "tls="),
        ({"wire": 1, "tls": 0}, "tls="),
    ],
)
def test_another_version_or_none_is_refused(note: dict[str, object], match: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        calling = Outcome(lambda: connect(address, SECRET, limit=20))
        sock, _ = listener.accept()
        with sock:
            demand_proof(sock, SECRET)
            recv_note(sock, 20)
            send_note(sock, note)
            with pytest.raises(HandshakeError, match=match):
                calling.result()


def test_both_must_encrypt_or_none(lines: Lines) -> None:
    with listening("tls") as (listener, arrived):
        with pytest.raises(HandshakeError, match="tls="):
            connect(listener.address, SECRET, limit=20)
        eventually(lambda: lines.texts)
        assert arrived.empty()
    with listening("tcp") as (listener, arrived):
        with pytest.raises(HandshakeError, match="tls="):
            connect(listener.address, SECRET, limit=20, tls=True)
        assert arrived.empty()


def test_what_is_encrypted_by_default() -> None:
    assert encrypted("10.0.0.5:2222", None) and encrypted("worker-0.local:2222", None)
    assert not encrypted("127.0.0.1:2222", None) and not encrypted("localhost:2222", None)
    assert not encrypted("[::1]:2222", None) and not encrypted("unix:@a", None)
    assert encrypted("127.0.0.1:2222", True) and not encrypted("10.0.0.5:2222", False)


@pytest.mark.parametrize("address", ["", "a", "127.0.0.1", "127.0.0.1:x", "unix:a"])
def test_a_wrong_address_is_named(address: str) -> None:
    with pytest.raises(ClusterError, match="correct"):
        connect(address, SECRET, limit=1)
    with pytest.raises(ClusterError, match="correct"):
        Listener(address, SECRET, "ps 0", print)


def test_nobody_there() -> None:
    for address in (free_address(), local_address()):
        with pytest.raises(ConnectionRefusedError):
            connect(address, SECRET, limit=20)


def test_a_port_in_use_is_named(kind: str) -> None:
    with listening(kind) as (listener, _), pytest.raises(ClusterError, match="ps 1 cannot listen"):
        Listener(listener.address, SECRET, "ps 1", print, tls=None)


def test_a_welcome_that_fails_is_logged_and_the_door_stays_open(
    lines: Lines,
) -> None:
    def serve(connection: Connection) -> None:
        frame = connection.receive()
        assert frame is not None
        connection.send({"answer": 10 // frame.header["n"]})

    with Listener(address_for("unix"), SECRET, "ps 0", serve) as listener:
        with connect(listener.address, SECRET, limit=20) as client:
            client.send({"n": 0})
            assert client.receive() is None
        with connect(listener.address, SECRET, limit=20) as client:
            client.send({"n": 5})
            assert client.receive() == Frame({"answer": 2}, 0)
    assert len(lines.texts) == 1 and "serving" in lines.texts[0]


def test_a_peer_that_comes_while_the_listener_is_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SlowAcceptor(acceptor.Acceptor):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            time.sleep(0.3)

    monkeypatch.setattr(tcp, "Acceptor", SlowAcceptor)
    address, came = local_address(), queue.SimpleQueue[Connection]()
    made: list[Connection] = []

    def come() -> None:
        while not made:
            with contextlib.suppress(ConnectionRefusedError):
                made.append(connect(address, SECRET, limit=PATIENCE))

    peer = threading.Thread(target=come, daemon=True)
    peer.start()
    with Listener(address, SECRET, "ps 0", came.put):
        came.get(timeout=PATIENCE).close()
        peer.join(PATIENCE)
    made[0].close()
