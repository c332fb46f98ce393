"""The helper process that forks replicas, when it or its owner ends early."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

import stratagem as sg
from stratagem.replicas import pipe_frames, zygote
from stratagem.replicas.pool import Follower, Pool
from stratagem.replicas.zygote import ZygoteProcess
from tests.clock import PATIENCE, in_time
from tests.replicas.scripts import runs, wait_for

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper of this test's own; that of other tests is there again afterwards."""
    monkeypatch.setattr(ZygoteProcess, "_instance", None)


def test_an_owner_that_ends_while_the_helper_imports() -> None:
    """Ctrl-C at the start: the answer finds nobody, and that is no error of the helper's."""
    ours, theirs = socket.socketpair()
    start = zygote._START.format(path=sys.path)
    helper = subprocess.Popen(
        [sys.executable, "-c", start, str(theirs.fileno()), "json", str(os.getpid())],
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    pipe_frames.send_with_fds(ours, json.dumps({"end": [], "number": 1}).encode(), [])
    ours.close()
    assert helper.communicate(timeout=PATIENCE)[1] == ""
    assert helper.returncode == 0


OWNER = """
import sys, time
from stratagem.replicas import zygote
sys.path.append({folder!r})
zygote._ALWAYS = ["slow_import"]
print(zygote.ZygoteProcess.get().pid, flush=True)
time.sleep(60)
"""


def test_an_owner_that_is_killed_while_the_helper_imports(tmp_path: Path) -> None:
    """The helper watches its owner before it imports, which takes seconds."""
    (tmp_path / "slow_import.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('begun').touch()\ntime.sleep(30)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(folder=str(tmp_path))],
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        helper = int(owner.stdout.readline())
        wait_for((tmp_path / "begun").exists, what="for the import to begin")
        owner.terminate()
    try:
        in_time(wait_for(lambda: not runs(helper), what="for the helper to end"), 1.0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(helper, signal.SIGKILL)


def test_a_helper_that_is_killed_before_it_has_forked_anyone() -> None:
    helper = ZygoteProcess.get()
    os.kill(helper.pid, signal.SIGSTOP)  # while it imports
    threading.Timer(0.3, os.kill, (helper.pid, signal.SIGKILL)).start()
    start = time.monotonic()
    words = rf"^replica 1 ended because the helper process \(pid {helper.pid}\).*by SIGKILL"
    with pytest.raises(sg.ReplicaLost, match=words) as caught:
        Follower("replica 1")
    in_time(time.monotonic() - start, 2.0)
    assert caught.value.who == "replica 1"
    assert helper.end([1]) == {}


def test_a_helper_that_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zygote, "_ALWAYS", ["no_such_module"])
    with pytest.raises(ChildProcessError, match="cannot be imported by a fresh interpreter"):
        Follower("replica 1")


def test_a_helper_that_is_killed_with_an_answer_unread() -> None:
    """Its death is known all the same, and the followers' pool can be ended more than once."""
    helper, pool = ZygoteProcess.get(), Pool(["replica 1"])
    assert pool.orphaned() is None
    request = json.dumps({"end": [], "number": 0}).encode()  # cut short by Ctrl-C, say
    pipe_frames.send_with_fds(helper._channel, request, [])
    helper._channel.recv(1, socket.MSG_PEEK)
    os.kill(helper.pid, signal.SIGKILL)
    pool.followers[0].control.recv(1)  # killed by the kernel, as its parent has ended
    lost = pool.orphaned()
    assert lost is not None and f"the helper process (pid {helper.pid})" in str(lost)
    pool.end()
    pool.drain()
    pool.end()
