"""Several devices of one worker go in step; between workers goes what the rule says."""

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
from torch.utils.data import DataLoader, TensorDataset

where = sg.ParameterServerStrategy(updates=sg.Asynchronous(), devices=["cpu:0", "cpu:1"])


def train(strategy):
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    strategy.prepare(module, optimizer, DataLoader(TensorDataset(x, y), batch_size=50))


for loop in (train, lambda strategy: strategy.run(train, strategy)):
    try:
        loop(where)
    except (sg.UsageError, sg.ReplicaFailed) as error:
        assert "with servers a custom loop runs on one" in str(error), error
    else:
        raise AssertionError("a loop on two devices was not refused")
print("refused")
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

how = os.environ["HOW"]
where = sg.ParameterServerStrategy(
    updates=sg.Asynchronous() if how == "killed" else sg.Synchronous(), devices=["cpu:0", "cpu:1"]
)
calls = [0]


class Hurt(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, rows):
        calls[0] += 1
        hurt = calls[0] > 10 and not first and sg.current_replica().index == 1
        if hurt and how == "raises":
            raise ValueError("device 1 of worker 1")
        if hurt:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "killed" and first:
            time.sleep(0.02)  # so that it is here when the other goes
        return self.inner(rows)


model = sg.Model(Hurt(), where)
model.compile(lambda p: torch.optim.SGD(p, lr=0.1), "cross_entropy")
model.fit(x[:300], y[:300], epochs=3, batch_size=10, verbose=0)
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
    """One worker alone is as one device without waiting for anybody, too."""
    assert "as one device" in launch(SCRIPT, workers, tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_callbacks_change_reaches_every_device(workers: int, tmp_path: Path) -> None:
    told = launch(CALLBACKS, workers, tmp_path, code=int(workers == 1))
    assert "as one device" in told
    assert ("a callback changed 'model.power'" in told) == (workers == 1)


def test_a_device_that_raises_is_named_on_every_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOW", "raises")
    told = launch(HURT, 2, tmp_path, code=1)
    assert "worker 1 failed first" in told, told
    assert told.rstrip().endswith("ValueError: device 1 of worker 1"), told


def test_a_device_that_is_killed_ends_its_worker_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOW", "killed")
    told = launch(HURT, 2, tmp_path, "--grace", "100", code=1)
    assert "went on to the end 90" in told, told
    assert "worker 1 failed first" in told and "was killed by SIGKILL" in told


def test_a_group_that_comes_too_late(tmp_path: Path) -> None:
    """Its devices wait for each other in the middle of a step: it ends, and then is dropped."""
    assert "as one device" in launch(LATE, 2, tmp_path)


def test_a_custom_loop_runs_on_one_device_of_a_worker(tmp_path: Path) -> None:
    assert "refused" in launch(OWN_LOOP, 1, tmp_path, code=1)  # a job in which a device has failed
