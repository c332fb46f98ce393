"""The output of tasks: line by line, labelled, never mixed, and never blocking a task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.launch.output import PATIENCE, Lines, Sink

sys.path.insert(0, str(Path(__file__).parent))
from run_processes import Launcher, alive, said, wait_for

from tests.clock import SLOWER

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end()


def test_lines_are_labelled_and_keep_their_stream(launcher: Launcher) -> None:
    script = "print('to out', index); print('to err', index, file=sys.stderr)"
    code, out, err = launcher.finish(script, "--workers", "2", "--ps", "1")
    assert code == 0
    assert sorted(out.splitlines()) == [
        "[ps 0] to out 0",
        "[worker 0] to out 0",
        "[worker 1] to out 1",
    ]
    *lines, remedy, who, same = err.splitlines()
    assert sorted(lines) == ["[ps 0] to err 0", "[worker 0] to err 0", "[worker 1] to err 1"]
    assert "make a strategy" in remedy
    assert "worker 0 and worker 1 ran the whole script" in who
    assert "did the same work" in same


def test_lines_never_mix(launcher: Launcher) -> None:
    script = """
letter = "ab"[index]
for i in range(300):
    for _ in range(3):
        os.write(1, (letter * 50).encode())
    os.write(1, b"\\n")
os.write(1, ("end " + letter).encode())
"""
    code, out, _ = launcher.finish(script, "--workers", "2")
    assert code == 0
    for index, letter in enumerate("ab"):
        assert said(out, f"worker {index}") == [letter * 150] * 300 + [f"end {letter}"]
    assert out.endswith("\n")


def test_progress_bars_and_noise(launcher: Launcher) -> None:
    script = r"""
os.write(1, b"\r 10%\r 50%\r100%\n" + b"windows\r\n" + b"\xff\xfe\x00noise\x80\n" + "é\n".encode())
os.write(1, b"x" * 200_000 + b"\n")
"""
    code, out, _ = launcher.finish(script)
    assert code == 0
    told = said(out, "worker 0")
    assert told[:2] == ["100%", "windows"]
    assert told[2] == "\udcff\udcfe\x00noise\udc80" and told[3] == "é"
    assert sum(map(len, told[4:])) == 200_000


def test_an_unfinished_line_is_shown_before_it_ends(launcher: Launcher) -> None:
    child = launcher("print('\\rwaiting', end=''); note('task0', os.getpid()); time.sleep(60)")
    assert child.stdout is not None and child.stdout.readline() == "[worker 0] waiting\n"


def test_pieces_of_a_line() -> None:
    cut = Lines()
    assert cut.feed(b"one\ntw", 0.0) == [b"one"]
    assert cut.stale(PATIENCE / 2) == []
    assert cut.feed(b"o\n\n", 1.0) == [b"two", b""]
    assert cut.feed(b"\r10%", 2.0) == [] and cut.feed(b"\r20%", 3.0) == []
    assert cut.stale(2.0 + PATIENCE) == [b"20%"]  # counted from the first piece
    assert cut.stale(99.0) == [] and cut.feed(b"\r30%", 99.0) == []
    assert cut.feed(b"\r        \r\n", 99.1) == [b"30%"]
    assert cut.feed(b"held", 100.0) == [] and cut.stale(110.0) == [b"held"]
    assert cut.feed(b"\nnext\n", 111.0) == [b"next"]  # its own end makes no empty line
    assert cut.feed(b"last", 112.0) == [] and cut.flush() == [b"last"] and cut.flush() == []


def test_colours_only_on_a_terminal(launcher: Launcher) -> None:
    for environ, options, coloured in (
        ({"NO_COLOR": ""}, (), True),
        ({"NO_COLOR": "1"}, (), False),
        ({"NO_COLOR": ""}, ("--no-color",), False),
    ):
        ours, theirs = os.openpty()
        with os.fdopen(ours, "rb", buffering=0), os.fdopen(theirs, "wb", buffering=0) as end:
            (launcher.where / "train.py").write_text("print('hello')")
            subprocess.run(
                [sys.executable, "-m", "stratagem", "run", *options, "train.py"],
                check=True,
                cwd=launcher.where,
                stdout=end,
                env={**os.environ, "TERM": "xterm", "CUDA_VISIBLE_DEVICES": "", **environ},
            )
            shown = os.read(ours, 1000)
        assert (b"\033[" in shown) is coloured and b"[worker 0]" in shown and b"hello" in shown


def test_every_task_has_its_colour() -> None:
    sink = Sink(sys.stderr, colour=True)
    assert len({sink.prefix("worker 0", number) for number in range(6)}) == 6
    assert Sink(sys.stderr, colour=False).prefix("worker 0", 3) == b"[worker 0] "


def test_a_reader_who_leaves_ends_the_job(launcher: Launcher) -> None:
    child = launcher("note('task0', os.getpid())\nwhile True: print('y'); time.sleep(0.01)")
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    child.stdout = None
    assert child.wait(20 * SLOWER) == 128 + signal.SIGPIPE
    assert not alive(launcher.pid("task0"))


def test_a_reader_who_stalls_does_not_hold_up_the_end(launcher: Launcher) -> None:
    child = launcher("note('task0', os.getpid())\nwhile True: print('y' * 1000)")
    task = launcher.pid("task0")
    time.sleep(1.0)  # the pipe to us is full by now, and the launcher stands before it
    child.terminate()
    wait_for(lambda: not alive(task))
    assert child.wait(20 * SLOWER) == 128 + signal.SIGTERM
