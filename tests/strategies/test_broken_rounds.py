"""Replicas that die, and join, between two meetings, against the formulas in one process."""

from __future__ import annotations

import copy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.training.broken_round import furthest
from tests.strategies.test_compressed import Kill, cluster_of, far, rows
from tests.strategies.test_meetings import BATCH, EPOCHS, SYNCS, ByHand, adam, fitted, until
from tests.support import mlp, strategy

pytestmark = pytest.mark.timeout(120)


class Broken(ByHand):
    """What travels is thrown away, and comes once more with all that was done since."""

    def throw_away(self) -> None:
        if self.travels is not None:
            self.unmet[self.travels[0]] += 1
            self.travels = None


class Leaving(Broken):
    """The same where replicas leave: at the first meeting after `at` updates."""

    def __init__(self, sync: Any, count: int, at: int, left: int) -> None:
        super().__init__(sync, count)
        self.at, self.left = at, left

    def end(self) -> None:
        if self.updates <= self.at or self.count == self.left:
            super().end()
            return
        self.count = self.left
        del self.replicas[self.left :], self.optimizers[self.left :]
        self.throw_away()
        self.meet()


class Renewed(Broken):
    """The same where all but the first begin anew: a meeting of one, for all, after `at`."""

    def __init__(self, sync: Any, count: int, at: int) -> None:
        super().__init__(sync, count)
        self.at = at

    def batch(self, x: Tensor, y: Tensor) -> None:
        super().batch(x, y)
        if self.updates == self.at:
            everybody, self.replicas = self.replicas, self.replicas[:1]
            self.throw_away()
            self.meet()
            self.replicas = everybody
            for module, optimizer in zip(everybody[1:], self.optimizers[1:], strict=True):
                module.load_state_dict(everybody[0].state_dict())
                optimizer.load_state_dict(copy.deepcopy(self.optimizers[0].state_dict()))


class KillAndSee(Kill):
    """Kills a follower, and goes on when that is known: who does not look yet trains on."""

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_batch_end(batch, logs)
        if self.seen == self.after:
            until(lambda: self.made.replica().membership.trouble is not None)


LEAVER = """
import os, signal, sys, time
import torch
import stratagem as sg
from tests.strategies.test_meetings import SYNCS, fitted

plain, made = torch.optim.Adam.step, [0]

def step(self, *given):
    result = plain(self, *given)
    made[0] += 1
    last = 7 if sys.argv[1] == "streaming" else 5  # a part of the model travels then
    if made[0] == last and sys.argv[3] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    return result

torch.optim.Adam.step = step
strategy = sg.MultiWorkerMirroredStrategy(
    sync=SYNCS[sys.argv[1]], devices=["cpu:0"], elastic=True
)
torch.save(list(fitted(strategy)[0].module.state_dict().values()), sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["diloco", "fragments", "streaming"])
def test_who_is_left_holds_the_next_meeting(name: str, tmp_path: Path) -> None:
    """The fifth or seventh update is the third worker's last; the others go on until they meet."""
    running = cluster_of(3, LEAVER, name, tmp_path)
    assert [each.wait(100) for each in running] == [0, 0, -signal.SIGKILL]
    first, second = (torch.load(tmp_path / f"{index}.pt") for index in range(2))
    assert all(map(torch.equal, first, second))
    # the last update after which all three have met, or one before that of the meeting
    last = {"diloco": 5, "fragments": 4, "streaming": 6}[name]
    expected = Leaving(SYNCS[name], 3, last, 2).train()
    pairs = zip(first, expected.state_dict().values(), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-12
    assert far(expected, ByHand(SYNCS[name], 3).train()) > 1e-6


@pytest.mark.parametrize(
    ("name", "at"),
    [("streaming", 6), *(pytest.param("diloco", n, marks=pytest.mark.slow) for n in (6, 7))],
)
def test_who_is_new_takes_the_weights_of_a_meeting(name: str, at: int) -> None:
    """On one machine all followers begin anew when one dies; here in mid-round, with a part that
    travels or without, and at its end."""
    with strategy(3, cross_device_ops="ring", sync=SYNCS[name], elastic=True) as made:
        model, history = fitted(made, callbacks=[KillAndSee(made, at, 1)], validation_data=rows())
    expected = Renewed(SYNCS[name], 3, at).train()
    assert far(model.module, expected) < 1e-12
    assert far(expected, ByHand(SYNCS[name], 3).train()) > 1e-6
    with torch.no_grad():
        x, y = rows()
        assert history["val_loss"][-1] == pytest.approx(float(F.cross_entropy(expected(x), y)))


def test_losses_and_metrics_are_those_of_all_who_are_left() -> None:
    """Where nothing is learned, every row counts once but those of the dead since the meeting."""

    def train(made: Any, **options: Any) -> dict[str, Any]:
        with made.scope():
            model = sg.Model(mlp().double())
            still = lambda params: torch.optim.SGD(params, lr=0.0)  # noqa: E731
            model.compile(optimizer=still, loss=F.cross_entropy, metrics=["accuracy"])
        x, y = rows()
        options = {"verbose": 0, "shuffle": False, **options}
        return model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, **options).history

    options = {"cross_device_ops": "ring", "sync": sg.LocalSteps(2), "elastic": True}
    with strategy(1) as one, strategy(2, **options) as made:
        expected = train(one)
        found = train(made, callbacks=[KillAndSee(made, 6, 0)])  # at a meeting: nothing is lost
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-12)
        assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-12)
        found = train(made, callbacks=[KillAndSee(made, 5, 0)])
    x, y = rows()
    first = slice(0, BATCH // 2)  # of the first batch of the second epoch the chief's rows
    with torch.no_grad():
        kept = float(F.cross_entropy(mlp().double()(x[first]), y[first]))
        whole = float(F.cross_entropy(mlp().double()(x[BATCH:]), y[BATCH:]))
    lost = (kept * BATCH + whole * (len(x) - BATCH)) / len(x)
    assert found["loss"] == pytest.approx([expected["loss"][0], lost, expected["loss"][2]])


def test_whose_meeting_counts() -> None:
    assert furthest([None, [3, 9, 1, 0]]) is None  # the chief had not begun
    assert furthest([[3, 9, 1, 0], [3, 9, 1, 0], None]) == 0
    assert furthest([[3, 9, 1, 0], None, [4, 9, 0, 0], [4, 10, 1, 0]]) == 2


def test_what_cannot_be_elastic_is_refused() -> None:
    with pytest.raises(sg.UsageError, match=r"use sg\.LocalSteps or sg\.DiLoCo"):
        strategy(2, sync=sg.Gossip(), elastic=True)
    refused = pytest.raises(sg.NotDistributable, match=r"LocalSteps.*not in custom loops")
    with strategy(2, sync=sg.LocalSteps(3), elastic=True) as made, refused:
        made.run(_prepared, made)


def _prepared(made: Any) -> None:
    module = mlp()
    loader = DataLoader(TensorDataset(*rows()), batch_size=BATCH)
    made.prepare(module, adam(module.parameters()), loader)
