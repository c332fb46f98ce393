"""Frames over TCP, Unix sockets and TLS arrive whole and in order; no connection delays another."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from stratagem.cluster.framing import BODY_LIMIT, HEADER_LIMIT, encode
from stratagem.errors import UsageError
from stratagem.wire.channel import _PIECES
from stratagem.wire.connection import Frame, WireError
from stratagem.wire.tcp import Connection
from tests.clock import PATIENCE, in_time
from tests.wire.wire_pairs import (
    KINDS,
    Lines,
    Outcome,
    call,
    listening,
    noise,
    pair,
)

pytestmark = pytest.mark.timeout(60)
MB = 1 << 20


# Frames arrive as sent


def test_there_and_back(ends: tuple[Connection, Connection]) -> None:
    server, client = ends
    client.send({"push": 7, "names": ["é", "\ud83d"], "deep": {"a": [None, 1.5]}}, [noise(10)])
    frame = server.receive()
    assert frame == Frame({"push": 7, "names": ["é", "\ud83d"], "deep": {"a": [None, 1.5]}}, 10)
    assert torch.equal(server.read(10), noise(10))
    server.send({"ok": True})
    assert client.receive() == Frame({"ok": True}, 0)


def test_large_and_small_tensors_in_one_frame(ends: tuple[Connection, Connection]) -> None:
    server, client = ends
    sizes = [0, 1, 5, 3 * MB, 0, 16 << 10, (16 << 10) + 1, 7, 8 * MB + 3, 0, 2]
    tensors = [noise(size, seed) for seed, size in enumerate(sizes)]
    sending = Outcome(lambda: client.send({}, tensors))
    frame = server.receive()
    assert frame is not None and frame.size == sum(sizes)
    found = [torch.zeros_like(tensor) for tensor in tensors]
    server.read_into(found)
    sending.result()
    assert all(map(torch.equal, found, tensors))


def test_a_body_is_sent_while_it_is_made_and_read_in_two(
    ends: tuple[Connection, Connection],
) -> None:
    server, client = ends
    begun, made = threading.Event(), threading.Event()

    def parts() -> Iterator[Tensor]:
        yield noise(MB)
        begun.set()
        assert made.wait(PATIENCE)  # the peer has the first part before there is a second
        yield noise(5, 2)

    sending = Outcome(lambda: client.stream({"t": 1}, MB + 5, parts()))
    frame = server.receive()
    assert frame == Frame({"t": 1}, MB + 5)
    first, second = torch.zeros(MB, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)
    server.read_into([first], more=True)
    assert begun.wait(PATIENCE) and sending.is_alive()
    made.set()
    server.read_into([second])
    sending.result()
    assert torch.equal(first, noise(MB)) and torch.equal(second, noise(5, 2))
    client.send({"next": 1})
    assert server.receive() == Frame({"next": 1}, 0)


def test_parts_that_do_not_add_up_end_the_connection() -> None:
    with pair("unix") as (server, client):
        with pytest.raises(UsageError, match="differ from its size by 3 bytes"):
            client.stream({}, 8, iter([noise(5)]))
        assert server.receive() == Frame({}, 8)
        with pytest.raises(WireError):
            server.read(8)


def test_more_tensors_than_one_call_takes(ends: tuple[Connection, Connection]) -> None:
    server, client = ends
    tensors = [torch.full((i % 3,), i) for i in range(3 * _PIECES + 5)]
    sending = Outcome(lambda: client.send({}, tensors))
    assert server.receive() is not None
    found = [torch.zeros_like(tensor) for tensor in tensors]
    server.read_into(found)
    sending.result()
    assert all(map(torch.equal, found, tensors))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.uint16,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_any_dtype_travels_as_it_lies_in_memory(dtype: torch.dtype) -> None:
    with pair("unix") as (server, client):
        tensor = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.5, 0.0]]).to(dtype)
        for sent in (tensor, tensor[0, 1], tensor[:0], tensor.clone().requires_grad_(False)):
            client.send({}, [sent])
            assert server.receive() == Frame({}, sent.numel() * sent.element_size())
            found = torch.ones_like(sent)
            server.read_into([found])
            assert torch.equal(found.view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8))


def test_parameters_are_sent_and_filled() -> None:
    with pair("unix") as (server, client):
        sent, found = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        client.send({}, list(sent.parameters()))
        server.receive()
        server.read_into(list(found.parameters()))
        assert torch.equal(sent.weight, found.weight) and torch.equal(sent.bias, found.bias)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 4).t()[:2],
        torch.zeros(1).expand(3),
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
)
def test_memory_that_cannot_travel_is_refused_before_anything_is_sent(tensor: Tensor) -> None:
    with pair("unix") as (server, client):
        with pytest.raises(UsageError):
            client.send({}, [torch.zeros(2), tensor])
        client.send({"still": "good"})
        assert server.receive() == Frame({"still": "good"}, 0)


@pytest.mark.parametrize("header", [[1], {"a": b"x"}, {"a": torch.zeros(1)}, "a", {"a": {1}}])
def test_only_plain_objects_are_headers(header: object) -> None:
    with pair("unix") as (server, client):
        with pytest.raises(UsageError):
            client.send(header)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="limit"):
            client.send({"a": "x" * HEADER_LIMIT})
        client.send({"still": "good"})
        assert server.receive() == Frame({"still": "good"}, 0)


def test_frames_of_many_threads_do_not_mix(ends: tuple[Connection, Connection]) -> None:
    server, client = ends

    def send(number: int) -> None:
        for serial in range(20):
            size = (number * 7919 + serial * 104729) % 60_000
            tensors = [torch.full((size,), number, dtype=torch.uint8), torch.tensor([serial])]
            client.send({"from": number, "serial": serial}, tensors)

    senders = [Outcome(partial(send, number)) for number in range(5)]
    seen: dict[int, int] = dict.fromkeys(range(5), 0)
    for _ in range(100):
        frame = server.receive()
        assert frame is not None
        body = server.read(BODY_LIMIT)
        number, serial = frame.header["from"], frame.header["serial"]
        assert seen[number] == serial
        seen[number] += 1
        assert bool((body[:-8] == number).all()) and body[-8] == serial
    for sender in senders:
        sender.result()


def test_a_partial_send_is_continued() -> None:
    """A small buffer and a slow reader: the kernel takes a frame in hundreds of parts."""
    with pair("tcp") as (server, client):
        raw: socket.socket = client._channel._sock  # type: ignore[attr-defined]
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        raw.settimeout(20)  # with a timeout the kernel's partial counts reach Python
        tensors = [noise(3001, seed) for seed in range(400)]
        sending = Outcome(lambda: client.send({}, tensors))
        assert server.receive() is not None
        found = [torch.zeros_like(tensor) for tensor in tensors]
        server.read_into(found)
        sending.result()
        assert all(map(torch.equal, found, tensors))


def test_a_body_in_drips_is_put_together() -> None:
    """recv with MSG_WAITALL may still return early."""
    with pair("tcp") as (server, client):
        raw: socket.socket = client._channel._sock  # type: ignore[attr-defined]
        server._channel._sock.settimeout(20)  # type: ignore[attr-defined]

        def drip() -> None:
            data = encode({"a": 1}, 300) + bytes(noise(300).tolist())
            for start in range(0, len(data), 7):
                raw.sendall(data[start : start + 7])
                time.sleep(0.001)

        dripping = Outcome(drip)
        assert server.receive() == Frame({"a": 1}, 300)
        found = [torch.zeros(100, dtype=torch.uint8) for _ in range(3)]
        server.read_into(found)
        dripping.result()
        assert torch.equal(torch.cat(found), noise(300))


# No connection delays another


def test_sending_goes_on_while_another_thread_waits_to_receive(
    ends: tuple[Connection, Connection],
) -> None:
    server, client = ends
    waiting = Outcome(client.receive)
    time.sleep(0.1)
    for number in range(3):
        sending = Outcome(partial(client.send, {"n": number}, [noise(2 * MB)]))
        assert server.receive() == Frame({"n": number}, 2 * MB)
        server.skip(BODY_LIMIT)
        sending.result()
    assert waiting.is_alive()
    server.send({"done": 1})
    assert waiting.result() == Frame({"done": 1}, 0)


def test_both_ends_send_a_lot_at_once(ends: tuple[Connection, Connection]) -> None:
    """Neither can finish unless both receive at the same time."""
    body = noise(12 * MB)

    def take(end: Connection) -> bool:
        assert end.receive() == Frame({}, len(body))
        return torch.equal(end.read(len(body)), body)

    work = [Outcome(partial(end.send, {}, [body])) for end in ends]
    results = [Outcome(partial(take, end)) for end in ends]
    assert all(result.result(20) for result in results)
    for sending in work:
        sending.result()


def test_close_wakes_a_blocked_receive(ends: tuple[Connection, Connection], lines: Lines) -> None:
    server, client = ends
    waiting = Outcome(server.receive)
    time.sleep(0.1)
    assert waiting.is_alive()
    server.close()
    assert waiting.result(10) is None
    assert server.receive() is None
    assert client.receive() is None
    with pytest.raises(WireError, match="closed by this side"):
        server.send({})
    assert not lines.texts


def test_close_wakes_a_receive_in_the_middle_of_a_body(
    ends: tuple[Connection, Connection], lines: Lines
) -> None:
    server, client = ends
    client._channel.send([memoryview(encode({}, 100) + b"x" * 50)])
    assert server.receive() == Frame({}, 100)
    waiting = Outcome(lambda: server.read(100))
    time.sleep(0.1)
    server.close()
    with pytest.raises(WireError, match="closed by this side"):
        waiting.result(10)
    assert not lines.texts


def test_close_wakes_a_blocked_send_and_those_behind_it(
    ends: tuple[Connection, Connection],
) -> None:
    _, client = ends
    sending = [Outcome(lambda: client.send({}, [torch.zeros(10 * MB)])) for _ in range(2)]
    time.sleep(0.3)
    assert all(thread.is_alive() for thread in sending)
    client.close()
    for thread in sending:
        with pytest.raises(WireError, match="closed by this side"):
            thread.result(10)


def test_readable(ends: tuple[Connection, Connection]) -> None:
    server, client = ends
    start = time.monotonic()
    assert not server.readable()
    assert not server.readable(0.05)
    in_time(time.monotonic() - start, 2, least=0.04)
    client.send({"a": 1}, [noise(5)])
    assert server.readable(5)
    assert server.receive() == Frame({"a": 1}, 5)
    # Over TLS these five bytes came in one record with the header: the socket itself is empty.
    assert server.readable()
    server.skip(5)
    assert not server.readable()
    waiting = Outcome(lambda: server.readable(10))
    time.sleep(0.05)
    client.close()
    assert waiting.result(10) is True
    assert server.receive() is None
    assert server.readable()


def test_a_stopped_peer_blocks_only_its_own_sender() -> None:
    code = (
        "import sys, time\n"
        "from stratagem.wire.tcp import connect\n"
        "c = [connect(a, b's' * 32, limit=20, tls=k == 'tls' or None)\n"
        "     for k, a in zip(sys.argv[1::2], sys.argv[2::2])]\n"
        "print('here', flush=True)\n"
        "time.sleep(60)\n"
    )
    with listening("tcp") as tcp, listening("unix") as unix, listening("tls") as tls:
        doors = dict(zip(KINDS, (tcp, unix, tls), strict=True))
        places = [word for kind, (door, _) in doors.items() for word in (kind, door.address)]
        process = subprocess.Popen([sys.executable, "-c", code, *places], stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"here\n"
            stopped = [arrived.get(timeout=20) for _, arrived in doors.values()]
            os.kill(process.pid, signal.SIGSTOP)
            stuck = [Outcome(partial(end.send, {}, [torch.zeros(10 * MB)])) for end in stopped]
            time.sleep(0.3)
            for kind, (door, arrived) in doors.items():
                with call(kind, door.address) as client, arrived.get(timeout=20) as other:
                    work = Outcome(partial(other.send, {}, [noise(MB)]))
                    assert client.receive() == Frame({}, MB)
                    client.skip(MB)
                    work.result(10)
            assert all(thread.is_alive() for thread in stuck)
            for end, thread in zip(stopped, stuck, strict=True):
                end.close()
                with pytest.raises(WireError):
                    thread.result(10)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
