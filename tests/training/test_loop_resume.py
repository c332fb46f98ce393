"""A custom loop that ends at any moment resumes with the next batch, to the same bits."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import stratagem as sg
from tests.clock import SLOWER
from tests.frontends.resume_runs import BATCH, ROWS, alike, make
from tests.frontends.test_resume import some_of
from tests.training.loop_runs import EPOCHS, STEPS, train

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(60)


def check(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Check that the bits are the same, and the losses are those after the resumption."""
    for mine, whole in zip(found, expected, strict=True):
        losses, before = mine.pop("losses"), dict(whole)
        all_losses = before.pop("losses")
        assert alike(mine, before)
        assert losses == dict(list(all_losses.items())[len(all_losses) - len(losses) :])


@pytest.mark.parametrize(("kind", "accumulate"), [("one", 2), ("ring-2", 1)])
def test_no_bit_differs_after_going_on_from_any_batch(
    tmp_path: Path, kind: str, accumulate: int
) -> None:
    """Dropout, noise of the data, running statistics, a scheduler and shuffling included."""
    with contextlib.closing(make(kind)) as strategy:
        whole = tmp_path / "whole"
        expected = train(strategy, whole, accumulate=accumulate, keep=99)
        saved = len(list(whole.iterdir()))
        assert saved >= EPOCHS * (STEPS // accumulate)
        # in mid-epoch, after the last batch of an epoch, in the next one, and when all is over
        for number in (0, 2, saved // EPOCHS - 1, saved // EPOCHS + 1, saved - 1):
            folder = some_of(whole, tmp_path / str(number), number)
            check(train(strategy, folder, accumulate=accumulate), expected)


def test_checkpoints_at_the_end_of_epochs(tmp_path: Path) -> None:
    with contextlib.closing(make("one")) as strategy:
        expected = train(strategy, tmp_path / "run", every=None, keep=9)
        made = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
        assert [name.rpartition("-")[2] for name in made] == ["7", "14", "21"]
        check(train(strategy, some_of(tmp_path / "run", tmp_path / "one", 1)), expected)


def test_others_go_on_where_it_was(tmp_path: Path) -> None:
    """Another number of replicas: each row once an epoch, and the answer of one device."""
    logs = [tmp_path / "before", tmp_path / "after"]
    with contextlib.closing(make("one")) as strategy:
        expected = train(strategy, tmp_path / "run", draws=False, log=logs[0], keep=99)
    folder = some_of(tmp_path / "run", tmp_path / "some", STEPS + 2)
    begun = int(next(folder.iterdir()).name.rpartition("-")[2])
    with contextlib.closing(make("ring-2")) as strategy:
        found = train(strategy, folder, draws=False, log=logs[1])
    for replica in found:
        for name, value in expected[0]["weights"].items():
            torch.testing.assert_close(replica["weights"][name], value, rtol=1e-4, atol=1e-5)
    read = [[int(line) for line in log.read_text().split()] for log in logs]
    seen = read[0][ROWS : ROWS + begun % STEPS * BATCH]
    assert 0 < len(seen) < ROWS
    counts = Counter(read[1])  # of this epoch what is left, and the next one
    assert [counts[i] for i in range(ROWS)] == [2 - (i in seen) for i in range(ROWS)]


class Odd:
    """Has a state that cannot be saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_what_a_loop_remembers_is_plain_on_disk(tmp_path: Path) -> None:
    with contextlib.closing(make("ring-2")) as strategy:
        train(strategy, tmp_path / "run", keep=99)
    folder = some_of(tmp_path / "run", tmp_path / "one", 2)
    state = torch.load(next(folder.iterdir()) / "model.state.pt", weights_only=True)
    saved = state["resume"]["things"]["steps"]
    assert saved["milestones"] == Counter([2, 9, 12]) and isinstance(saved, dict)


def start(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.training.loop_runs", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * SLOWER)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_killed_in_mid_epoch(tmp_path: Path) -> None:
    """Everything is ended by SIGKILL; the same script goes on."""
    folder = tmp_path / "run"
    assert start("ring-2", folder, STEPS + 3).returncode == -signal.SIGKILL
    for path in (folder, tmp_path / "alone"):
        done = start("ring-2", path, 0)
        assert done.returncode == 0, done.stderr
    found, expected = (torch.load(f"{path}.pt") for path in (folder, tmp_path / "alone"))
    assert len(found[0]["losses"]) < len(expected[0]["losses"])
    check(found, expected)


@pytest.mark.slow
def test_sigterm_saves_and_ends_with_a_code_of_its_own(tmp_path: Path) -> None:
    ended = start("ring-2", tmp_path / "run", 5, "term")
    assert ended.returncode == 75, ended.stderr
    assert "started again" in ended.stderr
    newest = sorted((tmp_path / "run").iterdir())[-1]
    assert int(newest.name.rpartition("-")[2]) >= 5


def test_sentences(tmp_path: Path) -> None:
    """Loops that could not be resumed are refused before they train."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = DataLoader(TensorDataset(torch.ones(4, 2), torch.ones(4, 1)), batch_size=2)
    with contextlib.closing(make("one")) as strategy:
        with pytest.raises(sg.UsageError, match=r"give prepare.*the DataLoader"):
            strategy.prepare(model, optimizer, resume=tmp_path)
        with pytest.raises(sg.UsageError, match="is for the loader that a model is trained on"):
            strategy.prepare(rows, resume=tmp_path)  # type: ignore[call-overload]
        loader = strategy.prepare(model, optimizer, rows, resume=tmp_path / "run").loader
        with pytest.raises(sg.UsageError, match=r"for epoch in loader\.epochs"):
            next(iter(loader))
        with pytest.raises(sg.UsageError, match="state_dict"):
            loader.remember(best=3.0)
        with pytest.raises(sg.NotDistributable, match=r"remember\(odd=.*set cannot travel"):
            loader.remember(odd=Odd())
        for _ in loader.epochs(1):
            assert len(list(loader)) == 2
            with pytest.raises(sg.UsageError, match="once in each epoch"):
                next(iter(loader))
        fitted = sg.Model(model)
        fitted.compile("sgd", "mse")
        with pytest.raises(sg.UsageError, match=r"saved by prepare\(\.\.\., resume"):
            fitted.fit(torch.ones(4, 2), torch.ones(4, 1), checkpoint=tmp_path / "run", resume=True)
        critic = nn.Linear(2, 1)
        loader = strategy.prepare(model, optimizer, rows, resume=tmp_path / "other").loader
        second = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
        strategy.prepare(critic, second)
        for thing in ({"critic": critic}, {"second": second}):
            with pytest.raises(sg.UsageError, match=r"loader\.remember\(critic"):
                next(loader.epochs(1))
            loader.remember(**thing)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        with pytest.raises(sg.UsageError, match=r"loader\.remember\(schedule"):
            next(loader.epochs(1))
        loader.remember(schedule=schedule)
        assert next(loader.epochs(1)) == 0


class AsItGoes(Sampler[int]):
    """Draws each row when it is asked for."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        left = list(range(24))
        while left:
            yield left.pop(int(torch.randint(len(left), (), generator=self.generator)))


@pytest.mark.parametrize(
    ("generator", "batch_size", "told"),
    [
        (None, 2, "not drawn again alike"),
        (torch.Generator(), 2, None),
        (None, 3, "with batch_size=2, and batch_size=3"),
    ],
)
def test_rows_that_would_come_twice_are_refused(
    tmp_path: Path, generator: Any, batch_size: int, told: str | None
) -> None:
    """Of rows that draw from what a sampler draws from, and of batches of another size."""
    seen: list[int] = []
    for size, ends in ((2, True), (batch_size, False)):
        model = nn.Linear(2, 1)
        rows = TensorDataset(torch.ones(24, 2), torch.arange(24))
        data = DataLoader(rows, batch_size=size, sampler=AsItGoes(generator))
        plan = sg.Checkpoints(tmp_path, every=5)
        refused = pytest.raises(sg.UsageError, match=told) if told and not ends else None
        with contextlib.closing(make("one")) as strategy, refused or contextlib.nullcontext():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = strategy.prepare(model, optimizer, data, resume=plan)
            epochs = loader.epochs(1)
            for _ in epochs:
                for x, numbers in loader:
                    if ends and loader.seen == 5:
                        break
                    seen += numbers.tolist()
                    (model(x).mean() + torch.rand(())).backward()
                    optimizer.step()
                if ends:
                    epochs.close()
    assert sorted(seen) == list(range(24)) if told is None else len(seen) == 10
