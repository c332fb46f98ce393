"""Frames of a member are checked before memory is allocated, and refused in one log line."""

from __future__ import annotations

import pytest
import torch

from stratagem.cluster.framing import BODY_LIMIT, HEAD, HEADER_LIMIT, encode
from stratagem.errors import UsageError
from stratagem.wire.connection import Frame, WireError
from stratagem.wire.tcp import Connection
from tests.wire.wire_pairs import (
    Lines,
    call,
    ended,
    listening,
    noise,
    pair,
    refused,
)

pytestmark = pytest.mark.timeout(60)
MB = 1 << 20


def test_a_size_that_differs_is_refused_before_reading(
    ends: tuple[Connection, Connection], lines: Lines
) -> None:
    server, client = ends
    client.send({}, [noise(10)])
    server.receive()
    target = torch.zeros(11, dtype=torch.uint8)
    refused(server, lambda: server.read_into([target]), lines, "10 bytes where 11 belong")
    assert not target.any()
    assert ended(client)


@pytest.mark.parametrize("verb", ["read", "skip"])
def test_more_than_the_limit_is_refused(
    verb: str, ends: tuple[Connection, Connection], lines: Lines
) -> None:
    server, client = ends
    client.send({}, [noise(10)])
    server.receive()
    refused(server, lambda: getattr(server, verb)(9), lines, "10 bytes; 9 is the limit")


def test_a_body_left_lying_is_the_callers_mistake(ends: tuple[Connection, Connection]) -> None:
    server, client = ends
    client.send({"a": 1}, [noise(3)])
    client.send({"a": 2})
    server.receive()
    with pytest.raises(UsageError, match="not read"):
        server.receive()
    server.skip(3)
    assert server.receive() == Frame({"a": 2}, 0)


GOOD = encode({"a": 1}, 4)
BAD = {
    "magic": b"XGWF" + GOOD[4:],
    "reserved": GOOD[:6] + b"\0\1" + GOOD[8:],
    "version": GOOD[:4] + b"\0\2" + GOOD[6:],
    "long header": HEAD.pack(b"SGWF", 1, 0, HEADER_LIMIT + 1, 0),
    "long body": HEAD.pack(b"SGWF", 1, 0, 2, BODY_LIMIT + 1) + b"{}",
    "huge": HEAD.pack(b"SGWF", 1, 0, 2**32 - 1, 2**64 - 1),
    "no JSON": HEAD.pack(b"SGWF", 1, 0, 3, 0) + b"{a}",
    "no text": HEAD.pack(b"SGWF", 1, 0, 2, 0) + b"\xff\xfe",
    "no header": HEAD.pack(b"SGWF", 1, 0, 0, 0),
    "a list": HEAD.pack(b"SGWF", 1, 0, 2, 0) + b"[]",
    "deep": HEAD.pack(b"SGWF", 1, 0, 200_005, 0) + b'{"a":' + b"[" * 200_000,
    "digits": HEAD.pack(b"SGWF", 1, 0, 9006, 0) + b'{"a":' + b"1" * 9000 + b"}",
    "another protocol": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_frame_is_refused(what: str, lines: Lines) -> None:
    with pair("unix") as (server, client):
        client._channel.send([memoryview(BAD[what])])
        refused(server, server.receive, lines, "version 2" if what == "version" else None)
        assert ended(client)


@pytest.mark.parametrize("cut", range(len(GOOD) + 4))
def test_a_truncated_frame_is_refused(cut: int, lines: Lines) -> None:
    with pair("unix") as (server, client):
        client._channel.send([memoryview((GOOD + b"body")[:cut])])
        client.close()

        def take() -> Frame | None:
            frame = server.receive()
            if frame is not None:
                server.read(4)
            return frame

        if cut == 0:
            assert take() is None and not lines.texts
        else:
            refused(server, take, lines, "in the middle of a frame")


def test_a_truncated_body_over_tls_is_refused(lines: Lines) -> None:
    with pair("tls") as (server, client):
        client._channel.send([memoryview(GOOD + b"bo")])
        client.close()
        server.receive()
        refused(server, lambda: server.read(4), lines, "in the middle of a frame")


def test_one_bad_peer_harms_no_other(lines: Lines) -> None:
    with listening() as (listener, arrived):
        good = call("tcp", listener.address)
        good_end = arrived.get(timeout=20)
        bad = call("tcp", listener.address)
        bad_end = arrived.get(timeout=20)
        with good, good_end, bad, bad_end:
            bad._channel.send([memoryview(BAD["huge"])])
            refused(bad_end, bad_end.receive, lines, "limit")
            good.send({"a": 1})
            assert good_end.receive() == Frame({"a": 1}, 0)


def test_a_reset_connection_is_a_wire_error(ends: tuple[Connection, Connection]) -> None:
    server, client = ends
    client.close()
    with pytest.raises(WireError):
        for _ in range(100):
            server.send({}, [noise(MB)])
