"""ShardedStrategy on the CPUs of one machine: the answer of one device, one set of gradients.

The reference is a loop written by hand on one device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.support import by_hand, closest, cpus, data, distance, mlp, moved

pytestmark = pytest.mark.timeout(120)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


class Own(nn.Module):
    """Has an own forward, so that gradients come as products; one parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(6, 300), nn.Linear(300, 4)
        self.middle = nn.Linear(300, 300)
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.middle(self.middle(x))))  # type: ignore[no-any-return]


def wide() -> nn.Module:
    """Linear layers large enough for factors."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 256), nn.Linear(256, 4))


@pytest.fixture(scope="module", params=[2, 3])
def several(request: pytest.FixtureRequest) -> Iterator[sg.ShardedStrategy]:
    with sg.ShardedStrategy(cpus(request.param)) as made:
        yield made


@pytest.fixture(scope="module")
def pair() -> Iterator[sg.ShardedStrategy]:
    with sg.ShardedStrategy(cpus(2)) as made:
        yield made


def fitted(
    on: sg.Strategy,
    module: nn.Module,
    optimizer: Any,
    x: Any,
    y: Any,
    *,
    batch: int = 64,
    loss: Any = "cross_entropy",
    fit: dict[str, Any] | None = None,
    **compile_options: Any,
) -> sg.Model:
    with on.scope():
        model = sg.Model(copy.deepcopy(module))
        model.compile(optimizer=optimizer, loss=loss, **compile_options)
    model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, **(fit or {}))
    return model


# every third is in the quick half
@pytest.mark.parametrize(
    ("name", "batch", "make"),
    [
        *(("sgd", 64, mlp), ("sgd", 64, wide), ("sgd", 64, Own)),
        *(("adamw", 65, wide), ("adamw", 65, Own), ("adamw", 65, mlp)),
        *(("fused", 110, Own), ("fused", 110, mlp), ("fused", 110, wide)),
    ],
)
def test_one_device(
    several: sg.ShardedStrategy, make: Callable[[], nn.Module], name: str, batch: int
) -> None:
    """331 rows: batches that do not divide, and a last batch of a single row."""
    x, y = data()
    start = make()
    alone = by_hand(start, OPTIMIZERS[name], F.cross_entropy, x, y, batch=batch)
    model = fitted(several, start, OPTIMIZERS[name], x, y, batch=batch)
    assert moved(start, alone)
    # Adam enlarges the rounding of small gradients: the rows of each batch in another order make
    # 1.1e-5 on one device (x86-64)
    assert distance(alone, model.module) < (2e-5 if name == "fused" else 2e-6)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_custom_loop(several: sg.ShardedStrategy, name: str) -> None:
    """The result of one device; one set of parameters, and state only where it is stepped."""
    x, y = data(47)
    x, start, make = x.double(), Own().double(), OPTIMIZERS[name]
    clip = {"before_step": lambda m: clip_grad_norm_(m.parameters(), 0.05)}
    alone = by_hand(start, make, F.cross_entropy, x, y, batch=16, **clip)

    def loop() -> Any:
        module = copy.deepcopy(start)
        loader = DataLoader(TensorDataset(x, y), batch_size=16)
        module, optimizer, loader = several.prepare(module, make(module.parameters()), loader)
        for _ in range(2):
            for rows, targets in loader:
                F.cross_entropy(module(rows), targets).backward()
                clip_grad_norm_(module.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
        index = several.replica().index
        held = [i for i, p in enumerate(module.parameters()) if optimizer.state.get(p)]
        several.replica().collective.barrier()
        if index == 1:
            module.unused.data.fill_(9.0)
        several.replica().collective.barrier()
        return module.state_dict(), held, float(module.unused[0].detach())

    told = several.run(loop)
    for state, _, seen in told:
        assert seen == 9.0
        module = copy.deepcopy(start)
        module.load_state_dict(state)
        with torch.no_grad():
            module.unused.copy_(alone.unused)
        assert distance(alone, module) < 1e-12
        assert moved(start, module)
    chief, *others = [held for _, held, _ in told]
    assert len(chief) == 6 and all(0 < len(held) < 6 for held in others)


def test_custom_loops_that_are_refused(pair: sg.ShardedStrategy) -> None:
    class Mine(torch.optim.SGD):
        pass

    def own_optimizer() -> None:
        module = mlp()
        pair.prepare(module, Mine(module.parameters(), lr=0.1))

    def closure() -> None:
        module = mlp()
        _, optimizer, _ = pair.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        optimizer.step(lambda: 0.0)

    def resumed() -> None:
        module = mlp()
        pair.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), resume="run/")

    for loop, words in (
        (own_optimizer, "Mine is not one of torch's"),
        (closure, "without a closure"),
        (resumed, r"use sg\.Model"),
    ):
        with pytest.raises(sg.NotDistributable, match=words):
            pair.run(loop)


def test_clipping_is_by_the_norm_of_all_slices(several: sg.ShardedStrategy) -> None:
    """Of gradients that are accumulated, from rows of which some are ignored."""
    x, y = data()
    y[40:90:2] = -100
    start, how = Own(), {"batch": 47, "accumulate": 2}
    clip: dict[str, Any] = {"before_step": lambda m: clip_grad_norm_(m.parameters(), 0.05)}
    alone = by_hand(start, OPTIMIZERS["sgd"], F.cross_entropy, x, y, **how, **clip)
    model = fitted(several, start, OPTIMIZERS["sgd"], x, y, clip_norm=0.05, **how)  # type: ignore[arg-type]
    assert distance(alone, model.module) < 2e-6
    free = by_hand(start, OPTIMIZERS["sgd"], F.cross_entropy, x, y, **how)  # type: ignore[arg-type]
    assert distance(alone, free) > 1e-3  # the limit was reached


class Watched(sg.callbacks.Callback):
    """Records the chief's memory after a batch."""

    def __init__(self) -> None:
        self.kept: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.kept.append(sum(p.grad is not None for p in self.model.module.parameters()))


def test_nobody_holds_whole_gradients(pair: sg.ShardedStrategy) -> None:
    x, y = data(64)
    watched = Watched()
    fitted(pair, Own(), OPTIMIZERS["sgd"], x, y, fit={"callbacks": [watched]})
    assert watched.kept == [0, 0]


def test_normalisation_over_the_batch() -> None:
    torch.manual_seed(6)
    start = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    x, y = data(101)
    alone = by_hand(start, OPTIMIZERS["sgd"], F.cross_entropy, x, y, batch=33)
    with sg.ShardedStrategy(cpus(3), sync_batchnorm=True) as strategy:
        model = fitted(strategy, start, OPTIMIZERS["sgd"], x, y, batch=33)
    assert distance(alone, model.module) < 2e-6


def test_one_plain_file(pair: sg.ShardedStrategy, tmp_path: Path) -> None:
    """A checkpoint is resumed under another strategy, and the other way round."""
    x, y = data(120)
    start = Own()
    alone = by_hand(start, OPTIMIZERS["adamw"], F.cross_entropy, x, y, batch=40, epochs=6)
    model = fitted(pair, start, OPTIMIZERS["adamw"], x, y, batch=40)
    model.save(tmp_path / "first")
    with sg.MirroredStrategy(cpus(1)).scope():
        other = sg.Model(copy.deepcopy(start))
        other.compile(optimizer=OPTIMIZERS["adamw"], loss="cross_entropy")
    other.load(tmp_path / "first")
    other.fit(x, y, batch_size=40, epochs=2, shuffle=False, verbose=0)
    other.save(tmp_path / "second")
    model.load(tmp_path / "second")
    model.fit(x, y, batch_size=40, epochs=2, shuffle=False, verbose=0)
    assert distance(alone, model.module) < 2e-6
    predicted = model.predict(x, batch_size=50, verbose=0)
    assert closest(predicted.flatten().tolist(), alone(x).flatten().tolist()) < 1e-5
    loss = model.evaluate(x, y, batch_size=50, verbose=0)["loss"]
    assert abs(loss - F.cross_entropy(alone(x), y).item()) < 1e-5


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "double": (lambda: mlp().double(), {}, "is torch.float64"),
    "adafactor": (mlp, {"optimizer": torch.optim.Adafactor}, "Adafactor may look at whole"),
    "float16": (mlp, {"precision": "float16"}, "unscales whole gradients"),
    "sparse": (lambda: nn.EmbeddingBag(9, 4, sparse=True), {}, "sparse gradients"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_refused(pair: sg.ShardedStrategy, case: str) -> None:
    make, options, sentence = REFUSED[case]
    x, y = data(40)
    x = {"sparse": x.long() % 9, "double": x.double()}.get(case, x)
    compiled = {"optimizer": OPTIMIZERS["sgd"], **options}
    with pytest.raises(sg.StratagemError, match=sentence):
        fitted(pair, make(), x=x, y=y, **compiled)


def test_gradients_in_two_parts_are_refused(pair: sg.ShardedStrategy) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            a = checkpoint(self.inner, x, use_reentrant=True)
            return a + checkpoint(self.inner, x * 2, use_reentrant=True)  # type: ignore[no-any-return]

    with pytest.raises(sg.StratagemError, match="use_reentrant=False"):
        fitted(pair, Twice(), OPTIMIZERS["sgd"], *data(40), check=False)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_fewer_rows_than_replicas(several: sg.ShardedStrategy, rows: int) -> None:
    x, y = data(rows)
    start = wide()
    alone = by_hand(start, OPTIMIZERS["sgd"], F.cross_entropy, x, y, batch=rows)
    model = fitted(several, start, OPTIMIZERS["sgd"], x, y, batch=rows)
    assert distance(alone, model.module) < 2e-6


class Half(nn.Module):
    """Uses a layer for some batches only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x) + self.inner(x) if x[0, 0] > 0 else self.inner(x)


def test_a_layer_that_was_used_before_has_no_gradient(pair: sg.ShardedStrategy) -> None:
    """Its earlier gradient is still in memory, and must not count in the norm."""
    x, y = data(80)
    x[:40, 0], x[40:, 0] = 1.0, -1.0
    clip: dict[str, Any] = {"before_step": lambda m: clip_grad_norm_(m.parameters(), 0.1)}
    alone = by_hand(Half(), OPTIMIZERS["sgd"], F.cross_entropy, x, y, batch=40, **clip)
    model = fitted(pair, Half(), OPTIMIZERS["sgd"], x, y, batch=40, clip_norm=0.1)
    assert distance(alone, model.module) < 2e-6


def test_a_layer_that_one_replica_uses(pair: sg.ShardedStrategy) -> None:
    """Only the second replica's rows use it; the first replica has no gradient for it."""
    x, y = data(40)
    x[:20, 0], x[20:, 0] = -1.0, 1.0
    start = Half()
    alone = copy.deepcopy(start)
    optimizer = OPTIMIZERS["sgd"](alone.parameters())
    for _ in range(2):
        for rows in (slice(0, 20), slice(20, 40)):
            (F.cross_entropy(alone(x[rows]), y[rows], reduction="sum") / 40).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = fitted(pair, start, OPTIMIZERS["sgd"], x, y, batch=40, check=False)
    assert distance(alone, model.module) < 2e-6


def test_factors_here_and_a_product_there(pair: sg.ShardedStrategy) -> None:
    """The table of factors has room for 256 of 300 rows, so the second replica multiplies."""
    x, y = data(300)
    start = wide()
    alone = by_hand(start, OPTIMIZERS["sgd"], F.cross_entropy, x, y, batch=300)
    model = fitted(pair, start, OPTIMIZERS["sgd"], x, y, batch=300)
    assert moved(start, alone)
    assert distance(alone, model.module) < 2e-6


def _decay(module: nn.Module, factor: float = 0.5) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(factor)


def _by_hand(module: nn.Module) -> None:
    for param in module.parameters():
        param.data.add_(param.grad if param.grad is not None else 0.0, alpha=-0.1)


def _new_memory(module: nn.Module) -> None:
    for param in module.parameters():
        param.data = param.data * 0.5


_WRITES: dict[str, dict[str, Callable[[Any, Any], object]]] = {
    "climbing": {"backward": lambda m, o: _decay(m, 1.1)},
    "between epochs": {"epoch": lambda m, o: _decay(m)},
    "unseen by autograd": {"epoch": lambda m, o: [p.data.mul_(0.5) for p in m.parameters()]},
    "by hand": {"step": lambda m, o: _by_hand(m)},
    "before the step": {"backward": lambda m, o: [p.data.mul_(0.9) for p in m.parameters()]},
    "other memory": {"epoch": lambda m, o: _new_memory(m)},
    "other optimizer": {"step": lambda m, o: torch.optim.SGD(m.parameters(), lr=0.1).step()},
    "a row": {"epoch": lambda m, o: m[0].weight.data[1].mul_(0.5)},
    "a column": {"epoch": lambda m, o: m[0].weight.data[:, 1].mul_(0.5)},
    "state, unseen": {
        "epoch": lambda m, o: [s["momentum_buffer"].data.mul_(0.5) for s in o.state.values()]
    },
    "one layer, late": {"last": lambda m, o: m[2].weight.data.mul_(0.5)},
    "state": {"epoch": lambda m, o: [s["momentum_buffer"].mul_(0.5) for s in o.state.values()]},
    "own state_dict": {
        "epoch": lambda m, o: [
            s["momentum_buffer"].mul_(0.5) for s in o.state_dict()["state"].values()
        ]
    },
    "state replaced": {
        "epoch": lambda m, o: [
            s.update(momentum_buffer=s["momentum_buffer"] * 0.5) for s in o.state.values()
        ]
    },
}


@pytest.mark.parametrize("case", list(_WRITES))
def test_writes_of_the_loop_are_refused(several: sg.ShardedStrategy, case: str) -> None:
    """Each replica would write once more to what they share."""
    x, y = data(21)
    does = _WRITES[case]

    def at(place: str, module: nn.Module, optimizer: Any) -> None:
        if place in does:
            does[place](module, optimizer)

    def loop() -> None:
        module = mlp()
        made = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        loader: Any = DataLoader(TensorDataset(x, y), batch_size=8)
        module, optimizer, loader = several.prepare(module, made, loader)
        for epoch in range(3):
            for i, (rows, targets) in enumerate(loader):
                F.cross_entropy(module(rows), targets).backward()
                at("backward", module, optimizer)
                if case not in ("by hand", "other optimizer"):
                    optimizer.step()
                at("step", module, optimizer)
                optimizer.zero_grad()
                if (epoch, i) == (2, 2):
                    at("last", module, optimizer)
            at("epoch", module, optimizer)

    what = "state was" if "state" in case else "weights were"
    with pytest.raises(
        (sg.NotDistributable, sg.ReplicaFailed), match=rf"MirroredStrategy: .*{what} written"
    ):
        several.run(loop)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("case", ["loaded", "cleared"])
def test_the_state_of_the_optimizer_after_a_change(
    several: sg.ShardedStrategy, name: str, case: str
) -> None:
    """The chief has the state of one device after state was loaded or cleared."""
    x, y = data(21)
    x, start = x.double(), mlp().double()

    def train(prepare: Callable[..., Any]) -> Any:
        module = copy.deepcopy(start)
        made = OPTIMIZERS[name](module.parameters())
        loader: Any = DataLoader(TensorDataset(x, y), batch_size=8)
        module, optimizer, loader = prepare(module, made, loader)
        for epoch in range(3):
            for rows, targets in loader:
                F.cross_entropy(module(rows), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            if epoch == 1 and case == "loaded":
                optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
            if epoch == 1 and case == "cleared":
                optimizer.state.clear()
        return module.state_dict(), optimizer.state_dict()["state"]

    other = OPTIMIZERS[name]((still := copy.deepcopy(start)).parameters())
    F.cross_entropy(still(x), y).backward()
    other.step()
    weights, state = train(lambda *given: given)
    ours, held = several.run(lambda: train(several.prepare))[0]
    assert max(float((weights[k] - ours[k]).abs().max()) for k in weights) < 1e-12
    assert held.keys() == state.keys() and len(state) == 4
    for key, values in state.items():
        for what, value in values.items():
            assert torch.allclose(held[key][what], value, atol=1e-12), (key, what)
