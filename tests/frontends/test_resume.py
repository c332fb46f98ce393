"""Training that is interrupted at any moment resumes with the next batch, and the same result."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stratagem as sg
from tests.clock import SLOWER
from tests.frontends.resume_runs import BATCH, EPOCHS, ROWS, STEPS, Stop, alike, make, train

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(60)


def some_of(folder: Path, into: Path, number: int) -> Path:
    """Make a folder with one checkpoint of another folder."""
    chosen = sorted(folder.iterdir())[number]
    shutil.copytree(chosen, into / chosen.name)
    return into


@pytest.mark.parametrize(
    ("kind", "data", "accumulate"),
    [
        ("one", "arrays", 1),
        ("one", "loader", 2),
        ("one", "generator", 1),
        pytest.param("shared_memory-2", "workers", 1, marks=pytest.mark.slow),
        ("ring-2", "dataset", 1),
        ("sharded-2", "arrays", 2),
        ("fully_sharded-2", "loader", 1),
        pytest.param("shared_memory-2", "arrays", 2, marks=pytest.mark.slow),
        pytest.param("ring-2", "generator", 1, marks=pytest.mark.slow),
    ],
)
def test_no_bit_differs_after_going_on_from_any_batch(
    tmp_path: Path, kind: str, data: str, accumulate: int
) -> None:
    """Including dropout, noisy data, running statistics, callbacks and shuffling."""
    with contextlib.closing(make(kind)) as strategy:
        expected = train(strategy, data, accumulate=accumulate)
        whole = tmp_path / "whole"
        assert alike(train(strategy, data, whole, accumulate=accumulate, keep=99), expected)
        saved = len(list(whole.iterdir()))
        # in mid-epoch, after the last batch of an epoch, after the epoch, and when all is over
        for number in (0, 2, saved // EPOCHS - 1, saved // EPOCHS, saved - 1):
            folder = some_of(whole, tmp_path / str(number), number)
            found = train(strategy, data, folder, accumulate=accumulate)
            assert alike(found, expected), (number, found["history"], expected["history"])


CHANGES = [("shared_memory-2", "one"), ("one", "ring-3"), ("ring-2", "servers-2-1")]
CHANGES += [("servers-2-1", "servers-1-2"), ("servers-2-1", "shared_memory-2")]
CHANGES += [("sharded-2", "ring-3"), ("one", "sharded-3"), ("fully_sharded-2", "sharded-2")]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_others_go_on_where_it_was(tmp_path: Path, before: str, after: str) -> None:
    """Resume with other numbers of replicas or servers, or another strategy.

    Each row is seen once an epoch, and the answer is that of one device.
    """
    folder, logs = tmp_path / "run", [tmp_path / "before", tmp_path / "after"]
    with contextlib.closing(make("one")) as strategy:
        expected = train(strategy, "loader", draws=False)
    with contextlib.closing(make(before)) as strategy:
        train(strategy, "loader", folder, draws=False, log=logs[0], keep=99)
    middle = next(path for path in sorted(folder.iterdir()) if path.name.endswith(f"-{STEPS + 3}"))
    one = tmp_path / "one"
    shutil.copytree(middle, one / middle.name)
    with contextlib.closing(make(after)) as strategy:
        found = train(strategy, "loader", one, draws=False, log=logs[1])
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-5)
    for name, values in expected["history"].items():
        torch.testing.assert_close(found["history"][name], values, rtol=1e-4, atol=1e-5)
    if "servers" in before + after:
        return  # to compare their data, workers of servers read rows besides
    read = [[int(line) for line in log.read_text().split()] for log in logs]
    seen = read[0][ROWS : ROWS + 3 * BATCH]
    left = ROWS - len(seen)
    assert sorted(seen + read[1][:left]) == list(range(ROWS))
    assert sorted(read[1][left:]) == list(range(ROWS))


def test_servers_count_an_epoch_of_which_nothing_is_left(tmp_path: Path) -> None:
    """The chief gets no more tickets of that epoch, and its metrics have the saved counts."""
    with contextlib.closing(make("servers-2-1")) as strategy:
        whole = train(strategy, "loader", tmp_path / "run", draws=False, keep=99)
        after = [p for p in sorted((tmp_path / "run").iterdir()) if p.name.endswith(f"-{STEPS}")]
        one = tmp_path / "one"  # before the end of the epoch, with its validation and callbacks
        shutil.copytree(after[0], one / after[0].name)
        found = train(strategy, "loader", one, draws=False)
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        values = whole["history"][name]
        torch.testing.assert_close(found["history"][name], values, rtol=1e-4, atol=1e-5)


def start(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.frontends.resume_runs", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * SLOWER)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kind", ["shared_memory-2", pytest.param("ring-2", marks=pytest.mark.exhaustive)]
)
def test_killed_again_and_again(tmp_path: Path, kind: str) -> None:
    """All processes are killed in the first epoch, and again soon after the resume."""
    folder = tmp_path / "run"
    for after in (3, 9):
        assert start(kind, "loader", folder, after).returncode == -signal.SIGKILL
    done = start(kind, "loader", folder, 0)
    assert done.returncode == 0, done.stderr
    alone = start(kind, "loader", tmp_path / "alone", 0)
    assert alone.returncode == 0, alone.stderr
    found, expected = (torch.load(f"{path}.pt") for path in (folder, tmp_path / "alone"))
    assert alike(found, expected)
    assert 3 <= len(list(folder.iterdir())) <= 4  # and perhaps a checkpoint that was cut short


@pytest.mark.slow
def test_sigterm_saves_and_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = start("one", "arrays", folder, 5, "term")
    assert ended.returncode == 75, ended.stderr
    assert "resume=True" in ended.stderr
    assert not Path(f"{folder}.pt").exists()
    newest = sorted(folder.iterdir())[-1]
    assert int(newest.name.rpartition("-")[2]) >= 5


def test_resume_needs_a_folder() -> None:
    model = sg.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    with pytest.raises(sg.UsageError, match=r'checkpoint="run/"'):
        model.fit(torch.ones(4, 2), torch.ones(4, 1), resume=True)


def test_what_goes_wrong_while_it_is_written_is_raised(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(OSError, match=r"could not be saved in .*run.*as they were"):
        train(make("one"), "arrays", tmp_path / "run", resume=False)


def test_a_damaged_checkpoint_is_left_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(make("one")) as strategy:
        expected = train(strategy, "arrays", tmp_path / "run", keep=2)
        newest = sorted((tmp_path / "run").iterdir())[-1] / "model.safetensors"
        content = bytearray(newest.read_bytes())
        content[-1] ^= 1  # a bit of the last weight, which the format does not see
        newest.write_bytes(content)
        assert alike(train(strategy, "arrays", tmp_path / "run"), expected)
    assert "is damaged" in caplog.text and "before it" in caplog.text


class Raises(Exception):
    """The error that a callback raises."""


def test_settings_of_today_count_and_what_was_learnt_stays(tmp_path: Path) -> None:
    """A callback with new settings loads its saved state."""

    def fail() -> Any:
        raise Raises

    x, y = torch.randn(40, 3), torch.randn(40, 1)
    waits = []
    for patience, extra in ((9, [Stop(14, fail)]), (4, [])):
        torch.manual_seed(1)
        model = sg.Model(torch.nn.Linear(3, 1))
        model.compile(lambda p: torch.optim.SGD(p, lr=0.0), "mse")
        early = sg.callbacks.EarlyStopping("loss", patience=patience, min_delta=1.0)
        options: dict[str, Any] = {"batch_size": 8, "epochs": 20, "verbose": 0, "resume": True}
        with contextlib.suppress(Raises):
            model.fit(x, y, callbacks=[early, *extra], checkpoint=tmp_path / "run", **options)
        waits.append((early.wait, early.stopped_epoch))
    assert waits == [(1, None), (4, 4)]
