"""The handshake accepts only peers that know the secret, and never hangs."""

from __future__ import annotations

import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.cluster.framing import HEAD, VERSION, Malformed
from stratagem.cluster.handshake import (
    NOTE_LIMIT,
    Stranger,
    WrongSecret,
    encode_note,
    job_secret,
    note_reader,
    prove,
    recv_note,
    send_note,
)
from stratagem.errors import HandshakeError, UsageError
from tests.clock import in_time
from tests.cluster.server_proof import demand_proof

pytestmark = pytest.mark.timeout(60)

SECRET = b"s" * 32
QUICK = settings(max_examples=30, deadline=None)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def outcome(action: Callable[[], None]) -> tuple[threading.Thread, list[BaseException | None]]:
    """Run in a thread; the list receives None or what was raised."""
    results: list[BaseException | None] = []

    def body() -> None:
        try:
            action()
        except BaseException as problem:
            results.append(problem)
        else:
            results.append(None)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, results


def prove_or_hang_up(sock: socket.socket, secret: bytes, server: bool) -> None:
    try:
        demand_proof(sock, secret) if server else prove(sock, secret, limit=20)
    except HandshakeError:
        sock.close()
        raise


def meet(server_secret: bytes, client_secret: bytes) -> list[BaseException | None]:
    """Return the results of the server and the client; each hangs up when it has failed."""
    with pair() as (server, client):
        thread, first = outcome(lambda: prove_or_hang_up(server, server_secret, True))
        other, second = outcome(lambda: prove_or_hang_up(client, client_secret, False))
        thread.join()
        other.join()
        return first + second


def test_the_same_secret_lets_both_in() -> None:
    assert meet(SECRET, SECRET) == [None, None]


def test_another_secret_is_refused_on_both_sides_at_once() -> None:
    start = time.monotonic()
    server, client = meet(SECRET, b"other")
    assert isinstance(server, WrongSecret)
    assert isinstance(client, WrongSecret)
    assert "STRATAGEM_SECRET" in str(client)
    in_time(time.monotonic() - start, 2)


def test_the_secret_is_in_no_message() -> None:
    secret = job_secret({"STRATAGEM_SECRET": "open sesame"}, "{}")
    for problem in meet(secret, b"other"):
        assert "sesame" not in str(problem) and secret.hex() not in str(problem)


def test_the_socket_keeps_its_own_timeout() -> None:
    with pair() as (server, client):
        client.settimeout(7.0)
        thread, _ = outcome(lambda: demand_proof(server, SECRET))
        prove(client, SECRET, limit=20)
        thread.join()
        assert client.gettimeout() == 7.0


@pytest.mark.parametrize("prove", [partial(prove, limit=2), partial(demand_proof, limit=2)])
def test_a_mirror_proves_nothing(prove: Callable[..., None]) -> None:
    with pair() as (ours, mirror):
        thread, results = outcome(lambda: prove(ours, SECRET))
        mirror.settimeout(0.2)
        while thread.is_alive():
            try:
                mirror.sendall(mirror.recv(4096) or b"")
            except OSError:
                continue
        thread.join()
        assert isinstance(results[0], HandshakeError)


def test_what_one_server_said_does_not_open_another() -> None:
    """A relay that turns the client's proof into a server's: the roles are inside the MAC."""
    with pair() as (first, left), pair() as (second, right):
        one, a = outcome(lambda: prove(first, SECRET, limit=20))
        two, b = outcome(lambda: prove(second, SECRET, limit=20))
        # Two clients, each shown the other as its server.
        left.sendall(right.recv(40))
        right.sendall(left.recv(40))
        left.sendall(right.recv(32))
        right.sendall(left.recv(32))
        one.join()
        two.join()
        assert isinstance(a[0], WrongSecret)
        assert isinstance(b[0], WrongSecret)


@pytest.mark.parametrize("prove", [partial(prove, limit=20), demand_proof])
@given(said=st.binary(max_size=200))
@QUICK
def test_garbage_is_refused(prove: Callable[..., None], said: bytes) -> None:
    with pair() as (ours, theirs):
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(HandshakeError):
            prove(ours, SECRET)


def forged_client(cut: int = 72, flip: int | None = None, bit: int = 0) -> BaseException | None:
    """Return a server's verdict on a valid client's 72 bytes, cut or with one bit changed."""

    def say(sock: socket.socket, part: bytes, start: int) -> None:
        data = bytearray(part)
        if flip is not None and start <= flip < start + len(data):
            data[flip - start] ^= 1 << bit
        sock.sendall(data[: max(0, cut - start)])

    greeting, nonce = b"STRATGM\x04", bytes(32)
    with pair() as (ours, theirs):
        thread, results = outcome(partial(prove_or_hang_up, ours, SECRET, True))
        with suppress(ConnectionError):
            say(theirs, greeting + nonce, 0)
            if cut >= 40:
                said = theirs.recv(40)
                mac = hmac.digest(SECRET, greeting + b"client" + nonce + said[8:], "sha256")
                say(theirs, mac, 40)
            theirs.shutdown(socket.SHUT_WR)
        thread.join(30)
        assert not thread.is_alive()
        return results[0]


def test_a_client_made_by_hand_is_let_in() -> None:
    assert forged_client() is None


@given(cut=st.integers(0, 71))
@QUICK
def test_a_truncated_client_is_refused(cut: int) -> None:
    assert isinstance(forged_client(cut=cut), HandshakeError)


@given(flip=st.integers(0, 71), bit=st.integers(0, 7))
@QUICK
def test_one_changed_bit_is_refused(flip: int, bit: int) -> None:
    assert isinstance(forged_client(flip=flip, bit=bit), HandshakeError)


def test_another_protocol_is_a_stranger_without_a_wait() -> None:
    with pair() as (ours, theirs):
        theirs.sendall(b"220 mail.example\r\n")
        start = time.monotonic()
        with pytest.raises(Stranger, match="something else"):
            prove(ours, SECRET, limit=5)
        in_time(time.monotonic() - start, 1)


def test_another_version_is_named() -> None:
    with pair() as (ours, theirs):
        theirs.sendall(b"STRATGM\x09" + bytes(32))
        with pytest.raises(Stranger, match="version 9"):
            demand_proof(ours, SECRET)


def test_a_peer_that_drips_is_cut_off_at_the_limit() -> None:
    with pair() as (ours, theirs):
        start = time.monotonic()
        thread, results = outcome(lambda: prove(ours, SECRET, limit=0.5))
        for byte in b"STRATGM\x04" + bytes(20):
            time.sleep(0.05)
            try:
                theirs.sendall(bytes([byte]))
            except OSError:
                break
        thread.join()
        assert isinstance(results[0], HandshakeError)
        in_time(time.monotonic() - start, 2.5)


def test_a_silent_peer_is_given_up_at_the_limit() -> None:
    with pair() as (ours, _):
        start = time.monotonic()
        with pytest.raises(HandshakeError, match="without a word"):
            prove(ours, SECRET, limit=0.3)
        in_time(time.monotonic() - start, 1.5)
        with pytest.raises(HandshakeError):
            recv_note(ours, limit=0.1)
        in_time(time.monotonic() - start, 2)


def test_notes_go_there_and_back() -> None:
    note = {"rank": 1, "loss": 0.5, "names": ["é", "\ud83d"], "deep": {"a": None}}
    with pair() as (ours, theirs):
        send_note(ours, note)
        assert recv_note(theirs, limit=20) == note


@given(said=st.binary(max_size=300))
@QUICK
def test_a_garbled_note_only_raises_connection_error(said: bytes) -> None:
    with pair() as (ours, theirs):
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            assert isinstance(recv_note(ours, limit=20), dict)


@given(
    value=st.recursive(
        st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
    )
)
@QUICK
def test_only_objects_are_notes(value: object) -> None:
    body = json.dumps(value).encode()
    with pair() as (ours, theirs):
        theirs.sendall(HEAD.pack(b"SGWF", VERSION, 0, len(body), 0) + body)
        with pytest.raises(HandshakeError):
            recv_note(ours, limit=20)


@given(size=st.integers(NOTE_LIMIT + 1, 2**32 - 1))
@QUICK
def test_a_long_note_is_refused_by_its_length_alone(size: int) -> None:
    with pair() as (ours, theirs):
        theirs.sendall(HEAD.pack(b"SGWF", VERSION, 0, size, 0))
        with pytest.raises(HandshakeError, match="limit"):
            recv_note(ours, limit=20)
    with pytest.raises(Malformed, match="limit"):
        list(note_reader().feed(HEAD.pack(b"SGWF", VERSION, 0, size, 0)))


def test_deep_nesting_is_refused() -> None:
    body = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    with pytest.raises(Malformed):
        list(note_reader().feed(HEAD.pack(b"SGWF", VERSION, 0, len(body), 0) + body))


def test_a_note_too_long_to_be_read_is_not_sent() -> None:
    with pytest.raises(UsageError, match="limit"):
        encode_note({"a": "x" * NOTE_LIMIT})


@given(
    notes=st.lists(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), max_size=6),
    cuts=st.lists(st.integers(1, 7), min_size=1),
)
@QUICK
def test_a_stream_in_pieces_gives_the_same_notes(
    notes: list[dict[str, int]], cuts: list[int]
) -> None:
    stream = b"".join(encode_note(note) for note in notes)
    reader, found, step = note_reader(), [], 0
    while stream:
        size = cuts[step % len(cuts)]
        step += 1
        found += [note for note, _ in reader.feed(stream[:size])]
        stream = stream[size:]
    assert found == notes


def test_the_secret_of_a_job() -> None:
    spec = '{"worker": ["a:1", "b:1"], "ps": ["c:1"]}'
    same = '{"ps": ["c:1"], "worker": ["a:1", "b:1"]}'
    other = '{"worker": ["b:1", "a:1"], "ps": ["c:1"]}'
    assert job_secret({}, spec) == job_secret({}, same) != job_secret({}, other)
    chosen = job_secret({"STRATAGEM_SECRET": "x"}, spec)
    assert chosen == job_secret({"STRATAGEM_SECRET": "x"}, other) != job_secret({}, spec)
    assert job_secret({"STRATAGEM_SECRET": ""}, spec) == job_secret({}, spec)
