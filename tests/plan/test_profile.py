"""The measured cost of a step: times, buckets, sparse rows; the model is not changed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from stratagem.errors import UsageError
from stratagem.plan.measure import rehearse
from stratagem.plan.notebook import profile
from stratagem.plan.profile import Profile
from stratagem.plan.report import warnings
from stratagem.training.dry_run import DryRun
from tests.clock import in_time, unless_late
from tests.plan import support

pytestmark = pytest.mark.timeout(60)


class Slow(nn.Module):
    """Sleeps in forward, and in backward after its gradient is made."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds[0])
        out = x + self.weight.sum()
        out.register_hook(lambda grad: time.sleep(self.seconds[1]))
        return out


def digits(rows: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8), torch.randint(0, 8, (rows,))


def test_times_are_those_of_the_model() -> None:
    net = nn.Sequential(Slow(0.0, 0.01), Slow(0.02, 0.0))
    seen = profile(
        net, digits(), loss=cross_entropy, optimizer=torch.optim.SGD(net.parameters()), steps=6
    )
    in_time(seen.forward, 0.06, least=0.02)
    in_time(seen.backward, 0.05, least=0.01)
    assert len(seen.samples) >= 5 and seen.batch == 16 and seen.name == "Sequential"
    assert seen.device == "cpu" and seen.threads in (1, torch.get_num_threads())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_other_work_is_told() -> None:
    """A busy loop on the same core leaves half of it to the measured step."""
    net, places, threads = nn.Linear(8, 8), os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(places)})
    loop = "print(flush=True)\nwhile True: pass"
    busy = subprocess.Popen([sys.executable, "-c", loop], stdout=subprocess.PIPE)
    try:
        assert busy.stdout is not None and busy.stdout.readline()
        seen = profile(
            net,
            digits(),
            loss=cross_entropy,
            optimizer=torch.optim.SGD(net.parameters()),
            steps=500,
        )
    finally:
        os.sched_setaffinity(0, places)
        torch.set_num_threads(threads)
        busy.kill()
        busy.communicate()
    assert "other work had the processor for" in " ".join(warnings(seen))


def test_buckets_are_those_of_the_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of backward, full when their last member is there."""
    monkeypatch.setattr("stratagem.plan.measure.BUCKET_BYTES", 40)
    net = nn.Sequential(Slow(0.0, 0.0), Slow(0.0, 0.02))
    seen = profile(
        net, digits(), loss=cross_entropy, optimizer=torch.optim.SGD(net.parameters()), steps=4
    )
    first, second = seen.buckets
    assert first.size == second.size == 32 and seen.shapes == ((8,), (8,))
    assert first.ready <= second.ready <= seen.backward and second.ready >= 0.02


def test_sparse_rows_are_counted() -> None:
    net = nn.Sequential(nn.Embedding(1000, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    x = torch.tensor([[1, 2], [2, 3], [999, 1]])
    seen = profile(
        net,
        (x, torch.tensor([0, 1, 0])),
        loss=cross_entropy,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        steps=2,
    )
    (table,) = seen.sparse
    assert (table.rows, table.row_bytes, table.touched) == (1000, 16, 4.0)
    assert seen.dense_bytes == (16 + 2) * 4 and seen.sparse_bytes == pytest.approx(4 * (16 + 8))


def test_a_batch_that_repeats_examples_touches_as_many_rows_as_one_that_does_not() -> None:
    net = nn.Sequential(nn.Embedding(5000, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ids = torch.randint(0, 5000, (1024,), generator=torch.Generator().manual_seed(0))

    def loss(batch: Tensor) -> Tensor:
        value: Tensor = net(batch).pow(2).mean()
        return value

    few = DryRun(net, ids[:64], loss, optimizer.step, optimizer, device="cpu")
    seen = rehearse(few, batch=1024, steps=1, crowded=False)
    (table,) = seen.sparse
    assert table.touched == pytest.approx(len(ids.unique()), rel=0.05)
    assert "repeating them" in " ".join(warnings(seen))
    assert "repeating" not in " ".join(rehearse(few, steps=1, crowded=False).notes)


class Crowded(nn.Linear):
    """A model whose threads slow each other down."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.004 * torch.get_num_threads())
        return super().forward(x)


def test_one_thread_that_is_faster_is_noted() -> None:
    net, threads = Crowded(4, 3), torch.get_num_threads()
    optimizer, x = torch.optim.SGD(net.parameters(), 0.1), torch.randn(8, 4)
    torch.set_num_threads(3)
    try:
        seen = profile(net, (x, x[:, :3]), loss=mse_loss, optimizer=optimizer, steps=5)
    finally:
        torch.set_num_threads(threads)
    unless_late(seen.threads == 1, "one thread slept longer than three")
    assert seen.usual_threads == 3
    assert any("one thread is faster here than 3" in note for note in warnings(seen))
    assert Profile.from_json(seen.to_json()) == seen


def test_the_model_is_left_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    net[1].eval()
    modes = [each.training for each in net.modules()]
    optimizer = torch.optim.Adam(net.parameters())
    data = digits()
    before, state = deepcopy(net.state_dict()), torch.get_rng_state()
    profile(net, data, loss=cross_entropy, optimizer=optimizer, steps=2)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    assert not optimizer.state and torch.equal(state, torch.get_rng_state())
    assert modes == [each.training for each in net.modules()] and not net[1].training
    assert all(p.grad is None for p in net.parameters())


def test_progress_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed memory is kept from the start, as in the replicas that one device is compared with."""
    said: list[str] = []
    monkeypatch.setattr("stratagem.plan.measure.keep_freed_memory", lambda: said.append("kept"))
    net = nn.Linear(8, 8)
    profile(
        net,
        digits(),
        loss=cross_entropy,
        optimizer=torch.optim.SGD(net.parameters()),
        steps=2,
        say=said.append,
    )
    assert said[0] == "kept"
    assert "profiling Linear, 16 examples" in said[1] and "2 steps" in said[2]


@pytest.mark.skipif(torch.get_num_threads() > 64, reason="an enormous machine")
def test_among_others_on_this_machine() -> None:
    """Real replicas compute at once; a sleeping model does not become slower."""
    net = nn.Sequential(Slow(0.02, 0.0))
    seen = profile(
        net,
        digits(),
        loss=cross_entropy,
        optimizer=torch.optim.SGD(net.parameters()),
        steps=3,
        crowded=True,
    )
    for n, compute in seen.crowd:
        assert n >= 2
        in_time(compute, 0.2, least=0.02)


class Greedy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * torch.empty(1 << 50)


def test_too_large_for_memory_is_one_sentence() -> None:
    net = Greedy()
    with pytest.raises(UsageError, match="Greedy does not fit in this device's memory with 16"):
        profile(net, digits(), loss=cross_entropy, optimizer=torch.optim.SGD(net.parameters()))


def test_nothing_to_train_and_nothing_to_train_on() -> None:
    net = nn.Linear(8, 8).requires_grad_(False)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(UsageError, match="no parameter that requires a gradient"):
        profile(net, digits(), loss=cross_entropy, optimizer=optimizer)
    with pytest.raises(UsageError, match="no example"):
        profile(net, digits(0), loss=cross_entropy, optimizer=optimizer)


@given(support.profiles())
def test_json_comes_back(model: Profile) -> None:
    assert Profile.from_json(model.to_json()) == model


@pytest.mark.parametrize("plain", [{}, {"name": 1}, {"batch": 0, "buckets": []}, {"buckets": 3}])
def test_no_profile_is_one_sentence(plain: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="no profile"):
        Profile.from_json(plain)
    with pytest.raises(UsageError, match="cannot be"):
        support.profile(batch=0)


def test_threads_share_a_part() -> None:
    model = support.profile(threads=4, single_thread=0.09)  # 0.03 with four: 0.01 is serial
    assert model.with_threads(4) == 0.03 and model.with_threads(1) == pytest.approx(0.09)
    assert model.with_threads(2) == pytest.approx(0.01 + 0.08 / 2)
