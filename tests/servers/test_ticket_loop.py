"""Custom loops with servers equal one device, or are refused."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import stratagem as sg
from stratagem.servers.ticket_loop import TicketLoader
from tests.served_support import apart, close_all, digits, net, strategy
from tests.spread import assert_work, watched

pytestmark = pytest.mark.timeout(60)

#: what a loop does with a batch and its number: it may or may not make a step
Step = Callable[[nn.Module, Optimizer, Any, int], None]
#: on the chief, or told by a worker that was first
REFUSED = sg.NotDistributable, sg.UsageError, sg.ReplicaFailed


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    close_all()


def alone() -> Any:
    """A single asynchronous worker, which equals plain training."""
    return strategy("1 ps", "asynchronous", 1)


def in_step() -> Any:
    return strategy("1 ps", "synchronous", 2)


def loop(
    where: Any,
    step: Step,
    rows: int = 160,
    epochs: int = 2,
    made: Callable[[], nn.Module] = net,
    kind: Any = torch.optim.SGD,
    rate: float = 0.5,
) -> nn.Module:
    x, y, _, _ = digits()
    module = made()
    optimizer = kind(module.parameters(), lr=rate)
    loader: Any = DataLoader(TensorDataset(x[:rows], y[:rows]), batch_size=16)
    if where is not None:
        module, optimizer, loader = where.prepare(module, optimizer, loader)
    for _ in range(epochs):
        for number, batch in enumerate(loader):
            step(module, optimizer, batch, number)
    return module


def compare(where: Any, step: Step, **options: Any) -> float:
    """Return the distance of the weights from those of one device.

    The weights must have changed, and every worker must have computed rows.
    """
    plain, alone = watched(lambda: loop(None, step, **options))
    assert apart(plain, options.get("made", net)()) > 1e-3
    found, spread = watched(lambda: where.run(partial(loop, where, step, **options)), where)
    assert_work(alone, spread)
    return apart(found[0], plain)


def backward(module: nn.Module, batch: Any) -> None:
    F.cross_entropy(module(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]


def clipped(module: nn.Module, optimizer: Optimizer, batch: Any, number: int) -> None:
    backward(module, batch)
    nn.utils.clip_grad_norm_(module.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()


def clamped(module: nn.Module, optimizer: Optimizer, batch: Any, number: int) -> None:
    backward(module, batch)
    for param in module.parameters():
        assert param.grad is not None
        param.grad = param.grad.clamp(-0.001, 0.001)
    optimizer.step()
    optimizer.zero_grad()


def without_bias(module: nn.Module, optimizer: Optimizer, batch: Any, number: int) -> None:
    backward(module, batch)
    module.get_parameter("0.bias").grad = None
    optimizer.step()
    optimizer.zero_grad()


def twice(module: nn.Module, optimizer: Optimizer, batch: Any, number: int) -> None:
    backward(module, batch)
    backward(module, (batch[0] * 0.5, batch[1]))
    optimizer.step()
    optimizer.zero_grad()


class Table(nn.Module):
    """A sparse table with a row for each shade of gray."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(17, 10, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows((x * 16).long()).mean(1)


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [clipped, clamped, without_bias, twice])
def test_gradients_count_as_they_are_when_step_is_called(step: Step) -> None:
    assert compare(alone(), step) < 1e-6


@pytest.mark.parametrize("where", [alone, in_step])
def test_a_sparse_gradient_of_two_backwards(where: Any) -> None:
    # torch adds each row up at its place in the table, in another order
    assert compare(where(), twice, made=Table) < 1e-4


@pytest.mark.parametrize("step", [without_bias, twice])
def test_in_step_what_everybody_does_alike(step: Step) -> None:
    assert compare(in_step(), step) < 1e-5


@pytest.mark.parametrize("step", [clipped, clamped])
def test_clipping_a_part_of_a_batch_is_refused(step: Step) -> None:
    where = in_step()
    with pytest.raises(REFUSED, match="clip_norm"):
        where.run(loop, where, step)


# --- settings ------------------------------------------------------------------------------------


def scheduled(where: Any, busy: int = -1, absent: int = -1) -> nn.Module:
    """Train with a falling learning rate; one worker is slow, or leaves at once."""
    x, y, _, _ = digits()
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
    loader: Any = DataLoader(TensorDataset(x[:161], y[:161]), batch_size=16)  # one is left over
    if where is not None:
        module, optimizer, loader = where.prepare(module, optimizer, loader)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    index = -2 if where is None else sg.current_replica().index
    for _ in range(0 if index == absent else 2):
        for batch in loader:
            if index == busy:
                time.sleep(0.02)
            backward(module, batch)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return module


@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.parametrize("workers", [2, 3])
def test_in_step_a_schedule_by_batch(workers: int, busy: int) -> None:
    where = strategy("1 ps", "synchronous", workers)
    assert apart(where.run(scheduled, where, busy)[0], scheduled(None)) < 1e-5


def test_a_schedule_by_batch_is_refused_where_a_batch_is_several() -> None:
    where = in_step()
    with pytest.raises(REFUSED, match="by epoch"):
        where.run(scheduled, where, -1, 1)


# --- batches without a step ----------------------------------------------------------------------


def in_a_window(where: Any, rows: int, reduction: str = "mean") -> nn.Module:
    """Fetch all batches of an epoch, then train on each, and make one step."""
    x, y, _, _ = digits()
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5 if reduction == "mean" else 0.02)
    loader: Any = DataLoader(TensorDataset(x[:rows], y[:rows]), batch_size=16)
    count = len(loader)
    if where is not None:
        module, optimizer, loader = where.prepare(module, optimizer, loader)
    for _ in range(2):
        batches = iter(loader)
        for a, b in [next(batches) for _ in range(count)]:
            F.cross_entropy(module(a), b, reduction=reduction).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert next(batches, None) is None
    return module


@pytest.mark.parametrize("rows", [35, 37])  # the last batch is of 3 or 5 rows
@pytest.mark.parametrize("where", [alone, in_step])
def test_batches_fetched_ahead_weigh_by_their_own_parts(where: Any, rows: int) -> None:
    here = where()
    for reduction in ("mean", "sum"):
        expected = in_a_window(None, rows, reduction)
        assert apart(expected, net()) > 1e-3
        assert apart(here.run(in_a_window, here, rows, reduction)[0], expected) < 1e-5


def test_a_worker_without_a_part_of_the_latest_batch_cannot_weigh_others() -> None:
    where = in_step()
    with pytest.raises(REFUSED, match="fetch each batch when its turn comes"):
        where.run(in_a_window, where, 33)


def every_other(module: nn.Module, optimizer: Optimizer, batch: Any, number: int) -> None:
    backward(module, batch)
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()


def but_dark(module: nn.Module, optimizer: Optimizer, batch: Any, number: int) -> None:
    """Skip some batches, which the optimizer must not count."""
    if float(batch[0].mean()) < 0.3:
        return
    backward(module, batch)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("step", [every_other, but_dark])
def test_batches_without_a_step_are_done(step: Step) -> None:
    where = alone()
    assert compare(where, step, kind=torch.optim.Adam, rate=0.01) < 1e-6
    books = where.stats()
    assert books.skipped and books.skipped + books.applied == 20
    assert not books.requeued and books.received == books.applied == books.updates


@pytest.mark.parametrize("rows", [160, 155, 153])
def test_in_step_gradients_of_several_batches_add_up(rows: int) -> None:
    """Also if the last batch is short, so that its parts have different shares."""
    assert compare(in_step(), every_other, rows=rows) < 1e-5


def test_in_step_a_batch_with_nothing_for_some_is_refused_while_gradients_add_up() -> None:
    with pytest.raises(REFUSED, match="drop_last=True"):
        in_step().run(partial(loop, in_step(), every_other, rows=145))
    assert compare(in_step(), twice, rows=145) < 1e-5


def again_and_again(where: Any) -> None:
    """Worker 1 begins a pass by hand once worker 0 has done all batches."""
    x, y, _, _ = digits()
    module = net()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x[:32], y[:32]), batch_size=16)
    module, optimizer, loader = where.prepare(module, optimizer, loader)
    if sg.current_replica().index == 0:
        for batch in loader:
            backward(module, batch)
            optimizer.step()
        return
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        backward(module, batch)
        optimizer.step()


def test_a_pass_that_finds_no_batch_is_told() -> None:
    where = strategy("1 ps", "asynchronous", 2)
    with pytest.raises(REFUSED, match=r"with `for`, or call next\(it, None\)") as caught:
        where.run(again_and_again, where)
    assert "Traceback" not in str(caught.value)


def by_class(where: Any) -> nn.Module:
    """Batches of one class each, so that all parts of a batch are left out, or none."""
    x, y, _, _ = digits()
    module = net()
    optimizer: Any = torch.optim.Adam(module.parameters(), lr=0.01)
    rows = torch.cat([torch.nonzero(y == n)[:16, 0] for n in range(10)])
    loader: Any = DataLoader(TensorDataset(x[rows], y[rows]), batch_size=16)
    if where is not None:
        module, optimizer, loader = where.prepare(module, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            if int(batch[1][0]) % 3:
                backward(module, batch)
                optimizer.step()
                optimizer.zero_grad()
    return module


def test_in_step_a_batch_that_all_leave_out_makes_no_update() -> None:
    where = in_step()
    results = where.run(by_class, where)
    assert apart(results[0], by_class(None)) < 1e-5 and apart(*results) == 0
    books = where.stats()
    assert (books.updates, books.applied, books.skipped, books.requeued) == (12, 24, 16, 0)


def one_leaves_out(where: Any) -> nn.Module:
    me = sg.current_replica().index

    def step(module: nn.Module, optimizer: Optimizer, batch: Any, number: int) -> None:
        if me == 1:
            return
        backward(module, batch)
        optimizer.step()

    return loop(where, step)


def test_in_step_one_part_may_be_left_out() -> None:
    """The other parts make the update; no worker computes the skipped part."""
    where = in_step()
    where.run(one_leaves_out, where)
    books = where.stats()
    assert books.applied + books.skipped == 40 and not books.requeued
    assert books.received == books.applied


# --- what servers cannot do ----------------------------------------------------------------------


def with_closure(module: nn.Module, optimizer: Optimizer, batch: Any, number: int) -> None:
    def again() -> float:
        optimizer.zero_grad()
        backward(module, batch)
        return 0.0

    optimizer.step(again)


def masked(module: nn.Module, optimizer: Optimizer, batch: Any, number: int) -> None:
    backward(module, batch)
    for param in module.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)
    optimizer.step()


def by_another(module: nn.Module, optimizer: Optimizer, batch: Any, number: int) -> None:
    """Step with an optimizer that was not prepared."""
    backward(module, batch)
    torch.optim.SGD(module.parameters(), lr=0.1).step()


def in_halves(where: Any) -> None:
    """Two optimizers for one model."""
    module = net()
    first = torch.optim.SGD(module.get_submodule("0").parameters(), lr=0.1)
    where.prepare(module, first, DataLoader(range(8)))  # type: ignore[arg-type]


def a_part_of_the_data(where: Any) -> None:
    """Take only a part of the data, as a script for DDP does."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rows: Any = range(8)
    sampler: Any = DistributedSampler(rows, num_replicas=2, rank=0)
    where.prepare(module, optimizer, DataLoader(rows, sampler=sampler))


def both_at_once(where: Any) -> None:
    """Train two models against each other."""
    for _ in range(2):
        module = net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        where.prepare(module, optimizer, DataLoader(range(8)))  # type: ignore[arg-type]


def one_within(where: Any) -> None:
    """Begin a second training within a batch of the first."""
    loop(where, lambda *_: both_at_once(where))


def one_after_the_other(where: Any, strays: str = "") -> list[nn.Module]:
    """Run two trainings; the second may use objects of the first."""
    x, y, _, _ = digits()
    made: list[Any] = []
    for seed in (0, 1):
        module = net(seed)
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.5)
        loader: Any = DataLoader(TensorDataset(x[:160], y[:160]), batch_size=16)
        if where is not None:
            module, optimizer, loader = where.prepare(module, optimizer, loader)
        made.append((module, optimizer, loader))
        for batch in loader:
            backward(module, batch)
            optimizer.step()
            optimizer.zero_grad()
            if seed and strays == "step":
                made[0][1].step()
    if strays == "loop":
        next(iter(made[0][2]))
    return [module for module, _, _ in made]


def prepared_again(where: Any) -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        where.prepare(module, optimizer, DataLoader(range(8)))  # type: ignore[arg-type]


def in_turn(where: Any) -> None:
    """Prepare a GAN's two models as on replicas."""
    for loader in (DataLoader(range(8)), None):  # type: ignore[arg-type]
        module = net()
        where.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1), loader)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (partial(loop, step=with_closure), "closure"),
        (in_halves, "2 trainable parameters .* not in the optimizer"),
        (a_part_of_the_data, "DistributedSampler.*leave the sampler out"),
        (both_at_once, "one model at a time"),
        (prepared_again, "this model is prepared already"),
        (in_turn, "where models train in turn .a GAN., use MirroredStrategy"),
        (lambda where: where.prepare(net(), None, DataLoader([])), r"torch\.optim\.SGD\(.*serves"),
        (lambda where: where.barrier(), "do not wait for each other, so there is no barrier"),
        (one_within, "one model at a time"),
        (partial(one_after_the_other, strays="step"), "another one was prepared.*in turn"),
        (partial(one_after_the_other, strays="loop"), "training of this loader has ended"),
    ],
    ids=[
        "closure",
        "two optimizers",
        "a sampler",
        "two models",
        "prepared again",
        "in turn",
        "no optimizer",
        "a barrier",
        "nested",
        "old optimizer",
        "old loader",
    ],
)
def test_what_servers_cannot_do_is_refused(function: Any, says: str) -> None:
    where = alone()
    with pytest.raises((sg.NotDistributable, sg.UsageError), match=says):
        where.run(function, where)


@pytest.mark.parametrize(
    ("step", "says"), [(masked, "to mask or scale"), (by_another, "that was not prepared")]
)
def test_a_remedy_fits_what_the_loop_did(step: Step, says: str) -> None:
    where = in_step()
    with pytest.raises(REFUSED, match=says):
        where.run(loop, where, step)


def afterwards(where: Any) -> None:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    where.prepare(module, optimizer, DataLoader(TensorDataset(torch.ones(4, 64)), batch_size=2))


def test_a_hook_that_would_see_old_values_is_refused() -> None:
    where = alone()
    with pytest.raises(REFUSED, match="after step"):
        where.run(afterwards, where)


@pytest.mark.parametrize("where", [alone, in_step])
def test_one_training_after_the_other(where: Any) -> None:
    there = where()
    results = there.run(one_after_the_other, there)
    for mine, plain in zip(results[0], one_after_the_other(None), strict=True):
        assert apart(mine, plain) < 1e-5


# --- checkpoints ---------------------------------------------------------------------------------


def saving(
    where: Any, stop: int, begin: int = 0, saved: Any = None
) -> tuple[nn.Module, list[Any], list[Any]]:
    """Train on batches from `begin`; return the state after batch `stop`, and at the end."""
    x, y, _, _ = digits()
    module: Any = net()
    optimizer: Any = torch.optim.Adam(module.parameters(), lr=0.01)
    if saved is not None:
        optimizer.load_state_dict(saved[0])
        module.load_state_dict(saved[1])
    rows = slice(begin * 16, 160)
    loader: Any = DataLoader(TensorDataset(x[rows], y[rows]), batch_size=16)
    if where is not None:
        module, optimizer, loader = where.prepare(module, optimizer, loader)
    group, kept = optimizer.param_groups[0], []
    for number, batch in enumerate(loader, begin + 1):
        backward(module, batch)
        optimizer.step()
        optimizer.zero_grad()
        if number == stop:
            kept = copy.deepcopy([optimizer.state_dict(), module.state_dict()])
    last = copy.deepcopy([optimizer.state_dict(), module.state_dict()])
    assert optimizer.param_groups[0] is group  # a scheduler may have it in hand
    return module, kept, last


def same(mine: Any, plain: Any, near: float) -> bool:
    """Return whether an optimizer's state and a model's values are those of one device."""
    a, b = mine[0]["state"], plain[0]["state"]
    assert a.keys() == b.keys() and len(a) == 4
    steps = all(float(a[i]["step"]) == float(b[i]["step"]) for i in a)
    pairs = [(a[i][k], b[i][k]) for i in a for k in ("exp_avg", "exp_avg_sq")]
    pairs += [(mine[1][key], plain[1][key]) for key in plain[1]]
    return steps and all(bool(((x - y).abs() <= near).all()) for x, y in pairs)


def test_what_is_saved_in_mid_epoch_is_gone_on_with() -> None:
    where = alone()
    plain, kept, last = saving(None, 5)
    ((mine, my_kept, my_last),) = where.run(saving, where, 5)
    assert same(my_kept, kept, 1e-6) and same(my_last, last, 1e-6)
    assert apart(mine, plain) < 1e-6
    again = saving(None, 0, 5, copy.deepcopy(my_kept))  # torch goes on in what it is given
    assert apart(again[0], plain) < 1e-6
    ((resumed, _, _),) = where.run(saving, where, 0, 5, my_kept)
    assert apart(resumed, plain) < 1e-6


def test_every_worker_can_save_what_came_of_it() -> None:
    where = in_step()
    plain, _, last = saving(None, 0)
    for index, (mine, _, my_last) in enumerate(where.run(saving, where, 0)):
        assert apart(mine, plain) < 1e-5
        if index == 0 or my_last[0]["state"]:  # the other may come when all is over
            assert same(my_last, last, 1e-5)


# --- what the loop writes itself -----------------------------------------------------------------


def writes(where: Any, kind: str) -> tuple[nn.Module, Any]:
    """Write weights and optimizer state during the training."""
    x, y, _, _ = digits()
    torch.manual_seed(9)
    other = net(7)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    backward(other, (x[:50], y[:50]))
    theirs.step()
    saved = copy.deepcopy([other.state_dict(), theirs.state_dict()])
    module: Any = net()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(TensorDataset(x[:96], y[:96]), batch_size=16)
    if where is not None:
        module, optimizer, loader = where.prepare(module, optimizer, loader)
    first = module.get_parameter("0.weight")
    for epoch in range(2):
        if (kind in ("all", "weights") and epoch == 0) or (kind == "later" and epoch == 1):
            module.load_state_dict(saved[0])
        if (kind in ("all", "state") and epoch == 0) or (kind == "later" and epoch == 1):
            optimizer.load_state_dict(saved[1])
        if kind == "anew":
            optimizer.state.clear()
        for number, batch in enumerate(loader):
            if kind == "before":
                with torch.no_grad():
                    first.clamp_(-0.05, 0.05)
            backward(module, batch)
            optimizer.step()
            optimizer.zero_grad()
            if kind == "after" and number == 2:
                with torch.no_grad():
                    first.clamp_(-0.05, 0.05)
            if kind == "data":
                first.data.clamp_(-0.05, 0.05)
            if kind == "state in the loop" and number == 2:
                optimizer.load_state_dict(saved[1])
            if kind == "left" and number == 2:
                break
        if kind in ("epoch", "left"):
            with torch.no_grad():
                first.clamp_(-0.05, 0.05)
        if kind == "memory":
            first.data = first.detach().clamp(-0.05, 0.05)
    return module, optimizer


KINDS = ["all", "weights", "state", "later", "anew", "epoch", "left", "memory"]


@pytest.mark.parametrize("where", [alone, in_step])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_loop_writes_counts_as_on_one_device(where: Any, kind: str) -> None:
    plain, optimizer = writes(None, kind)
    (mine, mine_too), *others = where().run(writes, where(), kind)
    for module in (mine, *(each for each, _ in others)):
        assert apart(module, plain) < 1e-6
    moments = [each.state_dict()["state"] for each in (mine_too, optimizer)]
    for i, state in moments[1].items():
        assert torch.allclose(moments[0][i]["momentum_buffer"], state["momentum_buffer"], atol=1e-6)


@pytest.mark.parametrize(
    ("where", "kind"),
    [(in_step, each) for each in ("before", "after", "data", "state in the loop")]
    + [(alone, each) for each in ("before", "after")],
)
def test_what_is_written_in_the_loop_is_refused(where: Any, kind: str) -> None:
    with pytest.raises(REFUSED, match="in the loop"):
        where().run(writes, where(), kind)


# --- the end -------------------------------------------------------------------------------------


def leaves(where: Any, first: int) -> nn.Module:
    """Leave the loop within an epoch on all workers, on `first` long before the other one."""
    x, y, _, _ = digits()
    module: Any = net()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=4)
    module, optimizer, loader = where.prepare(module, optimizer, loader)
    steps = 3 if sg.current_replica().index == first else 60
    for number, batch in enumerate(loader, 1):
        backward(module, batch)
        optimizer.step()
        optimizer.zero_grad()
        if number == steps:
            break
    return module


@pytest.mark.parametrize("first", [0, 1])
def test_who_leaves_the_loop_early_ends_with_the_others_values(first: int) -> None:
    where = strategy("2 ps", "bounded")
    results = where.run(leaves, where, first)
    assert apart(*results) == 0.0 and apart(results[0], net()) > 1e-3


def test_in_step_the_chief_leaves_for_all() -> None:
    def few(module: nn.Module, optimizer: Optimizer, batch: Any, number: int) -> None:
        backward(module, batch)
        optimizer.step()
        optimizer.zero_grad()

    where = strategy("2 ps", "synchronous")
    results = where.run(leaves, where, 0)
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y, _, _ = digits()
    for number in range(3):
        few(plain, optimizer, (x[4 * number :][:4], y[4 * number :][:4]), number)
    assert apart(*results) == 0.0 and apart(results[0], plain) < 1e-6


def test_in_step_nobody_goes_on_where_another_has_left() -> None:
    where = strategy("2 ps", "synchronous")
    with pytest.raises(REFUSED, match="worker 1 left its loop"):
        where.run(leaves, where, 1)


class ByEpoch:
    """Batches of four; the numbers of an epoch are a hundred above those of the one before."""

    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch += 1
        for first in range(0, 40, 4):
            yield [100 * self.epoch + first + i for i in range(4)]


def left_early(
    where: Any, late: bool, epochs: int = 3
) -> tuple[nn.Module, list[list[int]], list[nn.Module]]:
    """Three batches an epoch; the loop is left after a step, or before the step of a batch."""
    x, y, _, _ = digits()
    module: Any = net()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(x[:400], y[:400], torch.arange(400))
    loader: Any = DataLoader(data, batch_sampler=ByEpoch())  # type: ignore[arg-type]
    if where is not None:
        module, optimizer, loader = where.prepare(module, optimizer, loader)
    seen: list[list[int]] = []
    after = []
    for _ in range(epochs):
        seen.append([])
        for number, (a, b, i) in enumerate(loader):
            if late and number == 3:
                break
            seen[-1] += i.tolist()
            backward(module, (a, b))
            optimizer.step()
            optimizer.zero_grad()
            if not late and number == 2:
                break
        after.append(copy.deepcopy(module))
    return module, seen, after


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("place", ["1 ps", "2 ps"])
def test_in_step_a_loop_that_all_leave_is_that_of_one_device(place: str, late: bool) -> None:
    where = strategy(place, "synchronous")
    plain, order, steps = left_early(None, late)
    results = where.run(left_early, where, late)
    for mine, _, after in results:
        assert apart(mine, plain) < 1e-6
        assert max(map(apart, after, steps)) < 1e-6
    both = [sorted(a + b) for a, b in zip(results[0][1], results[1][1], strict=True)]
    assert both == order


def shuffled_and_left(where: Any) -> nn.Module:
    x, y, _, _ = digits()
    module: Any = net()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    dice = torch.Generator().manual_seed(5)
    loader: Any = DataLoader(
        TensorDataset(x[:60], y[:60]), batch_size=10, shuffle=True, generator=dice
    )
    if where is not None:
        module, optimizer, loader = where.prepare(module, optimizer, loader)
    for _ in range(3):
        for number, batch in enumerate(loader):
            backward(module, batch)
            optimizer.step()
            optimizer.zero_grad()
            if number == 3:  # all six have been drawn by then
                break
    return module


@pytest.mark.parametrize("where", [alone, in_step])
def test_what_was_drawn_ahead_of_a_loop_that_is_left_changes_no_later_order(where: Any) -> None:
    plain = shuffled_and_left(None)
    for mine in where().run(shuffled_and_left, where()):
        assert apart(mine, plain) < 1e-6


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rule", ["asynchronous", "bounded", "buffered", "spares"])
def test_every_pass_has_batches_of_its_own_epoch(rule: str, late: bool) -> None:
    where = strategy("1 ps", rule)
    results = where.run(left_early, where, late)
    for _, seen, _ in results:
        assert [{i // 100 for i in each} <= {k} for k, each in enumerate(seen)] == [True] * 3
    assert [len(each) > 4 for each in results[0][1]] == [True] * 3


# --- the order of batches ------------------------------------------------------------------------


def shuffled(where: Any, own: bool) -> nn.Module:
    """Two epochs in the order of the loader's own generator, or torch's."""
    x, y, _, _ = digits()
    module: Any = net()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.5)
    torch.manual_seed(5)
    dice = torch.Generator().manual_seed(3) if own else None
    loader: Any = DataLoader(TensorDataset(x[:90], y[:90]), 16, shuffle=True, generator=dice)
    if where is not None:
        module, optimizer, loader = where.prepare(module, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            backward(module, batch)
            optimizer.step()
            optimizer.zero_grad()
    return module


def shuffled_fit(where: Any, own: bool) -> nn.Module:
    """The same with sg.Model."""
    x, y, _, _ = digits()
    model = sg.Model(net(), where)
    model.compile(lambda params: torch.optim.SGD(params, lr=0.5), "cross_entropy")
    torch.manual_seed(5)
    dice = torch.Generator().manual_seed(3) if own else None
    loader: Any = DataLoader(TensorDataset(x[:90], y[:90]), 16, shuffle=True, generator=dice)
    model.fit(loader, epochs=2, verbose=0)
    return model.module


@pytest.mark.parametrize("own", [True, False])
def test_a_shuffled_loader_has_the_order_of_one_device(own: bool) -> None:
    where, plain = alone(), shuffled(None, own)
    assert apart(where.run(shuffled, where, own)[0], plain) < 1e-6
    if not own:  # `fit` takes a number from torch's dice before the loader does
        plain = shuffled_fit(None, own)
    assert apart(shuffled_fit(where, own), plain) < 1e-6


def renormed(where: Any) -> None:
    module = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    data = TensorDataset(torch.zeros(8, 2).long(), torch.zeros(8).long())
    where.prepare(module, optimizer, DataLoader(data, batch_size=4))


def test_rows_that_forward_rewrites_are_refused() -> None:
    """Servers would not know the new rows, not even with one worker."""
    where = alone()
    with pytest.raises(REFUSED, match="max_norm"):
        where.run(renormed, where)
    module = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 2))
    model = sg.Model(module, where)
    model.compile("sgd", "cross_entropy")
    with pytest.raises(REFUSED, match="max_norm"):
        model.fit(torch.zeros(8, 2).long(), torch.zeros(8).long(), verbose=0)


def test_scaled_gradients_are_not_pushed() -> None:
    """A GradScaler tells a fused optimizer the scale, and gradients are still scaled then."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
    optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
    with pytest.raises(sg.NotDistributable, match="leave the scaler out"):
        TicketLoader.hand_in(object.__new__(TicketLoader), optimizer, (optimizer,), {})
