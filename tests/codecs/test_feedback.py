"""Properties of every reducer with error feedback, on 1 to 5 replicas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stratagem.codecs.compression import Compression
from stratagem.codecs.feedback import Feedback, shared_out
from stratagem.codecs.int8 import Int8
from stratagem.codecs.layout import Layout
from stratagem.codecs.low_rank import PowerSGD
from stratagem.codecs.sign import Sign
from stratagem.codecs.topk import TopK
from stratagem.codecs.wire_choice import reducer
from stratagem.errors import UsageError
from stratagem.wire.collective import Alone
from tests.codecs.circle import Circle, together

pytestmark = pytest.mark.timeout(60)

SHAPES = ((3, 4), (), (7,), (2, 3, 5), (0,), (9, 8))
LAYOUT = Layout(tuple("abcdef"), SHAPES)
COUNT = sum(LAYOUT.counts)
RECORDS: list[Compression] = [
    Int8(16),
    TopK(0.1),
    TopK(0.2, momentum=0.7),
    Sign(),
    PowerSGD(2),
    TopK(0.1, momentum=0.5, clip=2.0, dense_steps=2),
    PowerSGD(1, dense_steps=1),
]
record = st.sampled_from(RECORDS)
replicas = st.integers(1, 5)
seeds = st.integers(0, 10**6)


def gradient(seed: int, step: int, rank: int) -> Tensor:
    dice = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    return torch.randn(COUNT, generator=dice, dtype=torch.float64)


class Training:
    """One replica that reduces some steps."""

    def __init__(
        self, wire: Compression, circle: Circle, *, undoes: bool = False, device: str = "cpu"
    ) -> None:
        self.rank = circle.rank
        self.reducer = reducer(circle, wire)
        assert isinstance(self.reducer, Feedback)
        self.reducer.undoes = undoes
        self.flat = self.reducer.buffer(COUNT, torch.float64, torch.device(device))
        self.reducer.lay_out(self.flat, LAYOUT)

    def step(self, mine: Tensor, weight: float = 1.0) -> Tensor:
        self.flat.copy_(mine)
        self.reducer.reduce(self.flat, weight).wait()
        self.reducer.end_step()
        return self.flat.clone()

    def kept(self) -> dict[str, Tensor]:
        found = self.reducer.state()["kept"]
        return {n: torch.cat([p.reshape(-1) for p in by.values()]) for n, by in found.items() if by}


@settings(max_examples=20)
@given(record, st.integers(2, 4), seeds, st.integers(0, 3))
def test_who_is_ahead_goes_back_a_step_and_the_dead_take_theirs_along(
    wire: Compression, count: int, seed: int, dead: int
) -> None:
    """The remaining replicas repeat a step, which one of them had finished."""
    dead = dead % count

    def before(circle: Circle, ahead: int) -> Feedback:
        training = Training(wire, circle, undoes=True)
        for t in range(3 + ahead):
            training.step(gradient(seed, t, circle.rank))
        assert isinstance(training.reducer, Feedback)
        return training.reducer

    plain = together(count, lambda circle: before(circle, 0))
    ahead = together(count, lambda circle: before(circle, 1))
    left = [rank for rank in range(count) if rank != dead]
    mixed = [(ahead if rank % 2 else plain)[rank] for rank in left]
    kept = [each.state_at(3)["kept"] for each in mixed]
    for rank, mine in zip(left, kept, strict=True):
        same = plain[rank].state()["kept"]
        assert all(torch.equal(mine[n][p], same[n][p]) for n in same for p in same[n])

    def after(circle: Circle) -> dict[str, Any]:
        training = Training(wire, circle)
        assert isinstance(training.reducer, Feedback)
        training.reducer.rejoin(3, kept[circle.rank], kept)
        return training.reducer.state()

    for number, state in enumerate(together(len(left), after)):
        assert state["steps"] == 3
        for name in set(kept[number]) - {"of_sums"}:
            mine = kept[number][name]
            assert all(torch.equal(state["kept"][name][p], mine[p]) for p in mine)
    if len(left) > 1 and "of_sums" in kept[0]:
        joined = [s["kept"]["of_sums"] for s in together(len(left), after)]
        for p in kept[0]["of_sums"]:
            total = torch.stack([each["of_sums"][p] for each in kept]).sum(0)
            assert torch.allclose(torch.stack([each[p] for each in joined]).sum(0), total)


def train(wire: Compression, count: int, seed: int, steps: int, empty: int = -1) -> Any:
    """Return each replica's sums of all steps, and its residuals; replica `empty` has no rows."""

    def one(circle: Circle) -> tuple[list[Tensor], dict[str, Tensor]]:
        training = Training(wire, circle)
        weight = float(circle.rank != empty)
        sums = [training.step(gradient(seed, t, circle.rank), weight) for t in range(steps)]
        return sums, training.kept()

    return together(count, one)


@settings(max_examples=25, deadline=None)
@given(record, replicas, seeds, st.integers(-1, 4))
def test_the_same_bits_everywhere(wire: Compression, count: int, seed: int, empty: int) -> None:
    first, *others = [sums for sums, _ in train(wire, count, seed, 4, empty)]
    for sums in others:
        assert all(torch.equal(a, b) for a, b in zip(first, sums, strict=True))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([r for r in RECORDS if not getattr(r, "momentum", 0)]), replicas, seeds)
def test_what_was_sent_and_what_is_kept_is_all_there_was(
    wire: Compression, count: int, seed: int
) -> None:
    """The residual of a replica without rows in some steps still travels."""
    steps, empty = 6, count - 1

    def one(circle: Circle) -> tuple[Tensor, Tensor, Tensor]:
        training, rank = Training(wire, circle), circle.rank
        had, got = torch.zeros(COUNT).double(), torch.zeros(COUNT).double()
        for t in range(steps):
            weight = 0.0 if rank == empty and t > 2 else 0.5
            had += weight * gradient(seed, t, rank)
            got += training.step(gradient(seed, t, rank), weight)
        kept = training.kept()
        return had, got, sum((kept[n] for n in ("residual", "of_sums") if n in kept), 0 * had)

    found = together(count, one)
    had, kept = sum(f[0] for f in found), sum(f[2] for f in found)
    torch.testing.assert_close(found[0][1] + kept, had, rtol=0, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([TopK(1.0), PowerSGD(9), Sign(dense_steps=9)]), replicas, seeds)
def test_a_compression_that_leaves_nothing_out_is_the_sum(
    wire: Compression, count: int, seed: int
) -> None:
    sums, _ = train(wire, count, seed, 3)[0]
    for t, found in enumerate(sums):
        expected = sum(gradient(seed, t, r) for r in range(count))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def clipped(mine: Tensor, limit: float | None, count: int) -> Tensor:
    """One replica's gradient as deep gradient compression clips it."""
    return mine * min(1.0, (limit or math.inf) / math.sqrt(count) / float(mine.norm()))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([0.0, 0.9]),
    st.none() | st.floats(0.1, 30.0),
    st.integers(0, 3),
    replicas,
    seeds,
)
def test_all_numbers_with_momentum_are_momentum_sgd(
    momentum: float, clip: float | None, dense: int, count: int, seed: int
) -> None:
    """By dense steps, and by a share of 1 without masking; masked, it begins anew at each step that
    is not dense. Each replica clips its gradient before anything is kept."""
    wires = [TopK(1.0, momentum, mask, clip, dense_steps=dense) for mask in (False, True)]
    (sums, _), (masked, _) = (train(wire, count, seed, 4)[0] for wire in wires)
    moved, begun = torch.zeros(2, COUNT, dtype=torch.float64)
    for t, found in enumerate(sums):
        plain = sum((clipped(gradient(seed, t, r), clip, count) for r in range(count)), 0 * moved)
        moved, begun = momentum * moved + plain, momentum * begun + plain
        torch.testing.assert_close(found, moved, rtol=0, atol=1e-12)
        torch.testing.assert_close(masked[t], begun, rtol=0, atol=1e-12)
        begun *= t < dense  # all of it was sent


@settings(max_examples=25, deadline=None)
@given(record, replicas, seeds, st.sampled_from(["nan", "inf", "-inf"]), st.integers(0, COUNT - 1))
def test_a_number_that_is_none_reaches_all_and_is_forgotten(
    wire: Compression, count: int, seed: int, what: str, where: int
) -> None:
    """The step is NaN on all replicas, and the next steps are as if it had not happened."""

    def one(circle: Circle) -> list[Tensor]:
        training, rank = Training(wire, circle), circle.rank
        training.reducer.steps = 1
        sums = [training.step(gradient(seed, 0, rank))]
        bad = gradient(seed, 7, rank)
        if rank == count - 1:
            bad[where] = float(what)
        assert bool(training.step(bad).isnan().all())
        training.reducer.steps -= 1
        return [*sums, *(training.step(gradient(seed, t, rank)) for t in (1, 2))]

    def without(circle: Circle) -> list[Tensor]:
        training = Training(wire, circle)
        training.reducer.steps = 1
        return [training.step(gradient(seed, t, circle.rank)) for t in range(3)]

    for found, expected in zip(together(count, one), together(count, without), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@settings(max_examples=25, deadline=None)
@given(record, replicas, seeds)
def test_a_training_goes_on_bit_for_bit(wire: Compression, count: int, seed: int) -> None:
    whole = train(wire, count, seed, 6)

    def first(circle: Circle) -> dict[str, Any]:
        training = Training(wire, circle)
        for t in range(3):
            training.step(gradient(seed, t, circle.rank))
        return training.reducer.state()

    states = together(count, first)

    def then(circle: Circle) -> list[Tensor]:
        training = Training(wire, circle)
        training.reducer.load(states)
        return [training.step(gradient(seed, t, circle.rank)) for t in range(3, 6)]

    for (sums, _), rest in zip(whole, together(count, then), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(sums[3:], rest, strict=True))


@settings(max_examples=25, deadline=None)
@given(record, replicas, replicas, seeds)
def test_others_go_on_with_all_that_was_kept(
    wire: Compression, before: int, after: int, seed: int
) -> None:
    def first(circle: Circle) -> dict[str, Any]:
        training = Training(wire, circle)
        for t in range(3):
            training.step(gradient(seed, t, circle.rank))
        return training.reducer.state()

    def then(circle: Circle) -> dict[str, Any]:
        training = Training(wire, circle)
        training.reducer.load(states)
        return training.reducer.state()

    states = together(before, first)
    found = together(after, then)
    old, new = (shared_out([s["kept"] for s in each], 1) for each in (states, found))
    assert old.keys() == new.keys()
    for name, by_parameter in old.items():
        for parameter, values in by_parameter.items():
            torch.testing.assert_close(new[name][parameter], values, rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(replicas, seeds)
def test_low_ranks_find_a_matrix_of_low_rank(count: int, seed: int) -> None:
    """It is exact if the rank suffices, also after and before gradients of zeros."""
    dice = torch.Generator().manual_seed(seed)
    left = torch.randn(count, 20, 2, generator=dice, dtype=torch.float64)
    right = torch.randn(30, 2, generator=dice, dtype=torch.float64)
    layout = Layout(("w",), ((20, 30),))

    def one(circle: Circle) -> list[Tensor]:
        made = reducer(circle, PowerSGD(2))
        flat = made.buffer(600, torch.float64, torch.device("cpu"))
        made.lay_out(flat, layout)
        found = []
        for values in (0 * left[0] @ right.T, left[circle.rank] @ right.T, 0 * left[0] @ right.T):
            flat.copy_(values.reshape(-1))
            made.reduce(flat, 1.0).wait()
            made.end_step()
            found.append(flat.clone())
        return found

    zero, found, after = together(count, one)[0]
    assert not zero.any() and float(after.abs().max()) < 1e-9
    torch.testing.assert_close(found, (left.sum(0) @ right.T).reshape(-1), rtol=0, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([PowerSGD(2), PowerSGD(1, dense_steps=1)]), replicas, seeds, st.data())
def test_whose_gradient_is_whose_does_not_matter_to_low_ranks(
    wire: Compression, count: int, seed: int, data: Any
) -> None:
    """The sum is approximated, so the order of ranks changes only the rounding."""
    order = data.draw(st.permutations(range(count)))

    def one(circle: Circle, ranks: list[int]) -> list[Tensor]:
        training = Training(wire, circle)
        return [training.step(gradient(seed, t, ranks[circle.rank])) for t in range(3)]

    plain, other = (
        together(count, lambda circle, ranks=ranks: one(circle, ranks))[0]
        for ranks in (list(range(count)), order)
    )
    for a, b in zip(plain, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_warm_starts_come_near_the_best_of_that_rank() -> None:
    values = torch.randn(40, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(values)
    best = (values - (u[:, :4] * s[:4]) @ v[:4]).norm()
    layout = Layout(("w",), ((40, 60),))
    made = reducer(Circle(0, [torch.empty(0)], _NOBODY), PowerSGD(4))
    assert isinstance(made, Feedback)
    flat = made.buffer(2400, torch.float64, torch.device("cpu"))
    made.lay_out(flat, layout)
    errors = []
    for _ in range(8):
        flat.copy_(values.reshape(-1))
        for memory in made._memories.values():
            memory.residual.kept.zero_()  # the power method alone
        made.reduce(flat, 1.0).wait()
        made.end_step()
        errors.append(float((values - flat.view(40, 60)).norm() / best))
    assert 1.0 <= errors[-1] < 1.05 < errors[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("wire", RECORDS, ids=repr)
def test_a_gpu_encodes_what_a_cpu_does(wire: Compression) -> None:
    """Sums and what is kept, to rounding; entries may be sent in another order."""
    found = []
    for device in ("cpu", "cuda"):
        training = Training(wire, Circle(0, [torch.empty(0)], _NOBODY), device=device)
        sums = torch.stack([training.step(gradient(0, t, 0)).cpu() for t in range(4)])
        kept = training.kept()
        found.append([sums, *(kept[name] for name in sorted(set(kept) - {"factors"}))])
    for expected, other in zip(*found, strict=True):
        torch.testing.assert_close(other, expected, rtol=0, atol=1e-6)


class _Nobody:
    def wait(self, seconds: float) -> None:
        """Do nothing: there is no other replica."""


_NOBODY: Any = _Nobody()


class Counting(Alone):
    """One of `size` replicas: counts what it sends, and receives nothing but zeros."""

    def __init__(self, size: int) -> None:
        self.size, self.sent = size, 0

    def swap(self, rows: Tensor) -> Tensor:
        self.sent += (self.size - 1) * rows[0].nbytes
        return torch.zeros_like(rows)

    def collect(self, row: Tensor) -> Tensor:
        self.sent += (self.size - 1) * row.nbytes
        return row.new_zeros(self.size, len(row))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([Int8(64), TopK(0.05), TopK(0.05, momentum=0.5), Sign()]),
    st.lists(st.integers(1, 9) | st.integers(1000, 20_000), min_size=1, max_size=9),
    st.integers(2, 64),
)
def test_bytes_do_not_grow_with_the_number_of_replicas(
    wire: Any, sizes: list[int], count: int
) -> None:
    """Every slice has a head, and is as long as the longest; each parameter in it may take a number
    and its place more, so bytes grow where many tiny parameters lie in one slice."""
    collective, shapes = Counting(count), tuple((size,) for size in sizes)
    layout = Layout(tuple(map(str, range(len(sizes)))), shapes)
    made = reducer(collective, wire)
    flat = made.buffer(sum(sizes), torch.float32, torch.device("cpu"))
    made.lay_out(flat, layout)
    made.reduce(flat.normal_(generator=torch.Generator().manual_seed(0)), 1.0).wait()
    formula = 2 * (count - 1) / count * wire.room(sizes, 4)
    most = max(len(each.lengths) for each in layout.slices(count))
    assert abs(collective.sent - formula) <= 2 * (count - 1) * (16 + 12 * most)


def test_what_another_model_has_kept_is_refused() -> None:
    def one(circle: Circle) -> None:
        training = Training(TopK(0.1), circle)
        state = training.reducer.state()
        other = {"residual": {"z": torch.zeros(3)}}
        training.reducer.load([{**state, "kept": other}])

    with pytest.raises(UsageError, match="other names"):
        together(1, one)


def test_where_others_are_trained_from_now_on_they_begin_at_zero() -> None:
    def one(circle: Circle) -> bool:
        training = Training(TopK(0.1), circle)
        training.step(gradient(0, 0, 0))
        gone = {"residual": {"z": torch.ones(3)}}
        training.reducer.load([{**training.reducer.state(), "kept": gone, "refrozen": True}])
        return any(bool(t.any()) for t in training.reducer.state()["kept"]["residual"].values())

    assert together(1, one) == [False]
