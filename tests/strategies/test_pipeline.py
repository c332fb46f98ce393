"""A pipeline gives the weights, losses and metrics of one device for all rows and splits.

The reference is a loop written by hand on one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests import spread
from tests.spread import watched
from tests.support import by_hand, cpus, data, distance, mlp, moved

pytestmark = pytest.mark.timeout(120)

Pipe = Callable[..., sg.PipelineStrategy]


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipe]:
    """Return a pipeline with these settings; pipelines are made once and reused."""
    made: dict[str, sg.PipelineStrategy] = {}

    def get(devices: int = 2, microbatches: Any = 4, **options: Any) -> sg.PipelineStrategy:
        key = f"{devices} {microbatches} {options}"
        if key not in made:
            made[key] = sg.PipelineStrategy(cpus(devices), microbatches, **options)
        return made[key]

    yield get
    for strategy in made.values():
        strategy.close()


def deep(layers: int = 4, width: int = 8) -> nn.Module:
    torch.manual_seed(5)
    inner = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, width), *inner, nn.Linear(width, 4)).double()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-2)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def fitted(
    on: sg.Strategy,
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
    with on.scope():
        model = sg.Model(copy.deepcopy(module))
        model.compile(optimizer=optimizer, loss=loss, **compiled)
    told = {"shuffle": False, "verbose": 0, **(fit or {})}
    model.fit(x, y, batch_size=batch, epochs=epochs, **told)
    return model


def doubles(rows: int) -> tuple[Tensor, Tensor]:
    x, y = data(rows)
    return x.double(), y


@pytest.mark.parametrize("make", [sgd, adam])
def test_every_number_of_rows(pipe: Pipe, make: Any) -> None:
    """From 1 to 2M + 1 rows, also in a last batch after a full one."""
    module, microbatches = deep(), 3
    on = pipe(2, microbatches)
    for rows in range(1, 2 * microbatches + 2):
        x, y = doubles(2 * microbatches + 1 + rows)
        batch = 2 * microbatches + 1
        one = by_hand(module, make, F.cross_entropy, x, y, batch=batch, epochs=1)
        model = fitted(on, module, x, y, optimizer=make, batch=batch, epochs=1)
        assert distance(one, model.module) < 1e-12, rows
        x, y = doubles(rows)
        one = by_hand(module, make, F.cross_entropy, x, y, batch=rows)
        assert distance(one, fitted(on, module, x, y, optimizer=make, batch=rows).module) < 1e-12
        assert moved(module, one)


# the first and the fourth are in the quick half
@pytest.mark.parametrize(
    ("schedule", "devices"),
    [
        *(("interleaved", 2), ("gpipe", 2), ("gpipe", 3)),
        *(("eager", 3), ("eager", 2), ("interleaved", 3)),
    ],
)
def test_schedules(pipe: Pipe, schedule: str, devices: int) -> None:
    module, (x, y) = deep(6), doubles(53)
    one = by_hand(module, adam, F.cross_entropy, x, y, batch=16)
    on = pipe(devices, 5, schedule=schedule)
    model, work = watched(lambda: fitted(on, module, x, y, optimizer=adam), on)
    assert distance(one, model.module) < 1e-12
    assert moved(module, model.module)
    alone = 14 * 2 * 53  # rows through the layers, but for what is measured and checked
    assert all(rows > alone / devices / 4 for rows in work.rows), work.rows


def shuffled(on: sg.Strategy) -> None:
    """Two epochs; the order of the second depends on all random numbers of the first."""
    found, (x, y), module = [], doubles(45), deep().double()
    for each in (sg.MirroredStrategy(cpus(1)), on):
        torch.manual_seed(5)
        found.append(fitted(each, module, x, y, batch=11, fit={"shuffle": True}).module)
    assert distance(*found) < 1e-12 and moved(module, found[0])


def test_rows_are_shuffled_as_on_one_device(pipe: Pipe) -> None:
    shuffled(pipe(2, 3))


def test_a_device_runs_its_own_layers_only(pipe: Pipe) -> None:
    """The first device also measures and checks all layers, so the test looks at the others."""
    module, (x, y) = deep(2), doubles(48)  # layers with weights: 0, 1, 3, 5
    on = pipe(3, 4, split=["1", "3"])
    on.run(spread._begin)
    fitted(on, module, x, y)
    assert on.run(_weights_seen)[1:] == [1, 2]
    on.run(spread._end)


def _weights_seen() -> int:
    assert spread._watch is not None
    return len(spread._watch.first)


def test_losses_are_divided_as_on_one_device(pipe: Pipe) -> None:
    """Ignored targets and class weights are distributed unevenly over the microbatches."""
    module, (x, y) = deep(), doubles(41)
    y[::3] = -100
    y[16:30] = -100
    y[30] = 1
    weights = torch.tensor([0.2, 1.0, 3.0, 0.5]).double()
    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weights, label_smoothing=0.1)):
        one = by_hand(module, sgd, loss, x, y, batch=16)
        model = fitted(pipe(2, 5), module, x, y, loss=copy.deepcopy(loss))
        assert distance(one, model.module) < 1e-12
        assert moved(module, one)
    summed = nn.CrossEntropyLoss(reduction="sum")
    small: Any = lambda p: torch.optim.SGD(p, lr=0.01)  # noqa: E731
    one = by_hand(module, small, summed, x, y, batch=16)
    model = fitted(pipe(2, 5), module, x, y, loss=copy.deepcopy(summed), optimizer=small)
    assert distance(one, model.module) < 1e-12


def test_sample_weights(pipe: Pipe) -> None:
    module, (x, y) = deep(), doubles(37)
    weight = torch.rand(37, generator=torch.Generator().manual_seed(1)).double()
    for make in (sgd, adam):
        expected = copy.deepcopy(module)
        optimizer = make(expected.parameters())
        for start in range(0, 37, 16):
            at = slice(start, start + 16)
            each = F.cross_entropy(expected(x[at]), y[at], reduction="none")
            (each * weight[at]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        given = {"sample_weight": weight}
        model = fitted(pipe(2, 3), module, x, y, optimizer=make, epochs=1, fit=given)
        assert distance(expected, model.module) < 1e-12


@pytest.mark.parametrize("accumulate", [3, 1])
def test_clipping_by_the_norm_of_all_stages_and_accumulation(pipe: Pipe, accumulate: int) -> None:
    """One of the stages has no parameters."""
    module, (x, y) = deep(), doubles(75)
    on = pipe(3, 4, split=["2", "3"])
    y[16:30] = -100
    clip = lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05)  # noqa: E731
    one = by_hand(
        module, adam, F.cross_entropy, x, y, batch=16, before_step=clip, accumulate=accumulate
    )
    options: dict[str, Any] = {"clip_norm": 0.05, "accumulate": accumulate}
    model = fitted(on, module, x, y, optimizer=adam, **options)
    assert distance(one, model.module) < 1e-8  # the norm is not rounded as torch rounds it
    assert moved(module, one)
    value = lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-3)  # noqa: E731
    one = by_hand(
        module, sgd, F.cross_entropy, x, y, batch=16, before_step=value, accumulate=accumulate
    )
    model = fitted(on, module, x, y, clip_value=1e-3, accumulate=accumulate)
    assert distance(one, model.module) < 1e-12


class Knotted(nn.Module):
    """Has skips over cuts, a tied weight, a layer used twice, an own parameter, in-place writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)
        self.twice = nn.Linear(8, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        h = self.embedding(x)
        a = self.first(h)
        b = self.act(a)
        c = self.twice(b) + h
        d, _ = self.rnn(c)
        e = self.twice(d) * self.scale + a
        if factor is not None:
            e = e * factor
        batch, time, width = e.shape
        return self.head(e.reshape(batch * time, width)).view(batch, time, -1).transpose(1, 2)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_skips_ties_and_layers_used_twice(pipe: Pipe, devices: int) -> None:
    module = Knotted().double()
    dice = torch.Generator().manual_seed(0)
    x = torch.randint(0, 11, (23, 5), generator=dice)
    y = torch.randint(0, 11, (23, 5), generator=dice)
    for make in (sgd, adam):
        one = by_hand(module, make, F.cross_entropy, x, y, batch=9)
        model = fitted(pipe(devices, 4), module, x, y, optimizer=make, batch=9)
        assert distance(one, model.module) < 1e-12
        assert moved(module, one)
        assert model.module.head.weight is model.module.embedding.weight  # type: ignore[union-attr]


def test_what_is_written_in_place_is_read_behind_it(pipe: Pipe) -> None:
    """The cut is before or after the layer that writes; a later stage reads the value."""
    module = Knotted().double()
    dice = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 11, (2, 23, 5), generator=dice)
    one = by_hand(module, sgd, F.cross_entropy, x, y, batch=9)
    model = fitted(pipe(3, 4, split=["act", "rnn"]), module, x, y, batch=9)
    assert distance(one, model.module) < 1e-12


def test_several_inputs_and_their_names(pipe: Pipe) -> None:
    module = Knotted().double()
    dice = torch.Generator().manual_seed(0)
    x = torch.randint(0, 11, (23, 5), generator=dice)
    y = torch.randint(0, 11, (23, 5), generator=dice)
    factor = torch.rand(23, 5, 8, generator=dice).double()
    one = copy.deepcopy(module)
    optimizer = sgd(one.parameters())
    for start in range(0, 23, 9):
        at = slice(start, start + 9)
        F.cross_entropy(one(x[at], factor[at]), y[at]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for given in ((x, factor), {"x": x, "factor": factor}):
        model = fitted(pipe(3, 4), module, given, y, batch=9, epochs=1)
        assert distance(one, model.module) < 1e-12


def test_loaders_streams_metrics_and_validation(pipe: Pipe) -> None:
    module, (x, y) = deep(), doubles(53)
    rows = TensorDataset(x, y)
    loader = DataLoader(rows, batch_size=16, shuffle=True)
    stream = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 53, 16)]
    for source in (loader, rows, stream):
        logs = []
        for on in (None, pipe(2, 3)):
            torch.manual_seed(7)
            model = sg.Model(copy.deepcopy(module), on)
            model.compile(optimizer=adam, loss="cross_entropy", metrics=["accuracy"])
            size = {"batch_size": 16} if source is rows else {}
            fit = {"epochs": 2, "verbose": 0, "validation_data": (x, y)}
            history = model.fit(source, **size, **fit).history  # type: ignore[arg-type]
            history.pop("examples_per_second")
            logs.append((history, model.module, model.evaluate(x, y, verbose=0), model.predict(x)))
        (one, alone, tested, guessed), (two, staged, tested2, guessed2) = logs
        assert distance(alone, staged) < 1e-12
        assert torch.allclose(guessed, guessed2, atol=1e-12)
        for name, values in one.items():
            assert two[name] == pytest.approx(values, abs=1e-6), name
        assert tested == pytest.approx(tested2, abs=1e-6)


def test_files_load_under_any_strategy_and_go_on(pipe: Pipe, tmp_path: Any) -> None:
    """One plain file has the weights and optimizer state of all stages."""
    module, (x, y) = deep(), doubles(48)
    one = by_hand(module, adam, F.cross_entropy, x, y, batch=16, epochs=2)
    model = fitted(pipe(2, 3), module, x, y, optimizer=adam, epochs=1)
    path = model.save(tmp_path / "model.safetensors")
    for on in (None, pipe(3, 4), pipe(2, 3)):
        other = sg.Model(deep(), on)
        other.compile(optimizer=adam, loss="cross_entropy")
        other.load(path)
        other.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        assert distance(one, other.module) < 1e-12
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert distance(one, model.module) < 1e-12


def test_frozen_layers_and_parameters_that_nobody_uses(pipe: Pipe) -> None:
    module, (x, y) = deep(), doubles(40)
    for layer in list(module.children())[:4]:  # type: ignore[assignment]
        layer.requires_grad_(False)
    module.register_parameter("idle", nn.Parameter(torch.ones(3).double()))
    one = by_hand(module, adam, F.cross_entropy, x, y, batch=16)
    model = fitted(pipe(3, 4), module, x, y, optimizer=adam)
    assert distance(one, model.module) < 1e-12
    assert moved(module, one)


def test_callbacks_see_and_change_everything(pipe: Pipe) -> None:
    """The chief has all weights between two batches, and its writes reach every stage."""
    module, (x, y) = deep(width=64), doubles(48)  # weights of several pages, which are let go

    class Halve(sg.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.param_groups[0]["lr"] *= 0.9
            with torch.no_grad():
                for param in self.model.module.parameters():
                    param.mul_(0.99)

    expected = copy.deepcopy(module)
    optimizer = sgd(expected.parameters())
    for start in range(0, 48, 16):
        F.cross_entropy(expected(x[start : start + 16]), y[start : start + 16]).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9
        with torch.no_grad():
            for param in expected.parameters():
                param.mul_(0.99)
    model = fitted(pipe(3, 4), module, x, y, epochs=1, fit={"callbacks": [Halve()]})
    assert distance(expected, model.module) < 1e-12


class Marked(nn.Module):
    """A forward that creates tensors, and that depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.heat = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.heat + torch.arange(8.0).double() / 8
        h = h * 2 if self.training else h
        return self.second(h * torch.tensor(0.5).double())


def test_constants_and_modes_that_callbacks_change(pipe: Pipe) -> None:
    """The model is traced again if a callback changes the mode, or a number that forward reads."""
    module, (x, y) = Marked().double(), doubles(40)

    class Still(sg.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.module.train(epoch == 0)
            self.model.module.heat = 3.0 if epoch == 2 else 1.0

    one = copy.deepcopy(module)
    optimizer = sgd(one.parameters())
    for epoch in range(3):
        one.train(epoch == 0)
        one.heat = 3.0 if epoch == 2 else 1.0
        for start in range(0, 40, 16):
            F.cross_entropy(one(x[start : start + 16]), y[start : start + 16]).backward()
            optimizer.step()
            optimizer.zero_grad()
    model = fitted(pipe(2, 3), module, x, y, epochs=3, fit={"callbacks": [Still()]})
    assert distance(one, model.module) < 1e-12
    assert moved(module, one)


def test_targets_with_other_rows_are_refused(pipe: Pipe) -> None:
    """Targets would be cut at other rows than inputs."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3), nn.Flatten(0, 1)).double()
    x = torch.randn(8, 5, 6).double()
    stream = [(x, torch.randint(0, 3, (40,)))]
    with pytest.raises(
        sg.NotDistributable, match=r"microbatches.*tensors of 8 and of 40 rows.*axis of time"
    ):
        fitted(pipe(2, 4), module, stream, batch=None, check=False)


class Tempered(nn.Module):
    """A loss with a parameter, by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5).double())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output * self.scale, target, reduction="none")


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss = deep(), Tempered()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found


def test_a_loss_with_parameters_of_the_model(pipe: Pipe) -> None:
    """Only the last device uses these parameters."""
    start, (x, y) = WithLoss(), doubles(40)
    one = copy.deepcopy(start)
    optimizer = sgd(one.parameters())
    for first in range(0, 40, 16):
        one.loss(one(x[first : first + 16]), y[first : first + 16]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    module = copy.deepcopy(start)
    model = sg.Model(module, pipe(2, 3))
    model.compile(optimizer=sgd, loss=module.loss)
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert distance(one, module) < 1e-12
    assert one.loss.scale.item() != 1.5


def test_single_precision(pipe: Pipe) -> None:
    module, (x, y) = mlp(), data(50)
    one = by_hand(module, adam, F.cross_entropy, x, y, batch=16)
    assert distance(one, fitted(pipe(2, "auto"), module, x, y, optimizer=adam).module) < 1e-6


def test_mixed_precision(pipe: Pipe) -> None:
    """One microbatch equals one device in bfloat16; several are rounded separately."""
    module, (x, y) = mlp(), data(50)
    options: dict[str, Any] = {"optimizer": sgd, "precision": "bfloat16"}
    whole = by_hand(module, sgd, F.cross_entropy, x, y, batch=16)
    with sg.MirroredStrategy(cpus(1)) as alone:
        one = fitted(alone, module, x, y, **options).module
    assert distance(whole, one) > 1e-5
    for microbatches, near in ((1, 1e-6), (4, 0.01)):
        found = fitted(pipe(2, microbatches), module, x, y, **options).module
        assert distance(one, found) < near < distance(module, found)
