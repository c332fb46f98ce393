"""ShardedStrategy over Gloo: torch's fully_shard underneath, with the answer of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import stratagem as sg
from stratagem.training.layer_shards import LayerShards, units
from tests.support import by_hand, closest, cpus, data, distance, mlp, moved

pytestmark = pytest.mark.timeout(120)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


@pytest.fixture(scope="module", params=[2, 3])
def several(request: pytest.FixtureRequest) -> Iterator[sg.ShardedStrategy]:
    with sg.ShardedStrategy(cpus(request.param), "ring") as made:
        yield made


@pytest.fixture(scope="module")
def pair() -> Iterator[sg.ShardedStrategy]:
    with sg.ShardedStrategy(cpus(2), "ring") as made:
        yield made


class Tied(nn.Module):
    """A list of large layers, which are gathered one by one; two are tied, one is unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 33)
        self.middle = nn.ModuleList(nn.Linear(33, 33) for _ in range(3))
        self.middle[2].weight = self.middle[0].weight
        self.last = nn.Linear(33, 4)
        self.unused = nn.Linear(3, 3)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.middle:
            x = x + torch.tanh(layer(x))
        return self.last(x)  # type: ignore[no-any-return]


class Deep(nn.Module):
    """Blocks of a million parameters, which are gathered one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.last = nn.Linear(6, 1024), nn.Linear(1024, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]


def compiled(on: sg.Strategy, module: nn.Module, optimizer: Any, **options: Any) -> sg.Model:
    with on.scope():
        model = sg.Model(copy.deepcopy(module))
        model.compile(**{"optimizer": optimizer, "loss": "cross_entropy", **options})
    return model


def fitted(
    on: sg.Strategy,
    module: nn.Module,
    optimizer: Any,
    x: Any,
    y: Any,
    *,
    batch: int = 64,
    fit: dict[str, Any] | None = None,
    **options: Any,
) -> sg.Model:
    model = compiled(on, module, optimizer, **options)
    model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, **(fit or {}))
    assert not dist.is_initialized()
    return model


@pytest.mark.parametrize("make", [mlp, Tied])
@pytest.mark.parametrize(("name", "batch"), [("sgd", 64), ("adamw", 65), ("fused", 110)])
def test_one_device(
    several: sg.ShardedStrategy, make: Callable[[], nn.Module], name: str, batch: int
) -> None:
    """331 rows: batches that do not divide, and a last batch of a single row."""
    x, y = data()
    start = make()
    alone = by_hand(start, OPTIMIZERS[name], F.cross_entropy, x, y, batch=batch)
    model = fitted(several, start, OPTIMIZERS[name], x, y, batch=batch)
    assert moved(start, alone)
    assert distance(alone, model.module) < 2e-6


def test_double_precision(pair: sg.ShardedStrategy) -> None:
    x, y = data(100)
    start = mlp().double()
    alone = by_hand(start, OPTIMIZERS["sgd"], F.cross_entropy, x.double(), y, batch=33)
    model = fitted(pair, start, OPTIMIZERS["sgd"], x.double(), y, batch=33)
    assert distance(alone, model.module) < 1e-12


@pytest.mark.parametrize(
    ("clip", "option"),
    [(clip_grad_norm_, {"clip_norm": 0.05}), (clip_grad_value_, {"clip_value": 0.01})],
)
def test_clipping(pair: sg.ShardedStrategy, clip: Any, option: dict[str, float]) -> None:
    x, y = data(131)
    start = Tied()
    limit = next(iter(option.values()))
    how: dict[str, Any] = {"before_step": lambda m: clip(m.parameters(), limit)}
    alone = by_hand(start, OPTIMIZERS["sgd"], F.cross_entropy, x, y, batch=47, **how)
    model = fitted(pair, start, OPTIMIZERS["sgd"], x, y, batch=47, **option)
    assert distance(alone, model.module) < 2e-6
    free = by_hand(start, OPTIMIZERS["sgd"], F.cross_entropy, x, y, batch=47)
    assert distance(alone, free) > 1e-3  # the limit was reached


@pytest.mark.parametrize("accumulate", [2, 1])
def test_ignored_targets(pair: sg.ShardedStrategy, accumulate: int) -> None:
    x, y = data(101)
    y[1::5] = -100
    y[40:60] = -100
    start = mlp()
    how = {"batch": 20, "accumulate": accumulate}
    alone = by_hand(start, OPTIMIZERS["sgd"], F.cross_entropy, x, y, **how)  # type: ignore[arg-type]
    model = fitted(pair, start, OPTIMIZERS["sgd"], x, y, **how)  # type: ignore[arg-type]
    assert distance(alone, model.module) < 2e-6


def test_sample_weights(pair: sg.ShardedStrategy) -> None:
    x, y = data(103)
    weight = torch.rand(103, generator=torch.Generator().manual_seed(5))
    both = torch.stack([y.float(), weight], dim=1)

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(output, target[:, 0].long(), reduction="none")
        return (each * target[:, 1]).mean()

    alone = by_hand(mlp(), OPTIMIZERS["sgd"], weighted, x, both, batch=32)
    model = fitted(pair, mlp(), OPTIMIZERS["sgd"], x, y, batch=32, fit={"sample_weight": weight})
    assert distance(alone, model.module) < 2e-6


def test_normalisation_over_the_batch() -> None:
    torch.manual_seed(6)
    start = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    x, y = data(101)
    alone = by_hand(start, OPTIMIZERS["sgd"], F.cross_entropy, x, y, batch=33)
    with sg.ShardedStrategy(cpus(3), "ring", sync_batchnorm=True) as strategy:
        model = fitted(strategy, start, OPTIMIZERS["sgd"], x, y, batch=33)
    assert distance(alone, model.module) < 2e-6


def test_blocks_are_gathered_one_by_one(pair: sg.ShardedStrategy) -> None:
    start = Deep()
    assert units(start) == [start.blocks[0][0], start.blocks[1][0]]
    x, y = data(33)
    make = lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)  # noqa: E731
    alone = by_hand(start, make, F.cross_entropy, x, y, batch=11)
    model = fitted(pair, start, make, x, y, batch=11)
    assert distance(alone, model.module) < 2e-6


def test_tied_layers_are_gathered_together() -> None:
    start = Deep()
    start.blocks[1][0].weight = start.blocks[0][0].weight
    assert units(start) == []


def test_each_replica_has_its_rows(pair: sg.ShardedStrategy) -> None:
    def look() -> tuple[int, int, int, int]:
        replica, module = sg.current_replica(), mlp()
        optimizer = torch.optim.AdamW(module.parameters())
        total = sum(p.numel() for p in module.parameters())
        shards = LayerShards(module, optimizer, replica)
        shards.leave_home()
        held = sum(p.numel() for p in module.parameters())
        shards.run(torch.randn(5, 6)).sum().backward()
        gradients = shards.gradients()
        shards.step(gradients)
        mine = sum(g.numel() for g in gradients if g is not None)
        state = sum(v.numel() for s in shards.update.state.values() for v in s.values())
        shards.close()
        assert sum(p.numel() for p in module.parameters()) == total
        return total, held, mine, state

    for total, held, mine, state in pair.run(look):
        assert held == 0
        assert mine == total // 2
        assert state == 2 * mine + 4  # two averages, and four counts of steps


class Looks(sg.callbacks.Callback):
    """Callbacks that read and change the model."""

    def __init__(self, between: bool) -> None:
        self.seen: list[dict[str, Tensor]] = []
        if between:
            self.on_train_batch_end = self._look

    def _look(self, batch: int, logs: Any = None) -> None:
        self.seen.append({k: v.clone() for k, v in self.model.module.state_dict().items()})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._look(0)
        with torch.no_grad():
            self.model.module[0].bias.zero_()
        self.model.optimizer.param_groups[0]["lr"] *= 0.5


def test_callbacks_see_and_change_the_whole(pair: sg.ShardedStrategy) -> None:
    x, y = data(64)
    looks = Looks(between=False)
    how: dict[str, Any] = {"fit": {"callbacks": [looks], "validation_data": (x, y)}}
    model = fitted(pair, mlp(), OPTIMIZERS["sgd"], x, y, batch=33, **how)
    other = Looks(between=False)
    how["fit"]["callbacks"] = [other]
    with sg.MirroredStrategy(cpus(1)) as one:
        alone = fitted(one, mlp(), OPTIMIZERS["sgd"], x, y, batch=33, **how)
    assert distance(alone.module, model.module) < 2e-6
    for mine, theirs in zip(looks.seen, other.seen, strict=True):
        assert all(torch.allclose(mine[k], theirs[k], atol=2e-6) for k in theirs)
    for name, values in alone.history.history.items():
        if "loss" in name:
            assert closest(model.history.history[name], values) < 1e-5


class Batches(sg.callbacks.Callback):
    """Records the weights after every batch."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.norms.append(self.model.module[0].weight.norm().item())


def test_callbacks_between_batches(pair: sg.ShardedStrategy) -> None:
    x, y = data(64)
    found = []
    with sg.MirroredStrategy(cpus(1)) as one:
        for strategy in (pair, one):
            batches = Batches()
            fit = {"callbacks": [batches]}
            fitted(strategy, mlp(), OPTIMIZERS["sgd"], x, y, batch=20, fit=fit)
            found.append(batches.norms)
    assert len(found[0]) == 8
    assert closest(*found) < 1e-5


def test_one_plain_file(pair: sg.ShardedStrategy, tmp_path: Path) -> None:
    """A checkpoint is resumed under another strategy, and the other way round."""
    x, y = data(120)
    start = Tied()
    alone = by_hand(start, OPTIMIZERS["adamw"], F.cross_entropy, x, y, batch=40, epochs=6)
    model = fitted(pair, start, OPTIMIZERS["adamw"], x, y, batch=40)
    model.save(tmp_path / "first")
    with sg.ShardedStrategy(cpus(2)) as shared:
        other = compiled(shared, start, OPTIMIZERS["adamw"])
        other.load(tmp_path / "first")
        other.fit(x, y, batch_size=40, epochs=2, shuffle=False, verbose=0)
        other.save(tmp_path / "second")
    model.load(tmp_path / "second")
    model.fit(x, y, batch_size=40, epochs=2, shuffle=False, verbose=0)
    assert distance(alone, model.module) < 2e-6
    predicted = model.predict(x, batch_size=50, verbose=0)
    assert closest(predicted.flatten().tolist(), alone(x).flatten().tolist()) < 1e-5


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(6, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale  # type: ignore[no-any-return]


class Elsewhere(nn.Module):
    """Computes with a tensor that is no longer its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.kept = [self.inner.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.kept[0].detach().clone().requires_grad_())


class Sometimes(nn.Module):
    """Uses a layer only for some rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x) + self.inner(x) if x[0, 0] > 0 else self.inner(x)


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "adafactor": (mlp, {"optimizer": torch.optim.Adafactor}, "Adafactor may look at whole"),
    "rprop": (mlp, {"optimizer": torch.optim.Rprop}, "Rprop may look at whole"),
    "float16": (mlp, {"precision": "float16"}, "unscales whole gradients"),
    "compiled": (mlp, {"jit_compile": True}, "on the CPUs of one machine only"),
    "sparse": (lambda: nn.EmbeddingBag(9, 4, sparse=True), {}, "sparse gradients"),
    "single": (Single, {}, "'scale' is a single number"),
    "nothing": (Elsewhere, {"check": False}, "no parameter had a gradient"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_refused(pair: sg.ShardedStrategy, case: str) -> None:
    make, options, sentence = REFUSED[case]
    x, y = data(40)
    x = x.long() % 9 if case == "sparse" else x
    with pytest.raises(sg.StratagemError, match=sentence):
        fitted(pair, make(), x=x, y=y, **{"optimizer": OPTIMIZERS["sgd"], **options})
    assert not dist.is_initialized()


def test_layers_of_keras_are_refused(pair: sg.ShardedStrategy) -> None:
    import keras

    net = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(4)])
    with pytest.raises(sg.StratagemError, match="is a layer of Keras"):
        fitted(pair, net, OPTIMIZERS["sgd"], *data(40))
    with pair.scope():
        net.compile(loss="mse")
    with pytest.raises(sg.NotDistributable, match="is a Keras model"):
        net.fit(*data(40), verbose=0)


def test_custom_loops_are_refused(pair: sg.ShardedStrategy) -> None:
    def loop() -> None:
        module = mlp()
        pair.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))

    with pytest.raises(sg.NotDistributable, match="a loop of your own updates whole ones; use sg"):
        pair.run(loop)


def test_a_layer_that_some_replicas_use_is_refused(pair: sg.ShardedStrategy) -> None:
    x, y = data(40)
    x[:20, 0], x[20:, 0] = 1.0, -1.0
    with pytest.raises(sg.StratagemError, match="use every parameter for every batch"):
        fitted(pair, Sometimes(), OPTIMIZERS["sgd"], x, y, batch=40, check=False)


class Slope(nn.Module):
    """A number that callbacks change, and a buffer that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner, self.slope = nn.Linear(6, 4), 1.0
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes = self.passes + 1.0
        return self.inner(x) * self.slope  # type: ignore[no-any-return]


class Steeper(sg.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.module.slope += 1.0


def test_attributes_and_buffers_are_carried(pair: sg.ShardedStrategy) -> None:
    x, y = data(40)
    fit = {"callbacks": [Steeper()]}
    model = fitted(pair, Slope(), OPTIMIZERS["sgd"], x, y, batch=20, fit=fit, check=False)
    with sg.MirroredStrategy(cpus(1)) as one:
        fit = {"callbacks": [Steeper()]}
        alone = fitted(one, Slope(), OPTIMIZERS["sgd"], x, y, batch=20, fit=fit, check=False)
    assert model.module.slope == 3.0 and model.module.passes.item() == 4.0
    assert distance(alone.module, model.module) < 2e-6
