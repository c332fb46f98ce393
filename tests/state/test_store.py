"""Pieces on K servers are updated as by one torch optimizer of the whole model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.errors import UsageError
from stratagem.state import sums
from stratagem.state.optimizer_recipe import describe
from stratagem.state.partition import Piece
from stratagem.state.store import Store
from tests.state.store_support import Make, Servers, close, gradients, parameters

O = torch.optim  # noqa: E741
SETTINGS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p: O.SGD(p, lr=0.1),
    "sgd momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05),
    "sgd nesterov": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd dampening": lambda p: O.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    "adam": lambda p: O.Adam(p, lr=0.1),
    "adam amsgrad": lambda p: O.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.05, betas=(0.8, 0.9)),
    "adam maximize": lambda p: O.Adam(p, lr=0.1, maximize=True),
    "adam foreach": lambda p: O.Adam(p, lr=0.1, foreach=True),
    "adam tensor lr": lambda p: O.Adam(p, lr=torch.tensor(0.1), capturable=False),
    "adamw": lambda p: O.AdamW(p, lr=0.1, weight_decay=0.1),
    "rmsprop": lambda p: O.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: O.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.3),
    "adadelta": lambda p: O.Adadelta(p, lr=0.5, weight_decay=0.01),
    "adamax": lambda p: O.Adamax(p, lr=0.1),
    "nadam": lambda p: O.NAdam(p, lr=0.1, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: O.RAdam(p, lr=0.1),
    "asgd": lambda p: O.ASGD(p, lr=0.1, t0=2),
    "rprop": lambda p: O.Rprop(p, lr=0.1),
    "adafactor": lambda p: O.Adafactor(p, lr=0.1),
}


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the small pieces of these tests as large ones."""
    monkeypatch.setattr(sums, "_SMALL", 0)


EACH = pytest.mark.parametrize("make", SETTINGS.values(), ids=SETTINGS.keys())


def plain_step(
    params: list[nn.Parameter], optimizer: O.Optimizer, grads: list[Tensor | None]
) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.to(param.dtype)
    optimizer.step()


def both(make: Make, servers: int, **more: Any) -> tuple[list[nn.Parameter], O.Optimizer, Servers]:
    params = parameters()
    optimizer = make(params)
    return params, optimizer, Servers(params, optimizer, servers, **more)


# --- the same answer ------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("servers", [1, 2, 3, 4])
def test_equals_the_whole_model(make: Make, servers: int) -> None:
    """Updates of two pushes by `add` and of one by `apply_one`; variable 1 is sometimes unused."""
    params, optimizer, spread = both(make, servers)
    for step in range(6):
        unused = [1] if step in (0, 3) else []
        one, two = gradients(2 * step, unused=unused), gradients(2 * step + 1, unused=unused)
        if step % 2:
            plain_step(params, optimizer, one)
            spread.each(one, lambda store, grad, used: store.apply_one(grad, 1.0, used))
        else:
            mean = [None if a is None else (3 * a + b) / 4 for a, b in zip(one, two, strict=True)]
            plain_step(params, optimizer, mean)
            spread.each(one, lambda store, grad, used: store.add(grad, 3.0, used))
            spread.each(two, lambda store, grad, used: store.add(grad, 1.0, used))
            for store in spread.stores:
                store.apply(1 / 4)
        close(spread.values(), params)
    assert {store.version for store in spread.stores} == {6}


@pytest.mark.parametrize("kind", [O.SGD, O.Adam, O.AdamW, O.RMSprop, O.Adagrad, O.NAdam])
def test_groups_have_their_own_settings(kind: Any) -> None:
    def make(p: list[nn.Parameter]) -> O.Optimizer:
        return kind(
            [
                {"params": [p[3], p[0]], "lr": 0.2},
                {"params": [p[1]], "weight_decay": 0.2},
                {"params": [p[4]], "maximize": True},
            ],
            lr=0.01,
        )

    params, optimizer, spread = both(make, 3)
    for step in range(4):
        grads = gradients(step)
        plain_step(params, optimizer, grads)
        spread.each(grads, lambda store, grad, used: store.apply_one(grad, 1.0, used))
    close(spread.values(), params)
    assert torch.equal(params[2], parameters()[2])  # in no group: nobody moves or fetches it
    changed = {
        o[d.piece].variable
        for o, s in zip(spread.own, spread.stores, strict=True)
        for d in s.changed_since(3)
    }
    assert changed == {0, 1, 3, 4}


@pytest.mark.parametrize("name", ["adam", "sgd momentum", "rmsprop", "adagrad", "nadam"])
def test_what_nobody_used_rests(name: str) -> None:
    """A zero gradient would move it, by momentum or weight decay."""
    _, _, spread = both(SETTINGS[name], 2)
    spread.each(gradients(0), lambda store, grad, used: store.apply_one(grad, 1.0))
    before, states = spread.values(), spread.states()
    spread.each(gradients(1, unused=[0, 2]), lambda store, g, used: store.add(g, 1.0, used))
    spread.each(gradients(2, unused=[0, 3]), lambda store, g, used: store.add(g, 1.0, used))
    for store in spread.stores:
        store.apply(0.5)
    moved = [not torch.equal(a, b) for a, b in zip(before, spread.values(), strict=True)]
    assert moved == [False, True, True, True, True]
    assert spread.states()[0].get("step") == states[0].get("step")


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("name", ["adam", "sgd momentum"])
def test_clip_by_value_comes_after_the_mean(name: str, sums: bool) -> None:
    params, optimizer, spread = both(SETTINGS[name], 2)
    for step in range(3):
        grads = [None if g is None else 2 * g for g in gradients(step)]
        clipped = [None if g is None else (g / 2).clamp(-0.3, 0.3) for g in grads]
        plain_step(params, optimizer, clipped)
        if sums:
            spread.each(grads, lambda store, grad, used: store.add(grad, 1.0))
            for store in spread.stores:
                store.apply(0.5, clip_value=0.3)
        else:
            spread.each(grads, lambda store, g, used: store.apply_one(g, 0.5, clip_value=0.3))
    close(spread.values(), params)


LINEAR = [name for name in SETTINGS if name not in ("asgd", "rprop", "adafactor")]


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("tensor", [False, True])
def test_a_rate_holds_for_one_step(name: str, tensor: bool) -> None:
    params, optimizer, spread = both(SETTINGS[name], 2)
    if tensor and "foreach" not in name:  # torch allows no tensor there
        for store in spread.stores:
            for group in store._stepper.optimizer.param_groups:  # type: ignore[union-attr]
                group["lr"] = torch.tensor(float(group["lr"]))
    for step, rate in enumerate([1.0, 0.25, 1.0, 0.5]):
        grads = gradients(step)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * rate
        plain_step(params, optimizer, grads)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / rate
        spread.each(grads, lambda store, grad, used, r=rate: store.apply_one(grad, 1.0, rate=r))
    close(spread.values(), params, 1e-5)
    assert spread.stores[0].settings()[0]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("name", ["asgd", "rprop", "adafactor"])
def test_a_rate_shortens_the_step_where_it_is_no_multiple(name: str) -> None:
    make: Make = SETTINGS[name]
    if name == "adafactor":  # its rate is bounded, and this one is over the bound
        make = lambda p: O.Adafactor(p, lr=2.0)  # noqa: E731
    params, optimizer, spread = both(make, 1)
    for step, rate in enumerate([1.0, 0.25, 0.5, 1.0]):
        before = [p.detach().clone() for p in params]
        grads = gradients(step)
        plain_step(params, optimizer, grads)
        with torch.no_grad():
            for p, b in zip(params, before, strict=True):
                p.copy_(b + rate * (p - b))
        spread.each(grads, lambda store, grad, used, r=rate: store.apply_one(grad, 1.0, rate=r))
    close(spread.values(), params)


def test_settings_change_on_the_way() -> None:
    params, optimizer, spread = both(SETTINGS["adam"], 2)
    for step in range(4):
        lr = 0.1 / (step + 1)
        optimizer.param_groups[0]["lr"] = lr
        for store in spread.stores:
            store.set_settings([{"lr": lr}])
        grads = gradients(step)
        plain_step(params, optimizer, grads)
        spread.each(grads, lambda store, grad, used: store.apply_one(grad, 1.0))
    close(spread.values(), params)
    (settings,) = spread.stores[0].settings()
    assert settings["lr"] == lr and settings["fused"] is None  # what the user said
    assert spread.stores[0]._stepper.optimizer.param_groups[0]["fused"]  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="2 groups"):
        spread.stores[0].set_settings([{}, {}])


def test_small_pieces_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "_SMALL", 1 << 13)
    params, optimizer, spread = both(SETTINGS["adam"], 2)
    for step in range(3):
        grads = gradients(step, unused=[step])
        plain_step(params, optimizer, grads)
        spread.each(grads, lambda store, g, used: store.apply_one(2 * g, 0.5, used))
    close(spread.values(), params)
    assert all(store.norm_squared(1.0) == 0 for store in spread.stores)


@pytest.mark.parametrize("shards", [2, 7])
def test_more_shards_than_servers(shards: int) -> None:
    params, optimizer, spread = both(SETTINGS["adam amsgrad"], 2, shards=shards)
    for step in range(3):
        grads = gradients(step)
        plain_step(params, optimizer, grads)
        spread.each(grads, lambda store, grad, used: store.apply_one(grad, 1.0))
    close(spread.values(), params)


def test_more_servers_than_rows() -> None:
    """A server without pieces does nothing."""
    params = parameters(shapes=[(2,)])
    spread = Servers(params, O.Adam(params), 4)
    assert [store.count for store in spread.stores] == [1, 1, 0, 0]
    spread.each([torch.ones(2)], lambda store, grad, used: store.apply_one(grad, 1.0))
    spread.each([torch.ones(2)], lambda store, grad, used: store.add(grad, 1.0))
    for store in spread.stores:
        assert store.norm_squared(1.0) == store.count
        store.apply(1.0)
    assert spread.stores[3].version == 2 and spread.stores[3].changed_since(-1) == []
    assert spread.stores[3].snapshot().states == []


# --- kinds of numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["adam", "sgd momentum", "adagrad"])
def test_stored_in_another_type(name: str, dtype: torch.dtype) -> None:
    params = parameters(dtype=dtype)
    optimizer = SETTINGS[name](params)
    spread = Servers(params, optimizer, 2)
    for step in range(4):
        grads = gradients(step)
        plain_step(params, optimizer, grads)
        do: Any = (
            (lambda store, grad, used: store.apply_one(grad.to(dtype), 1.0))
            if step % 2
            else (lambda store, grad, used: (store.add(grad.to(dtype), 1.0), store.apply(1.0)))
        )
        spread.each(grads, do)
    assert all(store.values.dtype is dtype for store in spread.stores)
    for ours, plain in zip(spread.values(), params, strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_are_wide_whatever_came(given: torch.dtype) -> None:
    """256 + 1 is 256 in bfloat16: only a wide sum counts small gradients."""
    store = one_store(lambda p: O.SGD(p, lr=1.0), (3,))
    store.add(torch.full((3,), 256.0, dtype=given), 1.0)
    for _ in range(8):
        store.add(torch.ones(3, dtype=given), 0.125)
    store.apply(1.0)
    assert store.values.tolist() == [-257.0] * 3


def test_a_gradient_of_another_type_is_not_touched() -> None:
    store = one_store(lambda p: O.SGD(p, lr=1.0), (3,))
    grad = torch.ones(3, dtype=torch.bfloat16)
    store.apply_one(grad, 1 / 3)
    assert grad.tolist() == [1.0] * 3
    assert torch.equal(store.values, torch.full((3,), -1.0) * torch.tensor(1 / 3))


# --- memory ---------------------------------------------------------------------------------------


def one_store(make: Make, *shapes: tuple[int, ...]) -> Store:
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    pieces = [Piece(i, 0, shape[0] if shape else 1, 0) for i, shape in enumerate(shapes)]
    return Store(pieces, shapes, torch.float32, describe(make(params), params))


@EACH
def test_lives_in_the_same_memory_throughout(make: Make) -> None:
    store = one_store(make, (3, 2), (), (1,))
    home = store.values
    store.restore(torch.arange(8.0), None)
    for step in range(3):
        store.apply_one(torch.ones(8), 1.0, rate=0.5 if step else 1.0)
        store.add(torch.ones(8), 1.0)
        store.apply(1.0)
    store.restore(None, store.snapshot().states)
    store.apply_one(torch.ones(8), 1.0)
    assert store.values.data_ptr() == home.data_ptr()
    assert torch.equal(home, torch.cat([view.reshape(-1) for view in store.views]))
    assert [view.data_ptr() - home.data_ptr() for view in store.views] == [0, 24, 28]
    assert [tuple(view.shape) for view in store.views] == [(3, 2), (), (1,)]
    assert not torch.equal(home, torch.arange(8.0))


class Memory(bytearray):
    """Memory of which a test can see when it is freed."""


@pytest.mark.parametrize("name", ["sgd", "sgd momentum", "adam", "rmsprop"])
def test_a_gradient_is_let_go(name: str) -> None:
    """It may lie in shared memory that will be unmapped, so nothing may refer to it."""
    store = one_store(SETTINGS[name], (3, 2), (2,))
    memory = Memory(32)
    gone = weakref.ref(memory)
    grad = torch.frombuffer(memory, dtype=torch.float32)
    del memory
    assert gone() is not None
    store.apply_one(grad, 0.5)
    assert all(view.grad is None for view in store.views)
    del grad
    assert gone() is None


def test_one_push_alone_takes_no_memory_for_a_sum() -> None:
    store = one_store(SETTINGS["sgd"], (10_000, 2), (20_000,))
    grad = torch.ones(40_000)
    store.apply_one(grad, 0.5)
    assert store.sum._memory is None
    assert grad.unique().tolist() == [0.5]  # scaled where it lies


def test_a_gradient_may_begin_anywhere_in_its_memory() -> None:
    store = one_store(lambda p: O.SGD(p, lr=1.0), (2, 2), (3,))
    store.apply_one(torch.arange(20.0)[5:12], 1.0)
    assert store.values.tolist() == [-5, -6, -7, -8, -9, -10, -11]
    store.apply_one(torch.arange(14.0)[::2], 1.0)
    assert store.values.tolist() == [-5, -8, -11, -14, -17, -20, -23]


def test_an_empty_sum_is_written_not_cleared() -> None:
    """Garbage in the sum's memory, NaN for example, must not reach the weights."""
    store = one_store(lambda p: O.SGD(p, lr=1.0), (3,), (2,), (4,))
    store.sum.flat.fill_(torch.nan)
    store.add(torch.ones(9), 2.0, [True, False, True])
    store.add(torch.ones(9), 1.0, [True, True, False])
    assert store.norm_squared(2.0) == 4 * (3 * 9 + 2 * 1 + 4 * 4)
    store.apply(1.0)
    assert store.values.tolist() == [-3.0] * 3 + [-1.0] * 2 + [-2.0] * 4
    store.add(torch.ones(9), 1.0)  # what was applied is not there any more
    assert store.norm_squared(1.0) == 9.0


@pytest.mark.parametrize("one", [True, False])
def test_only_the_used_pieces_may_be_sent(one: bool) -> None:
    store = one_store(lambda p: O.SGD(p, lr=1.0), (3,), (2,), (4,))
    grad, used = torch.arange(7.0), [True, False, True]
    if one:
        store.apply_one(grad, 2.0, used)
    else:
        store.add(grad, 2.0, used)
        store.apply(1.0)
    assert store.values.tolist() == [0, -2, -4, 0, 0, -6, -8, -10, -12]


# --- the rest -------------------------------------------------------------------------------------


def test_norms_and_distances() -> None:
    params, _, spread = both(SETTINGS["sgd"], 3)
    one, two = gradients(1), gradients(2)
    spread.each(one, lambda store, grad, used: store.add(grad, 2.0))
    spread.each(two, lambda store, grad, used: store.add(grad, 1.0))
    total = sum(store.norm_squared(1 / 3) for store in spread.stores)
    mean = [(2 * a + b) / 3 for a, b in zip(one, two, strict=True)]  # type: ignore[operator]
    assert total == pytest.approx(sum(float(m.square().sum()) for m in mean), rel=1e-5)
    then = [store.values.clone().to(torch.bfloat16) for store in spread.stores]
    for store in spread.stores:
        store.apply(1 / 3)
    gap = sum(s.distance_squared(t) for s, t in zip(spread.stores, then, strict=True))
    was = [p.detach().bfloat16().float() for p in params]
    want = sum(float((a - b).square().sum()) for a, b in zip(spread.values(), was, strict=True))
    assert gap == pytest.approx(want, rel=1e-5)


def test_a_large_norm_is_exact_enough() -> None:
    store = one_store(SETTINGS["sgd"], (300_000,))
    store.add(torch.full((300_000,), 0.1), 1.0)
    assert store.norm_squared(1.0) == pytest.approx(3000.0, rel=2e-6)


def test_what_changed() -> None:
    store = one_store(SETTINGS["adam"], (3,), (2,))
    assert [d.piece for d in store.changed_since(-1)] == [0, 1]
    assert store.changed_since(0) == []
    store.apply_one(torch.ones(5), 1.0, [False, True])
    (delta,) = store.changed_since(0)
    assert delta.piece == 1 and delta.rows is None
    assert torch.equal(store.values_of(delta), store.values[3:])
    assert store.changed_since(1) == []
    store.restore(torch.zeros(5), None)
    assert len(store.changed_since(1)) == 2  # other values under the same version
    store.apply_one(torch.ones(5), 1.0, [False, True])
    assert [d.piece for d in store.changed_since(1)] == [0, 1]
    assert store.changed_since(2) == []
    assert len(store.changed_since(9)) == 2  # from another life


def test_a_version_never_falls() -> None:
    store = one_store(SETTINGS["sgd"], (2,))
    store.restore(torch.ones(2), None, version=7)
    assert store.version == 7 and store.snapshot().version == 7


def test_snapshots_are_copies_of_one_version() -> None:
    """With momentum 0 and gradients of 1, every value must be minus the version."""
    store = one_store(lambda p: O.SGD(p, lr=1.0), (50_000,), (50_000,))
    for _ in range(5):
        store.apply_one(torch.ones(100_000), 1.0)
        taken = store.snapshot()
        store.apply_one(torch.ones(100_000), 1.0)
        assert taken.values.min() == taken.values.max() == -taken.version


def test_restored_where_it_was() -> None:
    _, _, spread = both(SETTINGS["adam amsgrad"], 1)
    (store,) = spread.stores
    spread.each(gradients(0), lambda store, grad, used: store.apply_one(grad, 1.0))
    taken = store.snapshot()
    kept = taken.values.clone()
    for step in (1, 2):
        spread.each(gradients(step), lambda store, grad, used: store.apply_one(grad, 1.0))
    after = store.values.clone()
    assert torch.equal(taken.values, kept) and not torch.equal(after, kept)
    store.add(torch.ones(store.count), 1.0)  # what waited belongs to the past
    store.restore(taken.values, taken.states)
    for step in (1, 2):
        spread.each(gradients(step), lambda store, grad, used: store.apply_one(grad, 1.0))
    assert torch.equal(store.values, after)
    assert float(taken.states[0]["step"]) == 1  # its own copy still


def test_refusals() -> None:
    store = one_store(SETTINGS["adam"], (3,), (2,))
    with pytest.raises(UsageError, match="gradient of shape"):
        store.add(torch.ones(4), 1.0)
    with pytest.raises(UsageError, match="gradient of shape"):
        store.apply_one(torch.ones(4), 1.0)
    assert store.version == 0
