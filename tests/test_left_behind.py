"""Shared memory of ours that is left fails a run; another program's does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.wire.segment import Segment
from tests import left_behind

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.timeout(60)
SHARED = Path("/dev/shm")


@pytest.mark.skipif(not SHARED.is_dir(), reason="no /dev/shm")
@pytest.mark.parametrize(("name", "passes"), [("another.lock", True), ("stratagem-leak", False)])
def test_files(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, name: str, passes: bool
) -> None:
    file = SHARED / f"{name}-{os.getpid()}"
    monkeypatch.setenv(left_behind.MARK, str(os.getpid()))  # no other run's processes count
    conftest = Path(__file__).with_name("conftest.py").read_text()
    pytester.makeconftest(conftest.replace("time.monotonic() + 20", "time.monotonic() + 1"))
    pytester.makepyfile(f"def test_that_leaves_something(): open({str(file)!r}, 'w').close()")
    try:
        done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist")
    finally:
        file.unlink()
    assert (done.ret == 0) == passes
    if not passes:
        done.stdout.fnmatch_lines([f"*left in shared memory: *{file.name}*"])


#: a process whose child holds a segment; it ends when told to, and leaves its child alone
PARENT = """
import os, time
from stratagem.wire.segment import Segment
read, write = os.pipe()
child = os.fork()
if not child:
    kept = Segment(100)
    os.write(write, b"made")
    time.sleep(50)
    os._exit(0)
os.read(read, 4)
print(child, flush=True)
input()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="segments have names elsewhere")
def test_a_segment_is_left_when_its_process_outlives_its_parent() -> None:
    mine = Segment(100)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            assert left_behind.in_shared_memory() == set(), "it is in use"
            parent.stdin.close()
            parent.wait(30)
            assert left_behind.in_shared_memory() == {f"a segment of process {pid}"}
        finally:
            os.kill(pid, signal.SIGKILL)
    assert mine.size >= 100
