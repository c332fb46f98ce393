"""Connections leave no descriptor, no thread, and nothing open in a forked child."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from stratagem.errors import HandshakeError
from stratagem.wire.connection import Frame, WireError
from stratagem.wire.tcp import Connection, connect
from tests.clock import PATIENCE, in_time
from tests.wire.wire_pairs import (
    KINDS,
    SECRET,
    call,
    ended,
    eventually,
    listening,
    noise,
)

pytestmark = pytest.mark.timeout(60)
MB = 1 << 20


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_descriptor_and_no_thread_is_left(kind: str) -> None:
    kept: list[Connection] = []  # not closed by the garbage collector

    def once() -> None:
        with listening(kind) as (listener, arrived):
            with call(kind, listener.address) as client, arrived.get(timeout=20) as server:
                client.send({}, [noise(10)])
                server.receive()
                server.skip(10)
                kept.extend((client, server))
            with pytest.raises(HandshakeError):
                call(kind, listener.address, b"another")
            with pytest.raises(HandshakeError):
                other = None if kind == "tls" else True
                connect(listener.address, SECRET, limit=20, tls=other)
            bad = call(kind, listener.address)
            end = arrived.get(timeout=20)
            bad._channel.send([memoryview(b"?" * 100)])
            with pytest.raises(WireError):
                end.receive()
            assert ended(bad)
            kept.extend((bad, end))

    if kind == "unix":
        pytest.skip("there is no TLS to mix up")
    once()
    before = descriptors(), threading.active_count()
    for _ in range(5):
        once()
    # Fewer, if threads of an earlier test have ended only now.
    eventually(lambda: descriptors() <= before[0] and threading.active_count() <= before[1])


def test_closing_a_listener_ends_those_who_greet() -> None:
    with listening() as (listener, _):
        host, port = listener.address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            eventually(lambda: listener._door._count)
            start = time.monotonic()
            listener.close()
            stranger.settimeout(20)
            assert stranger.recv(1) == b""
            in_time(time.monotonic() - start, 1)
    listener.close()


def test_a_connection_outlives_its_listener(kind: str) -> None:
    with listening(kind) as (listener, arrived):
        client = call(kind, listener.address)
        server = arrived.get(timeout=20)
    with client, server:
        client.send({"a": 1})
        assert server.receive() == Frame({"a": 1}, 0)


CHILD = """
import json, os, sys, time
from stratagem.wire.connection import WireError
from stratagem.wire.tcp import Listener, connect, local_address

SECRET = b"s" * 32
ends = [connect(address, SECRET, limit=20, tls=kind == "tls" or None)
        for kind, address in zip(sys.argv[1::2], sys.argv[2::2])]
door = Listener(local_address(), SECRET, "x", print)
locks = [lock for end in ends for lock in (end._sending, end._gate)]
for lock in locks:  # as if other threads were busy at the time of the fork
    lock.acquire()
pid = os.fork()
if pid == 0:
    said = []
    for end in ends:
        try:
            end.send({})
        except WireError as problem:
            said.append(str(problem))
        assert end.receive() is None and end.readable()
        end.close()
    door.close()
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.islink(f"/proc/self/fd/{fd}")]
    left = [name for name in names if name.startswith("socket:")]
    print(json.dumps([said, left]), flush=True)
    time.sleep(60)
for lock in locks:
    lock.release()
for end in ends:
    end.send({"child": pid})
time.sleep(60)
"""


def test_a_forked_child_keeps_no_connection_open() -> None:
    """The parent is killed, its child lives on: the peers notice the death at once."""
    with listening("tcp") as tcp, listening("unix") as unix, listening("tls") as tls:
        doors = dict(zip(KINDS, (tcp, unix, tls), strict=True))
        places = [word for kind, (door, _) in doors.items() for word in (kind, door.address)]
        process = subprocess.Popen([sys.executable, "-c", CHILD, *places], stdout=subprocess.PIPE)
        assert process.stdout is not None
        child = 0
        try:
            ends = [arrived.get(timeout=20) for _, arrived in doors.values()]
            for end in ends:
                frame = end.receive()
                assert frame is not None  # the parent's connection works after the fork
                child = frame.header["child"]
            said, left = json.loads(process.stdout.readline())
            assert len(said) == 3 and all("closed by this side" in text for text in said)
            assert left == []
            assert not any(end.readable() for end in ends)
            process.kill()
            killed = time.monotonic()
            for end in ends:
                assert end.readable(PATIENCE) and end.receive() is None
            in_time(time.monotonic() - killed, 2)
        finally:
            process.kill()
            process.wait()
            if child:
                os.kill(child, signal.SIGKILL)
            process.stdout.close()
