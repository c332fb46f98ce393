"""The committer of `sync=`, on 1 to 5 replicas that are threads, with any shares of a batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import stratagem as sg
from stratagem.cluster.membership import Membership
from stratagem.codecs.reducer import Plain
from stratagem.errors import ReplicaLost
from stratagem.state.outer import fragmented
from stratagem.training.exchange import GradientExchange
from stratagem.training.local_steps import LocalUpdates
from stratagem.training.replica import Replica
from tests.codecs.circle import Circle, together

pytestmark = pytest.mark.timeout(120)
MEAN = sg.Outer(lr=1.0, momentum=0.0)

#: rows of each replica in each batch: some have none, but never all
Shares = list[list[int]]


@st.composite
def shares(draw: Any, least: int = 1, steps: int = 5) -> Shares:
    count = draw(st.integers(least, 5))
    one = st.lists(st.integers(0, 3), min_size=count, max_size=count).filter(any)
    found: Shares = draw(st.lists(one, min_size=1, max_size=steps))
    return found


START = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def model() -> nn.Module:
    """The same in every thread."""
    return copy.deepcopy(START)


def batch(number: int, rows: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(number)
    x = torch.randn(rows, 3, generator=dice, dtype=torch.float64)
    return x, torch.randn(rows, 2, generator=dice, dtype=torch.float64)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.8, weight_decay=0.01)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


class Training:
    """One replica."""

    def __init__(
        self,
        circle: Circle,
        sync: Any,
        make: Any = sgd,
        module: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.replica = Replica(
            circle.rank, circle.size, torch.device("cpu"), "one", circle, Membership.alone()
        )
        self.module = model() if module is None else module
        self.optimizer = make(self.module)
        given = (list(self.module.named_parameters()), self.replica, Plain(circle))
        self.committer: GradientExchange = (
            GradientExchange(*given, notes=2)
            if sync is None
            else LocalUpdates(*given, every=sync, notes=2, **options)
        )
        self.committer.optimizer = self.optimizer

    def step(self, number: int, mine: Sequence[int], *, spoilt: bool = False) -> None:
        total, rank = sum(mine), self.replica.index
        x, y = batch(number, total)
        start = sum(mine[:rank])
        x, y = x[start : start + mine[rank]], y[start : start + mine[rank]]
        self.replica.share.set(mine[rank], total, float(mine[rank] > 0))
        if mine[rank]:
            loss = (self.module(x) - y).square().sum() / total
            (loss * float("inf") if spoilt else loss).backward()
        self.committer.commit([0.0, 0.0])
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, batches: Shares, first: int = 0) -> Tensor:
        for number, mine in enumerate(batches, first):
            self.step(number, mine)
            self.committer.sync()
        self.committer.meet()
        return weights(self.module)


def trained(batches: Shares, sync: Any, make: Any = sgd) -> list[Tensor]:
    return together(len(batches[0]), lambda circle: Training(circle, sync, make).run(batches))


def one_device(batches: Shares) -> Tensor:
    module = model()
    optimizer = sgd(module)
    for number, mine in enumerate(batches):
        x, y = batch(number, sum(mine))
        ((module(x) - y).square().sum() / len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@few
@given(shares())
def test_a_meeting_after_every_update_of_sgd_is_one_device(batches: Shares) -> None:
    """With momentum and weight decay, and rows on some replicas only."""
    expected = one_device(batches)
    for sync in (None, sg.LocalSteps(1), sg.DiLoCo(1, outer=MEAN)):
        for found in trained(batches, sync):
            assert float((found - expected).abs().max()) < 1e-12


class Sparing(nn.Module):
    """One layer is used by some rows only, and one by none."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = model()
        self.some, self.unused = model(), model()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        some = x[:, 0] > 0.5
        return y.index_add(0, some.nonzero()[:, 0], self.some(x[some])) if some.any() else y


def _trained_sparing(batches: Shares, sync: Any, circle: Circle | None = None) -> Tensor:
    """Train on a replica, or on one device; the first layer is frozen after the first update."""
    training = Training(circle, sync, module=Sparing()) if circle is not None else None
    module: Any = training.module if training is not None else Sparing()
    optimizer = sgd(module)
    for number, mine in enumerate(batches):
        if training is not None:
            training.step(number, mine)
            training.committer.sync()
        else:
            x, y = batch(number, sum(mine))
            ((module(x) - y).square().sum() / len(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        module.net[0].requires_grad_(False)
    return weights(module)


@few
@given(shares())
def test_layers_that_some_rows_use_or_none(batches: Shares) -> None:
    """Momentum and weight decay move a layer everywhere if a row uses it, and else nowhere."""
    expected = _trained_sparing(batches, None)
    for sync in (sg.LocalSteps(1), sg.DiLoCo(1, outer=MEAN)):
        play = partial(_trained_sparing, batches, sync)
        for found in together(len(batches[0]), play):
            assert float((found - expected).abs().max()) < 1e-12


@few
@given(shares(), st.integers(1, 4))
def test_an_outer_rate_of_one_without_momentum_is_the_mean(batches: Shares, every: int) -> None:
    for make in (sgd, adam):
        mean = trained(batches, sg.LocalSteps(every), make)
        outer = trained(batches, sg.DiLoCo(every, outer=MEAN), make)
        assert float((mean[0] - outer[0]).abs().max()) < 1e-12


@few
@given(shares(2).filter(lambda batches: len(batches[0]) <= 3))
def test_a_ring_in_which_all_are_neighbours_is_one_device(batches: Shares) -> None:
    """Two or three mix everything; they step first and mix then, so that gradients are taken at the
    same weights."""
    for found in trained(batches, sg.Gossip("ring")):
        assert float((found - one_device(batches)).abs().max()) < 1e-12


SYNCS = [
    sg.LocalSteps(2, after=1),
    sg.LocalSteps(2),
    sg.DiLoCo(2),
    sg.LocalSteps(3, wire=sg.TopK(0.3)),
    sg.DiLoCo(4, fragments=2, wire=sg.Int8(block=4)),
    sg.DiLoCo(4, fragments=2, wire=sg.TopK(0.3, dense_steps=2)),
    sg.DiLoCo(2, wire=sg.PowerSGD(1)),
    sg.DiLoCo(2, wire=sg.Sign()),
    sg.DiLoCo(2, wire="bfloat16"),
    sg.DiLoCo(4, fragments=2, wire=sg.Int8(block=4), overlap=1, mix=0.0),
    sg.DiLoCo(3, overlap=1),
    sg.Gossip("ring"),
    sg.Gossip("exponential"),
]


@settings(max_examples=30, deadline=None)
@given(shares(), st.sampled_from(SYNCS))
def test_all_have_the_same_bits_after_a_meeting(batches: Shares, sync: Any) -> None:
    first, *others = trained(batches, sync, adam)
    assert not torch.equal(first, weights(model()))
    assert all(torch.equal(first, other) for other in others)


class Streamed:
    """Fragments that are met some updates after they were sent: the formulas, in one process."""

    def __init__(self, sync: sg.DiLoCo, count: int) -> None:
        self.sync, self.count, self.since = sync, count, 0
        self.modules = [model() for _ in range(count)]
        self.optimizers = [adam(each) for each in self.modules]
        self.old = [p.detach().clone() for p in START.parameters()]
        self.momenta = [torch.zeros_like(p) for p in self.old]
        names = [name for name, _ in START.named_parameters()]
        found = fragmented(list(START.named_parameters()), sync.fragments)
        self.parts = [[names.index(name) for name, _ in part] for part in found]
        self.own = [0] * sync.fragments
        self.travels: tuple[int, list[Tensor]] | None = None

    def every(self, index: int) -> list[Tensor]:
        return [list(each.parameters())[index].data for each in self.modules]

    def step(self, number: int, mine: Sequence[int]) -> None:
        x, y = batch(number, sum(mine))
        rows = zip(x.split(list(mine)), y.split(list(mine)), strict=True)
        for module, optimizer, (a, b) in zip(self.modules, self.optimizers, rows, strict=True):
            optimizer.zero_grad()
            ((module(a) - b).square().sum() * self.count / len(x)).backward()
            optimizer.step()
        self.since += 1
        self.own = [each + 1 for each in self.own]
        pace = self.sync.every // self.sync.fragments
        if self.since % pace == 0:
            self.send((self.since // pace - 1) % self.sync.fragments)
        if self.travels is not None and self.since % pace == self.sync.delay:
            self.end()

    def send(self, part: int) -> None:
        mean = [torch.stack(self.every(i)).mean(0) for i in self.parts[part]]
        both = zip(self.parts[part], mean, strict=True)
        self.travels, self.own[part] = (part, [self.old[i] - m for i, m in both]), 0

    def end(self) -> None:
        assert self.travels is not None
        (part, ways), self.travels, outer = self.travels, None, self.sync.outer
        mix = self.sync.mix if self.own[part] else 0.0
        for i, way in zip(self.parts[part], ways, strict=True):
            self.momenta[i] = outer.momentum * self.momenta[i] + way
            self.old[i] = self.old[i] - outer.lr * (way + outer.momentum * self.momenta[i])
            for p in self.every(i):
                p.copy_(mix * p + (1 - mix) * self.old[i])
        self.own[part] *= mix > 0

    def meet(self) -> None:
        if self.travels is not None:
            self.end()
        for part in range(len(self.parts)):
            if self.own[part]:
                self.send(part)
                self.end()
        self.since = 0


def streaming(parts: int, pace: int, data: Any) -> sg.DiLoCo:
    return sg.DiLoCo(
        parts * pace,
        outer=sg.Outer(0.6, 0.5),
        fragments=parts,
        overlap=data.draw(st.integers(0, pace - 1) | st.none()),
        mix=data.draw(st.sampled_from([0.0, 0.3])),
    )


@few
@given(shares(steps=10), st.integers(1, 3), st.integers(1, 4), st.data())
def test_parts_that_travel_are_what_the_formula_says(
    batches: Shares, parts: int, pace: int, data: Any
) -> None:
    """With forced meetings, some of them while a fragment is under way."""
    sync = streaming(parts, pace, data)
    forced = data.draw(st.sets(st.integers(0, len(batches) - 1), max_size=2)) | {len(batches) - 1}
    expected = Streamed(sync, len(batches[0]))
    for number, mine in enumerate(batches):
        expected.step(number, mine)
        if number in forced:
            expected.meet()

    def run(circle: Circle) -> Tensor:
        training = Training(circle, sync, adam)
        for number, mine in enumerate(batches):
            training.step(number, mine)
            training.committer.sync()
            if number in forced:
                training.committer.meet()
                assert not training.committer.apart
        return weights(training.module)

    first, *others = together(len(batches[0]), run)
    assert float((first - weights(expected.modules[0])).abs().max()) < 1e-12
    assert all(torch.equal(first, other) for other in others)


def test_updates_are_made_while_a_part_travels() -> None:
    """Three of four between its sending and its outer step; each moves the weights."""

    def run(circle: Circle) -> list[tuple[int | None, int]]:
        training = Training(circle, sg.DiLoCo(8, fragments=2, overlap=3))
        committer, seen = training.committer, []
        assert isinstance(committer, LocalUpdates)
        for number in range(12):
            before = weights(training.module)
            training.step(number, [1, 2])
            assert not torch.equal(weights(training.module), before)
            committer.sync()
            seen.append((committer.cadence.under_way, committer.meetings))
        return seen

    none, first, second = (None, 0), (0, 0), (1, 1)
    expected = [none] * 3 + [first] * 3 + [(None, 1)] + [second] * 3 + [(None, 2), (0, 2)]
    assert together(2, run) == [expected] * 2


@few
@given(shares(2), st.sampled_from(["ring", "exponential"]))
def test_mixing_keeps_the_mean(batches: Shares, graph: str) -> None:
    def run(circle: Circle) -> list[tuple[Tensor, Tensor]]:
        training, seen = Training(circle, sg.Gossip(graph)), []
        for number, mine in enumerate(batches):
            training.step(number, mine)
            before = weights(training.module)
            training.committer.sync()
            seen.append((before, weights(training.module)))
        return seen

    for each in zip(*together(len(batches[0]), run), strict=True):
        before = torch.stack([b for b, _ in each])
        after = torch.stack([a for _, a in each])
        assert float((before.mean(0) - after.mean(0)).abs().max()) < 1e-14
        apart = float((before - before.mean(0)).norm())
        assert float((after - after.mean(0)).norm()) <= apart + 1e-12


@few
@given(shares(2), st.sampled_from(SYNCS), st.data())
def test_a_number_that_is_none_reaches_everybody(batches: Shares, sync: Any, data: Any) -> None:
    number = data.draw(st.integers(0, len(batches) - 1))
    where = data.draw(st.sampled_from([i for i, rows in enumerate(batches[number]) if rows]))

    def run(circle: Circle) -> Tensor:
        training = Training(circle, sync)
        for at, mine in enumerate(batches):
            training.step(at, mine, spoilt=at == number and circle.rank == where)
            training.committer.sync()
        training.committer.meet()
        return weights(training.module)

    for found in together(len(batches[0]), run):
        assert not found.isfinite().any()


#: what a state has, and where the training would go on otherwise without it
NEEDED = {
    "optimizer": SYNCS,
    "momenta": [each for each in SYNCS if isinstance(each, sg.DiLoCo)],
    "updates": [sg.LocalSteps(2, after=1), sg.Gossip("exponential")],
    "wires": [each for each in SYNCS if not isinstance(getattr(each, "wire", None), str | None)],
}


@pytest.mark.parametrize("sync", SYNCS, ids=repr)
def test_training_goes_on_from_its_state_bit_for_bit(sync: Any) -> None:
    """Outer momentum, residuals, each replica's own state of Adam, turns of the gossip."""
    before, after = [[2, 1, 1], [1, 3, 0], [0, 2, 2]], [[1, 2, 1], [2, 2, 3]]

    def first(circle: Circle) -> tuple[Any, Any, Tensor]:
        training = Training(circle, sync, adam)
        training.run(before)
        saved = copy.deepcopy((training.module.state_dict(), training.committer.state()))
        return *saved, training.run(after, first=len(before))

    found = together(3, first)

    def goes_on(without: str = "") -> bool:
        empty = {"optimizer": [{}] * 4, "momenta": {}, "updates": 0, "wires": [{}, {}]}
        states = [{k: empty[k] if k == without else v for k, v in s.items()} for _, s, _ in found]

        def second(circle: Circle) -> Tensor:
            training = Training(circle, sync, adam)
            training.module.load_state_dict(found[0][0])
            training.committer.load(states)
            return training.run(after, first=len(before))

        return all(map(torch.equal, together(3, second), [end for _, _, end in found]))

    assert goes_on()
    for name, wanted in NEEDED.items():
        assert goes_on(without=name) == (sync not in wanted), name


def test_a_forced_meeting_leaves_out_what_has_just_met() -> None:
    def run(circle: Circle) -> list[bool]:
        training = Training(circle, sg.DiLoCo(2, fragments=2))
        for number in range(4):
            training.step(number, [2, 2])
            training.committer.sync()
        before = copy.deepcopy(training.module.state_dict())
        training.committer.meet()
        training.committer.meet()
        now = training.module.state_dict()
        return [not torch.equal(before[name], now[name]) for name in now]

    assert together(2, run) == [[True, False, False, False]] * 2


class Sized(NamedTuple):
    """Stands for a parameter."""

    size: int

    def numel(self) -> int:
        return self.size


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(1, 6))
def test_fragments_are_neighbours_and_none_is_empty(sizes: list[int], parts: int) -> None:
    named: Any = [(str(i), Sized(size)) for i, size in enumerate(sizes)]
    found = fragmented(named, parts)
    assert [each for part in found for each in part] == named
    assert len(found) == min(parts, len(sizes))


@few
@given(st.lists(st.booleans(), min_size=1, max_size=4), st.sampled_from(["ring", "exponential"]))
def test_who_is_new_takes_its_neighbours_weights_and_all_mix(new: list[bool], graph: str) -> None:
    """Some of five replicas leave, others join; the last mix is made again on their graph."""
    sync, here = sg.Gossip(graph), [True, *(not each for each in new)]

    def leave(circle: Circle) -> Any:
        one = Training(circle, sync, undoes=True)
        for number in range(3):
            one.step(number, [1, 2, 0, 1, 1])
            one.committer.sync()
        return one.committer.broken_off()

    broken = together(5, leave)

    def go_on(circle: Circle) -> tuple[Tensor, Tensor]:
        one = Training(circle, sync, undoes=True)
        mine = replace(broken[circle.rank]) if here[circle.rank] else None
        one.committer.rejoin(mine, one.replica)
        mixed = weights(one.module)
        one.committer.meet()
        return mixed, weights(one.module)

    found = together(len(here), go_on)
    starts: list[Tensor] = []
    for rank, was_here in enumerate(here):
        mine = torch.cat([values.reshape(-1) for values in broken[rank].mine.weights.values()])
        starts.append(mine if was_here else starts[-1])
    for rank, (mixed, met) in enumerate(found):
        parts = [weight * starts[r] for r, weight in sync.weights(rank, len(here), 2).items()]
        assert torch.allclose(mixed, torch.stack(parts).sum(0), atol=1e-12, rtol=0)
        assert torch.equal(met, found[0][1])
        assert torch.allclose(met, torch.stack(starts).mean(0), atol=1e-12, rtol=0)


class Left(Streamed):
    """Some replicas leave after a meeting has ended for them; the others hold it."""

    def leave(self, left: int, *, forced: bool) -> None:
        if forced and self.travels is None:
            self.send(next(part for part, own in enumerate(self.own) if own))
        if forced:
            self.end()
        self.count = left
        del self.modules[left:], self.optimizers[left:]
        self.meet()


def break_off(committer: LocalUpdates, *, ended: bool) -> None:
    """Have the next meeting break off here; or what follows it, where it is `ended`."""
    over: list[bool] = []

    def end(plain: Any, mix: float = 0.0) -> None:
        if not ended:
            raise ReplicaLost("one has died", "one")
        plain(mix)
        over.append(True)

    def send(plain: Any, weight: float) -> None:
        if over:
            raise ReplicaLost("one has died", "one")
        plain(weight)

    for each in committer.fragments:
        vars(each).update(end=partial(end, each.end), send=partial(send, each.send))


@few
@given(st.integers(1, 3), st.integers(1, 4), st.data())
@pytest.mark.timeout(60)
def test_who_has_not_ended_a_meeting_ends_it_as_others_have(
    parts: int, pace: int, data: Any
) -> None:
    """One or two of four die in it. No replica's updates of other fragments are lost."""
    sync = streaming(parts, pace, data)
    ended = data.draw(st.lists(st.booleans(), min_size=2, max_size=3).filter(any))
    updates, rows = data.draw(st.integers(1, 2 * parts * pace)), [2, 1, 3, 1]
    left = rows[: len(ended)]

    def break_in_a_meeting(circle: Circle) -> tuple[Any, bool, Any]:
        one = Training(circle, sync, adam, undoes=True)
        committer, forced = one.committer, False
        assert isinstance(committer, LocalUpdates)
        for number in range(updates):
            one.step(number, rows)
            if number < updates - 1:
                committer.sync()
        before = committer.meetings
        break_off(committer, ended=(*ended, True, True)[circle.rank])
        with suppress(ReplicaLost):
            committer.sync()
            if forced := committer.meetings == before:
                committer.meet()
        return committer.broken_off(), forced, one.module.state_dict()

    broken = together(4, break_in_a_meeting)

    def go_on(circle: Circle) -> list[Tensor]:
        one = Training(circle, sync, adam, undoes=True)
        one.module.load_state_dict(broken[0][2])
        one.committer.rejoin(broken[circle.rank][0], one.replica)
        met = weights(one.module)
        one.step(updates, left)
        one.committer.sync()
        one.committer.meet()
        return [met, weights(one.module)]

    found = together(len(left), go_on)
    expected = Left(sync, 4)
    for number in range(updates):
        expected.step(number, rows)
    expected.leave(len(left), forced=broken[3][1])
    met = weights(expected.modules[0])
    expected.step(updates, left)
    expected.meet()
    for each in found:
        assert float((each[0] - met).abs().max()) < 1e-12
        assert float((each[1] - weights(expected.modules[0])).abs().max()) < 1e-12


@pytest.mark.timeout(60)
def test_updates_behind_a_meeting_that_the_chief_has_not_made_do_not_count() -> None:
    sync, updates, rows = sg.DiLoCo(3, outer=sg.Outer(0.6, 0.5)), 6, [2, 1, 3]

    def break_in_a_meeting(circle: Circle) -> tuple[Any, Any]:
        one = Training(circle, sync, adam, undoes=True)
        for number in range(updates):
            one.step(number, rows)
            if number < updates - 1:
                one.committer.sync()
        assert isinstance(one.committer, LocalUpdates)
        break_off(one.committer, ended=circle.rank > 0)
        with suppress(ReplicaLost):
            one.committer.sync()
            if circle.rank == 1:  # goes on by an update, and by one that is not counted yet
                one.step(updates, rows)
                one.committer.sync()
                one.step(updates + 1, rows)
        return one.committer.broken_off(), one.module.state_dict()

    broken = together(3, break_in_a_meeting)

    def go_on(circle: Circle) -> tuple[Tensor, int]:
        one = Training(circle, sync, adam, undoes=True)
        one.module.load_state_dict(broken[0][1])
        one.committer.rejoin(broken[circle.rank][0], one.replica)
        assert isinstance(one.committer, LocalUpdates)
        return weights(one.module), one.committer.cadence.updates

    expected = Left(sync, 3)
    for number in range(updates):
        expected.step(number, rows)
    expected.leave(2, forced=False)
    for found, counted in together(2, go_on):
        assert float((found - weights(expected.modules[0])).abs().max()) < 1e-12
        assert counted == updates
