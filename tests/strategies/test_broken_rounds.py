"""Replicas that die and join between two meetings, against the formulas in one process."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.training.broken_round import (
    BrokenRound,
    LoopRounds,
    OwnState,
    RoundProgress,
    furthest,
)
from tests.clock import wait_for
from tests.codecs.by_hand import Replicas
from tests.strategies.test_compressed import (
    RECORDS,
    Kill,
    by_formula,
    cluster_of,
    far,
    rows,
)
from tests.strategies.test_meetings import BATCH, EPOCHS, SYNCS, ByHand, adam, fitted
from tests.support import mlp, strategy

pytestmark = pytest.mark.timeout(120)


class Interrupted(ByHand):
    """The formulas if a fragment under way is dropped, and sent again with all updates since."""

    def throw_away(self) -> None:
        if self.travels is not None:
            self.unmet[self.travels[0]] += 1
            self.travels = None


class Leaving(Interrupted):
    """The formulas if replicas leave at the first meeting after `at` updates."""

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


class Broken(Interrupted):
    """The formulas if replicas leave after `at` updates, and the remaining ones meet or mix."""

    def __init__(self, sync: Any, count: int, at: int, left: int) -> None:
        super().__init__(sync, count)
        self.at, self.left = at, left

    def mix(self) -> None:
        if self.updates == self.at:
            self.leave()
        super().mix()

    def batch(self, x: Tensor, y: Tensor) -> None:
        super().batch(x, y)
        if self.updates == self.at and not isinstance(self.sync, sg.Gossip):
            self.leave()
            self.throw_away()
            self.meet()

    def leave(self) -> None:
        self.count = self.left
        del self.replicas[self.left :], self.optimizers[self.left :]


class Renewed(Broken):
    """The formulas if all replicas but the first restart: a meeting of one, after `at`."""

    def __init__(self, sync: Any, count: int, at: int) -> None:
        super().__init__(sync, count, at, 1)

    def mix(self) -> None:
        if self.updates == self.at:
            self.renew()
        ByHand.mix(self)

    def batch(self, x: Tensor, y: Tensor) -> None:
        everybody, optimizers, count = [*self.replicas], [*self.optimizers], self.count
        super().batch(x, y)
        if self.count != count:
            self.replicas, self.optimizers, self.count = everybody, optimizers, count
            self.renew()

    def renew(self) -> None:
        for module, optimizer in zip(self.replicas[1:], self.optimizers[1:], strict=True):
            module.load_state_dict(self.replicas[0].state_dict())
            optimizer.load_state_dict(copy.deepcopy(self.optimizers[0].state_dict()))


class KillAndSee(Kill):
    """Kills a follower, and goes on when the death is known; others train on until they look."""

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_batch_end(batch, logs)
        if self.seen == self.after:
            wait_for(lambda: self.made.replica().membership.trouble is not None)


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
        time.sleep(1.0)  # the others have made that update, too, by then
        os.kill(os.getpid(), signal.SIGKILL)
    return result

torch.optim.Adam.step = step
strategy = sg.MultiWorkerMirroredStrategy(
    sync=SYNCS[sys.argv[1]], devices=["cpu:0"], elastic=True
)
torch.save(list(fitted(strategy)[0].module.state_dict().values()), sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["streaming", "diloco", "fragments", "ring"])
def test_who_is_left_holds_the_next_meeting(name: str, tmp_path: Path) -> None:
    """The third worker dies after the fifth or seventh update; the others train until they meet."""
    running = cluster_of(3, LEAVER, name, tmp_path)
    assert [each.wait(100) for each in running] == [0, 0, -signal.SIGKILL]
    first, second = (torch.load(tmp_path / f"{index}.pt") for index in range(2))
    assert all(map(torch.equal, first, second))
    if name == "ring":  # it dies before it has mixed
        expected = Broken(SYNCS[name], 3, 5, 2).train()
    else:  # the last update after which all three have met, or one before that of the meeting
        last = {"diloco": 5, "fragments": 4, "streaming": 6}[name]
        expected = Leaving(SYNCS[name], 3, last, 2).train()
    pairs = zip(first, expected.state_dict().values(), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-12
    assert far(expected, ByHand(SYNCS[name], 3).train()) > 1e-6


LATE = """
import os, signal, sys, time
import torch
import stratagem as sg
from stratagem.state.outer import OuterFragment
from tests.clock import wait_for
from tests.strategies.test_meetings import SYNCS, fitted

plain, ends = OuterFragment.end, [0]

def end(self, *given):
    ends[0] += 1
    if ends[0] == 4 and sys.argv[3] == "0":
        membership = sg.current_replica().membership
        wait_for(lambda: membership.trouble is not None)
        membership.raise_if_trouble()
    plain(self, *given)
    if ends[0] == 4 and sys.argv[3] == "2":
        time.sleep(1.0)  # it has ended for the second worker, too, by then
        os.kill(os.getpid(), signal.SIGKILL)

OuterFragment.end = end
strategy = sg.MultiWorkerMirroredStrategy(
    sync=SYNCS[sys.argv[1]], devices=["cpu:0"], elastic=True
)
torch.save(list(fitted(strategy)[0].module.state_dict().values()), sys.argv[2])
"""


@pytest.mark.slow
def test_a_meeting_that_breaks_off_for_the_chief_alone(tmp_path: Path) -> None:
    """At the seventh update one fragment meets; the other one has not been synchronized."""
    running = cluster_of(3, LATE, "streaming", tmp_path)
    assert [each.wait(100) for each in running] == [0, 0, -signal.SIGKILL]
    first, second = (torch.load(tmp_path / f"{index}.pt") for index in range(2))
    assert all(map(torch.equal, first, second))
    expected = Broken(SYNCS["streaming"], 3, 7, 2).train()
    assert _far(first, expected) < 1e-12


ALONE = """
import os, sys, time
import torch
import torch.nn.functional as F
import stratagem as sg
from tests.clock import wait_for
from tests.strategies import test_compressed, test_meetings
from tests.strategies.test_broken_rounds import adam, looped

(form, name), where, me = sys.argv[1].split(), sys.argv[2], sys.argv[3]
wire = test_compressed.RECORDS.get(name)
kind, make = (torch.optim.SGD, test_compressed.sgd) if wire else (torch.optim.Adam, adam)
plain, made = kind.step, [0]

def step(self, *given):
    result = plain(self, *given)
    made[0] += 1
    if made[0] == 3 and me == "1" and sys.argv[-1] != "again":
        time.sleep(1.0)  # the chief has made this update, too, by then
        told = [sys.executable, "-c", os.environ["SOURCE"], *sys.argv[1:], "again"]
        os.execv(sys.executable, told)
    return result

kind.step = step
options = {"wire": wire} if wire else {"sync": sg.LocalSteps(3, after=9)}
strategy = sg.MultiWorkerMirroredStrategy(devices=["cpu:0"], elastic=True, **options)

def wait(seen):
    replica = sg.current_replica()
    if seen == 5 and replica.count == 1:
        wait_for(lambda: replica.membership.trouble is not None)  # the second waits to join

class Wait(sg.callbacks.Callback):
    seen = 0

    def on_batch_end(self, batch, logs=None):
        self.seen += 1
        wait(self.seen)

if form == "loop":
    found = strategy.run(looped, strategy, make, wait)[0]
elif wire:
    found = list(test_compressed.fitted(strategy, callbacks=[Wait()]).module.parameters())
else:
    found = list(test_meetings.fitted(strategy, callbacks=[Wait()])[0].module.parameters())
torch.save(found, where)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fit", "loop"])
def test_updates_of_a_chief_that_is_alone_count(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second worker leaves after three updates and joins after five of twelve.

    Nine updates are those of one device, whichever worker makes them.
    """
    found = gone_and_back(f"{form} sync", tmp_path, monkeypatch)
    assert _far(found, ByHand(sg.LocalSteps(3, after=9), 2).train()) < 1e-12


def gone_and_back(told: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    monkeypatch.setenv("SOURCE", ALONE)
    folder.mkdir(exist_ok=True)
    running = cluster_of(2, ALONE, told, folder)
    assert [each.wait(100) for each in running] == [0, 0]
    first, second = (torch.load(folder / f"{index}.pt") for index in range(2))
    assert all(map(torch.equal, first, second))
    return list(first)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_comes_back_has_kept_nothing_and_the_chief_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a compression: the chief alone sends nothing, and its residual waits."""
    for told, joins in (("fit int8", 5), ("loop power", 6)):

        def away(step: int, replicas: Replicas, joins: int = joins) -> None:
            replicas.count = 1 if 3 <= step < joins else 2
            if step == 3:
                replicas.e[1].zero_()
                replicas.f[len(replicas.f) // 2 :] = 0.0  # the slice that it added up

        wire = RECORDS[told.split()[1]]
        expected = by_formula(wire, 2, before=away)
        assert far(expected, by_formula(wire, 2)) > 1e-9
        assert _far(gone_and_back(told, tmp_path / told, monkeypatch), expected) < 1e-12


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("streaming", 6),
        *(pytest.param("diloco", n, marks=pytest.mark.slow) for n in (6, 7)),
        pytest.param("ring", 6, marks=pytest.mark.slow),
    ],
)
def test_who_is_new_takes_the_weights_of_a_meeting(name: str, at: int) -> None:
    """On one machine all followers restart when one dies.

    Here one dies within a round, with a fragment under way or without, and at its end.
    """
    with strategy(3, cross_device_ops="ring", sync=SYNCS[name], elastic=True) as made:
        model, history = fitted(made, callbacks=[KillAndSee(made, at, 1)], validation_data=rows())
    expected = Renewed(SYNCS[name], 3, at).train()
    assert far(model.module, expected) < 1e-12
    assert far(expected, ByHand(SYNCS[name], 3).train()) > 1e-6
    with torch.no_grad():
        x, y = rows()
        assert history["val_loss"][-1] == pytest.approx(float(F.cross_entropy(expected(x), y)))


def test_losses_and_metrics_are_those_of_all_who_are_left() -> None:
    """Without learning, every row counts once, except the dead replica's since the meeting."""

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
    third = RoundProgress(3, 9, apart=True, can_go_back=False)
    fourth = third._replace(meetings=4)
    assert furthest([None, third]) is None  # the chief had not begun
    assert furthest([third, third, None]) == 0
    assert furthest([third, None, fourth._replace(apart=False), fourth._replace(updates=10)]) == 2


# --- custom loops --------------------------------------------------------------------------------


def looped(made: Any, optimizer: Any, see: Callable[[int], None] = lambda seen: None) -> list[Any]:
    """A custom loop; `see` is called when a batch begins."""
    module = mlp().double()
    data = DataLoader(TensorDataset(*rows()), batch_size=BATCH)
    model, optimizer, loader = made.prepare(module, optimizer(module.parameters()), data)
    losses: list[float] = []
    loader.remember(losses=losses)
    for epoch in loader.epochs(EPOCHS):
        for batch, (x, y) in enumerate(loader, loader.seen):
            see(4 * epoch + batch)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(0.0)
    assert len(losses) == 4 * EPOCHS
    return [p.detach().clone() for p in model.parameters()]


LOOP = """
import os, signal, sys, time
import torch
import stratagem as sg
from stratagem.state.outer import OuterPart
from tests.strategies.test_broken_rounds import adam, looped
from tests.strategies.test_compressed import RECORDS, sgd
from tests.strategies.test_meetings import SYNCS

name, place = sys.argv[1].split()
kind, made = OuterPart if place == "in" else torch.optim.Optimizer, [0]
verb, last = ("send", 3) if place == "in" else ("zero_grad", 5)
plain = getattr(kind, verb)

def act(self, *given, **options):
    made[0] += 1
    if made[0] == last and sys.argv[3] == "2":
        time.sleep(1.0)  # the others have ended this batch by then, or wait in the meeting
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, *given, **options)

setattr(kind, verb, act)
options = {"sync": SYNCS[name]} if name in SYNCS else {"wire": RECORDS[name]}
strategy = sg.MultiWorkerMirroredStrategy(devices=["cpu:0"], elastic=True, **options)
found = strategy.run(looped, strategy, adam if name in SYNCS else sgd)
torch.save(found[0], sys.argv[2])
"""
#: where the third worker dies, and after how many updates the others go on
PLACES = [("diloco", "in", 6), ("local", "between", 6)]
PLACES += [(name, "between", 5) for name in ("fragments", "ring", "int8", "topk", "power")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place", "at"), PLACES)
def test_a_loop_goes_on_without_the_dead(name: str, place: str, at: int, tmp_path: Path) -> None:
    """The interrupted batch is repeated; the updates since the meeting are not lost."""

    def lose(step: int, replicas: Replicas) -> None:
        if step == at and replicas.count == 3:
            replicas.f[len(replicas.f) * 2 // 3 :] = 0.0  # the slice that it added up
            replicas.e, replicas.u, replicas.count = replicas.e[:2], replicas.u[:2], 2

    running = cluster_of(3, LOOP, f"{name} {place}", tmp_path)
    assert [each.wait(100) for each in running] == [0, 0, -signal.SIGKILL]
    first, second = (torch.load(tmp_path / f"{index}.pt") for index in range(2))
    assert all(map(torch.equal, first, second))
    if name in RECORDS:
        expected = by_formula(RECORDS[name], 3, before=lose)
    else:
        expected = Broken(SYNCS[name], 3, at, 2).train()
        assert far(expected, ByHand(SYNCS[name], 3).train()) > 1e-6
    assert _far(first, expected) < 1e-12


@pytest.mark.parametrize("name", ["diloco", pytest.param("ring", marks=pytest.mark.slow)])
def test_who_is_new_in_a_loop_takes_the_chiefs_weights(name: str) -> None:
    """Followers restart; the chief notices at its next meeting or mixing."""
    at, killed = 6, []

    def see(made: Any, seen: int) -> None:
        if seen == at and made.replica_group._pool is not None and not killed:
            killed.append(seen)
            os.kill(made.replica_group._pool.followers[1].pid, signal.SIGKILL)

    with strategy(3, cross_device_ops="ring", sync=SYNCS[name], elastic=True) as made:
        found = made.run(looped, made, adam, lambda seen: see(made, seen))
    assert killed and all(map(torch.equal, found[0], found[1]))
    assert _far(found[0], Renewed(SYNCS[name], 3, at).train()) < 1e-12


def _far(weights: list[Tensor], module: Any) -> float:
    pairs = zip(weights, module.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def test_a_replica_that_came_further_goes_back_to_where_the_chief_was() -> None:
    rounds = LoopRounds()
    for meetings, updates in ((0, 1), (0, 2), (1, 3), (1, 4), (1, 5)):
        rounds.keep(_Kept(meetings, updates))
    assert rounds.own is not None and rounds.own.at == (1, 5)
    found = {updates: rounds.find(1, updates) for updates in range(1, 7)}
    assert [updates for updates, mark in found.items() if mark] == [2, 3, 4, 5]
    assert rounds.find(0, 3) is None  # it has not held that meeting
    rounds.keep(_Kept(1, 5))
    rounds._keeper.updates = 6
    rounds.break_off()
    assert rounds.own.at == (1, 5) and rounds.find(1, 6) is not None


class _Kept:
    """A committer with given numbers of updates and meetings."""

    def __init__(self, meetings: int, updates: int) -> None:
        self.meetings, self.updates = meetings, updates

    def broken_off(self, before: Any = None) -> BrokenRound:
        return BrokenRound(self.meetings, self.updates, [0], {}, OwnState({}, []), {}, [])
