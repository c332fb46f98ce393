"""Scripts that catch the planner's exception, and files that cannot be written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from stratagem.launch import cli
from stratagem.launch.script import beside, run_to_fit
from stratagem.plan.choose import choose
from stratagem.plan.hardware import Hardware
from stratagem.plan.machine import crowd
from stratagem.plan.report import dumps, write
from tests.plan.support import profile

LOOP = """
import torch
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.{optimizer}
def compute():
    loss = net(torch.randn(8, 4)).square().mean()
    loss.backward()
    return loss
for _ in range(2):
    try:
        {step}
    except{what}:
        print("caught")
print("to the end")
"""


def script(folder: Path, optimizer: str, step: str, what: str = "") -> list[str]:
    file = folder / "train.py"
    file.write_text(LOOP.format(optimizer=optimizer, step=step, what=what))
    return [str(file)]


def test_a_script_that_catches_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is made from its first step, and says that the script ran on."""
    words = script(tmp_path, "SGD(net.parameters(), lr=0.1)", "compute(); optimizer.step()")
    trial = run_to_fit(words)
    seen = capsys.readouterr()
    assert type(trial.module).__name__ == "Linear" and "to the end" in seen.out
    assert "a bare except:" in seen.err and "never called" not in seen.err


def test_a_module_beside_the_script(tmp_path: Path) -> None:
    """Replicas import the model from the folder of the script."""
    (tmp_path / "nearby.py").write_text("from torch import nn\nclass Net(nn.Linear): pass\n")
    words = script(tmp_path, "SGD(net.parameters(), lr=0.1)", "compute(); optimizer.step()")
    file = Path(words[0])
    text = "from nearby import Net\n" + file.read_text().replace("torch.nn.Linear(", "Net(")
    assert "Net(" in text
    file.write_text(text)
    with beside(words[0]):
        trial = run_to_fit(words)
        assert type(trial.module).__module__ == "nearby"
        ((n, seconds),) = crowd(trial, trial.batch, [2], seconds=0.01)
    assert n == 2 and seconds > 0
    sys.modules.pop("nearby")


@pytest.mark.parametrize("optimizer", ["LBFGS(net.parameters())", "SGD(net.parameters(), lr=0.1)"])
def test_a_closure_is_not_trained_with(
    optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = script(tmp_path, optimizer, "optimizer.step(compute)", " Exception")
    assert cli.main(["plan", *words]) != 0
    seen = capsys.readouterr()
    assert "caught" not in seen.out and "to the end" not in seen.out
    assert "computes inside of the step" in seen.err and optimizer.partition("(")[0] in seen.err


def test_a_closure_and_a_script_that_catches_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = script(tmp_path, "LBFGS(net.parameters())", "optimizer.step(compute)")
    assert cli.main(["plan", *words]) != 0
    assert "computes inside of the step" in capsys.readouterr().err


def test_all_files_are_tried_before_the_script_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('this should not have run')")
    words = ["--json", str(tmp_path / "ok.json"), "--html", "/proc/1/plan.html"]
    assert cli.main(["plan", *words, str(tmp_path / "train.py")]) != 0
    seen = capsys.readouterr().err
    assert "plan.html: it cannot be written" in seen and "should not have run" not in seen
    assert sorted(each.name for each in tmp_path.iterdir()) == ["train.py"]


def test_the_output_says_where_the_rest_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "plan.json"
    earlier.write_text(dumps(choose(profile(), Hardware(hosts=2))))
    assert cli.main(["plan", "--from", str(earlier)]) == 0
    assert "--rows has examples/s and efficiency" in capsys.readouterr().err
    assert cli.main(["plan", "--from", str(earlier), "--rows"]) == 0
    seen = capsys.readouterr()
    assert "efficiency" in seen.out and "--rows" not in seen.err


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    """With `--json /dev/stdout` a pipe is written to, not replaced."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, "words")
    assert os.read(reader, 9) == b"words" and pipe.is_fifo()
    os.close(reader)
    write(tmp_path / "file", "words")
    assert (tmp_path / "file").read_text() == "words"
