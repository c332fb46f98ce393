"""Errors as users see them: the lines of their script, and a sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stratagem as sg
from stratagem.launch.output import Interrupts
from stratagem.tracebacks import described

pytestmark = pytest.mark.timeout(90)

RUN = """
import sys, time
import stratagem as sg
strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
def work():
    if sg.current_replica().index == 1:
        raise RuntimeError("no more milk")
    time.sleep(0.1)
strategy.run(work)
"""

LAUNCHED = """
import pathlib, sys, time
import torch
import stratagem as sg
strategy = sg.MirroredStrategy()
replica = sg.current_replica()
if replica.index == 1 and "raise" in sys.argv:
    raise RuntimeError("no more milk")
pathlib.Path(f"ready{replica.index}").touch()
while True:
    replica.all_reduce(1.0)
"""


REFUSED = "rows of one length each: pad them"


def refuse(meets: bool) -> None:
    """Refuse on the second replica, which the first waits for in a collective or at the end."""
    replica = sg.current_replica()
    if replica.index == 1:
        raise sg.NotDistributable(REFUSED)
    if meets:
        replica.all_reduce(1.0)


@pytest.mark.parametrize("meets", [True, False])
def test_a_refusal_of_another_replica_is_raised_as_it_is(meets: bool) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy, pytest.raises(sg.NotDistributable) as caught:
        strategy.run(refuse, meets)
    assert str(caught.value) == REFUSED and caught.value.who == "replica 1"
    told = described(caught.value)
    assert told.count(REFUSED) == 1 and told.count("Traceback") == 1 and "replica 1" in told


@pytest.mark.parametrize("launcher", ["stratagem", "torch.distributed.run"])
def test_a_launched_task_tells_the_refusal_of_another_without_its_traceback(
    tmp_path: Path, launcher: str
) -> None:
    """Each of two tasks says it once; `stratagem run` ends with the output of the first."""
    run = ["run", "--replicas"] if launcher == "stratagem" else ["--nproc-per-node"]
    script = LAUNCHED.replace('RuntimeError("no more milk")', f"sg.NotDistributable({REFUSED!r})")
    shown = ended(tmp_path, script, "-m", launcher, *run, "2")
    assert "ReplicaFailed" not in shown and "raised an exception" not in shown
    assert shown.count(f"NotDistributable: {REFUSED}") == 2 + (launcher == "stratagem")
    assert shown.count("(It was raised on worker 1.)") == 1
    assert "worker 1 failed first" in shown or launcher != "stratagem"


def ended(folder: Path, script: str, *words: str, **environ: str) -> str:
    """What a script wrote to stderr until it failed."""
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, *words, "train.py", *(["raise"] if words else [])],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.slow
def test_an_exception_on_a_replica_shows_the_script_alone(tmp_path: Path) -> None:
    shown = ended(tmp_path, RUN)
    assert "no more milk" in shown and "replica 1 raised an exception" in shown
    assert 'train.py", line 7, in work' in shown and 'train.py", line 9' in shown
    assert f"{os.sep}stratagem{os.sep}" not in shown
    assert len(shown.splitlines()) < 16


@pytest.mark.slow
def test_the_whole_traceback_can_be_had(tmp_path: Path) -> None:
    assert f"{os.sep}training{os.sep}replica_group.py" in ended(
        tmp_path, RUN, STRATAGEM_TRACEBACK="1"
    )


def test_an_exception_on_a_worker_is_told_in_few_lines(tmp_path: Path) -> None:
    run = ("-m", "stratagem", "run", "--replicas", "2")
    shown = ended(tmp_path, LAUNCHED, *run)
    assert "worker 1 failed first" in shown and f"{os.sep}stratagem{os.sep}" not in shown
    others = [line for line in shown.splitlines() if line.startswith("[worker 0]")]
    assert len(others) < 12 and any("worker 1" in line and "raised" in line for line in others)
    assert f"{os.sep}stratagem{os.sep}" in ended(tmp_path, LAUNCHED, *run, "--traceback")


CAUGHT = """
import sys
import torch
from torch import nn
import stratagem as sg

strategy = sg.MirroredStrategy()
model = sg.Model(nn.Linear(6, 3), strategy)
model.compile("sgd", "mse")
x = torch.ones(5, 6)
try:
    model.evaluate(x[:, :4], x[:, :3], batch_size=4, verbose=0)
except (RuntimeError, sg.ReplicaFailed):
    pass
model.fit(x, x[:, :3], batch_size=4, verbose=0)
"""


def test_a_call_behind_a_caught_error_says_that_the_job_is_over(tmp_path: Path) -> None:
    shown = ended(tmp_path, CAUGHT, "-m", "stratagem", "run", "--replicas", "2")
    for task in (0, 1):
        told = " ".join(line for line in shown.splitlines() if line.startswith(f"[worker {task}]"))
        if "ReplicaFailed" in told or f"worker {task} failed first" in shown:
            assert "an earlier call raised an exception" in told
    assert "shapes cannot be multiplied" in shown and "model.fit" in shown


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ("{bad", "is not JSON"),
        ('{"cluster": {"worker": ["h:1", "h:2"]}}', "the task must be an object"),
        (
            '{"cluster": {"worker": ["h:1", "h:2"]}, "task": {"type": "worker", "index": 5}}',
            "worker 5 is not in the cluster",
        ),
    ],
)
def test_a_wrong_description_of_the_cluster_is_told_in_few_lines(
    tmp_path: Path, written: str, what: str
) -> None:
    """No strategy has been made yet that could shorten tracebacks."""
    script = "import stratagem as sg\nsg.MultiWorkerMirroredStrategy()\n"
    shown = ended(tmp_path, script, TF_CONFIG=written)
    assert what in shown and "correct: " in shown and 'train.py", line 2' in shown
    assert len(shown.splitlines()) <= 5


@pytest.mark.slow
def test_ctrl_c_shows_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LAUNCHED)
    child = subprocess.Popen(
        [sys.executable, "-m", "stratagem", "run", "--replicas", "2", "train.py"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 50
        while not all((tmp_path / f"ready{i}").exists() for i in range(2)):
            assert time.monotonic() < until and child.poll() is None
            time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        _, shown = child.communicate(timeout=30)
    finally:
        child.kill()
    assert "Traceback" not in shown
    assert "Interrupted in " in shown and "train.py, line" in shown
    assert len(shown.splitlines()) < 8


def test_tracebacks_of_an_interrupt_are_left_out_and_nothing_else() -> None:
    interrupts = Interrupts()
    boring = [b"Traceback (most recent call last):", b'  File "a.py", line 1', b"KeyboardInterrupt"]
    assert interrupts.feed([b"epoch 1", *boring, b"saved"]) == [b"epoch 1", b"saved"]
    chained = [*boring[:2], b"ValueError: x", b"", b"During handling of the above", b""]
    assert interrupts.feed(chained) + interrupts.feed(boring) == chained
    assert interrupts.feed(boring[:2]) == [] and interrupts.flush() == boring[:2]
