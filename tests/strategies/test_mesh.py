"""A mesh of pipelines gives the weights, losses and metrics of one device for all shares.

The reference is a loop written by hand on one device.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stratagem as sg
from stratagem.training.replica import current_replica
from tests.clock import in_time
from tests.strategies.test_pipeline import Knotted, adam, deep, doubles, fitted, sgd, shuffled
from tests.strategies.test_pipeline_faults import Break, Mishap, fit, normalised_by_pieces
from tests.support import by_hand, cpus, data, distance, mlp, moved

pytestmark = pytest.mark.timeout(120)

#: processes are more than cores
PATIENT = sg.Patience(answer=30.0)


@pytest.fixture(scope="module")
def two() -> Iterator[sg.Mesh]:
    made = sg.Mesh(2, 2, microbatches=2, batch_norm="microbatch", patience=PATIENT)
    yield made
    made.close()


@pytest.fixture(scope="module")
def three() -> Iterator[sg.Mesh]:
    """Three rows."""
    made = sg.Mesh(data=3, stage=2, microbatches=3, patience=PATIENT)
    yield made
    made.close()


@pytest.mark.parametrize("make", [sgd, adam])
def test_every_number_of_rows(two: sg.Mesh, three: sg.Mesh, make: Any) -> None:
    """Also fewer rows than pipelines, in the last batch and in the first."""
    module = deep()
    for rows in (1, 5):
        x, y = doubles(8 + rows)
        one = by_hand(module, make, F.cross_entropy, x, y, batch=8, epochs=1)
        model = fitted(three, module, x, y, optimizer=make, batch=8, epochs=1)
        assert distance(one, model.module) < 1e-12, rows
        assert moved(module, one)
    x, y = doubles(3)
    one = by_hand(module, make, F.cross_entropy, x, y, batch=1)
    assert distance(one, fitted(two, module, x, y, optimizer=make, batch=1).module) < 1e-12


class Counted(nn.Module):
    """Records the rows that pass through it, by process."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__()
        self.path = str(folder / name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and float(x.detach()[0, 0]) is not None:  # so it is not traced
            with open(f"{self.path} {current_replica().index}", "a") as file:
                file.write(f"{len(x)} ")
        return x


def test_every_process_computes_its_rows_and_layers(two: sg.Mesh, tmp_path: Path) -> None:
    """The processes of the second pipeline, which measure nothing, compute 8 of 16 rows."""
    first, second = Counted(tmp_path, "first"), Counted(tmp_path, "second")
    module = nn.Sequential(nn.Linear(6, 8), first, nn.Linear(8, 8), second, nn.Linear(8, 4))
    with sg.PipelineStrategy(cpus(4), 2, split=["2"], data=2, patience=PATIENT) as on:
        fitted(on, module.double(), *doubles(32), epochs=1, check=False)
        fitted(on, module, *doubles(1), epochs=1, check=False)  # none for the second row
    assert (tmp_path / "first 2").read_text() == "4 4 4 4 "
    assert (tmp_path / "second 3").read_text() == "4 4 4 4 "
    assert not (tmp_path / "first 3").exists() and not (tmp_path / "second 2").exists()
    assert two.num_replicas_in_sync == 2


def test_losses_and_metrics_are_those_of_one_device(two: sg.Mesh) -> None:
    """Ignored targets in only one pipeline's share, sample weights, and a loss that is a sum."""
    module, (x, y) = deep(), doubles(41)
    y[:8] = -100
    y[16:28] = -100
    alone = fitted(sg.MirroredStrategy(["cpu:0"]), module, x, y, metrics=["accuracy"])
    model = fitted(two, module, x, y, metrics=["accuracy"])
    one = by_hand(module, sgd, F.cross_entropy, x, y, batch=16)
    assert distance(one, model.module) < 1e-12 and moved(module, one)
    for name in ("loss", "accuracy"):
        expected = alone.history.history[name]  # type: ignore[union-attr]
        assert model.history.history[name] == pytest.approx(expected, abs=1e-6)  # type: ignore[union-attr]
    y = y.clamp(min=0)
    weight = {"sample_weight": torch.rand(41, generator=torch.Generator().manual_seed(1)).double()}
    alone = fitted(sg.MirroredStrategy(["cpu:0"]), module, x, y, fit=weight)
    assert distance(alone.module, fitted(two, module, x, y, fit=weight).module) < 1e-12
    summed = nn.CrossEntropyLoss(reduction="sum")
    small: Any = lambda p: torch.optim.SGD(p, lr=0.01)  # noqa: E731
    one = by_hand(module, small, summed, x, y, batch=16)
    model = fitted(two, module, x, y, loss=copy.deepcopy(summed), optimizer=small)
    assert distance(one, model.module) < 1e-12


@pytest.mark.parametrize("accumulate", [3, 1])
def test_clipping_counts_every_stage_once(two: sg.Mesh, accumulate: int) -> None:
    module, (x, y) = deep(), doubles(75)
    y[16:30] = -100
    clip = lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05)  # noqa: E731
    one = by_hand(
        module, adam, F.cross_entropy, x, y, batch=16, before_step=clip, accumulate=accumulate
    )
    options: dict[str, Any] = {"clip_norm": 0.05, "accumulate": accumulate}
    model = fitted(two, module, x, y, optimizer=adam, **options)
    assert distance(one, model.module) < 1e-8  # the norm is not rounded as torch rounds it
    assert moved(module, one)


@pytest.mark.parametrize("schedule", ["interleaved", "gpipe"])
def test_schedules_skips_and_ties(schedule: str) -> None:
    module = Knotted().double()
    dice = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 11, (2, 23, 5), generator=dice)
    one = by_hand(module, sgd, F.cross_entropy, x, y, batch=11)
    with sg.PipelineStrategy(cpus(4), 3, schedule, data=2, patience=PATIENT) as on:
        model = fitted(on, module, x, y, batch=11)
    assert distance(one, model.module) < 1e-12 and moved(module, one)
    assert model.module.head.weight is model.module.embedding.weight  # type: ignore[union-attr]


class Sometimes(nn.Module):
    """Uses one of its layers only for some values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.seldom = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.always(x)
        if float(x[:, 0].detach().max()) > 1.9:
            h = h + self.seldom(x)
        return h


def test_a_parameter_without_a_gradient_does_not_move(two: sg.Mesh) -> None:
    """With momentum a zero gradient would move it; if one pipeline has a gradient, all have it."""
    module = nn.Sequential(Sometimes(), nn.Linear(6, 4)).double()
    x, y = doubles(48)
    x = x.clamp(max=1.5)
    x[20, 0], x[32:, :] = 2.0, x[:16, :]
    found = copy.deepcopy(module)
    optimizer = adam(found.parameters())
    for start in range(0, 48, 16):  # rows by fours, as they are cut: 2 rows of 2 microbatches
        parts = [slice(start + 4 * i, start + 4 * i + 4) for i in range(4)]
        sum(F.cross_entropy(found(x[p]), y[p]) / 4 for p in parts).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    model = fitted(two, module, x, y, optimizer=adam, epochs=1, check=False)
    assert distance(found, model.module) < 1e-12
    assert distance(found, module) > 1e-3


class Halve(sg.callbacks.Callback):
    """Writes, unseen by autograd, into memory that only the first pipeline shares."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for param in self.model.module.parameters():
            param.data.mul_(0.5)


def test_what_callbacks_write_is_followed_by_all_rows(two: sg.Mesh) -> None:
    module, (x, y) = deep(), doubles(64)
    found = []
    for on in (sg.MirroredStrategy(["cpu:0"]), two):
        model = fitted(on, module, x, y, fit={"callbacks": Halve(), "validation_data": (x, y)})
        found.append((model.module, model.history.history["val_loss"], model.predict(x)))  # type: ignore[union-attr]
    assert distance(found[0][0], found[1][0]) < 1e-12
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-9)
    assert torch.allclose(torch.as_tensor(found[0][2]), torch.as_tensor(found[1][2]), atol=1e-9)


def test_a_training_goes_on_exactly(two: sg.Mesh, tmp_path: Path) -> None:
    """It resumes with another number of pipelines and stages; the file loads anywhere."""
    module, (x, y) = deep(), doubles(64)
    plan, again = sg.Checkpoints(tmp_path / "run", every=1), {"epochs": 3, "optimizer": adam}
    whole = by_hand(module, adam, F.cross_entropy, x, y, batch=16, epochs=3)
    with pytest.raises(RuntimeError, match="broken off"):
        fitted(two, module, x, y, fit={"checkpoint": plan, "callbacks": Break(6)}, **again)  # type: ignore[arg-type]
    with sg.PipelineStrategy(cpus(3), 4, patience=PATIENT) as on:
        rest = fitted(on, module, x, y, fit={"checkpoint": plan, "resume": True}, **again)  # type: ignore[arg-type]
    assert distance(whole, rest.module) < 1e-12


def test_rows_are_shuffled_as_on_one_device(two: sg.Mesh) -> None:
    shuffled(two)


def test_batch_norm_by_microbatch(two: sg.Mesh) -> None:
    """Of a row; running statistics are the mean over the rows when an epoch ends."""
    torch.manual_seed(0)
    normed = nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)
    ).double()
    one = normalised_by_pieces(normed, rows=2, pieces=2, epochs=2)
    assert distance(one, fit(two, normed, shuffle=False, epochs=2).module) < 1e-12
    assert moved(normed, one)


def test_dropout_is_repeatable(two: sg.Mesh) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 4))
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(fitted(two, module.double(), *doubles(32)).module)
    assert distance(found[0], found[1]) == 0.0
    assert distance(found[0], found[2]) > 1e-4


@pytest.mark.parametrize("kind", ["raise", "SIGKILL"])
def test_a_stage_of_the_second_row_is_named(two: sg.Mesh, kind: str) -> None:
    """Every process but the first one fails; the error names the earliest."""
    module = nn.Sequential(deep(1), Mishap(kind))
    began = time.monotonic()
    kinds = {"raise": sg.ReplicaFailed, "SIGKILL": sg.ReplicaLost}
    with pytest.raises(kinds[kind], match=r"replica [13]"):
        fitted(two, module, *doubles(96), batch=16, epochs=6, check=False)
    in_time(time.monotonic() - began, 8.0)
    fitted(two, deep(), *doubles(32))  # it can be used again


def refused(words: str, module: nn.Module, **options: Any) -> None:
    strategy = sg.Mesh(**{"data": 2, "stage": 2, **options})
    model = sg.Model(module, strategy)
    model.compile(optimizer="sgd", loss="cross_entropy")
    with pytest.raises(sg.StratagemError, match=words) as caught:
        model.fit(*data(20), batch_size=8, verbose=0)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    group: Any = strategy.replica_group
    assert group.replica is None and group._pool is None
    strategy.close()


def test_refusals_start_nothing() -> None:
    normed = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    refused("'1' is a BatchNorm.*beside each other", normed, microbatches=1)
    refused("3 layers that can be cut apart .0, 1, 2., and 4 stages", mlp(), stage=4)
    sparse = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    sparse.add_module("unused", nn.Embedding(3, 4, sparse=True))
    refused("'unused' has sparse gradients", sparse)


def test_bad_arguments() -> None:
    for options, words in (
        ({"data": 1, "stage": 2}, "data=1 is a PipelineStrategy"),
        ({"data": 2, "stage": 1}, "stage=1 is a MirroredStrategy"),
        ({"data": 0, "stage": 2}, "data=0; give a number"),
        ({"data": 2, "stage": 2, "devices": cpus(3)}, "needs 4 devices"),
    ):
        with pytest.raises(sg.UsageError, match=words):
            sg.Mesh(**options)  # type: ignore[arg-type]
    with pytest.raises(sg.UsageError, match="divides the devices"):
        sg.PipelineStrategy(cpus(3), data=2)
    with pytest.raises(sg.UsageError, match="use one of them"):
        sg.PipelineStrategy(cpus(4), data=2, columns=4)
