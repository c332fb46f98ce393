"""Weight gradients written where they are to lie: the same bits, and nobody else's memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import stratagem as sg
from stratagem.strategies import at_home
from stratagem.strategies.at_home import AtHome
from stratagem.wire.buckets import Buckets


@pytest.fixture(autouse=True)
def everything_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_home, "WORTH", 1)


def fresh(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((count,), torch.nan, dtype=dtype, device=device)


class Trainee:
    """A module, its gradients' homes, and the same module without them."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.module = make()
        torch.manual_seed(0)
        self.plain = make()
        params = [p for p in self.module.parameters() if p.requires_grad]
        self.buckets = Buckets(params, fresh, capacity=1 << 62, notes=0)
        homes = zip(self.buckets.params, self.buckets.views, strict=True)
        self.at_home = AtHome(self.module.modules(), homes)

    def backward(self, loss: Callable[[nn.Module], Tensor]) -> None:
        """Of both."""
        with self.at_home.working():
            found = loss(self.module)
            with self.at_home.lending():
                found.backward()  # type: ignore[no-untyped-call]
        loss(self.plain).backward()  # type: ignore[no-untyped-call]

    def check(self) -> list[bool]:
        """Gradients are equal to the bit; which of them lie at home?"""
        for (name, p), q in zip(
            self.module.named_parameters(), self.plain.parameters(), strict=True
        ):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and q.grad is not None:
                assert torch.equal(p.grad, q.grad), name
        return [
            p.grad is not None and p.grad.data_ptr() == home.data_ptr()
            for p, home in zip(self.buckets.params, self.buckets.views, strict=True)
        ]


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    bias=st.booleans(),
    wanted=st.booleans(),
    turned=st.booleans(),
)
def test_the_same_bits(shape: list[int], bias: bool, wanted: bool, turned: bool) -> None:
    """Any number of dimensions, no rows, views that are not contiguous, inputs that learn."""
    trainee = Trainee(lambda: nn.Linear(6, 4, bias=bias))
    x = torch.randn(*shape, 6)
    if turned:
        x = torch.randn(6, *reversed(shape)).permute(*reversed(range(len(shape) + 1)))
    inputs = [x.clone().requires_grad_(wanted) for _ in range(2)]
    turn = iter(inputs)
    trainee.backward(lambda net: net(next(turn)).square().sum())
    assert trainee.check()[0]
    if wanted:
        assert inputs[0].grad is not None and torch.equal(inputs[0].grad, inputs[1].grad)


def test_a_gradient_that_is_there_is_added_to() -> None:
    trainee, x = Trainee(two_layers), torch.randn(4, 7)
    trainee.backward(lambda net: net(x).square().sum())
    assert trainee.check() == [True, False, True]
    trainee.backward(lambda net: net(2 * x).sum())
    assert trainee.check() == [True, False, True]  # in place


class Twice(nn.Module):
    """One weight in two layers, and one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 5, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.middle(self.embed(x))).tanh())  # type: ignore[no-any-return]


def test_a_weight_used_twice_has_one_writer() -> None:
    trainee = Trainee(Twice)
    x = torch.randint(0, 5, (4,))
    for _ in range(2):
        trainee.backward(lambda net: net(x).square().sum())
        trainee.check()


class Penalised(nn.Module):
    """Asks for gradients of its own, in forward."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.layer, self.create_graph = nn.Linear(6, 4), create_graph
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        (own,) = torch.autograd.grad(
            y.square().sum(), self.layer.weight, create_graph=self.create_graph,
            retain_graph=True,
        )  # fmt: skip
        self.seen = own
        return y.sum() + own.square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_that_somebody_else_asks_for_are_theirs(create_graph: bool) -> None:
    trainee, x = Trainee(lambda: Penalised(create_graph)), torch.randn(3, 6)
    trainee.backward(lambda net: net(x))
    trainee.check()
    seen: Any = trainee.module.seen
    assert seen.data_ptr() != trainee.buckets.views[0].data_ptr()
    assert torch.equal(seen, trainee.plain.seen)  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_runs_again(reentrant: bool) -> None:
    trainee, x = Trainee(two_layers), torch.randn(4, 7, requires_grad=True)
    trainee.backward(lambda net: checkpoint(net, x, use_reentrant=reentrant).square().sum())
    assert any(trainee.check())


def test_hooks_of_the_users_own() -> None:
    trainee, x = Trainee(two_layers), torch.randn(4, 7)
    for net in (trainee.module, trainee.plain):
        net[0].weight.register_hook(lambda grad: grad * 2)  # type: ignore[index]
        net[2].weight.register_hook(lambda grad: grad.mul_(3))  # type: ignore[index]
    trainee.backward(lambda net: net(x).square().sum())
    assert trainee.check() == [False, False, True] or trainee.check() == [False, True, False]


def test_other_kinds_of_products_stay_as_they_are() -> None:
    trainee, x = Trainee(two_layers), torch.randn(4, 7)

    def mapped(net: nn.Module) -> Tensor:
        return torch.func.vmap(net)(x[:, None]).square().sum()

    def swapped(net: nn.Module) -> Tensor:
        values = {name: p * 1.0 for name, p in net.named_parameters()}
        return torch.func.functional_call(net, values, (x,)).square().sum()  # type: ignore[no-any-return]

    def cast(net: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float().square().sum()  # type: ignore[no-any-return]

    def one_row(net: nn.Module) -> Tensor:
        return net(x[0]).square().sum()  # type: ignore[no-any-return]

    for loss in (mapped, swapped, cast, one_row):
        trainee.backward(loss)
        assert not any(trainee.check())
        for p in (*trainee.module.parameters(), *trainee.plain.parameters()):
            p.grad = None
    with torch.autograd.forward_ad.dual_level(), trainee.at_home.working():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(trainee.module(dual)).tangent
        assert tangent is not None
    with torch.no_grad(), trainee.at_home.working():
        assert not trainee.module(x).requires_grad


def test_frozen_weights_and_layers_with_a_forward_of_their_own() -> None:
    def make() -> nn.Module:
        net = two_layers()
        net[0].weight.requires_grad_(False)  # type: ignore[index]
        last = net[2]  # type: ignore[index]
        last.forward = lambda x: nn.functional.linear(x, last.weight) * 2  # type: ignore[assignment]
        return net

    trainee, x = Trainee(make), torch.randn(4, 7)
    trainee.backward(lambda net: net(x).square().sum())
    assert not any(trainee.check())


class Target(nn.Module):
    """Copies itself, and saves itself, in forward: as self-supervised models do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.target = [copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))]
        with torch.no_grad():
            for target in self.target:
                for p in target.parameters():
                    p.mul_(2.0)
            aims = [target(x) for target in self.target]
        return sum(((self.net(x) - aim).square().sum() for aim in aims), torch.zeros(()))


def test_copies_stand_on_their_own() -> None:
    trainee, x = Trainee(Target), torch.randn(3, 6)
    trainee.backward(lambda net: net(x))
    trainee.check()
    target: Any = trainee.module.target
    for one in target:
        one.weight.data.zero_()
        assert torch.equal(one(x), one.bias.expand(3, 4))
        assert torch.equal(copy.deepcopy(one)(x), one(x))
        pickle.dumps(one)


def test_nothing_is_left_on_the_layers() -> None:
    trainee = Trainee(two_layers)
    with pytest.raises(ZeroDivisionError), trainee.at_home.working():
        assert "forward" in vars(trainee.module[0])  # type: ignore[index]
        raise ZeroDivisionError
    assert not any("forward" in vars(layer) for layer in trainee.module.modules())
    assert not at_home._hosts


@pytest.mark.timeout(120)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_replicas_equal_one_device(accumulate: int) -> None:
    """Layers large enough by themselves, in real processes."""
    at_home.WORTH = 1 << 16
    torch.manual_seed(1)
    x, y = torch.randn(44, 300), torch.randint(0, 10, (44,))

    def trained(devices: list[str]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(300, 256), nn.ReLU(), nn.Linear(256, 10))
        model = sg.Model(net, sg.MirroredStrategy(devices))
        model.compile("sgd", "cross_entropy", accumulate=accumulate)
        model.fit(x, y, batch_size=11, epochs=3, verbose=0)
        return [p.detach().clone() for p in net.parameters()]

    for one, three in zip(trained(["cpu:0"]), trained(["cpu:0", "cpu:1", "cpu:2"]), strict=True):
        torch.testing.assert_close(one, three, rtol=1e-5, atol=1e-6)
