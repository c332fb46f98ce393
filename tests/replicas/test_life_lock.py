"""A death is known before the kernel has freed the memory of the dead and closed its sockets."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest

import stratagem as sg
from stratagem.errors import ReplicaLost
from stratagem.replicas import follower, life_lock
from stratagem.replicas.life_lock import LifeLock
from tests.clock import unless_late

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="robust mutexes are Linux's"),
]


def start(lock: LifeLock, then: Callable[[socket.socket], object]) -> tuple[int, socket.socket]:
    """A process that holds the lock; its socket has said so, and closes when it ends."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        try:
            ours.close()
            lock.hold()
            theirs.send(b"held")
            then(theirs)
        finally:
            os._exit(3)
    theirs.close()
    os.close(lock.fd)
    assert ours.recv(4) == b"held"
    return pid, ours


def rest(sock: socket.socket) -> None:
    signal.pause()


def fill(size: int, sock: socket.socket) -> None:
    memory = b"x" * size
    sock.send(b"full")
    rest(sock)
    del memory


def made() -> LifeLock:
    lock = LifeLock.make()
    assert lock is not None
    return lock


def test_whoever_is_killed_is_known_to_be_dead_and_not_before() -> None:
    for _ in range(3):
        lock, heard = made(), threading.Event()
        pid, sock = start(lock, rest)
        with sock:
            told: list[bool] = []

            def wait(lock: LifeLock, pid: int, told: list[bool], heard: threading.Event) -> None:
                told.append(lock.await_end(pid))
                heard.set()

            thread = threading.Thread(target=wait, args=(lock, pid, told, heard))
            thread.start()
            assert not heard.wait(0.05)
            os.kill(pid, signal.SIGKILL)
            thread.join()
            assert told == [True]
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_whoever_ends_by_itself_is_known_too() -> None:
    lock = made()
    pid, sock = start(lock, lambda sock: None)
    with sock:
        assert lock.await_end(pid)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert lock.await_end(pid) is False, "nobody holds it any more"


def test_it_comes_before_the_socket_closes() -> None:
    """Pages that must be freed keep the socket open; nobody waits for that."""
    first = 0
    for _ in range(4):
        lock = made()
        pid, sock = start(lock, partial(fill, 64 << 20))
        with sock:
            assert sock.recv(4) == b"full"
            os.kill(pid, signal.SIGKILL)
            assert lock.await_end(pid)
            first += not select.select([sock], [], [], 0)[0]
            os.waitpid(pid, 0)
    unless_late(first, "each time the socket had closed by then")


def test_a_thread_that_may_still_write_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, seen = made(), list[int]()
    pid, sock = start(lock, rest)

    def runs(pid: int) -> bool:
        seen.append(pid)
        return len(seen) < 3

    monkeypatch.setattr(life_lock, "_runs", runs)
    with sock:
        os.kill(pid, signal.SIGKILL)
        assert lock.await_end(pid) and len(seen) == 3
        os.waitpid(pid, 0)
    assert life_lock._is_exiting(os.getpid(), str(threading.get_native_id())) is False


def dies_behind_an_open_socket(holder: Path) -> None:
    """Replica 1 dies; another process keeps its membership's socket open for a while."""
    replica = sg.current_replica()
    if replica.index == 1:
        assert follower.state is not None
        kept = subprocess.Popen(["sleep", "60"], pass_fds=[follower.state.sock.fileno()])
        holder.write_text(str(kept.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    replica.barrier()


@pytest.mark.timeout(170)
def test_replicas_do_not_wait_for_a_socket_to_close(tmp_path: Path) -> None:
    with closing(sg.MirroredStrategy(["cpu:0", "cpu:1"])) as strategy:
        strategy.run(os.getpid)  # starts everybody
        for i in range(2):
            began = time.monotonic()
            with pytest.raises(ReplicaLost, match="was killed by SIGKILL"):
                strategy.run(dies_behind_an_open_socket, tmp_path / str(i))
            assert time.monotonic() - began < 50, "it was heard of when the socket closed"
            with suppress(ProcessLookupError):
                os.kill(int((tmp_path / str(i)).read_text()), signal.SIGKILL)
