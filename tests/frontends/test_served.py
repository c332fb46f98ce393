"""sg.Model and custom loops on parameter servers: every rule and placement, in real processes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stratagem as sg
from tests.clock import unless_late
from tests.served_support import PLACES, RULES, apart, close_all, digits, net, strategy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    close_all()


def model(where: Any = None, optimizer: Any = None, module: nn.Module | None = None) -> sg.Model:
    made = sg.Model(module or net(), where)
    made.compile(
        optimizer or (lambda p: torch.optim.Adam(p, lr=0.002)), "cross_entropy", ["accuracy"]
    )
    return made


def plain(optimizer: Any, **fit: Any) -> sg.Model:
    """Train likewise on one device."""
    x, y, _, _ = digits()
    made = model(None, optimizer)
    torch.manual_seed(5)
    made.fit(x[:500], y[:500], verbose=0, **fit)
    return made


EPOCHS = 16  # enough for 95% also where two gradients make an update


def rate(epoch: int, _: float = 0.0) -> float:
    """Fall to zero, so that the last weights settle in spite of stale gradients."""
    return 0.004 * (1 - epoch / EPOCHS)


@pytest.mark.parametrize(
    "place",
    [pytest.param(place, marks=pytest.mark.slow) for place in ("central", "1 ps")] + ["2 ps"],
)
@pytest.mark.parametrize("rule", RULES)
def test_model_learns_the_digits(rule: str, place: str) -> None:
    x, y, test_x, test_y = digits()
    where = strategy(place, rule, 3 if rule == "spares" else 2)
    made = model(where, lambda p: torch.optim.Adam(p, lr=rate(0)))
    falling = sg.callbacks.LearningRateScheduler(rate)
    fit = {"epochs": EPOCHS, "batch_size": 50, "verbose": 0, "callbacks": [falling]}
    history = made.fit(x, y, **fit).history
    # how stale gradients are is the machine's affair
    accuracy = made.evaluate(test_x, test_y, verbose=0)["accuracy"]
    unless_late(accuracy >= 0.95, accuracy)
    assert history["loss"][-1] < history["loss"][0]
    if where.served:
        books = where.stats()
        assert books.received == books.applied + books.dropped + books.buffered
        assert books.buffered == 0
        assert sum(history["updates"]) == books.updates
        for name, whole in (
            ("staleness_histogram", books.staleness),
            ("waiting_by_worker", books.waiting),
        ):
            assert len(history[name]) == EPOCHS
            for key, value in whole.items():
                told = sum(each.get(key, 0) for each in history[name])
                assert told == pytest.approx(value, abs=1.0 if name[0] == "w" else 0)
        parts = 2 if rule in ("synchronous", "spares") else 1
        assert books.applied == EPOCHS * 28 * parts  # every part of every batch, once


def train(where: Any, net: nn.Module, epochs: int) -> tuple[nn.Module, int]:
    x, y, _, _ = digits()
    optimizer = torch.optim.Adam(net.parameters(), lr=rate(0))
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
    net, optimizer, loader = where.prepare(net, optimizer, loader)
    steps = 0
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = rate(epoch)
        for a, b in loader:
            F.cross_entropy(net(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return net, steps


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rule", RULES)
def test_own_loop_learns_the_digits(rule: str, place: str) -> None:
    _, _, test_x, test_y = digits()
    where = strategy(place, rule, 3 if rule == "spares" else 2)
    results = where.run(train, where, net(), EPOCHS)
    for trained, _ in results:
        accuracy = float((trained(test_x).argmax(1) == test_y).float().mean())
        unless_late(accuracy >= 0.95, accuracy)
        assert apart(trained, results[0][0]) == 0.0  # everybody ends with the same weights
    if where.served and rule != "spares":
        parts = 2 if rule == "synchronous" else 1
        books = where.stats()
        assert books.applied == EPOCHS * 28 * parts  # every part of every batch, once
        # A worker that stood still for 16 updates has its step's gradient dropped and done again.
        assert sum(steps for _, steps in results) == books.received, books
        assert not books.dropped or rule == "asynchronous"


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("place", ["1 ps", "2 ps"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_synchronous_equals_one_device(name: str, place: str) -> None:
    """Also if batches do not divide evenly, and the last has fewer rows than there are workers."""
    x, y, _, _ = digits()
    where = strategy(place, "synchronous", 3)
    ours = model(where, OPTIMIZERS[name])
    torch.manual_seed(5)
    history = ours.fit(x[:500], y[:500], epochs=2, batch_size=166, verbose=0).history
    theirs = plain(OPTIMIZERS[name], epochs=2, batch_size=166)
    assert apart(ours.module, theirs.module) < 2e-5
    assert theirs.history is not None
    for key in ("loss", "accuracy"):
        assert history[key] == pytest.approx(theirs.history.history[key], abs=1e-5)
    ours_state = ours.optimizer.state_dict()["state"]  # type: ignore[union-attr]
    for i, state in theirs.optimizer.state_dict()["state"].items():  # type: ignore[union-attr]
        for key, value in state.items():
            torch.testing.assert_close(ours_state[i][key], value, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("shared", ["0", "1"])
def test_more_servers_than_pieces(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers without a shard of a tiny model do no harm."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    x, y = torch.randn(40, 1), torch.randn(40, 1)
    many = sg.ParameterServerStrategy(sg.LocalCluster(workers=2, ps=3), updates=sg.Synchronous())
    found = []
    for where in (None, many):
        torch.manual_seed(1)
        small = sg.Model(nn.Linear(1, 1), where)
        small.compile("adam", loss="mse", clip_norm=0.5)
        small.fit(x, y, batch_size=8, epochs=2, verbose=0)
        found.append(small.module)
    many.close()
    assert apart(*found) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 0.1},
        {"clip_value": 0.01},
        {"clip_norm": 0.2, "clip_value": 0.05},
    ],
)
def test_clipping_is_of_the_whole_gradient(options: dict[str, float]) -> None:
    x, y, _, _ = digits()
    made = []
    for where in (strategy("2 ps", "synchronous", 3), None):
        one = sg.Model(net(), where)
        one.compile(lambda p: torch.optim.SGD(p, lr=0.5), "cross_entropy", **options)  # type: ignore[arg-type]
        torch.manual_seed(5)
        one.fit(x[:300], y[:300], epochs=1, batch_size=50, verbose=0)
        made.append(one)
    assert apart(made[0].module, made[1].module) < 1e-5


POLICIES: dict[str, Any] = {
    "none": [],
    "lower rate": [sg.LowerRate()],
    "drop": [sg.Drop()],
    "scale": [sg.ScaleDown()],
    "linear": [sg.ScaleDown(linear=True)],
    "compensated": [sg.DelayCompensated()],
    "constant": [sg.DelayCompensated(adaptive=False)],
    "gap": [sg.GapAware()],
    "all": [sg.LowerRate(), sg.Drop(), sg.ScaleDown(), sg.DelayCompensated(), sg.GapAware()],
}


@pytest.mark.parametrize("name", POLICIES)
def test_one_asynchronous_worker_is_plain_training(name: str) -> None:
    x, y, _, _ = digits()
    rule = sg.Asynchronous(staleness=POLICIES[name], warmup=sg.Ramp(steps=5))
    where = sg.ParameterServerStrategy(sg.LocalCluster(workers=1, ps=1), updates=rule)
    try:
        ours = model(where, OPTIMIZERS["momentum"])
        torch.manual_seed(5)
        ours.fit(x[:500], y[:500], epochs=1, batch_size=64, verbose=0)
        theirs = plain(OPTIMIZERS["momentum"], epochs=1, batch_size=64)
        assert apart(ours.module, theirs.module) == 0.0
        assert where.stats().staleness == {0: 8}
    finally:
        where.close()


def test_weighted_losses_are_those_of_one_device() -> None:
    """The denominator of the mean depends on the targets, and differs between parts of a batch."""
    x, y, _, _ = digits()
    y = y[:300].clone()
    y[:40] = -100  # ignored
    weight = torch.linspace(0.1, 3.0, 10)
    made = []
    for where in (strategy("1 ps", "synchronous", 3), None):
        one = sg.Model(net(), where)
        one.compile(lambda p: torch.optim.SGD(p, lr=0.5), nn.CrossEntropyLoss(weight=weight))
        torch.manual_seed(5)
        one.fit(x[:300], y, epochs=2, batch_size=50, shuffle=False, verbose=0)
        made.append(one)
    assert apart(made[0].module, made[1].module) < 1e-5
    losses = [one.history.history["loss"] for one in made]  # type: ignore[union-attr]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


class Stream(IterableDataset[Any]):
    """An iterable dataset."""

    def __iter__(self) -> Iterator[Any]:
        x, y, _, _ = digits()
        return iter(zip(x[:200], y[:200], strict=True))


@pytest.mark.parametrize("kind", ["loader", "dataset", "stream", "generator", "batches"])
def test_every_kind_of_data(kind: str) -> None:
    x, y, _, _ = digits()
    data = TensorDataset(x[:200], y[:200])
    batches = [(x[i : i + 30], y[i : i + 30]) for i in range(0, 200, 30)]
    sources: dict[str, Any] = {
        "loader": lambda: DataLoader(data, batch_size=30),
        "dataset": lambda: data,
        "stream": lambda: DataLoader(Stream(), batch_size=30),
        "generator": lambda: iter(batches * 2),
        "batches": lambda: batches,
    }
    options = {"batch_size": 30} if kind == "dataset" else {}
    options |= {"steps_per_epoch": 7} if kind == "generator" else {}
    made = []
    for where in (strategy("2 ps", "synchronous", 3), None):
        one = model(where, OPTIMIZERS["sgd"])
        torch.manual_seed(5)
        one.fit(sources[kind](), epochs=2, shuffle=False, verbose=0, **options)
        made.append(one)
    assert apart(made[0].module, made[1].module) < 1e-5


class Halve(sg.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for group in self.model.optimizer.param_groups:
            group["lr"] /= 2


class Zero(sg.callbacks.Callback):
    """Writes to the weights after the first epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            with torch.no_grad():
                next(iter(self.model.module.parameters())).mul_(0.5)


class Fall(sg.callbacks.Callback):
    """Lowers the learning rate after each batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.01)  # the others would do its next part meanwhile, if they could
        for group in self.model.optimizer.param_groups:
            group["lr"] *= 0.8


def falling() -> sg.callbacks.Callback:
    return sg.callbacks.LearningRateScheduler(lambda step, rate: rate * 0.8, per="step")


@pytest.mark.parametrize("callback", [Halve, Zero, Fall, falling])
def test_servers_follow_callbacks(callback: Any) -> None:
    x, y, _, _ = digits()
    made = []
    for where in (strategy("2 ps", "synchronous", 3), None):
        one = model(where, OPTIMIZERS["momentum"])
        torch.manual_seed(5)
        one.fit(x[:300], y[:300], epochs=3, batch_size=50, verbose=0, callbacks=[callback()])
        made.append(one)
    assert apart(made[0].module, made[1].module) < 2e-5


class Shrink(sg.callbacks.Callback):
    """Writes to the weights in mid-epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            with torch.no_grad():
                next(iter(self.model.module.parameters())).mul_(0.5)


@pytest.mark.parametrize("callbacks", [[], [Shrink()]], ids=["none", "shrink"])
@pytest.mark.parametrize("rule", ["asynchronous", "synchronous"])
def test_a_stream_to_one_worker_is_plain_training(rule: str, callbacks: list[Any]) -> None:
    """Tickets come with the answers to pushes, and are requeued when the weights change."""
    made = []
    for where in (strategy("1 ps", rule, 1), None):
        one = model(where, OPTIMIZERS["momentum"])
        stream: Any = DataLoader(Stream(), batch_size=30)
        one.fit(stream, epochs=2, verbose=0, callbacks=callbacks)
        made.append(one)
    assert apart(made[0].module, made[1].module) < 1e-6  # rows that travel lie elsewhere in memory
    ahead = rule == "asynchronous" and bool(callbacks)
    assert strategy("1 ps", rule, 1).stats().requeued == (2 if ahead else 0)


class Slow(sg.callbacks.Callback):
    """Only waits, so that other workers continue meanwhile."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.005)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.005)


class Begins(sg.callbacks.Callback):
    """Only waits, before each batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.005)


class Count(nn.Module):
    """Its weight is the number of updates, if every one of them counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Any) -> Any:
        return -self.weight.expand(len(x))


@pytest.mark.parametrize("shared", ["1", pytest.param("0", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", ["synchronous", "spares", "asynchronous", "bounded"])
def test_callbacks_that_change_nothing_undo_nothing(
    rule: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", shared)
    workers = 3 if rule == "spares" else 2
    updates = sg.Asynchronous() if rule == "asynchronous" else RULES[rule]
    where = sg.ParameterServerStrategy(sg.LocalCluster(workers, 1), updates=updates)
    one = model(where, OPTIMIZERS["sgd"], Count())
    one.compile(lambda p: torch.optim.SGD(p, lr=1.0), lambda output, _: output.mean())
    x, _, _, _ = digits()
    done = 0
    for callback in (Slow(), Begins()):
        one.fit(x[:300], batch_size=4, verbose=0, callbacks=[callback])
        done += where.stats().updates
        assert float(one.module.get_parameter("weight").detach()) == done
    where.close()


def test_in_step_weights_change_between_epochs_only() -> None:
    x, y, _, _ = digits()
    one = model(strategy("1 ps", "synchronous"), OPTIMIZERS["sgd"])
    with pytest.raises(sg.NotDistributable, match="on_epoch_end"):
        one.fit(x[:200], y[:200], batch_size=50, verbose=0, callbacks=[Shrink()])


def leave_early(where: Any, net: nn.Module) -> tuple[nn.Module, list[int]]:
    x, y, _, _ = digits()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loader: Any = DataLoader(TensorDataset(x[:80], y[:80]), batch_size=10)
    net, optimizer, loader = where.prepare(net, optimizer, loader)
    steps = [0, 0, 0]
    for epoch in range(3):
        for a, b in loader:
            F.cross_entropy(net(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps[epoch] += 1
            if epoch == 0 and steps[0] == 3:
                break
    return net, steps


@pytest.mark.parametrize("rule", ["asynchronous", "synchronous"])
def test_a_loop_may_be_left_in_mid_epoch(rule: str) -> None:
    """Tickets that are left of that epoch are not computed in the next one."""
    where = strategy("1 ps", rule, 1)
    ((_, steps),) = where.run(leave_early, where, net())
    assert steps == [3, 8, 8]
    assert where.stats().applied == 19


class Stop(sg.callbacks.Callback):
    """Stops the training in mid-epoch, and records the calls that follow."""

    def __init__(self, when: str) -> None:
        self.when, self.ends = when, list[int]()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 3 and self.when == "begin":
            self.model.stop_training = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.02)  # the other is a batch ahead by then
        if batch == 2 and self.when == "end":
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ends.append(epoch)


@pytest.mark.parametrize("when", ["begin", "end"])
@pytest.mark.parametrize("stream", [False, True], ids=["arrays", "stream"])
def test_a_training_that_is_stopped_in_mid_epoch_is_that_of_one_device(
    when: str, stream: bool
) -> None:
    x, y, _, _ = digits()
    made, histories = [], []
    for where in (strategy("2 ps", "synchronous"), None):
        one = model(where, OPTIMIZERS["momentum"])
        stop = Stop(when)
        data: Any = (DataLoader(Stream(), batch_size=30),) if stream else (x[:300], y[:300])
        options: Any = {} if stream else {"batch_size": 30, "shuffle": False}
        history = one.fit(*data, epochs=3, verbose=0, callbacks=[stop], **options).history
        assert stop.ends == [0]
        made.append(one)
        histories.append(history)
    assert apart(made[0].module, made[1].module) < 1e-6
    for name in ("loss", "accuracy"):
        assert histories[0][name] == pytest.approx(histories[1][name], abs=1e-6)


def test_an_asynchronous_training_may_be_stopped_in_mid_epoch() -> None:
    x, y, _, _ = digits()
    where = strategy("1 ps", "bounded")
    one = model(where, OPTIMIZERS["sgd"])
    stop = Stop("end")
    history = one.fit(x, y, epochs=3, batch_size=10, verbose=0, callbacks=[stop]).history
    assert stop.ends == [0] and len(history["loss"]) == 1
    assert where.stats().applied == where.stats().received < 140


def test_schedule_by_step_and_early_stop() -> None:
    x, y, _, _ = digits()
    where = strategy("1 ps", "asynchronous")
    one = model(where, OPTIMIZERS["sgd"])
    stop = sg.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0)
    rates = sg.callbacks.LearningRateScheduler(lambda step, rate: rate * 0.99, per="step")
    history = one.fit(x, y, epochs=9, batch_size=50, verbose=0, callbacks=[stop, rates])
    assert len(history.epoch) == 2
    assert one.optimizer.param_groups[0]["lr"] < 0.1  # type: ignore[union-attr]


def test_saved_on_two_servers_goes_on_with_one(tmp_path: Any) -> None:
    x, y, _, _ = digits()
    first = model(strategy("2 ps", "synchronous", 3))
    torch.manual_seed(5)
    saver = sg.callbacks.ModelCheckpoint(tmp_path / "m")
    how: Any = {"epochs": 1, "batch_size": 50, "shuffle": False, "verbose": 0}
    first.fit(x[:300], y[:300], callbacks=[saver], **how)
    made = []
    for where in (strategy("1 ps", "synchronous", 2), None):
        one = model(where, module=net(9))
        one.load(tmp_path / "m")
        assert apart(one.module, first.module) == 0.0
        one.fit(x[:300], y[:300], **how)
        made.append(one)
    assert apart(made[0].module, made[1].module) < 2e-5


@pytest.mark.parametrize("grouped", [False, True])
def test_one_optimizer_for_what_is_trained_now_and_later(grouped: bool) -> None:
    """The optimizer has all parameters, and each fit freezes other ones."""
    x, y, _, _ = digits()
    made = []
    for where in (strategy("2 ps", "synchronous", 3), None):
        module: Any = net()
        groups = [{"params": part.parameters()} for part in (module[0], module[2])]
        optimizer = torch.optim.Adam(groups if grouped else module.parameters(), lr=0.01)
        one = model(where, optimizer, module)
        for first, last in ((False, True), (True, True), (True, False), (False, True)):
            module[0].requires_grad_(first)
            module[2].requires_grad_(last)
            torch.manual_seed(5)
            one.fit(x[:200], y[:200], batch_size=50, verbose=0)
        made.append(one)
    assert apart(made[0].module, made[1].module) < 2e-5
    ours, plain = (m.optimizer.state_dict()["state"] for m in made)  # type: ignore[union-attr]
    for state in (ours, plain):
        assert [float(state[n]["step"]) for n in range(4)] == [8, 8, 12, 12]


def test_frozen_and_unused_parameters_stay() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.used = nn.Linear(64, 10)
            self.unused = nn.Linear(3, 3)
            self.frozen = nn.Linear(10, 10).requires_grad_(False)

        def forward(self, x: Any) -> Any:
            return self.frozen(self.used(x))

    x, y, _, _ = digits()
    made = []
    for where in (strategy("2 ps", "synchronous", 3), None):
        one = model(where, OPTIMIZERS["adamw"], Odd())
        torch.manual_seed(5)
        one.fit(x[:300], y[:300], epochs=1, batch_size=50, verbose=0)
        made.append(one)
    assert apart(made[0].module, made[1].module) < 2e-5
    assert apart(made[0].module.unused, Odd().unused) == 0.0  # type: ignore[arg-type]


def test_a_model_without_weights_is_evaluated_and_not_trained() -> None:
    x, y, _, _ = digits()
    made = model(strategy("2 ps", "synchronous", 3), "sgd", nn.Softmax(-1))
    here = F.cross_entropy(x.softmax(-1), y)
    assert made.evaluate(x, y, verbose=0)["loss"] == pytest.approx(float(here), abs=1e-6)
    assert torch.allclose(made.predict(x), x.softmax(-1), atol=1e-6)
    with pytest.raises(sg.UsageError, match="unfreeze what shall be trained"):
        made.fit(x, y, verbose=0)


def test_wire_in_bfloat16_and_over_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between machines, without shared memory."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")
    x, y, _, _ = digits()
    for wire, near in ((None, 2e-5), ("bfloat16", 0.1)):
        where = sg.ParameterServerStrategy(
            sg.LocalCluster(workers=2, ps=2), updates=sg.Synchronous(), wire=wire
        )
        try:
            ours = model(where, OPTIMIZERS["sgd"])
            torch.manual_seed(5)
            ours.fit(x[:500], y[:500], epochs=2, batch_size=64, verbose=0)
            theirs = plain(OPTIMIZERS["sgd"], epochs=2, batch_size=64)
            assert apart(ours.module, theirs.module) < near
        finally:
            where.close()


class Words(nn.Module):
    """An embedding table of which a batch uses a few rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(5000, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.table(x).mean(1))


@pytest.mark.parametrize(
    ("rule", "workers", "memory", "wire"),
    [
        (sg.Synchronous(), 2, "1", None),
        (sg.Synchronous(), 2, "0", None),
        (sg.Synchronous(), 3, "1", None),  # each scatters its rows itself
        (sg.Synchronous(), 3, "1", "bfloat16"),
        (sg.Asynchronous(), 1, "1", None),
        (sg.Asynchronous(), 1, "0", None),
    ],
    ids=["2", "2, sockets", "3", "3, bf16", "async", "async, sockets"],
)
def test_sparse_gradients_travel_as_rows(
    rule: Any, workers: int, memory: str, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", memory)
    dice = torch.Generator().manual_seed(0)
    x = torch.randint(0, 5000, (120, 6), generator=dice)
    y = torch.randint(0, 3, (120,), generator=dice)
    cluster = sg.LocalCluster(workers=workers, ps=2)
    where = sg.ParameterServerStrategy(cluster, updates=rule, wire=wire)
    made = []
    try:
        for at in (where, None):
            one = sg.Model(Words(), at)
            one.compile(lambda p: torch.optim.SGD(p, lr=0.5), "cross_entropy")
            one.fit(x, y, epochs=2, batch_size=16, shuffle=False, verbose=0)
            made.append(one)
    finally:
        where.close()
    assert apart(made[0].module, made[1].module) < (1e-6 if wire is None else 1e-2)
    untouched = torch.ones(5000, dtype=torch.bool)
    untouched[x.unique()] = False
    table: Any = made[0].module.table
    assert torch.equal(table.weight[untouched], Words().table.weight[untouched])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate": 2}, "accumulate"),
        ({"precision": "float16"}, "float16"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    x, y, _, _ = digits()
    one = sg.Model(net(), strategy("1 ps", "asynchronous"))
    one.compile("sgd", "cross_entropy", **options)
    with pytest.raises(sg.NotDistributable, match=words):
        one.fit(x, y, verbose=0)


def test_own_optimizers_are_refused() -> None:
    class Mine(torch.optim.SGD):
        pass

    x, y, _, _ = digits()
    with pytest.raises(sg.NotDistributable, match="Mine"):
        model(strategy("1 ps", "asynchronous"), lambda p: Mine(p, lr=0.1)).fit(x, y, verbose=0)


class Wide(nn.Module):
    """Large enough to push gradients during backward; the first layer is slow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(64, 400), nn.Linear(400, 700)
        self.unused, self.last = nn.Linear(5, 5), nn.Linear(700, 10)

    def forward(self, x: Any) -> Any:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


@pytest.mark.parametrize("rule", ["synchronous", "spares", "asynchronous"])
def test_bytes_travel_beside_the_computation(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over sockets, with transfer threads: the same answer, and no frame out of order."""
    monkeypatch.setenv("STRATAGEM_SHARED_MEMORY", "0")
    x, y, _, _ = digits()
    where = sg.ParameterServerStrategy(
        sg.LocalCluster(workers=1 if rule == "asynchronous" else 2, ps=2), updates=RULES[rule]
    )
    made = []
    try:
        for at in (where, None):
            one = model(at, OPTIMIZERS["momentum"], Wide())
            torch.manual_seed(5)
            one.fit(DataLoader(TensorDataset(x[:400], y[:400]), batch_size=32), epochs=2, verbose=0)
            made.append(one)
        books = where.stats()
        assert books.received == books.applied + books.dropped
    finally:
        where.close()
    if rule != "spares":
        assert apart(made[0].module, made[1].module) < 2e-5


def test_a_changed_attribute_is_refused_and_weights_of_train_begin_count() -> None:
    x, y, _, _ = digits()
    where = strategy("1 ps", "synchronous", 2)
    made = model(where, module=nn.Sequential(net(), nn.Dropout(0.5)))

    def halve(logs: Any = None) -> None:
        with torch.no_grad():
            for param in made.module.parameters():
                param.zero_()

    def raise_p(epoch: int, logs: Any = None) -> None:
        made.module[1].p = 0.9

    fit = {"batch_size": 50, "verbose": 0, "epochs": 2}
    zero = sg.callbacks.LambdaCallback(on_train_begin=halve)
    first = made.fit(x[:100], y[:100], callbacks=[zero], **fit).history["loss"][0]
    assert abs(first - math.log(10)) < 0.1
    change = sg.callbacks.LambdaCallback(on_epoch_end=raise_p)
    with pytest.raises(sg.errors.NotDistributable, match=r"model.1.p"):
        made.fit(x[:100], y[:100], callbacks=[change], **fit)

    def freeze(epoch: int, logs: Any = None) -> None:
        next(made.module.parameters()).requires_grad_(False)

    change = sg.callbacks.LambdaCallback(on_epoch_end=freeze)
    with pytest.raises(sg.errors.NotDistributable, match=r"requires_grad"):
        made.fit(x[:100], y[:100], callbacks=[change], **fit)


def test_an_optimizer_of_rows_over_a_part_of_the_model() -> None:
    torch.manual_seed(0)
    x, y = torch.randint(0, 5000, (60, 4)), torch.randint(0, 3, (60,))
    made = []
    for where in (strategy("2 ps", "synchronous"), None):
        one = model(where, lambda p: torch.optim.SparseAdam([next(iter(p))]), Words())
        one.fit(x, y, epochs=2, batch_size=20, shuffle=False, verbose=0)
        made.append(one.module)
    assert apart(made[0], made[1]) < 1e-6 and apart(made[0], Words()) > 1e-4


class Hollow(nn.Module):
    """Has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.used = nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        return self.used(x) + self.empty.sum()


def test_a_parameter_without_elements_has_a_state_as_on_one_device() -> None:
    x, y, _, _ = digits()
    found = []
    for where in (sg.CentralStorageStrategy(["cpu:0", "cpu:1"]), None):
        one = model(where, module=Hollow())
        one.fit(x[:100], y[:100], batch_size=50, shuffle=False, verbose=0)
        found.append(one.optimizer.state_dict()["state"])  # type: ignore[union-attr]
        if where is not None:
            where.close()
    mine, plain = found
    assert mine.keys() == plain.keys()
    for i, state in plain.items():
        assert {n: v.shape for n, v in mine[i].items()} == {n: v.shape for n, v in state.items()}
        for name, value in state.items():
            assert torch.allclose(mine[i][name], value, atol=1e-6)


class Normed(nn.Module):
    """Has a batch norm, whose running mean must be that of all examples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(x))


def normed_loop(where: Any) -> list[torch.Tensor]:
    x, y, _, _ = digits()
    module: Any = Normed()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x[:120], y[:120]), batch_size=20)
    if where is not None:
        module, optimizer, loader = where.prepare(module, optimizer, loader)
    found = []
    for _ in range(3):
        for a, b in loader:
            F.cross_entropy(module(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(module.norm.running_mean.clone())
    return found


def test_running_means_of_one_device() -> None:
    """In every epoch, and in a custom loop on every worker."""
    x, y, _, _ = digits()
    where = strategy("1 ps", "synchronous")
    plain = normed_loop(None)
    for mine in where.run(normed_loop, where):
        for epoch, found in enumerate(mine):
            assert torch.allclose(found, plain[epoch], atol=1e-6), epoch
    for epochs in (1, 2, 3):
        one = model(where, OPTIMIZERS["sgd"], Normed())
        one.fit(x[:120], y[:120], epochs=epochs, batch_size=20, shuffle=False, verbose=0)
        assert torch.allclose(one.module.norm.running_mean, plain[epochs - 1], atol=1e-6)  # type: ignore


class Load(sg.callbacks.Callback):
    """Loads a checkpoint after the first epoch."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            self.model.load(self.path)


class Clear(sg.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.state.clear()


@pytest.mark.parametrize("kind", ["load", "clear"])
def test_servers_follow_a_change_of_the_optimizers_state(kind: str, tmp_path: Any) -> None:
    x, y, _, _ = digits()
    saved = model(None, OPTIMIZERS["momentum"])
    saved.fit(x[300:400], y[300:400], batch_size=50, verbose=0)
    saved.save(tmp_path / "saved")
    made = []
    for where in (strategy("2 ps", "synchronous", 3), strategy("1 ps", "asynchronous", 1), None):
        one = model(where, OPTIMIZERS["momentum"])
        callback = Load(tmp_path / "saved") if kind == "load" else Clear()
        one.fit(
            x[:200],
            y[:200],
            epochs=3,
            batch_size=50,
            shuffle=False,
            verbose=0,
            callbacks=[callback],
        )
        made.append(one)
    assert max(apart(each.module, made[-1].module) for each in made[:-1]) < 1e-5


@pytest.mark.parametrize("kind", ["load", "clear"])
@pytest.mark.parametrize("where", [sg.MirroredStrategy, sg.CentralStorageStrategy])
def test_replicas_refuse_a_change_of_the_optimizers_state(
    where: Any, kind: str, tmp_path: Any
) -> None:
    x, y, _, _ = digits()
    model(None, OPTIMIZERS["momentum"]).save(tmp_path / "saved")
    here = where(["cpu:0", "cpu:1"])
    one = model(here, OPTIMIZERS["momentum"])
    callback = Load(tmp_path / "saved") if kind == "load" else Clear()
    with pytest.raises(sg.NotDistributable, match="optimizer's state"):
        one.fit(x[:100], y[:100], epochs=2, batch_size=50, verbose=0, callbacks=[callback])
    here.close()


class One(sg.callbacks.Callback):
    """Writes to one of two parameters after every batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.002)  # the other worker goes on meanwhile
        with torch.no_grad():
            self.model.module.other.fill_(float(batch))


class Two(Count):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(1))

    def forward(self, x: Any) -> Any:
        return super().forward(x) + 0.0 * self.other


def test_what_a_callback_writes_undoes_nothing_else() -> None:
    x, _, _, _ = digits()
    where = strategy("1 ps", "bounded")
    one = model(where, OPTIMIZERS["sgd"], Two())
    one.compile(lambda p: torch.optim.SGD(p, lr=1.0), lambda output, _: output.mean())
    one.fit(x[:300], batch_size=4, verbose=0, callbacks=[One()])
    assert float(one.module.get_parameter("weight").detach()) == where.stats().updates


class Opened(torch.utils.data.Dataset[Any]):
    """Reads several rows at once, and asserts that no DataLoader worker reads them."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("several at once are asked for")

    def __getitems__(self, indices: list[int]) -> Any:
        assert torch.utils.data.get_worker_info() is None
        return [(torch.ones(64), torch.tensor(i % 10)) for i in indices]


def test_whoever_trains_reads(caplog: pytest.LogCaptureFixture) -> None:
    """The DataLoader's own workers are not used, which is logged."""
    model = sg.Model(net(), strategy("1 ps", "asynchronous", 1))
    model.compile("sgd", "cross_entropy")
    loader = torch.utils.data.DataLoader(Opened(), batch_size=8, num_workers=2)
    model.fit(loader, verbose=0)
    assert "num_workers=2 is not used" in caplog.text
