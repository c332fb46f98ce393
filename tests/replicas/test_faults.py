"""Law 3: nobody waits in silence. What goes wrong in a replica is named, and nothing is left over.

Followers misbehave for real: they raise, die by a signal, stop. Afterwards the same strategy must
train as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from stratagem.cluster.framing import encode
from stratagem.replicas import pipe_frames
from stratagem.replicas.zygote import ZygoteProcess
from tests.clock import in_time, unless_late
from tests.replicas.scripts import Nursery, Script, family, nursery, runs, wait_for
from tests.support import by_hand, data, distance, mlp, strategy

pytestmark = pytest.mark.timeout(120)

OPS = ["shared_memory", "ring"]
SOON = 5.0  # seconds; the promise is 2, the rest is for a busy machine


@pytest.fixture(scope="module", params=OPS)
def two(request: pytest.FixtureRequest) -> Iterator[sg.MirroredStrategy]:
    made = strategy(2, cross_device_ops=request.param)
    yield made
    made.close()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def fit(on: sg.Strategy, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> nn.Module:
    """Four steps."""
    x, y = data(64)
    with on.scope():
        model = sg.Model(mlp())
        model.compile(optimizer=sgd, loss=loss)
    model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    return model.module


def alone() -> nn.Module:
    x, y = data(64)
    return by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=16, epochs=1)


def works(on: sg.Strategy) -> bool:
    """Whether it trains as one device does."""
    return distance(fit(on), alone()) < 1e-6


class Act:
    """A loss that does something on one replica in its third step, and notes when."""

    def __init__(self, act: Callable[[], object], note: Path, replica: int = 1) -> None:
        self.act, self.note, self.replica, self.step = act, note, replica, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.step += 1
        if sg.current_replica().index == self.replica and self.step == 3:
            self.note.write_text(str(time.time()))
            self.act()
        return F.cross_entropy(output, target)


def kill_myself(number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


class Mine(Exception):
    """An exception of the user's."""


def raise_mine() -> None:
    raise Mine("a bad day", 7)


# --- exceptions ----------------------------------------------------------------------------------


def test_an_exception_in_a_follower(two: sg.MirroredStrategy) -> None:
    def work(word: str) -> str:
        replica = sg.current_replica()
        if replica.index == 1:
            raise Mine(word, 7)
        replica.barrier()
        return word

    with pytest.raises(sg.ReplicaFailed) as caught:
        two.run(work, "a bad day")
    error = caught.value
    assert error.who == "replica 1"
    text = str(error)
    assert text.startswith("replica 1 raised an exception")
    assert "in work" in text and "raise Mine(word, 7)" in text, "its own traceback is missing"
    assert type(error.__cause__) is Mine
    assert error.__cause__.args == ("a bad day", 7)
    assert works(two)


def test_an_exception_in_mid_fit(two: sg.MirroredStrategy, tmp_path: Path) -> None:
    with pytest.raises(sg.ReplicaFailed, match="replica 1 raised") as caught:
        fit(two, Act(raise_mine, tmp_path / "note"))
    assert type(caught.value.__cause__) is Mine
    assert "raise_mine" in str(caught.value)
    in_time(time.time() - float((tmp_path / "note").read_text()), SOON)
    assert works(two)


def test_an_exception_in_the_caller_is_its_own(two: sg.MirroredStrategy, tmp_path: Path) -> None:
    with pytest.raises(Mine, match="a bad day"):
        fit(two, Act(raise_mine, tmp_path / "note", replica=0))
    assert works(two)


def test_an_exception_everywhere_is_the_users(two: sg.MirroredStrategy) -> None:
    """A mistake that every replica makes looks as it would on one device."""
    with pytest.raises(Mine) as caught:
        two.run(raise_mine)
    assert caught.value.args == ("a bad day", 7)
    with pytest.raises(sg.UsageError, match="not known"):
        two.run(lambda: two.reduce("median", torch.ones(1)))
    with pytest.raises(RuntimeError, match=r"shape|size"):
        fit(two, lambda output, target: (output @ output).mean())
    assert works(two)


def test_the_culprit_is_named_not_those_who_waited(three: sg.MirroredStrategy) -> None:
    """Replica 1 waits for replica 2, fails because that one failed, and answers first."""

    def work() -> None:
        replica = sg.current_replica()
        if replica.index == 1:
            replica.barrier()
        elif replica.index == 2:
            raise_mine()

    for _ in range(3):
        with pytest.raises(sg.ReplicaFailed) as caught:
            three.run(work)
        assert caught.value.who == "replica 2"
        assert type(caught.value.__cause__) is Mine


def test_the_culprit_is_named_while_others_are_busy(three: sg.MirroredStrategy) -> None:
    def work() -> None:
        index = sg.current_replica().index
        if index == 1:
            time.sleep(30)
        elif index == 2:
            raise_mine()

    start = time.monotonic()
    with pytest.raises(sg.ReplicaFailed) as caught:
        three.run(work)
    in_time(time.monotonic() - start, SOON)
    assert caught.value.who == "replica 2"
    assert type(caught.value.__cause__) is Mine


@pytest.mark.parametrize("how", [SystemExit, KeyboardInterrupt])
def test_leaving_by_exception(two: sg.MirroredStrategy, how: type[BaseException]) -> None:
    """sys.exit() in a replica must not end the caller without a word."""

    def work() -> None:
        if sg.current_replica().index == 1:
            raise how(3)

    with pytest.raises(sg.ReplicaFailed, match=how.__name__) as caught:
        two.run(work)
    assert type(caught.value.__cause__) is how


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.lock = threading.Lock()


class TwoWords(Exception):
    """Can be pickled and not unpickled: the usual mistake with exceptions of several arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize("error", [lambda: Locked("odd one"), lambda: TwoWords("odd", "one")])
def test_an_exception_that_cannot_travel(
    two: sg.MirroredStrategy, error: Callable[[], Exception]
) -> None:
    def work() -> None:
        if sg.current_replica().index == 1:
            raise error()

    with pytest.raises(sg.ReplicaFailed, match="odd one") as caught:
        two.run(work)
    assert caught.value.who == "replica 1"
    assert "in work" in str(caught.value)
    assert two.run(lambda: 1) == [1, 1]


def test_an_argument_that_cannot_travel(two: sg.MirroredStrategy) -> None:
    with pytest.raises(sg.UsageError, match=r"cannot be sent to them.*_thread.lock") as caught:
        two.run(lambda lock: None, threading.Lock())
    assert "make them inside the function" in str(caught.value)
    assert two.run(lambda: 1) == [1, 1]


def test_a_result_that_cannot_travel(two: sg.MirroredStrategy) -> None:
    took = []
    for _ in range(3):  # a busy machine may be slow once
        start = time.monotonic()
        with pytest.raises(sg.UsageError, match="result, a lock, cannot be sent back") as caught:
            two.run(threading.Lock)
        took.append(time.monotonic() - start)
        assert caught.value.who == "replica 1"
        assert two.run(lambda: 1) == [1, 1]
    in_time(min(took), 0.9)  # or it waited for an answer that it already had


@pytest.mark.parametrize(
    "op", [OPS[0], *(pytest.param(op, marks=pytest.mark.slow) for op in (*OPS[1:], "hierarchical"))]
)
def test_failures_leave_nothing_open(op: str) -> None:
    """A notebook may see many; descriptors are few."""
    made = strategy(2, cross_device_ops=op)

    def fail() -> int:
        with contextlib.suppress(sg.ReplicaFailed):
            made.run(work)
        made.run(os.getpid)
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def work() -> None:
        if sg.current_replica().index == 1:
            raise_mine()
        sg.current_replica().barrier()

    counts = [fail() for _ in range(6)]
    made.close()
    unless_late(max(counts[1:]) <= counts[0], counts)


# --- death ---------------------------------------------------------------------------------------


def test_killed_in_mid_fit(two: sg.MirroredStrategy, tmp_path: Path) -> None:
    with pytest.raises(sg.ReplicaLost) as caught:
        fit(two, Act(kill_myself, tmp_path / "note"))
    in_time(time.time() - float((tmp_path / "note").read_text()), SOON)
    assert caught.value.who == "replica 1"
    assert "replica 1 (cpu:1, pid " in str(caught.value)
    assert "SIGKILL" in str(caught.value) and "memory" in str(caught.value)
    assert works(two)


@pytest.mark.parametrize(
    ("act", "words"), [(lambda: os._exit(3), "exit code 3"), (os.abort, "SIGABRT")]
)
def test_other_deaths(
    two: sg.MirroredStrategy, act: Callable[[], object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(sg.ReplicaLost, match=words) as caught:
        fit(two, Act(act, tmp_path / "note"))
    assert caught.value.who == "replica 1"
    assert works(two)


@pytest.mark.parametrize("pause", [0.0, 0.3])
def test_killed_between_two_calls(two: sg.MirroredStrategy, pause: float) -> None:
    """The next call finds out; with no pause, in mid-sentence."""
    pid = two.run(os.getpid)[1]
    os.kill(pid, signal.SIGKILL)
    time.sleep(pause)
    with pytest.raises(sg.ReplicaLost, match=f"pid {pid}.*SIGKILL") as caught:
        two.run(os.getpid)
    assert caught.value.who == "replica 1"
    assert works(two)


def test_last_words_without_an_end_are_shown(
    two: sg.MirroredStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        if sg.current_replica().index == 1:
            sys.stdout.write("a whole line\nand half a li")
            sys.stdout.flush()
            sys.stderr.write("alas\nand ala")
            sys.stderr.flush()
            os._exit(3)
        sg.current_replica().barrier()

    with pytest.raises(sg.ReplicaLost):
        two.run(work)
    shown = capsys.readouterr()
    assert shown.out == "[replica 1] a whole line\n[replica 1] and half a li\n"
    assert shown.err == "[replica 1] alas\n[replica 1] and ala\n"


@pytest.mark.slow
def test_the_death_of_the_helper_that_starts_replicas() -> None:
    made = strategy(2)

    def work() -> None:
        for _ in range(3000):
            sg.current_replica().barrier()
            time.sleep(0.01)

    assert len(made.run(os.getpid)) == 2
    helper = ZygoteProcess.get()._process.pid
    threading.Timer(0.3, os.kill, (helper, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(sg.ReplicaLost, match=rf"pid {helper}\).*killed by SIGKILL") as caught:
        made.run(work)
    in_time(time.monotonic() - start, 0.3 + 2.0)
    assert caught.value.who == "replica 1" and str(caught.value).startswith("replica 1 ended")
    assert made.run(lambda: 1) == [1, 1]
    made.close()


def test_a_replica_collects_no_garbage_among_what_was_imported(two: sg.MirroredStrategy) -> None:
    """It would copy the pages that all replicas share, and look at half a million objects."""
    enabled, frozen = two.run(lambda: (gc.isenabled(), gc.get_freeze_count()))[1]
    assert enabled and frozen > 100_000


def test_a_strategy_that_is_dropped_ends_its_replicas() -> None:
    made = strategy(3)
    followers = made.run(os.getpid)[1:]
    assert all(runs(pid) for pid in followers)
    del made
    gc.collect()
    in_time(wait_for(lambda: not any(runs(pid) for pid in followers)), SOON)


def test_shared_memory_has_no_name() -> None:
    """Nothing in /dev/shm, so nothing to leave there when everything is killed."""

    def named() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}

    def mapped() -> set[str]:
        sg.current_replica().collective.buffer(100, torch.float32, torch.device("cpu"))
        return named()

    already = named()  # other libraries in this process may hold some: Keras' datasets do
    with contextlib.closing(strategy(2)) as made:
        assert set().union(*made.run(mapped)) <= already


# --- standstill ----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["shared_memory", pytest.param("ring", marks=pytest.mark.slow)])
def test_stopped_in_mid_fit(op: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stopped replica is named within seconds; woken, it goes on, and the result is the same."""
    made = strategy(2, cross_device_ops=op)
    pid = made.run(os.getpid)[1]

    def named(words: str) -> list[logging.LogRecord]:
        return [r for r in caplog.records if words in r.getMessage()]

    def wake() -> None:
        try:
            wait_for(lambda: named(f"replica 1 (cpu:1, pid {pid}) has not answered"), 20)
        finally:
            os.kill(pid, signal.SIGCONT)

    helper = threading.Thread(target=wake)
    helper.start()
    model = fit(made, Act(lambda: kill_myself(signal.SIGSTOP), tmp_path / "note"))
    helper.join()
    stopped = float((tmp_path / "note").read_text())
    in_time(named("has not answered")[0].created - stopped, 6.5)
    assert "stopped" in named("has not answered")[0].getMessage()
    assert distance(model, alone()) < 1e-6
    wait_for(lambda: named("replica 1 (cpu:1"))
    made.close()


@pytest.mark.slow
def test_stopped_for_longer_than_patience(caplog: pytest.LogCaptureFixture) -> None:
    """Given up, though the call is too large for a follower's socket and it reads nothing."""
    made = strategy(2, patience=sg.Patience(answer=4))
    pid = made.run(os.getpid)[1]
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(sg.ReplicaStalled, match=r"replica 1 .* stopped answering") as caught:
        made.run(len, os.urandom(3_000_000))
    in_time(time.monotonic() - start, 4 + SOON, least=3)
    assert caught.value.who == "replica 1"
    assert re.search(r"replica 1 .* giving up in \d s", caplog.text)
    assert not runs(pid)
    assert made.run(len, os.urandom(3_000_000)) == [3_000_000] * 2
    made.close()


def half_an_answer() -> None:
    """In a follower: its next answer is cut off in the middle, for good."""

    def send(sock: socket.socket, data: bytes) -> None:
        sock.sendall(encode({}, len(data)) + data[: len(data) // 2])
        kill_myself(signal.SIGSTOP)

    if sg.current_replica().index == 1:
        pipe_frames.send = send  # type: ignore[assignment]


@pytest.mark.slow
def test_stopped_in_the_middle_of_its_answer() -> None:
    made = strategy(2, patience=sg.Patience(answer=4))
    made.run(half_an_answer)
    start = time.monotonic()
    with pytest.raises(sg.ReplicaStalled, match=r"replica 1 .* stopped answering"):
        made.run(os.getpid)
    in_time(time.monotonic() - start, 4 + SOON, least=3)
    assert made.run(lambda: 1) == [1, 1]
    made.close()


def test_stopped_in_the_middle_of_its_complaint() -> None:
    """What it told everybody before is raised; the rest of the answer is not waited for."""
    made = strategy(2, patience=sg.Patience(answer=30))

    made.run(half_an_answer)
    start = time.monotonic()
    with pytest.raises(sg.ReplicaFailed, match="a bad day") as caught:
        made.run(lambda: sg.current_replica().index == 0 or raise_mine())
    in_time(time.monotonic() - start, 2 * SOON)
    assert caught.value.who == "replica 1"
    assert made.run(lambda: 1) == [1, 1]
    made.close()


# --- the end of the script -----------------------------------------------------------------------

LONG = """
import os, time
import torch
import stratagem as sg
from tests.support import data, mlp, strategy

class Show(sg.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            print("in mid-fit", self.round)

def fit(steps, round):
    x, y = data(64)
    show = Show()
    show.round = round
    with made.scope():
        model = sg.Model(mlp())
        model.compile(lambda p: torch.optim.SGD(p, lr=0.1), loss)
    model.fit(x, y, batch_size=16, epochs=steps // 4, verbose=0, callbacks=[show])

def loss(output, target):
    time.sleep(0.01)
    return torch.nn.functional.cross_entropy(output, target)

made = strategy(2, cross_device_ops={op!r}, patience=sg.Patience(answer=30))
made.run(os.getpid)
"""


@pytest.fixture
def scripts() -> Iterator[Nursery]:
    yield nursery()
    nursery().clear()


@pytest.mark.parametrize(
    ("op", "last"),
    [
        ("ring", signal.SIGINT),
        pytest.param("shared_memory", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c(op: str, last: signal.Signals, scripts: Nursery, tmp_path: Path) -> None:
    """Once it is an exception like any other: the strategy lives. Uncaught, all ends at once."""
    script = scripts.start(
        tmp_path,
        LONG.format(op=op)
        + """
try:
    fit(4000, "one")
except KeyboardInterrupt:
    print("interrupted")
fit(8, "two")
print("trained again")
fit(4000, "three")
""",
    )
    script.says("in mid-fit one", 40)
    before = family(script.pid)
    script.keyboard()
    in_time(script.says("interrupted"), SOON)
    script.says("trained again")
    script.says("in mid-fit three")
    everybody = family(script.pid)
    assert len(everybody) == 2, "a zygote and one follower"
    assert not set(before[1:]) & set(everybody), "the interrupted follower lives on"
    ends_by(last, script, everybody)
    assert script.err.count("Interrupted in") == (last == signal.SIGINT), "the script alone says so"
    assert "Traceback" not in script.err


def ends_by(number: signal.Signals, script: Script, everybody: list[int]) -> None:
    """Ended by a signal, it leaves no process behind. (Ctrl-C reaches its whole group.)"""
    if number == signal.SIGINT:
        script.keyboard()
    else:
        script.signal(number)
    in_time(wait_for(lambda: script.status is not None, what=f"for the end of {script}"), SOON)
    assert script.status == -number
    wait_for(lambda: not any(runs(pid) for pid in everybody), what="for replicas to end")


@pytest.mark.slow
def test_the_script_itself_is_stopped_then_killed(scripts: Nursery, tmp_path: Path) -> None:
    """A laptop's lid: replicas wait as long as the strategy was told to, and go on."""
    script = scripts.start(
        tmp_path, LONG.format(op="shared_memory") + "fit(40, 'one')\nfit(4000, 'two')"
    )
    script.says("in mid-fit one", 40)
    everybody = family(script.pid)
    script.signal(signal.SIGSTOP)
    time.sleep(4)
    script.signal(signal.SIGCONT)
    script.says("in mid-fit two")
    assert "[replica 1] replica 0 (cpu:0, pid" in script.err
    assert re.search("giving up in 2[3-7] s", script.err), "patience=Patience(answer=30)"
    ends_by(signal.SIGKILL, script, everybody)
