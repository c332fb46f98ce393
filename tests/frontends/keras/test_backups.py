"""BackupAndRestore resumes with the next batch: the result is that of an unbroken training."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest
import torch

from tests.clock import SLOWER
from tests.frontends.keras.backup_runs import STEPS, train
from tests.frontends.resume_runs import alike
from tests.keras_support import strategy

ROOT = Path(__file__).parents[3]
#: from 3.16 on Keras draws the order of rows from a generator of its own
OWN_DICE = not keras.__version__.startswith(("3.12", "3.13", "3.14", "3.15"))
pytestmark = pytest.mark.timeout(60)


class Ended(Exception):
    """Raised by a callback to end a training."""


def end() -> None:
    raise Ended


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same bits, and of the history the epochs that were still to come."""
    for name, values in found["history"].items():
        assert values == expected["history"][name][-len(values) :], name
    assert all(alike(found[name], expected[name]) for name in ("weights", "optimizer", "drawn"))


@pytest.mark.parametrize(
    ("replicas", "kind", "freq", "after", "epochs"),
    [
        (1, "accumulated", 3, STEPS + 5, 2),
        (2, "loader", 2, STEPS + 4, 2),
        (2, "arrays", "epoch", STEPS + 4, 2),
        (1, "generator", 3, STEPS + 5, 2),
        (2, "arrays", STEPS, 2 * STEPS, 2),  # the last batch of an epoch
    ],
)
def test_no_bit_differs(
    tmp_path: Path, replicas: int, kind: str, freq: Any, after: int, epochs: int
) -> None:
    """Dropout, moving statistics, a compounding rate, metrics so far and shuffling included."""
    on = strategy(replicas)
    expected = train(on, kind, tmp_path / "whole", freq)
    with pytest.raises(Ended):
        train(on, kind, tmp_path / "run", freq, after=after, act=end)
    found = train(on, kind, tmp_path / "run", freq)
    assert len(found["history"]["loss"]) == epochs
    check(found, expected)


def test_others_go_on_where_it_was(tmp_path: Path) -> None:
    """Another number of replicas: the answer of one device, to rounding."""
    expected = train(strategy(1), "arrays", tmp_path / "whole", 2, draws=False)
    with pytest.raises(Ended):
        train(strategy(1), "arrays", tmp_path / "run", 2, after=STEPS + 4, act=end, draws=False)
    found = train(strategy(2), "arrays", tmp_path / "run", 2, draws=False)
    assert len(found["history"]["loss"]) == 2
    for mine, whole in zip(found["weights"], expected["weights"], strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-5)
    for name, values in found["history"].items():
        torch.testing.assert_close(values, expected["history"][name][1:], rtol=1e-4, atol=1e-5)


def test_data_that_cannot_be_read_again_alike_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keras' shuffle="batch" draws before each batch from what dropout draws from, before 3.16."""
    for kind, told in (("arrays", False), ("batch", not OWN_DICE)):
        with pytest.raises(Ended):
            train(strategy(1), kind, tmp_path / kind, 2, after=STEPS + 5, act=end)
        caplog.clear()
        train(strategy(1), kind, tmp_path / kind, 2)
        assert ("not read again alike" in caplog.text) == told


def start(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.frontends.keras.backup_runs", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=80 * SLOWER)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_killed_in_mid_epoch(tmp_path: Path) -> None:
    """All processes are killed; the same script resumes."""
    folder = tmp_path / "run"
    assert start(2, folder, STEPS + 4).returncode == -signal.SIGKILL
    for path in (folder, tmp_path / "alone"):
        done = start(2, path, 0)
        assert done.returncode == 0, done.stderr
    found, expected = (torch.load(f"{path}.pt") for path in (folder, tmp_path / "alone"))
    assert len(found["history"]["loss"]) < len(expected["history"]["loss"])
    check(found, expected)
