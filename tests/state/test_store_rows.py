"""Sparse gradients: only their rows are updated and sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stratagem.errors import UsageError
from stratagem.state import store as store_module
from stratagem.state.optimizer_recipe import describe
from stratagem.state.partition import Piece
from stratagem.state.store import Store
from tests.state.store_support import Servers, close, parameters

O = torch.optim  # noqa: E741
SHAPES = [(11, 3), (4, 2)]
SPARSE: dict[str, Callable[..., Any]] = {
    "sgd": lambda p: O.SGD(p, lr=0.1),
    "sgd maximize": lambda p: O.SGD(p, lr=0.1, maximize=True),
    "sgd foreach": lambda p: O.SGD(p, lr=0.1, foreach=True),
    "sparse adam": lambda p: O.SparseAdam(p, lr=0.1),
    "adagrad": lambda p: O.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
}
EACH = pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE.keys())


def drawn(seed: int, rows: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 11, (rows,), generator=generator),
        torch.randn(rows, 3, generator=generator),
    )


def push(spread: Servers, rows: Tensor, values: Tensor, factor: float) -> None:
    """Push the rows of variable 0 to the servers that hold them."""
    for own, store in zip(spread.own, spread.stores, strict=True):
        for i, piece in enumerate(own):
            if piece.variable == 0:
                here = (rows >= piece.start) & (rows < piece.stop)
                store.add_rows(i, rows[here] - piece.start, values[here], factor)


def sparse(rows: Tensor, values: Tensor, shape: tuple[int, ...] = (11, 3)) -> Tensor:
    made = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=True)
    return made.coalesce()


@EACH
@pytest.mark.parametrize("servers", [1, 2, 4])
def test_rows_equal_the_whole_model(make: Any, servers: int) -> None:
    params = parameters(shapes=SHAPES)
    optimizer = make(params)
    spread = Servers(params, optimizer, servers)
    for step in range(5):
        (rows, values), (more, others) = drawn(2 * step), drawn(2 * step + 1, rows=2)
        mean = sparse(torch.cat([rows, more]), torch.cat([3 * values, others]) / 4)
        params[0].grad = mean
        optimizer.step()
        push(spread, rows, values, 3.0)
        push(spread, more, others, 1.0)
        want = float(mean.values().square().sum())
        assert sum(s.norm_squared(1 / 4) for s in spread.stores) == pytest.approx(want, rel=1e-5)
        for store in spread.stores:
            store.apply(1 / 4)
        close(spread.values(), params)


@EACH
def test_only_given_rows_move_and_travel(make: Any) -> None:
    params = parameters(shapes=SHAPES)
    store = Servers(params, make(params), 1).stores[0]
    store.add_rows(0, torch.tensor([4, 1, 4]), torch.ones(3, 3), 1.0)
    store.apply(1.0)  # version 1
    assert len(store.changed_since(0)) == 2  # everything: restored under version 0
    before = store.values.clone()
    store.add_rows(0, torch.tensor([9, 1]), torch.ones(2, 3), 1.0)
    store.apply(1.0)  # version 2
    moved = (store.views[0] != before[:33].view(11, 3)).any(1).nonzero().flatten()
    assert moved.tolist() == [1, 9]
    (delta,) = store.changed_since(1)
    assert delta.piece == 0 and delta.rows is not None and delta.rows.tolist() == [1, 9]
    assert delta.rows.dtype is torch.int64
    assert torch.equal(store.values_of(delta), store.views[0][[1, 9]])
    store.add_rows(0, torch.tensor([2]), torch.ones(1, 3), 1.0)
    store.apply(1.0)
    first, second = store.changed_since(1)
    assert first.rows is not None and first.rows.tolist() == [1, 9]
    assert second.rows is not None and second.rows.tolist() == [2]
    (delta,) = store.changed_since(2)
    assert delta.rows is not None and delta.rows.tolist() == [2]
    assert store.changed_since(3) == []


def test_many_rows_travel_as_the_whole() -> None:
    store = one(O.SGD, (8, 4))
    store.add_rows(0, torch.arange(7), torch.ones(7, 4), 1.0)
    store.apply(1.0)
    (delta,) = store.changed_since(0)
    assert delta.rows is None  # 7 rows and their numbers are more bytes than 8 rows


def test_a_table_without_rows() -> None:
    store = one(O.SGD, (0, 4), (3,))
    store.add(torch.ones(3), 1.0, [False, True])
    store.add_rows(0, torch.empty(0, dtype=torch.int64), torch.empty(0, 4), 1.0)
    store.apply(1.0)
    assert [delta.piece for delta in store.changed_since(0)] == [1]


@pytest.mark.parametrize("optimizer", [O.SGD, O.Adagrad])
def test_rows_of_a_vector(optimizer: Any) -> None:
    """torch itself adds a sparse vector to a view at the wrong place."""
    store = one(optimizer, (3,), (8,))
    store.add_rows(1, torch.tensor([6, 1]), torch.tensor([2.0, 1.0]), 1.0)
    store.apply(1.0)
    moved = store.values.nonzero().flatten().tolist()
    assert moved == [3 + 1, 3 + 6]


def test_who_is_far_behind_gets_every_row_once() -> None:
    store = one(O.SGD, (400, 2))
    for _ in range(40):
        store.add_rows(0, torch.tensor([5, 5, 7]), torch.ones(3, 2), 1.0)
        store.apply(1.0)
    (delta,) = store.changed_since(10)
    assert delta.rows is not None and delta.rows.tolist() == [5, 7]
    assert len(store.changed_since(38)) == 2
    recent = store._row_versions[0]._recent
    assert all(rows.untyped_storage().nbytes() == rows.nbytes for _, rows, _ in recent)


@pytest.mark.parametrize("recent", [0, 2])
@settings(deadline=None, max_examples=25)  # a busy machine is no failure
@given(st.lists(st.lists(st.integers(0, 19), max_size=4), min_size=1, max_size=8), st.data())
def test_who_takes_what_changed_is_current(
    recent: int, steps: list[list[int]], data: st.DataObject
) -> None:
    """A worker that fetches sometimes, only rows where possible, has the store's values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "_RECENT", recent)
        fetch_now_and_then(steps, data)


def fetch_now_and_then(steps: list[list[int]], data: st.DataObject) -> None:
    store = one(O.Adagrad, (20, 8), (3,))
    mine, version = store.values.clone(), 0
    for number, rows in enumerate(steps):
        if data.draw(st.booleans()):
            store.add(torch.ones(3), 1.0, [False, True])
        if rows and number % 3 == 2:
            store.add(torch.ones(160), 1.0, [True, False])  # the embedding densely, for once
        store.add_rows(0, torch.tensor(rows, dtype=torch.int64), torch.ones(len(rows), 8), 1.0)
        store.apply(1.0)
        if data.draw(st.booleans()):
            for delta in store.changed_since(version):
                flat = mine[:160].view(20, 8) if delta.piece == 0 else mine[160:]
                where = slice(None) if delta.rows is None else delta.rows
                flat[where] = store.values_of(delta)
            version = store.version
            assert torch.equal(mine, store.values)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: O.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
        lambda p: O.SGD(p, lr=0.1, weight_decay=0.1),
        lambda p: O.Adagrad(p, lr=0.1, weight_decay=0.1),
        lambda p: O.Adam(p, lr=0.1),
        lambda p: O.RMSprop(p, lr=0.1),
    ],
)
def test_optimizers_that_move_every_row(make: Any) -> None:
    """Rows are to them a gradient that is zero elsewhere; all of the piece changes."""
    params = parameters(shapes=SHAPES)
    optimizer = make(params)
    spread = Servers(params, optimizer, 2)
    for step in range(4):
        rows, values = drawn(step)
        params[0].grad = sparse(rows, values).to_dense()
        optimizer.step()
        push(spread, rows, values, 1.0)
        for store in spread.stores:
            store.apply(1.0)
            assert all(delta.rows is None for delta in store.changed_since(store.version - 1))
    close(spread.values(), params)


def test_sparse_beside_dense_in_one_group() -> None:
    """Dense parameters keep their fused kernel, which takes no sparse gradients."""
    for make in (SPARSE["sgd"], SPARSE["adagrad"]):
        params = parameters(shapes=SHAPES)
        optimizer = make(params)
        spread = Servers(params, optimizer, 2)
        for step in range(4):
            if step == 2:
                optimizer.param_groups[0]["lr"] = 0.03
                for store in spread.stores:
                    store.set_settings([{"lr": 0.03}])
            rows, values = drawn(step)
            dense = torch.randn(4, 2, generator=torch.Generator().manual_seed(step))
            params[0].grad, params[1].grad = sparse(rows, values), dense
            optimizer.step()
            push(spread, rows, values, 1.0)
            spread.each([None, dense], lambda store, grad, used: store.apply_one(grad, 1.0, used))
        close(spread.values(), params)
        (fused, beside) = spread.stores[0]._stepper.optimizer.param_groups  # type: ignore[attr-defined]
        assert fused["fused"] and not beside["fused"] and len(beside["params"]) == 1


def test_rows_and_a_dense_gradient_of_one_piece() -> None:
    """A tied weight: one use sparse, one dense."""
    for order in (0, 1):
        store = one(O.SGD, (3, 2))
        steps = [
            lambda s: s.add(torch.ones(6), 1.0),
            lambda s: s.add_rows(0, torch.tensor([1]), torch.ones(1, 2), 2.0),
        ]
        for step in steps[::-1] if order else steps:
            step(store)
        assert store.norm_squared(1.0) == 4 * 1 + 2 * 9
        store.apply(0.5)
        assert store.values.tolist() == [-0.5, -0.5, -1.5, -1.5, -0.5, -0.5]
    store.add_rows(0, torch.tensor([0]), torch.ones(1, 2), 1.0)
    grad = torch.ones(6)
    store.apply_one(grad, 1.0)
    assert store.values.tolist() == [-2.5, -2.5, -2.5, -2.5, -1.5, -1.5]


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_clip_and_rate_of_rows(rate: float) -> None:
    store = one(O.SGD, (4,))
    store.add_rows(0, torch.tensor([1, 1, 3]), torch.tensor([4.0, 4.0, -1.0]), 1.0)
    store.apply(0.5, rate=rate, clip_value=3.0)
    assert store.values.tolist() == [0.0, -3.0 * rate, 0.0, 0.5 * rate]


@pytest.mark.parametrize("name", ["sparse adam", "adagrad"])
def test_no_rows_still_count_as_a_step(name: str) -> None:
    """The whole variable's counter grows with every use of it; so must a piece's without rows."""
    params = parameters(shapes=SHAPES)
    store = Servers(params, SPARSE[name](params), 1).stores[0]
    before = store.values.clone()
    store.add_rows(0, torch.empty(0, dtype=torch.int64), torch.empty(0, 3), 1.0)
    store.apply(1.0)
    assert store.snapshot().states[0]["step"] == 1
    assert torch.equal(store.values, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_in_another_type(dtype: torch.dtype) -> None:
    store = one(O.SGD, (4, 2), dtype=dtype)
    store.add_rows(0, torch.tensor([2]), torch.full((1, 2), 256.0, dtype=torch.bfloat16), 1.0)
    for _ in range(2):
        store.add_rows(0, torch.tensor([2]), torch.ones(1, 2, dtype=torch.bfloat16), 1.0)
    store.apply(1.0)
    assert store.views[0][2].tolist() == [-258.0, -258.0]


def test_the_callers_memory_is_his_again() -> None:
    store = one(O.SGD, (4, 2))
    rows, values = torch.tensor([0, 2]), torch.ones(2, 2)
    store.add_rows(0, rows, values, 1.0)
    rows.fill_(3)
    values.fill_(torch.nan)
    store.apply(1.0)
    assert store.values.tolist() == [-1, -1, 0, 0, -1, -1, 0, 0]


def test_refusals() -> None:
    adam = one(O.SparseAdam, (4, 2))
    with pytest.raises(UsageError, match="sparse gradients only"):
        adam.add(torch.ones(8), 1.0)
    with pytest.raises(UsageError, match="sparse gradients only"):
        adam.apply_one(torch.ones(8), 1.0)
    adam.add(torch.empty(0), 1.0, [False])


def one(kind: Any, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Store:
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    pieces = [Piece(i, 0, shape[0] if shape else 1, 0) for i, shape in enumerate(shapes)]
    return Store(pieces, shapes, dtype, describe(kind(params, lr=1.0), params))
