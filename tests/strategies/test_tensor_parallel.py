"""Divided layers give the weights, losses and metrics of one device.

The reference is a loop written by hand on one device.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.training.replica import current_replica
from tests.clock import in_time
from tests.support import by_hand, cpus, data, distance, moved

pytestmark = pytest.mark.timeout(120)

Group = Callable[..., sg.TensorParallelStrategy]


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """Return a strategy with these settings; strategies are made once and reused."""
    made: dict[str, sg.TensorParallelStrategy] = {}

    def get(devices: int = 2, **options: Any) -> sg.TensorParallelStrategy:
        key = f"{devices} {options}"
        if key not in made:
            made[key] = sg.TensorParallelStrategy(
                cpus(devices), patience=sg.Patience(answer=30.0), **options
            )
        return made[key]

    yield get
    for strategy in made.values():
        strategy.close()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-2)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3)  # so that rounding stays rounding


def net(width: int = 13) -> nn.Module:
    torch.manual_seed(5)
    layers = [nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, 4)]
    return nn.Sequential(*layers).double()


def fitted(
    on: sg.Strategy | None,
    module: nn.Module,
    x: Any,
    y: Any = None,
    *,
    optimizer: Any = sgd,
    loss: Any = "cross_entropy",
    batch: int | None = 16,
    epochs: int = 2,
    fit: dict[str, Any] | None = None,
    **compiled: Any,
) -> sg.Model:
    model = sg.Model(copy.deepcopy(module), on)
    model.compile(optimizer=optimizer, loss=loss, **compiled)
    model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **(fit or {}))
    return model


def doubles(rows: int) -> tuple[Tensor, Tensor]:
    x, y = data(rows)
    return x.double(), y


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("devices", [2, 3])
def test_weights_losses_and_metrics(group: Group, devices: int, make: Any) -> None:
    """Widths that do not divide, a last batch of a single row."""
    module, (x, y) = net(), doubles(33)
    one = by_hand(module, make, F.cross_entropy, x, y, batch=16)
    alone = fitted(None, module, x, y, optimizer=make, metrics=["accuracy"])
    model = fitted(group(devices), module, x, y, optimizer=make, metrics=["accuracy"])
    assert distance(one, model.module) < 1e-12 and moved(module, one)
    for name in ("loss", "accuracy"):
        expected = alone.history.history[name]  # type: ignore[union-attr]
        assert model.history.history[name] == pytest.approx(expected, abs=1e-12)  # type: ignore[union-attr]
    assert group(devices).num_replicas_in_sync == 1


def test_fused_updates(group: Group) -> None:
    """Of parts in one piece; a part of a layer divided by rows has another part's numbers between
    its own, which fused kernels would write over."""

    def fused(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01, eps=1e-3, fused=True)

    module, (x, y) = net(), doubles(33)
    one = by_hand(module, fused, F.cross_entropy, x, y, batch=16)
    model = fitted(group(2), module, x, y, optimizer=fused)
    assert distance(one, model.module) < 1e-12 and moved(module, one)


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Conv2d(3, 7, 3, padding=1), nn.Conv2d(7, 5, 3)
        self.norm_a, self.norm_b = nn.BatchNorm2d(7), nn.BatchNorm2d(5)
        self.c, self.head = nn.Conv2d(5, 6, 3), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm_a(self.a(x)))
        x = F.relu(self.norm_b(self.b(x)))
        out: Tensor = self.head(F.max_pool2d(self.c(x), 2).flatten(1))
        return out


@pytest.mark.parametrize("devices", [2, 3])
def test_convolutions_and_batch_norm(group: Group, devices: int) -> None:
    """Divided by channels, with (running) statistics of all rows; also an undivided norm."""
    module = Picture().double()
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(21, 3, 8, 8, generator=dice).double()
    y = torch.randint(0, 4, (21,), generator=dice)
    one = by_hand(module, sgd, F.cross_entropy, x, y, batch=8)
    model = fitted(group(devices), module, x, y, batch=8)
    assert distance(one, model.module) < 1e-11 and moved(module, one)
    assert int(model.module.norm_a.num_batches_tracked) == 6  # type: ignore[union-attr,arg-type]
    assert float(model.module.norm_a.running_mean.abs().sum()) > 0  # type: ignore[union-attr,operator]
    one.eval()
    assert torch.allclose(torch.as_tensor(model.predict(x)), one(x), atol=1e-10)


class Line(nn.Module):
    """Takes inputs of any length, unless a linear layer takes all features."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.hidden, self.head = nn.Conv1d(2, 6, 1), nn.Linear(width, 5), nn.Linear(5, 3)
        self.mean = width == 1

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.conv(x)).flatten(1)
        return self.head(torch.tanh(self.hidden(x.mean(1, keepdim=True) if self.mean else x)))


def lines(*lengths: int) -> list[Any]:
    dice = torch.Generator().manual_seed(0)
    y = torch.arange(8) % 3
    return [(torch.randn(8, 2, each, generator=dice).double(), y) for each in lengths]


def test_flattened_channels_of_batches_of_several_lengths(group: Group) -> None:
    for batches in (lines(10, 6, 6, 4), lines(6, 10)):
        module = Line().double()
        for part in (False, True):
            module.conv.requires_grad_(part)
            one, two = (fitted(on, module, batches, batch=None) for on in (None, group(2)))
            assert distance(one.module, two.module) < 1e-12 and moved(module, one.module)


def test_a_batch_that_is_too_short_for_the_model(group: Group) -> None:
    """It is refused, as on one device."""
    on = group(plan={"hidden": "columns"})
    with pytest.raises(sg.StratagemError, match=r"12 elements of axis 1.*first batch had 18"):
        fitted(on, Line(36).double(), lines(6, 4), batch=None)


class Words(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 17, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(12, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.encoder(self.drop(self.embedding(x)))))
        return out.transpose(1, 2)


def texts(rows: int = 23) -> tuple[Tensor, Tensor]:
    x, y = torch.randint(0, 11, (2, rows, 5), generator=torch.Generator().manual_seed(0))
    return x, y


@pytest.mark.parametrize("devices", [2, 3])
def test_attention_and_tied_weights(group: Group, devices: int) -> None:
    module, (x, y) = Words().double(), texts()
    one = by_hand(module, adam, F.cross_entropy, x, y, batch=9)
    model = fitted(group(devices), module, x, y, optimizer=adam, batch=9)
    assert distance(one, model.module) < 1e-11 and moved(module, one)
    assert model.module.head.weight is model.module.embedding.weight  # type: ignore[union-attr]


def test_dropout_draws_what_one_device_draws(group: Group) -> None:
    """Dropout of divided values, attention weights and whole values."""
    module, (x, y) = Words(0.4).double(), texts()
    found = []
    for on in (None, group(2), group(3)):
        torch.manual_seed(7)
        found.append(fitted(on, module, x, y, batch=9).module)
    assert distance(found[0], found[1]) < 1e-12
    assert distance(found[0], found[2]) < 1e-12
    assert distance(found[0], fitted(None, Words().double(), x, y, batch=9).module) > 1e-3


class Padded(Words):
    """Causal attention over rows that begin with padding: first words attend to nothing."""

    def forward(self, x: Tensor) -> Tensor:
        ahead = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)
        padding = torch.zeros(x.shape, dtype=torch.float64).masked_fill(x == 0, -torch.inf)
        found = self.encoder(self.embedding(x), mask=ahead, src_key_padding_mask=padding)
        out: Tensor = self.head(found)
        return out[:, -1]


def test_dropout_of_a_query_that_sees_no_key(group: Group) -> None:
    module, (x, y) = Padded(0.4).double(), texts()
    x = x.clamp(1)
    x[9:12, :2] = 0
    found = []
    for on in (None, group(2)):
        torch.manual_seed(7)
        found.append(fitted(on, module, x, y[:, -1], batch=9).module)
    assert distance(found[0], found[1]) < 1e-12 and moved(module, found[0])


@pytest.mark.parametrize("accumulate", [3, 1])
def test_clipping_by_the_norm_of_all_parts_and_accumulation(group: Group, accumulate: int) -> None:
    module, (x, y) = net(), doubles(75)
    y[16:30] = -100
    clip = lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05)  # noqa: E731
    one = by_hand(
        module, adam, F.cross_entropy, x, y, batch=16, before_step=clip, accumulate=accumulate
    )
    options: dict[str, Any] = {"clip_norm": 0.05, "accumulate": accumulate}
    model = fitted(group(3), module, x, y, optimizer=adam, **options)
    assert distance(one, model.module) < 1e-8  # the norm is not rounded as torch rounds it
    assert moved(module, one)
    value = lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-3)  # noqa: E731
    one = by_hand(
        module, sgd, F.cross_entropy, x, y, batch=16, before_step=value, accumulate=accumulate
    )
    model = fitted(group(3), module, x, y, clip_value=1e-3, accumulate=accumulate)
    assert distance(one, model.module) < 1e-12


def test_sample_weights_and_mixed_precision(group: Group) -> None:
    """In bfloat16 sums over the parts are rounded once more."""
    module, (x, y) = net(), doubles(33)
    weight = torch.rand(33, generator=torch.Generator().manual_seed(1)).double()
    one, two = (fitted(on, module, x, y, fit={"sample_weight": weight}) for on in (None, group(2)))
    assert distance(one.module, two.module) < 1e-12
    assert distance(one.module, fitted(None, module, x, y).module) > 1e-3
    module, half = module.float(), {"precision": "bfloat16"}
    one, two = (fitted(on, module, x.float(), y, **half) for on in (None, group(2)))
    assert distance(one.module, two.module) < 0.01 < distance(module, two.module)
    assert distance(two.module, fitted(group(2), module, x.float(), y).module) > 1e-5


class Tempered(nn.Module):
    """A loss with a parameter, and with the model's last weight."""

    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.ones(1).double())
        self.last = nn.Linear(7, 4).double()

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output * self.heat, y) + self.last.weight.square().sum()


class Judged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss = net(), Tempered()
        self.net[4] = self.loss.last  # type: ignore[operator]

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


def test_a_loss_with_parameters_of_the_model(group: Group) -> None:
    """Parameters of the loss are not divided."""
    (x, y), found = doubles(64), []
    for on in (None, group(2)):
        torch.manual_seed(0)
        model = sg.Model(Judged(), on)
        model.compile(optimizer=sgd, loss=model.module.loss, clip_norm=0.2)  # type: ignore[arg-type]
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        found.append(model.module)
    assert distance(found[0], found[1]) < 1e-8
    assert abs(float(found[0].loss.heat.detach()) - 1) > 1e-4  # type: ignore[union-attr,operator,arg-type]


class Reaching(nn.Module):
    """Its last layer, which is not traced, uses the first layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding, self.middle = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.last = Reach(self.embedding)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.middle(self.embedding(x))))


class Reach(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.taken = [embedding]

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.detach().sum()) == 1e9 else x @ self.taken[0].weight.T


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_gradients_that_reach_a_divided_parameter_past_its_layer(
    group: Group, clip_norm: float | None
) -> None:
    """A penalty in a loss that is a function, and a layer that uses another's weight."""
    x, y = doubles(33)

    def penalised(on: sg.Strategy | None) -> nn.Module:
        module = net()

        def loss(output: Tensor, y: Tensor) -> Tensor:
            penalty = torch.stack([p.square().sum() for p in module.parameters()]).sum()
            return F.cross_entropy(output, y) + 0.1 * penalty

        model = sg.Model(module, on)
        model.compile(optimizer=sgd, loss=loss, clip_norm=clip_norm)
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        return model.module

    assert distance(penalised(None), penalised(group(2))) < (1e-12 if clip_norm is None else 1e-8)
    words = torch.arange(33) % 11
    one, two = (fitted(on, Reaching().double(), words, y) for on in (None, group(2)))
    assert distance(one.module, two.module) < 1e-12 and moved(Reaching().double(), one.module)


def test_plans_that_are_given(group: Group) -> None:
    module, (x, y) = net(), doubles(33)
    one = by_hand(module, sgd, F.cross_entropy, x, y, batch=16)
    for plan in (
        {"0": "rows", "2": "columns", "4": "rows"},
        {"0": "columns", "2": "columns", "4": "columns"},
        {"0": "replicate", "4": "rows"},
    ):
        with sg.TensorParallelStrategy(cpus(2), plan) as on:
            assert distance(one, fitted(on, module, x, y).module) < 1e-12, plan


def test_streams_validation_and_a_second_fit(group: Group) -> None:
    """Only the first process reads the stream; the optimizer's state is kept."""
    module, (x, y) = net(), doubles(37)
    found = []
    for on in (None, group(2)):
        model = sg.Model(copy.deepcopy(module), on)
        model.compile(optimizer=adam, loss="cross_entropy", metrics=["accuracy"])
        loader = DataLoader(TensorDataset(x, y), batch_size=16)
        for _ in range(2):
            model.fit(loader, epochs=1, verbose=0, validation_data=(x, y))
        told = model.history.history["val_loss"], model.evaluate(x, y, verbose=0)  # type: ignore[union-attr]
        found.append((model.module, told))
    assert distance(found[0][0], found[1][0]) < 1e-12
    assert found[0][1][0] == pytest.approx(found[1][1][0], abs=1e-9)
    assert found[0][1][1] == pytest.approx(found[1][1][1], abs=1e-6)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_rows_that_look_at_each_other_are_trained_and_not_validated(group: Group) -> None:
    """Training sees whole batches; validation divides rows, as `evaluate` does."""
    module, (x, y) = nn.Sequential(net(), Centred()), doubles(32)
    for on in (group(2), sg.PipelineStrategy(cpus(2), 1)):
        one = fitted(None, module, x, y)
        assert distance(one.module, fitted(on, module, x, y).module) < 1e-12
        with pytest.raises(sg.StratagemError, match="other rows"):
            fitted(on, module, x, y, fit={"validation_data": (x, y)})
    on.close()


def test_one_plain_file_and_its_optimizer(group: Group, tmp_path: Path) -> None:
    """Saved by two processes; resumed by one device, three processes and a mirrored strategy."""
    module, (x, y) = net(), doubles(48)
    whole = fitted(None, module, x, y, optimizer=adam, epochs=4)
    half = fitted(group(2), module, x, y, optimizer=adam)
    half.save(tmp_path / "m.safetensors")
    for on in (None, group(3), sg.MirroredStrategy(cpus(2))):
        model = sg.Model(net(), on)
        model.compile(optimizer=adam, loss="cross_entropy")
        model.load(tmp_path / "m.safetensors")
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        assert distance(whole.module, model.module) < 1e-12
    on.close()  # type: ignore[union-attr]


class Break(sg.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        torch.rand(3)  # what the first process alone draws moves nobody apart
        if batch == 2:
            raise RuntimeError("broken off")


def test_a_training_goes_on_exactly(group: Group, tmp_path: Path) -> None:
    module, (x, y) = Words(0.3).double(), texts(36)
    plan, kept = sg.Checkpoints(tmp_path / "run", every=1), {"epochs": 2, "batch": 9}
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="broken off"):
        fitted(group(2), module, x, y, fit={"checkpoint": plan, "callbacks": Break()}, **kept)  # type: ignore[arg-type]
    found = []
    for on in (None, group(3)):
        copied = tmp_path / str(on is None)
        copied.mkdir()
        for file in (tmp_path / "run").rglob("*"):
            if file.is_file():
                target = copied / file.relative_to(tmp_path / "run")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
        again: dict[str, Any] = {"checkpoint": sg.Checkpoints(copied, every=1), "resume": True}
        found.append(fitted(on, module, x, y, fit=again, **kept).module)  # type: ignore[arg-type]
    assert distance(found[0], found[1]) < 1e-12
    assert moved(module, found[0])


# --- memory ---------------------------------------------------------------------------------------


class Resident(nn.Module):
    """Records the shared memory that this process has touched, and its bytes of gradients."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.calls = folder, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and float(x.detach().sum()) is not None:  # so it is not traced
            self.calls += 1
            path = Path(self.folder) / f"{current_replica().index}"
            path.write_text(str(_touched()))
        return x


def _touched() -> int:
    """Return the bytes of stratagem's segments that are in this process' memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            inside = "stratagem" in line
        elif inside and words[0] == "Rss:":
            found += int(words[1]) * 1024
    return found


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_process_has_its_part_of_parameters_and_state(tmp_path: Path, devices: int) -> None:
    """Weights and two states of 4 MB each: the second process has touched about half of them."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(16, 65536), nn.ReLU(), nn.Linear(65536, 16))
    module = nn.Sequential(wide, Resident(str(tmp_path)), nn.Linear(16, 4))
    x, y = data(64, features=16)
    with sg.TensorParallelStrategy(cpus(devices)) as on:
        model = sg.Model(copy.deepcopy(module), on)
        model.compile(optimizer="adam", loss="cross_entropy", check=False)
        model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    whole = 3 * sum(p.nbytes for p in module.parameters())
    touched = [int((tmp_path / str(rank)).read_text()) for rank in range(1, devices)]
    for each in touched:
        assert 0.9 / devices < each / whole < 1.35 / devices + 0.08, (touched, whole)


# --- what goes wrong ------------------------------------------------------------------------------


class Mishap(nn.Module):
    """Acts in a process other than the first, in the third batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.home = kind, 0, os.getpid()

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach().sum()) != 0.0 and os.getpid() != self.home:  # so it is not traced
            self.calls += 1
            if self.calls > 3:
                self.happen()
                if self.kind == "differ":
                    x = x * random.Random(os.getpid()).random()
        return x

    def happen(self) -> None:
        if self.kind == "raise":
            raise ValueError("the fourth batch is one too many")
        if self.kind.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, self.kind))


def with_mishap(kind: str) -> nn.Module:
    return nn.Sequential(net(), Mishap(kind), nn.Linear(4, 4).double())


def test_an_exception_comes_back_with_its_traceback(group: Group) -> None:
    with pytest.raises(sg.ReplicaFailed, match=r"(?s)replica 1.*in happen.*one too many"):
        fitted(group(2), with_mishap("raise"), *doubles(64))
    fitted(group(2), net(), *doubles(64))  # it can be used again


def test_a_dead_process_is_named(group: Group) -> None:
    began = time.monotonic()
    with pytest.raises(sg.ReplicaLost, match="replica 1"):
        fitted(group(2), with_mishap("SIGKILL"), *doubles(64))
    in_time(time.monotonic() - began, 5.0)
    fitted(group(2), net(), *doubles(64))


def test_a_process_that_stopped_is_named() -> None:
    began = time.monotonic()
    with sg.TensorParallelStrategy(cpus(2), patience=sg.Patience(answer=3.0)) as on:
        with pytest.raises(sg.ReplicaStalled, match="replica 1"):
            fitted(on, with_mishap("SIGSTOP"), *doubles(64))
        in_time(time.monotonic() - began, 8.0)


def test_processes_that_come_apart_are_refused(group: Group) -> None:
    with pytest.raises(sg.StratagemError, match="different values of one batch"):
        fitted(group(2), with_mishap("differ"), *doubles(64))


def refused(words: str, module: nn.Module, compiled: Any = None, **options: Any) -> None:
    strategy = sg.TensorParallelStrategy(**{"devices": cpus(2), **options})
    model = sg.Model(module, strategy)
    model.compile(**{"optimizer": "sgd", "loss": "cross_entropy", **(compiled or {})})
    with pytest.raises(sg.StratagemError, match=words) as caught:
        model.fit(*data(20), batch_size=8, verbose=0)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    group: Any = strategy.replica_group
    assert group.replica is None and group._pool is None
    strategy.close()


def test_refusals_start_nothing() -> None:
    small = lambda: net().float()  # noqa: E731
    refused("no layer of that name; there are.*'0'", small(), plan={"nowhere": "rows"})
    refused("'1' is a Tanh that cannot be divided", small(), plan={"1": "columns"})
    refused(
        "'2' has 7 columns, and there are 8 devices",
        small(),
        plan={"2": "columns"},
        devices=cpus(8),
    )
    refused("no layer that Sequential calls can be divided", nn.Sequential(nn.LayerNorm(6)))
    refused('precision="float16"', small(), {"precision": "float16"})
    refused("jit_compile", small(), {"jit_compile": True})
    refused("Adafactor may look at whole parameters", small(), {"optimizer": torch.optim.Adafactor})
    refused("LBFGS", small(), {"optimizer": torch.optim.LBFGS})
    hooked = small()
    hooked[0].register_forward_hook(lambda *given: None)  # type: ignore[index]
    refused("'0' has hooks", hooked, plan={"0": "rows"})


def test_bad_arguments() -> None:
    with pytest.raises(sg.UsageError, match="choose one of 'columns', 'rows', 'replicate'"):
        sg.TensorParallelStrategy(cpus(2), plan={"0": "heads"})
    with pytest.raises(sg.UsageError, match='give "auto"'):
        sg.TensorParallelStrategy(cpus(2), plan="all")
    with pytest.raises(sg.StratagemError, match="twice"):
        sg.TensorParallelStrategy(["cpu:0", "cpu:0"])
    with pytest.raises(sg.StratagemError, match="none can leave or join"):
        sg.TensorParallelStrategy(cpus(2), elastic=True)  # type: ignore[call-arg]


def test_keras_models_are_refused_by_name(group: Group) -> None:
    keras = pytest.importorskip("keras")
    with group(2).scope():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4)])
        with pytest.raises(sg.NotDistributable, match="this is a Keras model"):
            model.compile(optimizer="sgd", loss="mse")

    def loop() -> None:
        keras.utils.clear_session()
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4, "relu", False)])
        model.set_weights([np.ones((6, 4))])
        group(2).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(sg.NotDistributable, match="'Sequential' is a layer of Keras, and a loop"):
        group(2).run(loop)
