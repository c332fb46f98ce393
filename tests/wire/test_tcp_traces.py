"""Nothing is left behind: no descriptor, no thread, no connection in a forked child."""

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
from stratagem.wire.frames import Frame, WireError
from stratagem.wire.tcp import connect
from tests.wire.wire_pairs import (
    KINDS,
    SECRET,
    call,
    ended,
    eventually,
    listening,
    noise,
)

pytestmark = pytest.mark.timeout(30)
MB = 1 << 20


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_descriptor_and_no_thread_is_left(kind: str) -> None:
    def once() -> None:
        with listening(kind) as (listener, arrived):
            with call(kind, listener.address) as client, arrived.get(timeout=5) as server:
                client.send({}, [noise(10)])
                server.receive()
                server.skip(10)
            with pytest.raises(HandshakeError):
                call(kind, listener.address, b"another")
            with pytest.raises(HandshakeError):
                other = None if kind == "tls" else True
                connect(listener.address, SECRET, limit=2, tls=other)
            bad = call(kind, listener.address)
            end = arrived.get(timeout=5)
            bad._channel.send([memoryview(b"?" * 100)])
            with pytest.raises(WireError):
                end.receive()
            assert ended(bad)

    if kind == "unix":
        pytest.skip("there is no TLS to mix up")
    once()
    before = descriptors(), threading.active_count()
    for _ in range(5):
        once()
    eventually(lambda: (descriptors(), threading.active_count()) == before)


def test_closing_a_listener_ends_those_who_greet() -> None:
    with listening() as (listener, _):
        host, port = listener.address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            eventually(lambda: listener._greetings)
            start = time.monotonic()
            listener.close()
            stranger.settimeout(2)
            assert stranger.recv(1) == b""
            assert time.monotonic() - start < 1
    listener.close()


def test_a_connection_outlives_its_listener(kind: str) -> None:
    with listening(kind) as (listener, arrived):
        client = call(kind, listener.address)
        server = arrived.get(timeout=5)
    with client, server:
        client.send({"a": 1})
        assert server.receive() == Frame({"a": 1}, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_keeps_no_connection_open(kind: str) -> None:
    """The parent is killed, its child lives on: the peer notices the death at once."""
    code = (
        "import json, os, sys, time\n"
        "from stratagem.wire.frames import WireError\n"
        "from stratagem.wire.tcp import connect, Listener, local_address\n"
        "c = connect(sys.argv[1], b's' * 32, limit=5, tls=sys.argv[2] == 'tls' or None)\n"
        "door = Listener(local_address(), b's' * 32, 'x', print)\n"
        "c._sending.acquire()\n"  # as if a thread were sending at the time of the fork
        "if (pid := os.fork()) == 0:\n"
        "    try:\n"
        "        c.send({})\n"
        "        said = 'sent'\n"
        "    except WireError as problem:\n"
        "        said = str(problem)\n"
        "    c.close(); door.close()\n"
        "    left = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')\n"
        "            if os.path.islink(f'/proc/self/fd/{fd}')]\n"
        "    sockets = sum(name.startswith('socket:') for name in left)\n"
        "    print(json.dumps([os.getpid(), said, c.receive(), sockets]), flush=True)\n"
        "    time.sleep(60)\n"
        "c._sending.release()\n"
        "c.send({'child': pid})\n"
        "time.sleep(60)\n"
    )
    with listening(kind) as (listener, arrived):
        process = subprocess.Popen(
            [sys.executable, "-c", code, listener.address, kind], stdout=subprocess.PIPE
        )
        child = 0
        try:
            with arrived.get(timeout=20) as server:
                frame = server.receive()
                assert frame is not None  # the parent's connection works after the fork
                assert process.stdout is not None
                child, said, received, sockets = json.loads(process.stdout.readline())
                assert child == frame.header["child"]
                assert "closed by this side" in said and received is None
                assert sockets == 0
                assert not server.readable()
                process.kill()
                assert server.readable(2)
                assert server.receive() is None
        finally:
            process.kill()
            process.wait()
            if child:
                os.kill(child, signal.SIGKILL)
            assert process.stdout is not None
            process.stdout.close()
