"""Any bytes give frames, the end, or one WireError; never another error or a hang."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.cluster.framing import HEAD, encode
from stratagem.wire.channel import PlainChannel
from stratagem.wire.connection import Connection, Frame, WireError
from tests.wire.wire_pairs import Outcome, call, listening, noise

pytestmark = pytest.mark.timeout(60)
SETTINGS = settings(max_examples=40, deadline=None)
LIMIT = 1 << 20


@contextmanager
def raw_pair() -> Iterator[tuple[Connection, socket.socket]]:
    near, far = socket.socketpair()
    with far, Connection(PlainChannel(near), "a peer") as connection:
        yield connection, far


def drain(connection: Connection) -> int:
    """Read frames until the end, and return their number."""
    count = 0
    while (frame := connection.receive()) is not None:
        assert isinstance(frame.header, dict)
        if count % 2:
            connection.skip(LIMIT)
        else:
            assert len(connection.read(LIMIT)) == frame.size
        count += 1
    return count


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
headers = st.dictionaries(st.text(max_size=6), plain, max_size=4)
bodies = st.binary(max_size=60)
small = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=2)
streams = st.lists(st.tuples(small, bodies), max_size=3).map(
    lambda frames: b"".join(encode(header, len(body)) + body for header, body in frames)
)


@given(said=st.binary(max_size=200))
@SETTINGS
def test_garbage(said: bytes) -> None:
    with raw_pair() as (connection, far):
        far.sendall(said)
        far.shutdown(socket.SHUT_WR)
        if said:
            with pytest.raises(WireError):
                drain(connection)
        assert connection.receive() is None


@given(
    said=streams,
    cut=st.integers(0, 400),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
)
@SETTINGS
def test_frames_changed_and_cut(said: bytes, cut: int, changes: list[tuple[int, int]]) -> None:
    data = bytearray(said)
    for place, value in changes:
        if place < len(data):
            data[place] = value
    with raw_pair() as (connection, far):
        far.sendall(data[:cut])
        far.shutdown(socket.SHUT_WR)
        with suppress(WireError):
            drain(connection)
        assert connection.receive() is None


@given(header=st.integers(0, 2**32 - 1), body=st.integers(0, 2**64 - 1), version=st.integers(0, 3))
@SETTINGS
def test_any_lengths(header: int, body: int, version: int) -> None:
    with raw_pair() as (connection, far):
        far.sendall(HEAD.pack(b"SGWF", version, 0, header, body))
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(WireError):
            drain(connection)


@given(value=plain)
@SETTINGS
def test_only_objects_are_headers(value: object) -> None:
    text = json.dumps(value).encode()
    with raw_pair() as (connection, far):
        far.sendall(HEAD.pack(b"SGWF", 1, 0, len(text), 0) + text)
        if isinstance(value, dict):
            assert connection.receive() == Frame(value, 0)
        else:
            with pytest.raises(WireError):
                connection.receive()


@given(
    header=headers,
    sizes=st.lists(st.integers(0, 70) | st.integers(0, 40_000), max_size=20),
    groups=st.lists(st.integers(0, 40_000), max_size=3),
)
@SETTINGS
def test_any_frame_arrives(header: dict[str, object], sizes: list[int], groups: list[int]) -> None:
    """The receiver may divide the body into other tensors than the sender."""
    tensors = [noise(size, seed) for seed, size in enumerate(sizes)]
    whole = torch.cat([*tensors, noise(0)])
    edges = sorted({min(edge, len(whole)) for edge in groups} | {0, len(whole)})
    found = torch.zeros_like(whole)
    with raw_pair() as (connection, far), Connection(PlainChannel(far), "b") as other:
        sending = Outcome(lambda: other.send(header, tensors))
        assert connection.receive() == Frame(header, len(whole))
        connection.read_into([found[a:b] for a, b in pairwise(edges)])
        sending.result()
    assert torch.equal(found, whole)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_strangers_at_the_door(kind: str) -> None:
    """Garbage is refused, and the next member is accepted."""
    with listening(kind) as (listener, arrived):

        @given(said=st.binary(max_size=120) | st.binary(max_size=80).map(b"STRATGM\x04".__add__))
        @settings(max_examples=30, deadline=None)
        def knock(said: bytes) -> None:
            if kind == "unix":
                sock = socket.socket(socket.AF_UNIX)
                sock.connect("\0" + listener.address.removeprefix("unix:@"))
            else:
                sock = socket.create_connection(("127.0.0.1", int(listener.address.split(":")[1])))
            with sock, suppress(OSError):
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
            assert arrived.empty()

        knock()
        with call(kind, listener.address) as client, arrived.get(timeout=20) as server:
            client.send({"a": 1})
            assert server.receive() == Frame({"a": 1}, 0)
