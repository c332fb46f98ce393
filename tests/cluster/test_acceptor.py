"""A port under attack: members are accepted, strangers are few, and the log stays short."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import pytest

from stratagem.cluster import acceptor as doors
from stratagem.cluster.acceptor import Acceptor, Refusals
from stratagem.cluster.handshake import Ended, Stranger, WrongSecret, prove
from stratagem.errors import HandshakeError
from tests.clock import PATIENCE, in_time, unless_late
from tests.cluster.crowd import crowd
from tests.ports import free_ports

pytestmark = pytest.mark.timeout(60)
SECRET = b"s" * 32


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "stratagem")
    return lambda: [record.getMessage() for record in caplog.records]


@contextmanager
def opened() -> Iterator[tuple[Acceptor, tuple[str, int], SimpleQueue[socket.socket]]]:
    """An acceptor, its address, and the accepted connections."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    where: tuple[str, int] = listener.getsockname()
    inside: SimpleQueue[socket.socket] = SimpleQueue()
    door = Acceptor(listener, SECRET, inside.put, "ps 0")
    door.open()
    try:
        yield door, where, inside
    finally:
        door.close()


def enter(where: tuple[str, int], limit: float = 5.0) -> float:
    """Connect as a member does, with retries; returns the seconds it took."""
    start = time.monotonic()
    while True:
        try:
            with socket.create_connection(where, timeout=2) as sock:
                prove(sock, SECRET, limit=2)
                return time.monotonic() - start
        except (Stranger, WrongSecret):
            raise
        except OSError:
            unless_late(time.monotonic() - start < limit, "no member came in")


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        unless_late(time.monotonic() < end, "it never came true")
        time.sleep(0.01)


def worked(door: Acceptor) -> float:
    """Return the processor seconds that the acceptor's thread has used."""
    assert door._thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(door._thread.ident))


def test_a_member_comes_in_past_a_thousand_strangers() -> None:
    with opened() as (door, where, inside), crowd(1000, [f"{where[0]}:{where[1]}"]) as outsider:
        eventually(lambda: door._count > 100)  # silent strangers
        threads = [thread.name for thread in threading.enumerate()]
        assert threads.count("stratagem-acceptor") == 1 and "stratagem-greeting" not in threads
        began, before = time.monotonic(), worked(door)
        for _ in range(3):
            in_time(enter(where, 30), 30)
            inside.get(timeout=PATIENCE).close()
            assert door._count <= doors.PLACES + 1  # and the one that replaces another
            time.sleep(0.1)
        # what a job loses to them at most, which a wall clock shows on a quiet machine only
        took, share = time.monotonic() - began, 0.05
        unless_late(worked(door) - before < share * took, f"more than {share:.0%} of {took:.1f} s")
    assert outsider.opened > 100  # as many as it could in that time, at the end of the queue


def test_who_was_let_in_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "PLACES", 4)
    with opened() as (door, where, inside), socket.create_connection(where) as member:
        prove(member, SECRET, limit=PATIENCE)
        ours = inside.get(timeout=PATIENCE)
        strangers = [socket.create_connection(where) for _ in range(12)]
        strangers[0].settimeout(PATIENCE)
        assert strangers[0].recv(1) == b""  # the oldest was closed
        eventually(lambda: door._count == 4)
        ours.sendall(b"still here")
        assert member.recv(20) == b"still here"
        for sock in (*strangers, ours):
            sock.close()


def test_the_address_with_most_strangers_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "PLACES", 4)
    monkeypatch.setattr(doors, "GREETING", PATIENCE)  # no stranger times out
    with opened() as (door, (_, port), _):
        first = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.9", 0))
        eventually(lambda: door._count == 1)
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(9)]
        crowd[5].settimeout(PATIENCE)
        assert crowd[5].recv(1) == b""
        first.settimeout(0.2)
        with pytest.raises(TimeoutError):  # the oldest, but alone at its address
            first.recv(1)
        for sock in (first, *crowd):
            sock.close()


@pytest.mark.parametrize("after", [0, 5, 8, 39, 40, 71])
def test_a_client_that_ends_is_told_as_that(after: int, said: Callable[[], list[str]]) -> None:
    """A worker that is killed during the greeting is not said to have a wrong secret."""
    with opened() as (_, where, inside):
        with socket.create_connection(where) as client:
            client.sendall((b"STRATGM\x04" + os.urandom(64))[:after])
            if after >= 40:
                assert len(client.recv(40)) == 40
        eventually(said)
        assert inside.empty()
    (line,) = said()
    assert "ended the connection during the greeting" in line and "SECRET" not in line


@pytest.mark.parametrize("after", [0, 8, 40, 60])
def test_a_server_that_ends_is_told_as_that(after: int) -> None:
    """At any point: only the refusal of a proof mentions the secret."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(40)
                sock.sendall((b"STRATGM\x04" + os.urandom(64))[:after])
                if after >= 40:
                    sock.recv(32)

        thread = threading.Thread(target=serve)
        thread.start()
        with (
            socket.create_connection(listener.getsockname()) as client,
            pytest.raises(Ended, match="during the greeting") as told,
        ):
            prove(client, SECRET, limit=PATIENCE)
        thread.join(PATIENCE)
    assert "SECRET" not in str(told.value)


def test_a_wrong_secret_is_still_told_as_one(said: Callable[[], list[str]]) -> None:
    with opened() as (_, where, inside):
        with socket.create_connection(where) as client, pytest.raises(WrongSecret):
            prove(client, b"other", limit=PATIENCE)
        eventually(said)
        assert inside.empty()
    assert "STRATAGEM_SECRET" in said()[0]


def test_the_log_stays_short(said: Callable[[], list[str]]) -> None:
    with opened() as (_, where, _):
        for words in [b"GET / HTTP/1.1\r\n"] * 30 + [b"STRATGM\x04" + bytes(64)] * 3:
            with socket.create_connection(where) as sock:
                sock.sendall(words)
                sock.settimeout(PATIENCE)
                with suppress(ConnectionResetError):  # unread bytes reset the connection
                    while sock.recv(100):
                        continue
        assert len(said()) == 2  # a new kind is logged at once
    assert "refused 31 more connections to ps 0" in said()[2] and "127.0.0.1" in said()[2]


def test_the_count_is_told_now_and_then(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    counted = Refusals("ps 0")
    for port in range(40):
        counted.tell(f"10.0.0.{port % 5}:{port}", Stranger("it knocks"))
    assert len(said()) == 1
    monkeypatch.setattr(doors, "EVERY", 0.0)
    counted.tell("10.0.0.9:1", Stranger("it knocks"))
    assert "refused 40 more" in said()[1] and "and 3 more addresses" in said()[1]


def test_a_refusal_is_no_silent_end() -> None:
    assert not issubclass(WrongSecret, Ended) and issubclass(Ended, HandshakeError)


class Broken(logging.Handler):
    """A logging handler of the user's that raises."""

    def handle(self, record: logging.LogRecord) -> bool:
        raise RuntimeError(f"cannot log {record.getMessage()}")


def test_an_unforeseen_error_does_not_shut_the_port(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="stratagem")
    handler = Broken()
    with opened() as (_, where, inside):
        logging.getLogger("stratagem").addHandler(handler)
        try:
            with socket.create_connection(where) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                sock.settimeout(PATIENCE)
                with suppress(ConnectionResetError):
                    assert sock.recv(1) == b""
            told: list[str] = []

            def was_told() -> bool:
                told.append(capfd.readouterr().err)
                return "RuntimeError: cannot log" in "".join(told)

            eventually(was_told)
        finally:
            logging.getLogger("stratagem").removeHandler(handler)
        in_time(enter(where), 5)
        inside.get(timeout=PATIENCE).close()


def test_a_door_that_was_never_opened_is_closed() -> None:
    where = "127.0.0.1", free_ports(1)[0]  # not an ephemeral port, which another process could get
    listener = socket.create_server(where)
    door = Acceptor(listener, SECRET, SimpleQueue[socket.socket]().put, "ps 0")
    assert door.close() and not door.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where, timeout=2)
