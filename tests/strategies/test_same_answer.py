"""Law 1: any number of replicas gives the weights, losses and metrics of one device.

The reference is always a loop written by hand on one device, never stratagem itself.
"""

from __future__ import annotations

import copy
import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stratagem as sg
from tests.support import by_hand, closest, cpus, data, distance, mlp, moved, strategy

OPS = ["shared_memory", "ring", "hierarchical", "one_device"]
SIZES = [2, 3]

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    # not elementwise, so every replica steps on the whole: the other way through the update
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


@pytest.fixture(scope="module", params=list(itertools.product(SIZES, OPS)), ids=str)
def several(request: pytest.FixtureRequest) -> Iterator[sg.MirroredStrategy]:
    count, op = request.param
    made = strategy(count, cross_device_ops=op)
    yield made
    made.close()


@pytest.fixture(scope="module")
def three_ring() -> Iterator[sg.MirroredStrategy]:
    made = strategy(3, cross_device_ops="ring")
    yield made
    made.close()


@pytest.fixture(scope="module")
def sharded() -> Iterator[sg.ShardedStrategy]:
    with sg.ShardedStrategy(cpus(2)) as made:
        yield made


@pytest.fixture(scope="module", params=["sliced", "replicated"])
def mirrored(
    request: pytest.FixtureRequest, two: sg.MirroredStrategy, three_ring: sg.MirroredStrategy
) -> sg.MirroredStrategy:
    """Strategies with both kinds of update: slices in shared memory, a copy on every replica."""
    return two if request.param == "sliced" else three_ring


@pytest.fixture(scope="module", params=["sliced", "replicated", "sharded"])
def either(
    request: pytest.FixtureRequest,
    two: sg.MirroredStrategy,
    three_ring: sg.MirroredStrategy,
    sharded: sg.ShardedStrategy,
) -> sg.Strategy:
    """The strategies of `mirrored`, and a sharded one."""
    return {"sliced": two, "replicated": three_ring, "sharded": sharded}[request.param]


def fitted(
    on: sg.Strategy,
    module: nn.Module,
    optimizer: Any,
    loss: Any,
    x: Any,
    y: Any = None,
    *,
    batch: int = 64,
    epochs: int = 2,
    metrics: Any = None,
    fit: dict[str, Any] | None = None,
    **compile_options: Any,
) -> sg.Model:
    with on.scope():
        model = sg.Model(copy.deepcopy(module))
        model.compile(optimizer=optimizer, loss=loss, metrics=metrics, **compile_options)
    model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **(fit or {}))
    return model


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("sgd", 64),
        ("adam", 65),
        ("adam", 330),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("adam", 64), ("sgd", 65), ("sgd", 330))
        ),
    ],
)
def test_every_operation_equals_one_device(
    several: sg.MirroredStrategy, name: str, batch: int
) -> None:
    """331 rows: batches that divide evenly or not, and a last batch of a single row."""
    x, y = data()
    start = mlp()
    alone = by_hand(start, OPTIMIZERS[name], F.cross_entropy, x, y, batch=batch)
    model = fitted(several, start, OPTIMIZERS[name], "cross_entropy", x, y, batch=batch)
    assert moved(start, alone)
    assert distance(alone, model.module) < 2e-6


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer(either: sg.Strategy, name: str) -> None:
    x, y = data(100)
    start = mlp()
    if name == "rprop" and either.settings.sharded:
        with pytest.raises(sg.NotDistributable, match="Rprop may look at whole parameters"):
            fitted(either, start, OPTIMIZERS[name], "cross_entropy", x, y)
        return
    alone = by_hand(start, OPTIMIZERS[name], F.cross_entropy, x, y, batch=32)
    model = fitted(either, start, OPTIMIZERS[name], "cross_entropy", x, y, batch=32)
    assert distance(alone, model.module) < 5e-6


def test_losses_metrics_and_validation(either: sg.Strategy) -> None:
    x, y = data()
    start = mlp()
    model = fitted(
        either,
        start,
        OPTIMIZERS["sgd"],
        "cross_entropy",
        x,
        y,
        epochs=3,
        metrics=["accuracy"],
        fit={"validation_data": (x[:50], y[:50])},
    )
    expected = reference_history(start, x, y, x[:50], y[:50], epochs=3)
    history = model.history.history
    for name, values in expected.items():
        assert closest(history[name], values) < 1e-5, name


def reference_history(
    start: nn.Module, x: Tensor, y: Tensor, vx: Tensor, vy: Tensor, epochs: int
) -> dict[str, list[float]]:
    module = copy.deepcopy(start)
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    logs: dict[str, list[float]] = {n: [] for n in ("loss", "accuracy", "val_loss", "val_accuracy")}
    for _ in range(epochs):
        loss_sum = right = 0.0
        for i in range(0, len(x), 64):
            output = module(x[i : i + 64])
            loss = F.cross_entropy(output, y[i : i + 64])
            loss_sum += float(loss.detach()) * len(output)
            right += float((output.argmax(1) == y[i : i + 64]).sum())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            output = module(vx)
        logs["loss"].append(loss_sum / len(x))
        logs["accuracy"].append(right / len(x))
        logs["val_loss"].append(float(F.cross_entropy(output, vy)))
        logs["val_accuracy"].append(float((output.argmax(1) == vy).float().mean()))
    return logs


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_fewer_examples_than_replicas(three_ring: sg.MirroredStrategy, rows: int) -> None:
    x, y = data(rows)
    start = mlp()
    alone = by_hand(start, OPTIMIZERS["adam"], F.cross_entropy, x, y, batch=4, epochs=4)
    model = fitted(
        three_ring,
        start,
        OPTIMIZERS["adam"],
        "cross_entropy",
        x,
        y,
        batch=4,
        epochs=4,
        metrics=["accuracy"],
    )
    assert distance(alone, model.module) < 1e-6
    assert model.evaluate(x, y)["loss"] == pytest.approx(
        float(F.cross_entropy(alone(x), y).detach()), abs=1e-5
    )


@pytest.mark.parametrize("limit", [{"clip_norm": 0.3}, {"clip_value": 0.01}])
def test_clipping_comes_after_the_reduction(either: sg.Strategy, limit: dict[str, float]) -> None:
    x, y = data(100)
    start = mlp()

    def clip(module: nn.Module) -> None:
        if "clip_norm" in limit:
            nn.utils.clip_grad_norm_(module.parameters(), limit["clip_norm"])
        else:
            nn.utils.clip_grad_value_(module.parameters(), limit["clip_value"])

    alone = by_hand(start, OPTIMIZERS["sgd"], F.cross_entropy, x, y, batch=32, before_step=clip)
    free = by_hand(start, OPTIMIZERS["sgd"], F.cross_entropy, x, y, batch=32)
    model = fitted(either, start, OPTIMIZERS["sgd"], "cross_entropy", x, y, batch=32, **limit)
    assert moved(alone, free), "the limit never bites"
    assert distance(alone, model.module) < 2e-6


def test_clipping_with_opposite_gradients(two: sg.MirroredStrategy) -> None:
    """Gradients +1 and -99 on two replicas, norm limit 1, rate 1: one device gives w = 2."""
    start = nn.Linear(1, 1, bias=False)
    nn.init.ones_(start.weight)
    x = torch.tensor([[1.0], [-99.0]])
    model = fitted(
        two,
        start,
        lambda p: torch.optim.SGD(p, lr=1.0),
        lambda o, t: o.squeeze(1),
        x,
        torch.zeros(2),
        batch=2,
        epochs=1,
        clip_norm=1.0,
    )
    assert float(model.module.weight) == pytest.approx(2.0, abs=1e-5)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulation(either: sg.Strategy, accumulate: int) -> None:
    x, y = data(101)
    y = y.clone()
    y[1::5] = -100
    start = mlp()
    alone = by_hand(
        start, OPTIMIZERS["adam"], F.cross_entropy, x, y, batch=20, accumulate=accumulate
    )
    model = fitted(
        either, start, OPTIMIZERS["adam"], "cross_entropy", x, y, batch=20, accumulate=accumulate
    )
    assert distance(alone, model.module) < 2e-6


LOSSES: dict[str, Any] = {
    "ignored targets": F.cross_entropy,
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2, 2.0])),
    "label smoothing": nn.CrossEntropyLoss(
        weight=torch.tensor([1.0, 5.0, 0.2, 2.0]), label_smoothing=0.2, ignore_index=-100
    ),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "a value a row": nn.CrossEntropyLoss(reduction="none", ignore_index=2),
}


@pytest.mark.parametrize("name", list(LOSSES))
def test_losses_that_normalise_by_something_else(either: sg.Strategy, name: str) -> None:
    x, y = data(103)
    y = y.clone()
    if name != "a value a row":
        y[3:20] = -100
    start = mlp()
    loss = LOSSES[name]
    make: Make = lambda p: torch.optim.SGD(p, lr=0.02)  # noqa: E731
    alone = by_hand(start, make, lambda o, t: loss(o, t).mean(), x, y, batch=32)
    model = fitted(either, start, make, loss, x, y, batch=32)
    assert moved(start, alone)
    assert distance(alone, model.module) < 5e-6


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_double_precision_is_kept(
    mirrored: sg.MirroredStrategy, weighted: bool, accumulate: int
) -> None:
    """No step is in float32: the float32 reciprocals of 49 and 97 would show."""
    x, y = data(243)
    x, start = x.double(), mlp().double()
    rates = torch.rand(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss = nn.CrossEntropyLoss(weight=rates if weighted else None)
    how = {"batch": 97, "accumulate": accumulate}
    alone = by_hand(start, OPTIMIZERS["sgd"], loss, x, y, **how)  # type: ignore[arg-type]
    model = fitted(mirrored, start, OPTIMIZERS["sgd"], loss, x, y, **how)  # type: ignore[arg-type]
    assert distance(alone, model.module) < 1e-14
    expected = F.cross_entropy(alone(x), y, rates if weighted else None)
    assert abs(model.evaluate(x, y, batch_size=243, verbose=0)["loss"] - float(expected)) < 1e-14


def test_sample_weights(either: sg.Strategy) -> None:
    x, y = data(103)
    weight = torch.rand(103, generator=torch.Generator().manual_seed(5))
    start = mlp()
    both = torch.stack([y.float(), weight], dim=1)

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(output, target[:, 0].long(), reduction="none")
        return (each * target[:, 1]).mean()

    alone = by_hand(start, OPTIMIZERS["sgd"], weighted, x, both, batch=32)
    model = fitted(
        either,
        start,
        OPTIMIZERS["sgd"],
        "cross_entropy",
        x,
        y,
        batch=32,
        fit={"sample_weight": weight},
    )
    assert distance(alone, model.module) < 2e-6


class Branches(nn.Module):
    """Uses one of two branches, depending on the data; has an unused, a tied and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.left = nn.Linear(6, 4)
        self.right = nn.Linear(6, 4)
        self.never = nn.Linear(6, 4)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.tied = self.left

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        if x[0, 0] > 0.3:
            return self.left(x) + self.tied(x * 0.5)
        return self.right(x)


def test_unused_frozen_and_shared_parameters(either: sg.Strategy) -> None:
    """A branch may be taken on one replica only, on some steps only, or nowhere.

    The branch depends on a share's first row, so the reference computes the same shares on one
    device, and adds up their gradients.
    """
    x, y = data(64, seed=9)
    start = Branches()
    alone = copy.deepcopy(start)
    make: Make = lambda p: torch.optim.Adam(p, lr=0.05)  # noqa: E731
    optimizer = make([p for p in alone.parameters() if p.requires_grad])
    count = either.num_replicas_in_sync
    for _ in range(3):
        for i in range(0, 64, 8):
            pieces = torch.arange(i, i + 8).tensor_split(count)
            for rows in pieces:
                loss = F.cross_entropy(alone(x[rows]), y[rows], reduction="sum") / 8
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model = fitted(either, start, make, "cross_entropy", x, y, batch=8, epochs=3, check=False)
    assert moved(start, alone)
    assert distance(alone, model.module) < 5e-6
    assert torch.equal(model.module.never.weight, start.never.weight)


def cnn() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 5),
        nn.BatchNorm1d(5, momentum=None),
        nn.Linear(5, 4),
    )


@pytest.mark.parametrize("options", [{}, {"cross_device_ops": "ring"}], ids=["shared", "ring"])
def test_synchronised_batch_norm(options: dict[str, Any]) -> None:
    """Unequal shares, and a last batch of 2 on 3 replicas, so that one of them is empty.

    In double precision: normalising two rows amplifies the rounding of single.
    """
    x, y = data(98, features=16)
    x, start = x.double(), cnn().double()
    make: Make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    alone = by_hand(start, make, F.cross_entropy, x, y, batch=32)
    made = strategy(3, sync_batchnorm=True, **options)
    try:
        model = fitted(made, start, make, "cross_entropy", x, y, batch=32)
        assert distance(alone, model.module) < 1e-9
    finally:
        made.close()


def test_batch_norm_statistics_of_two_replicas(two: sg.MirroredStrategy) -> None:
    """Unsynchronised: the mean over replicas. x=[0,2 / 10,14], momentum .5: means .5 and 6."""
    start = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5), nn.Linear(1, 1))
    x = torch.tensor([[0.0], [2.0], [10.0], [14.0]])
    model = fitted(
        two,
        start,
        lambda p: torch.optim.SGD(p, lr=0.0),
        "mse",
        x,
        torch.zeros(4, 1),
        batch=4,
        epochs=1,
    )
    assert float(model.module[0].running_mean) == pytest.approx((0.5 + 6.0) / 2)


def test_synchronised_statistics_match_the_facts() -> None:
    """The same data over the whole batch: mean 3.25, variance (biased, as Keras) 16.875."""
    made = strategy(2, sync_batchnorm=True)
    start = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5), nn.Linear(1, 1))
    x = torch.tensor([[0.0], [2.0], [10.0], [14.0]])
    model = fitted(
        made,
        start,
        lambda p: torch.optim.SGD(p, lr=0.0),
        "mse",
        x,
        torch.zeros(4, 1),
        batch=4,
        epochs=1,
    )
    made.close()
    norm = model.module[0]
    assert float(norm.running_mean) == pytest.approx(3.25)
    # torch keeps the unbiased variance: 0.5 * 1 + 0.5 * (32.75 * 4 / 3); biased it is 16.875
    assert float(norm.running_var) == pytest.approx(0.5 + 0.5 * 32.75 * 4 / 3)


def test_dropout_differs_by_replica_and_repeats_from_one_seed(
    three_ring: sg.MirroredStrategy,
) -> None:
    def masks() -> Tensor:
        torch.manual_seed(7)
        net = nn.Linear(1, 1)
        three_ring.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        return F.dropout(torch.ones(64), 0.5)

    first, second = three_ring.run(masks), three_ring.run(masks)
    for one, other in itertools.combinations(first, 2):
        assert not torch.equal(one, other)
    for once, again in zip(first, second, strict=True):
        assert torch.equal(once, again)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", ["shared_memory", "ring", "hierarchical", "one_device"])
def test_sixteen_bit_wire(op: str, wire: str) -> None:
    x, y = data(100)
    start = mlp()
    alone = by_hand(start, OPTIMIZERS["sgd"], F.cross_entropy, x, y, batch=32)
    made = strategy(3, cross_device_ops=op, wire=wire)
    model = fitted(made, start, OPTIMIZERS["sgd"], "cross_entropy", x, y, batch=32)
    made.close()
    error = distance(alone, model.module)
    assert 1e-7 < error < 5e-3  # rounded, and only rounded


def test_autocast_matches_one_device(either: sg.Strategy) -> None:
    x, y = data(100)
    start = mlp()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.float(), target)

    module = copy.deepcopy(start)
    optimizer = OPTIMIZERS["sgd"](module.parameters())
    for _ in range(2):
        for i in range(0, 100, 32):
            with torch.autocast("cpu", torch.bfloat16):
                value = loss(module(x[i : i + 32]), y[i : i + 32])
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
    model = fitted(either, start, OPTIMIZERS["sgd"], loss, x, y, batch=32, precision="bfloat16")
    assert distance(module, model.module) < 5e-3


# --- one's own loop ------------------------------------------------------------------------------


def own_loop(
    on: sg.Strategy | None,
    start: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    shuffle: bool,
    batch: int = 64,
    clip: float | None = None,
    accumulate: int = 1,
    scaler: bool = False,
    sum_loss: bool = False,
) -> nn.Module:
    torch.manual_seed(11)
    model: nn.Module = copy.deepcopy(start)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=shuffle)
    scale = torch.amp.GradScaler("cpu", enabled=scaler, init_scale=1024.0)
    if on is not None:
        says = "sum" if sum_loss and accumulate > 1 else None  # a sum divided by 2 may be a mean
        model, optimizer, loader = on.prepare(model, optimizer, loader, loss_reduction=says)
    for _ in range(2):
        for number, (a, b) in enumerate(loader):
            reduction = "sum" if sum_loss else "mean"
            loss = F.cross_entropy(model(a), b, reduction=reduction) / accumulate
            scale.scale(loss).backward()
            if (number + 1) % accumulate == 0:
                scale.unscale_(optimizer)
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scale.step(optimizer)
                scale.update()
                optimizer.zero_grad()
    return model


LOOPS: list[dict[str, Any]] = [
    {},
    {"shuffle": True},
    {"batch": 50, "clip": 0.1},
    {"accumulate": 3, "batch": 20},
    {"scaler": True},
    {"sum_loss": True, "batch": 110},
    {"batch": 110, "shuffle": True},
]


@pytest.mark.parametrize("options", LOOPS, ids=str)
def test_own_loop_equals_one_device(mirrored: sg.MirroredStrategy, options: dict[str, Any]) -> None:
    loops_are_alike(mirrored, options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(each, marks=() if "batch" in each and "shuffle" in each else pytest.mark.slow)
        for each in LOOPS
    ],
    ids=str,
)
def test_own_loop_with_every_operation(
    several: sg.MirroredStrategy, options: dict[str, Any]
) -> None:
    loops_are_alike(several, options)


def loops_are_alike(several: sg.MirroredStrategy, options: dict[str, Any]) -> None:
    """Compare loops over 331 rows in batches of 110: the last batch has a single row."""
    options = {"shuffle": False, **options}
    x, y = data()
    start = mlp()
    alone = own_loop(None, start, x, y, **options)
    replicas = several.run(lambda: own_loop(several, start, x, y, **options))
    assert moved(start, alone)
    for replica in replicas:
        assert distance(alone, replica) < 5e-6


def test_own_loop_with_unused_parameters(several: sg.MirroredStrategy) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(8)
            self.used = nn.Linear(6, 4)
            self.never = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    x, y = data(50)
    start = Half()
    alone = own_loop(None, start, x, y, shuffle=False, batch=20)
    for replica in several.run(lambda: own_loop(several, start, x, y, shuffle=False, batch=20)):
        assert distance(alone, replica) < 5e-6
        assert torch.equal(replica.never.weight, start.never.weight)


def test_a_module_prepared_again(two: sg.MirroredStrategy) -> None:
    """In a second run the chief's module is the same object: its old hooks must be gone."""
    x, y = data(64)
    start = mlp()

    def train() -> nn.Module:
        optimizer = torch.optim.SGD(start.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(x, y), batch_size=16)
        model, optimizer, loader = two.prepare(start, optimizer, loader)
        for a, b in loader:
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    alone = by_hand(
        start, lambda p: torch.optim.SGD(p, lr=0.1), F.cross_entropy, x, y, batch=16, epochs=2
    )
    two.run(train)
    for replica in two.run(train):
        assert distance(alone, replica) < 2e-6


@pytest.mark.parametrize("leave", ["at the end", "in the middle"])
def test_a_loader_by_itself(three_ring: sg.MirroredStrategy, leave: str) -> None:
    """Validation between the steps sees every row once, and does not affect training."""
    x, y = data(61)
    start = mlp()

    def train() -> tuple[nn.Module, list[float], int]:
        replica = sg.current_replica()
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, _ = three_ring.prepare(model, optimizer)
        valid = three_ring.prepare(DataLoader(TensorDataset(x), batch_size=20))
        rows = 60 // replica.count
        mine = slice(replica.index * rows, (replica.index + 1) * rows)
        seen: list[float] = []
        for _ in range(3):
            loss = F.cross_entropy(model(x[mine]), y[mine])
            for number, (a,) in enumerate(valid):  # the last batch is one row
                assert replica.share.total == (1 if number == 3 else 20)
                seen += a[: replica.share.examples, 0].tolist()
                if number == 0 and leave == "in the middle":
                    break
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, seen, len(valid)

    alone = by_hand(
        start,
        lambda p: torch.optim.SGD(p, lr=0.1),
        F.cross_entropy,
        x[:60],
        y[:60],
        batch=60,
        epochs=3,
    )
    results = three_ring.run(train)
    expected = x[:, 0] if leave == "at the end" else x[:20, 0]
    assert sorted(v for _, seen, _ in results for v in seen) == sorted(expected.tolist() * 3)
    assert moved(start, alone)
    for replica, _, length in results:
        assert length == 4
        assert distance(alone, replica) < 2e-6


class Sentences(IterableDataset[Any]):
    """A data set of numbered rows with two texts each, as a stream or a map."""

    def __init__(self, count: int) -> None:
        self.rows = [(f"a{i}", {"more": f"b{i}", "x": torch.tensor(i)}) for i in range(count)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


@pytest.mark.parametrize("streamed", [True, False])
def test_texts_go_with_their_rows(three_ring: sg.MirroredStrategy, streamed: bool) -> None:
    """The last batch has one row: two replicas borrow it."""
    dataset: Any = Sentences(31) if streamed else Sentences(31).rows

    def look() -> list[tuple[str, str, int]]:
        share, seen = sg.current_replica().share, []
        for first, rest in three_ring.prepare(DataLoader(dataset, batch_size=10)):
            each = list(zip(first, rest["more"], rest["x"].tolist(), strict=True))
            seen += each[: share.examples]
        return seen

    seen = sorted((row for part in three_ring.run(look) for row in part), key=lambda row: row[2])
    assert seen == [(f"a{i}", f"b{i}", i) for i in range(31)]


def test_a_loader_by_itself_may_train(three_ring: sg.MirroredStrategy) -> None:
    """It is prepared apart from the model; unequal and empty shares have the right weights."""
    x, y = data(331)

    def train() -> nn.Module:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, _ = three_ring.prepare(model, optimizer)
        for a, b in three_ring.prepare(DataLoader(TensorDataset(x, y), batch_size=110)):
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    alone = by_hand(
        mlp(), lambda p: torch.optim.SGD(p, lr=0.1), F.cross_entropy, x, y, batch=110, epochs=1
    )
    for replica in three_ring.run(train):
        assert distance(alone, replica) < 2e-6


def test_one_replica_takes_the_batches_of_its_loader() -> None:
    loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
    found = strategy(1).prepare(loader)
    assert [batch.tolist() for (batch,) in found] == [[0, 1], [2, 3], [4]]
    assert found.dataset is loader.dataset and len(found) == 3


def test_prepare_refuses_what_is_neither(two: sg.MirroredStrategy) -> None:
    with pytest.raises(sg.NotDistributable, match="DataLoader, not a list"):
        two.run(lambda: two.prepare([torch.ones(2)]))  # type: ignore[call-overload]
    with pytest.raises(sg.UsageError, match=r"prepare\(model, optimizer, loader\)"):
        two.run(lambda: two.prepare(mlp()))  # type: ignore[call-overload]


@pytest.mark.parametrize("before", [True, False])
def test_schedules_of_torch_do_not_complain(two: sg.MirroredStrategy, before: bool) -> None:
    """They check the optimizer's own step, which they find before or after prepare."""

    def train() -> float:
        model: Any = nn.Linear(6, 4)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = StepLR(optimizer, 1, 0.5) if before else None
        loader: Any = DataLoader(TensorDataset(*data(16)), batch_size=8)
        model, optimizer, loader = two.prepare(model, optimizer, loader)
        schedule = schedule or StepLR(optimizer, 1, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                for a, b in loader:
                    F.cross_entropy(model(a), b).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                schedule.step()
        return float(optimizer.param_groups[0]["lr"])

    assert two.run(train) == [0.125] * 2


def test_summed_losses_are_accumulated(two: sg.MirroredStrategy) -> None:
    x, y = data(40)

    def train(on: sg.Strategy | None) -> nn.Module:
        return own_loop(on, mlp(), x, y, shuffle=False, batch=10, accumulate=2, sum_loss=True)

    expected = train(None)
    assert moved(expected, mlp())
    for trained in two.run(train, two):
        assert distance(trained, expected) < 1e-5


# --- what loops of one's own do with gradients ---------------------------------------------------


class Heads(nn.Module):
    """A model with two heads that share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), mlp()


def summed_heads(on: sg.Strategy | None) -> list[Tensor]:
    x, y = data(20)
    module = Heads()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=20)
    if on is not None:
        module, optimizer, loader = on.prepare(module, optimizer, loader, loss_reduction="sum")
    for a, b in loader:
        F.cross_entropy(module.first(a), b, reduction="sum").backward()
        F.cross_entropy(module.second(a), b, reduction="sum").backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def test_a_backward_for_each_head(several: sg.MirroredStrategy) -> None:
    alone = summed_heads(None)
    for found in several.run(summed_heads, several):
        for mine, theirs in zip(alone, found, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def surgery(on: sg.Strategy | None) -> nn.Module:
    """Train with the gradients of two losses; the first is kept during the second backward."""
    x, y = data(40)
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=20)
    if on is not None:
        module, optimizer, loader = on.prepare(module, optimizer, loader)
    for a, b in loader:
        output = module(a)
        F.cross_entropy(output, b).backward(retain_graph=True)
        kept = [p.grad for p in module.parameters()]
        optimizer.zero_grad()
        output.square().mean().backward()
        for param, first in zip(module.parameters(), kept, strict=True):
            assert first is not None and param.grad is not None
            param.grad = first - 2 * param.grad
        optimizer.step()
        optimizer.zero_grad()
    return module


def test_a_gradient_that_is_kept_stays(several: sg.MirroredStrategy) -> None:
    alone = surgery(None)
    assert moved(mlp(), alone)
    for module in several.run(surgery, several):
        assert distance(alone, module) < 2e-6


def kept_by_one_head(on: sg.Strategy) -> None:
    x, y = data(20)
    module = Heads()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    module, optimizer, loader = on.prepare(module, optimizer, loader)
    for a, b in loader:
        F.cross_entropy(module.first(a), b).backward()
        kept = [p.grad for p in module.first.parameters() if p.grad is not None]
        before = [grad.clone() for grad in kept]
        optimizer.zero_grad()
        F.cross_entropy(module.second(a), b).backward()
        assert kept and all(map(torch.equal, kept, before))


def test_a_kept_gradient_stays_where_the_next_pass_has_none(two: sg.MirroredStrategy) -> None:
    two.run(kept_by_one_head, two)


def line_search(on: sg.Strategy) -> None:
    module = mlp()
    on.prepare(module, torch.optim.LBFGS(module.parameters()), None)


def test_a_search_along_a_line_is_refused(two: sg.MirroredStrategy) -> None:
    with pytest.raises(sg.NotDistributable, match="LBFGS"):
        two.run(line_search, two)


def forgotten(on: sg.Strategy) -> None:
    module = mlp()
    loader = DataLoader(TensorDataset(*data(40)), batch_size=20)
    prepared = on.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), loader)
    for a, b in prepared.loader:
        F.cross_entropy(module(a), b).backward()


def tables() -> int:
    gc.collect()
    collective: Any = sg.current_replica().collective
    return len(collective._tables)


def test_memory_of_models_that_were_prepared_and_forgotten(two: sg.MirroredStrategy) -> None:
    two.run(forgotten, two)
    before = two.run(tables)
    for _ in range(3):
        two.run(forgotten, two)
    assert two.run(tables) == before


def test_the_mean_of_complex_numbers(two: sg.MirroredStrategy) -> None:
    found = two.run(lambda: sg.current_replica().all_reduce(torch.tensor([1 + 2j]), "mean"))
    assert all(torch.equal(each, torch.tensor([1 + 2j])) for each in found)


def test_unlike_shapes_cannot_be_reduced(two: sg.MirroredStrategy) -> None:
    def unlike() -> None:
        replica = sg.current_replica()
        replica.all_reduce(torch.ones(1 + replica.index))

    with pytest.raises(sg.UsageError, match=r"\(1,\), \(2,\).*all_gather"):
        two.run(unlike)
