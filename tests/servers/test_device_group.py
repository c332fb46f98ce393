"""Several devices of one worker train synchronously; the update rule is for workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.served_support import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

SCRIPT = """
where = sg.ParameterServerStrategy(
    updates=sg.Synchronous() if workers > 1 else sg.Asynchronous(),
    devices=["cpu:0", "cpu:1"] if first else "cpu:0",
)
made = []
for strategy in (where, None) if first else (where,):
    one = sg.Model(net(), strategy)
    one.compile(lambda p: torch.optim.Adam(p, lr=0.01), "cross_entropy", ["accuracy"])
    torch.manual_seed(5)
    one.fit(x[:301], y[:301], epochs=2, batch_size=50, verbose=0)
    made.append(one)
if first:
    logs = [one.history.history for one in made]
    assert apart(made[0].module, made[1].module) < 2e-5
    for key in ("loss", "accuracy"):
        assert all(abs(a - b) < 1e-5 for a, b in zip(logs[0][key], logs[1][key], strict=True))
    print("as one device")
"""


OWN_LOOP = """
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

where = sg.ParameterServerStrategy(
    updates=sg.Synchronous() if workers > 1 else sg.Asynchronous(),
    devices=["cpu:0", "cpu:1", "cpu:2"],
)


def normed():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def train(strategy, mode):
    module = normed() if mode == "statistics" else net()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    torch.manual_seed(5)
    # the last batch has 50 rows, 35, or a single one
    rows = {"statistics": 300, "windows": 285}.get(mode, 301)
    loader = DataLoader(TensorDataset(x[:rows], y[:rows]), batch_size=50, shuffle=True)
    if strategy is not None:
        module, optimizer, loader = strategy.prepare(module, optimizer, loader)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    for epoch in range(2):
        batches = loader
        if mode == "windows":
            source = iter(loader)
            batches = [next(source) for _ in range(6)]
        for number, (rows, labels) in enumerate(batches):
            reduction = "sum" if mode == "windows" and epoch else "mean"
            F.cross_entropy(module(rows), labels, reduction=reduction).backward()
            if mode == "windows" and number < 5:
                continue
            if mode == "adds up" and number % 2 == 0:
                continue
            if mode == "clips":
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if mode == "leaves" and number == 2:
                break
            if mode == "leave apart" and number == sg.current_replica().index:
                break
        if mode == "windows":
            assert next(source, None) is None
    here = sg.current_replica()
    return module, [here.index, here.count, here.is_chief, strategy and strategy.is_chief]


for mode in ("plain", "adds up", "leaves", "windows") + (("clips",) if workers == 1 else ()):
    made = where.run(train, where, mode)
    chief = [first and i == 0 for i in range(3)]
    assert [who for _, who in made] == [[i, 3, chief[i], chief[i]] for i in range(3)]
    plain = train(None, mode)[0]
    assert apart(plain, net()) > 1e-3
    assert max(apart(one, plain) for one, _ in made) < 1e-6, mode
class Own(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return x[index], y[index]


def dice(strategy):
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    strategy.prepare(module, optimizer, DataLoader(Own(), batch_size=4))
    return float(torch.rand(()))


print("drew", *where.run(dice, where))
made = [one for one, _ in where.run(train, where, "statistics")]
assert all(torch.equal(made[0][1].running_mean, one[1].running_mean) for one in made)
assert made[0][1].running_mean.abs().max() > 0
if workers == 1:
    try:
        where.prepare(net(), torch.optim.SGD(net().parameters(), lr=0.1), None)
    except sg.UsageError as error:
        assert "3 devices" in str(error) and "strategy.run" in str(error)
    else:
        raise AssertionError("a loop outside of run was not refused")
    try:
        where.run(train, where, "leave apart")
    except sg.ReplicaFailed as error:
        assert "at different batches" in str(error), error
    else:
        raise AssertionError("devices that go different ways were not told")
if first:
    print("as one device")
"""


CALLBACKS = """
from torch import nn

where = sg.ParameterServerStrategy(
    updates=sg.Synchronous() if workers > 1 else sg.Asynchronous(), devices=["cpu:0", "cpu:1"]
)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.outer, self.power = nn.Linear(64, 32), nn.Linear(32, 10), 1.0
        self.frozen = nn.Parameter(torch.ones(32), requires_grad=False)
        self.register_buffer("real", torch.ones(32))
        self.register_buffer("whole", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        factor = self.frozen * self.real * (1 + 0.1 * self.whole) * self.power
        return self.outer(torch.relu(self.inner(x)) * factor)


class Change(sg.callbacks.Callback):
    def __init__(self, what):
        self.what = what

    @torch.no_grad()
    def on_epoch_end(self, epoch, logs=None):
        module = self.model.module
        if self.what == "load":
            module.load_state_dict({k: v / 2 if v.is_floating_point() else v + 1
                                    for k, v in module.state_dict().items()})
        elif self.what == "power":
            module.power *= 0.5
        elif self.what == "whole":
            module.whole += 1
        else:
            getattr(module, self.what).mul_(0.7)


def train(what, strategy):
    model = sg.Model(Scaled(), strategy)
    model.compile(lambda p: torch.optim.SGD(p, lr=0.1), "cross_entropy")
    callbacks = [Change(what)] if first else []
    torch.manual_seed(5)
    return model, model.fit(
        x[:101], y[:101], epochs=3, batch_size=25, callbacks=callbacks, verbose=0
    ).history["loss"]


for what in ("frozen", "real", "whole", "load"):
    model, losses = train(what, where)
    if first:
        plain, expected = train(what, None)
        assert apart(model.module, plain.module) < 1e-6, what
        assert all(abs(a - b) < 1e-5 for a, b in zip(losses, expected, strict=True)), what
if first:
    print("as one device")
if workers == 1:  # the other devices do not follow that
    train("power", where)
"""

HURT = """
import signal, time
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

how = os.environ["HOW"]
where = sg.ParameterServerStrategy(
    updates=sg.Asynchronous() if how == "killed" else sg.Synchronous(), devices=["cpu:0", "cpu:1"]
)


def train(strategy):
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x[:300], y[:300]), batch_size=10)
    module, optimizer, loader = strategy.prepare(module, optimizer, loader)
    for epoch in range(3):
        for number, (rows, labels) in enumerate(loader):
            hurt = number == 2 and not first and sg.current_replica().index == 1
            if hurt and how == "raises":
                raise ValueError("device 1 of worker 1")
            if hurt:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "killed" and first:
                time.sleep(0.02)  # so that it is here when the other goes
            F.cross_entropy(module(rows), labels).backward()
            optimizer.step()
            optimizer.zero_grad()


where.run(train, where)
if first:
    print("went on to the end", where.stats().applied)
"""

LATE = """
import time

where = sg.ParameterServerStrategy(
    updates=sg.Synchronous(spares=1), devices=["cpu:0", "cpu:1"] if first else "cpu:0"
)


class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        time.sleep(0.05 if first else 0.01)
        return self.net(x)


model = sg.Model(Slow(), where)
model.compile(lambda p: torch.optim.SGD(p, lr=0.1), "cross_entropy")
model.fit(x[:300], y[:300], epochs=2, batch_size=20, verbose=0)
books = where.stats()
assert books.received == books.applied + books.dropped + books.buffered
if first:
    assert books.dropped, books
    print("as one device")
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_the_devices_of_a_worker_share_its_batches(workers: int, tmp_path: Path) -> None:
    """A single worker equals one device under asynchronous updates, too."""
    assert "as one device" in launch(SCRIPT, workers, tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_callbacks_change_reaches_every_device(workers: int, tmp_path: Path) -> None:
    told = launch(CALLBACKS, workers, tmp_path, code=int(workers == 1))
    assert "as one device" in told
    assert ("a callback changed 'model.power'" in told) == (workers == 1)


def test_a_device_that_raises_is_named_on_every_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not reported as a loop that was left."""
    monkeypatch.setenv("HOW", "raises")
    told = launch(HURT, 2, tmp_path, code=1)
    assert "worker 1 failed first" in told, told
    assert told.rstrip().endswith("ValueError: device 1 of worker 1"), told
    assert "left its loop" not in told


def test_a_device_that_is_killed_ends_its_worker_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOW", "killed")
    told = launch(HURT, 2, tmp_path, "--grace", "100", code=1)
    assert "went on to the end 90" in told, told
    assert "worker 1 failed first" in told and "was killed by SIGKILL" in told


def test_a_group_that_comes_too_late(tmp_path: Path) -> None:
    """Its devices wait for each other within the step, so the step ends before it is dropped."""
    assert "as one device" in launch(LATE, 2, tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_devices_of_a_worker_share_the_batches_of_a_loop(workers: int, tmp_path: Path) -> None:
    told = launch(OWN_LOOP, workers, tmp_path)
    assert "as one device" in told
    drawn = [each for line in told.splitlines() if " drew " in line for each in line.split()[3:]]
    assert len(drawn) == len(set(drawn)) == 3 * workers, told
