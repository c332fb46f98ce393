"""Gradients as factors: for any mix of factors and products the sum is that of one device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import stratagem as sg
from stratagem.data.shares import share
from stratagem.state.factors import Factors, make_factors
from stratagem.state.sliced import SlicedUpdate
from stratagem.training import gradient_placement
from stratagem.wire.buckets import Buckets
from stratagem.wire.segment import Segment
from stratagem.wire.shared_memory import SharedMemoryCollective
from tests.state.crowd_support import together


@pytest.mark.timeout(120)
@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 4),
    height=st.integers(1, 12),
    width=st.integers(1, 5),
    total=st.integers(0, 16),
    scale=st.sampled_from([1.0, 0.25]),
    draw=st.data(),
)
def test_the_sum_is_that_of_all_rows(
    size: int, height: int, width: int, total: int, scale: float, draw: st.DataObject
) -> None:
    """Replicas with factors, with a product, with both and with nothing, and unequal shares."""
    torch.manual_seed(0)
    dy, x = torch.randn(total, height), torch.randn(total, width)
    kind = st.sampled_from(["factors", "product", "both", "none"])
    kinds = draw.draw(st.lists(kind, min_size=size, max_size=size))
    cuts = sorted({0, height, *draw.draw(st.lists(st.integers(0, height), max_size=3))})
    besides = torch.randn(size, height, width)

    def work(collective: SharedMemoryCollective) -> tuple[Tensor, bool]:
        rank = collective.rank
        table = collective.table(height * width, torch.float32)
        row = table.rows[rank].view(height, width).fill_(torch.nan)
        _, factors = make_factors([torch.empty(3, 2), torch.empty(height, width)], collective)
        if rank == 0:  # what nobody has written there is nobody's
            factors._dy.fill_(torch.nan)
        collective.barrier()
        start, end = share(total, size, rank)
        found = torch.full((height * width,), torch.nan)
        for _ in range(2):  # a step leaves nothing to the next
            factors.expect(start, end)
            kept = kinds[rank] in ("factors", "both") and factors.keep(dy[start:end], x[start:end])
            product = kinds[rank] in ("product", "both")
            if product:
                row.copy_(besides[rank])
            factors.mark(product)
            collective.barrier()
            for lo, hi in pairwise(cuts):
                at = lo * width
                factors.add_up(lo, hi, scale, (table, at), found[at : hi * width])
            collective.barrier()
        return found.view(height, width), kept

    results = together(size, work)
    expected = torch.zeros(height, width, dtype=torch.double)
    for rank, (_, kept) in enumerate(results):
        start, end = share(total, size, rank)
        assert not kept or end <= min(height, size * height * width // (height + width) or 1)
        if kept:
            expected += dy[start:end].double().t() @ x[start:end].double()
        if kinds[rank] in ("product", "both"):
            expected += besides[rank].double()
    for found, _ in results:
        torch.testing.assert_close(found.double(), expected * scale, rtol=1e-4, atol=1e-5)


@pytest.mark.timeout(120)
@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 5),
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), min_size=1, max_size=4),
    factored=st.sets(st.integers(0, 3)),
)
def test_slices_cover_everything_once_and_cut_between_rows(
    size: int, shapes: list[tuple[int, int]], factored: set[int]
) -> None:
    chosen = [i for i in factored if i < len(shapes)]

    def work(collective: SharedMemoryCollective) -> list[tuple[int, int, int]]:
        params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        allocate = collective.buffer
        buckets = Buckets(params, allocate, capacity=1 << 62, notes=2)
        update = SlicedUpdate(torch.optim.SGD(params), buckets, collective, chosen)
        bucket = buckets.buckets[0].flat.copy_(torch.arange(len(buckets.buckets[0].flat)))
        for factors in update.factors.values():
            factors.expect(0, 0)
            factors.mark(True)
        collective.barrier()
        update._sum(1.0)
        for piece in update.pieces:  # every element is the sum of its own ones
            torch.testing.assert_close(
                piece.grad, bucket[piece.at : piece.at + piece.hi - piece.lo] * size
            )
        return [(piece.index, piece.lo, piece.hi) for piece in update.pieces]

    pieces = [piece for found in together(size, work) for piece in found]
    for i, (height, width) in enumerate(shapes):
        mine = sorted((lo, hi) for index, lo, hi in pieces if index == i)
        assert [e for lo, hi in mine for e in range(lo, hi)] == list(range(height * width))
        if i in chosen:  # by rows, and as much for everybody as can be
            assert all(lo % width == hi % width == 0 for lo, hi in mine)
            assert len(mine) == min(size, height)
            assert max(hi - lo for lo, hi in mine) - min(hi - lo for lo, hi in mine) <= width


# --- real processes -----------------------------------------------------------------------------


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(700, 96), nn.ReLU(), nn.Linear(96, 10))


def tied() -> nn.Module:
    first, last = nn.Linear(260, 260), nn.Linear(260, 260)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last)


def folded() -> nn.Module:
    """Two rows for each example."""
    return nn.Sequential(
        nn.Unflatten(1, (2, 350)),
        nn.Flatten(0, 1),
        nn.Linear(350, 192),
        nn.ReLU(),
        nn.Unflatten(0, (-1, 2)),
        nn.Flatten(1),
        nn.Linear(384, 10),
    )


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (stack, {}),
    "clipped by norm": (stack, {"clip_norm": 0.05}),
    "clipped by value": (stack, {"clip_value": 0.001}),
    "accumulated": (stack, {"accumulate": 2}),
    "tied": (tied, {}),
    "rows that are no examples": (folded, {}),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rows", [97, 24])  # more examples than the weight has rows, and fewer
@pytest.mark.parametrize("case", CASES)
def test_replicas_equal_one_device(three: sg.Strategy, case: str, rows: int) -> None:
    """Batches that do not divide, and a last one with fewer examples than replicas."""
    make, how = CASES[case]
    inputs = 260 if case == "tied" else 700
    torch.manual_seed(1)
    x, y = torch.randn(2 * rows + 2, inputs), torch.randint(0, 10, (2 * rows + 2,))

    def trained(where: sg.Strategy | None) -> list[Tensor]:
        torch.manual_seed(0)
        net = make()
        model = sg.Model(net, where)
        model.compile(lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9), "cross_entropy", **how)
        model.fit(x, y, batch_size=rows, epochs=3, verbose=0)
        return [p.detach().clone() for p in net.parameters()]

    for one, several in zip(trained(None), trained(three), strict=True):
        # momentum makes rounding grow
        torch.testing.assert_close(one, several, rtol=1e-4, atol=2e-5)


def test_factors_are_taken_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_placement, "WORTH", 1)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[4].weight = net[2].weight  # type: ignore[union-attr]
    params = list(net.parameters())
    home = gradient_placement.PlacedGradients(net, [(p, torch.empty_like(p)) for p in params])
    first, twice = alone(home)
    for factors in (first, twice):
        factors.expect(0, 2)
    with home.forward():
        loss = net(torch.randn(2, 5)).square().sum() + net[2].weight.sum()  # type: ignore[union-attr]
    with home.backward():
        loss.backward()
    assert first.kept and params[0].grad is None
    assert twice.kept and params[2].grad is not None  # of the sum and of its second use


def alone(home: gradient_placement.PlacedGradients) -> list[Factors]:
    control = Segment(SharedMemoryCollective.control_size(1))
    weights = home.weights()
    made = make_factors(weights, SharedMemoryCollective(0, 1, control))
    home.factors = dict(zip(weights, made, strict=True))
    return made


def test_who_looks_at_gradients_is_known() -> None:
    net = stack()
    params = list(net.parameters())
    for p in params:
        p.register_post_accumulate_grad_hook(lambda p: None)  # as the exchange has one
    assert gradient_placement.is_unseen(params)
    net(torch.randn(2, 700)).sum().backward()
    assert gradient_placement.is_unseen(params)
    for register in (params[1].register_hook, params[1].register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        assert not gradient_placement.is_unseen(params)
        handle.remove()
        assert gradient_placement.is_unseen(params)
    with torch.autograd.detect_anomaly(check_nan=False):
        assert not gradient_placement.is_unseen(params)


def test_who_hooks_into_what_adds_up_is_known() -> None:
    net = stack()
    params = list(net.parameters())
    net(torch.randn(2, 700)).sum().backward()
    assert not any(map(gradient_placement.is_kept, params))
    node: Any = torch.autograd.graph.get_gradient_edge(params[3]).node
    node.register_prehook(lambda grads: None)
    assert list(map(gradient_placement.is_kept, params)) == [False, False, False, True]
    net(torch.randn(2, 700)).sum().backward()
    assert gradient_placement.is_kept(params[3])
    del node
    assert not any(map(gradient_placement.is_kept, params))


def look_at_hook(net: Any) -> dict[str, Any]:
    """A hook of one parameter changes the gradient of another that is complete by then."""
    hooked: list[Any] = []

    def halve(_: Tensor) -> None:
        net[2].weight.grad.mul_(0.5)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        if not hooked:  # on every replica
            hooked.append(net[0].bias.register_post_accumulate_grad_hook(halve))
        return nn.functional.cross_entropy(output, y, reduction="none")

    return {"loss": loss}


def look_in_loss(net: Any) -> dict[str, Any]:
    """A loss hooks into what adds a gradient up, and keeps that."""
    kept: list[Any] = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        if not kept:
            kept.append(torch.autograd.graph.get_gradient_edge(net[0].weight).node)
            kept[0].register_prehook(lambda grads: (grads[0] * 0.5,))
        return nn.functional.cross_entropy(output, y, reduction="none")

    return {"loss": loss}


def look_in_metric(net: Any) -> dict[str, Any]:
    def metric(output: Tensor, y: Tensor) -> Tensor:
        net[0].weight.grad.mul_(0.5)
        return output.mean()

    return {"loss": "cross_entropy", "metrics": [metric]}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [look_at_hook, look_in_loss])
def test_whoever_looks_at_a_gradient_finds_it(how: Callable[[Any], dict[str, Any]]) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(50, 700), torch.randint(0, 10, (50,))

    def trained(devices: list[str]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(700, 96), nn.ReLU(), nn.Linear(96, 700), nn.Linear(700, 10))
        model = sg.Model(net, sg.MirroredStrategy(devices))
        model.compile(lambda p: torch.optim.SGD(p, lr=0.1), **how(net))
        model.fit(x, y, batch_size=24, epochs=2, verbose=0)
        return [p.detach().clone() for p in net.parameters()]

    for one, two in zip(trained(["cpu:0"]), trained(["cpu:0", "cpu:1"]), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=2e-6)


@pytest.mark.timeout(120)
def test_metrics_of_ones_own_find_gradients() -> None:
    net = stack()
    model = sg.Model(net, sg.MirroredStrategy(["cpu:0", "cpu:1"]))
    model.compile("sgd", **look_in_metric(net))
    model.fit(torch.randn(30, 700), torch.randint(0, 10, (30,)), batch_size=10, verbose=0)


def test_which_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones of torch's own layers, whatever hooks a replica has."""
    monkeypatch.setattr(gradient_placement, "WORTH", 100)
    net = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 2))
    homes = [(p, torch.empty_like(p)) for p in net.parameters()]
    assert gradient_placement.PlacedGradients(net, homes).weights() == [net[0].weight]
    net[0].register_forward_hook(lambda *args: None)
    assert gradient_placement.PlacedGradients(net, homes).weights() == [net[0].weight]

    class Own(nn.Linear):
        pass

    assert gradient_placement.PlacedGradients(nn.Sequential(*net, Own(2, 2)), homes).weights() == []
