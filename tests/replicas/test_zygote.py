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

import pytest

import stratagem as sg
from stratagem.replicas import pipe_frames, zygote
from stratagem.replicas.pool import Follower
from stratagem.replicas.zygote import ZygoteProcess
from tests.clock import PATIENCE, in_time

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper of this test's own; that of other tests is there again afterwards."""
    monkeypatch.setattr(ZygoteProcess, "_instance", None)


def test_an_owner_that_ends_while_the_helper_imports() -> None:
    """Ctrl-C at the start: the answer finds nobody, and that is no error of the helper's."""
    ours, theirs = socket.socketpair()
    helper = subprocess.Popen(
        [sys.executable, "-c", zygote._START.format(path=sys.path), str(theirs.fileno()), "json"],
        pass_fds=[theirs.fileno()],
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    pipe_frames.send_with_fds(ours, json.dumps({"end": [], "number": 1}).encode(), [])
    ours.close()
    assert helper.communicate(timeout=PATIENCE)[1] == ""
    assert helper.returncode == 0


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
