"""Every parameter is in exactly one bucket, and buckets are released in the same order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stratagem.wire.buckets import WHOLE, Buckets, plan_buckets

sizes = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=12)


def made(
    spec: list[tuple[int, bool]], capacity: int, notes: int = 2, *, may_be_kept: bool = False
) -> Buckets:
    params = [
        nn.Parameter(torch.randn(size).to(torch.float64 if double else torch.float32))
        for size, double in spec
    ]
    return Buckets(
        params,
        lambda n, dtype, device: torch.zeros(n, dtype=dtype),
        capacity=capacity,
        notes=notes,
        may_be_kept=may_be_kept,
    )


@given(sizes, st.integers(1, 400))
def test_each_parameter_has_one_home(spec: list[tuple[int, bool]], capacity: int) -> None:
    buckets = made(spec, capacity)
    members = [i for bucket in buckets.buckets for i in bucket.members]
    assert sorted(members) == list(range(len(spec)))
    for i, view in enumerate(buckets.views):
        assert view.shape == buckets.params[i].shape and view.dtype == buckets.params[i].dtype
        view.fill_(i + 1)
    for i, view in enumerate(buckets.views):
        assert (view == i + 1).all(), "two parameters share an element"
    assert (buckets.tail == 0).all(), "a gradient reaches into the notes"
    assert len(buckets.used) == len(spec) and len(buckets.notes) == 2


@given(sizes, st.integers(1, 400), st.randoms(use_true_random=False))
def test_buckets_leave_in_one_order_whatever_the_gradients_do(
    spec: list[tuple[int, bool]], capacity: int, dice: object
) -> None:
    buckets = made(spec, capacity)
    order = list(range(len(spec)))
    dice.shuffle(order)  # type: ignore[attr-defined]
    buckets.begin()
    left = []
    for i in order:
        param = buckets.params[i]
        param.grad = torch.ones_like(param)
        buckets.take(i, param)
        assert param.grad.data_ptr() == buckets.views[i].data_ptr()
        for bucket in buckets.full():
            assert bucket.missing == 0
            left.append(bucket.members)
    left += [bucket.members for bucket in buckets.rest()]
    assert left == [bucket.members for bucket in buckets.buckets]


@given(sizes, st.integers(1, 400))
def test_scaling_spares_the_notes(spec: list[tuple[int, bool]], capacity: int) -> None:
    buckets = made(spec, capacity)
    for view in buckets.views:
        view.fill_(2.0)
    buckets.tail.fill_(5.0)
    buckets.scale(torch.tensor(3.0))
    assert all((view == 6.0).all() for view in buckets.views)
    assert (buckets.tail == 5.0).all()


def passed(buckets: Buckets, value: float) -> Tensor:
    """Set a gradient as backward does, and return `grad` after `take`."""
    param = buckets.params[0]
    param.grad = torch.full_like(param, value)
    buckets.begin()
    buckets.take(0, param)
    found, param.grad = param.grad, None
    assert found.data_ptr() == buckets.views[0].data_ptr()
    return found


@pytest.mark.parametrize("keeper", ["a name", "autograd", "a view in autograd", "requires_grad"])
def test_a_kept_gradient_stays_what_it_was(keeper: str) -> None:
    """A gradient that a variable refers to; references inside autograd cannot be detected."""
    buckets = made([(3, False)], 1 << 20, may_be_kept=True)
    weight = torch.ones(3, requires_grad=True)
    for value in (1.0, 2.0, 3.0):
        last = passed(buckets, value)
        kept = last if keeper == "a name" else None
        if keeper == "requires_grad":
            last.requires_grad_()
        seen = last.flatten() if keeper == "a view in autograd" else last
        product = (weight * seen).sum() if "autograd" in keeper else None
        del last, seen
        again = passed(buckets, value + 1)
        assert (again == value + 1).all() and not again.requires_grad
        assert kept is None or (kept == value).all()
        if product is not None:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(product, weight)


def test_the_first_bucket_does_not_wait_for_the_bias_of_a_layer_that_does_not_fit() -> None:
    sizes = [(1024, 1024), (1024,), (1024, 1024), (1024,), (10, 1024), (10,)]
    params = [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    assert plan_buckets(params, 8 << 20) == [[5, 4, 3, 2], [1, 0]]
    assert plan_buckets(params, WHOLE) == [[5, 4, 3, 2, 1, 0]]
    assert plan_buckets(params, 64) == [[5], [4], [3], [2], [1], [0]]
