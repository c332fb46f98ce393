"""Weight gradients computed at home: the same bits, in no other gradient's memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import stratagem as sg
from stratagem.training import gradient_placement
from stratagem.training.gradient_placement import PlacedGradients
from stratagem.wire.buckets import Buckets


@pytest.fixture(autouse=True)
def everything_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_placement, "WORTH", 1)


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
        self.at_home = PlacedGradients(self.module, homes)

    def backward(self, x: Tensor, loss: Callable[[Tensor], Tensor] = torch.sum) -> None:
        """Run both; the loss is squared, so that all elements of dy differ."""
        with self.at_home.forward():
            found = loss(self.module(x).square())
        with self.at_home.backward():
            found.backward()  # type: ignore[no-untyped-call]
        loss(self.plain(x).square()).backward()  # type: ignore[no-untyped-call]

    def check(self) -> list[bool]:
        """Check that gradients are equal to the bit; return which lie at home."""
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


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 5), nn.ReLU(inplace=True), nn.Linear(5, 3, bias=False))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    bias=st.booleans(),
    turned=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_same_bits(rows: int, bias: bool, turned: bool, dtype: torch.dtype) -> None:
    """No rows, and views that are not contiguous, too."""
    trainee = Trainee(lambda: nn.Sequential(nn.Linear(6, 4, bias), nn.Tanh()).to(dtype))
    x = torch.randn(6, rows, dtype=dtype).t() if turned else torch.randn(rows, 6, dtype=dtype)
    trainee.backward(x)
    assert trainee.check()[0]


def test_inputs_that_learn() -> None:
    trainee = Trainee(lambda: nn.Linear(6, 4))
    x = torch.randn(3, 6, requires_grad=True)
    trainee.backward(x)
    assert trainee.check() == [True, False]
    assert x.grad is not None
    with torch.enable_grad():
        (once,) = torch.autograd.grad(trainee.plain(x).square().sum(), x)
    assert torch.equal(x.grad, 2 * once)  # of both


def test_a_gradient_that_is_there_is_added_to() -> None:
    trainee, x = Trainee(two_layers), torch.randn(4, 7)
    trainee.backward(x)
    assert trainee.check() == [True, False, True]
    trainee.backward(2 * x)
    assert trainee.check() == [True, False, True]  # in place


def twice() -> nn.Sequential:
    layer = nn.Linear(6, 6)
    other = nn.Linear(6, 6)
    other.weight = layer.weight
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), other)


def test_a_weight_used_twice_has_one_writer() -> None:
    trainee = Trainee(twice)
    for _ in range(2):
        trainee.backward(torch.randn(4, 6))
        trainee.check()


class Own(nn.Module):
    """A user's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert "forward" not in vars(self.layer)
        return self.layer(x)  # type: ignore[no-any-return]


class Mine(nn.Linear):
    """Of another type."""


def hooked(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = two_layers()
        getattr(net[2], kind)(lambda *args: None)
        return net

    return make


def patched() -> nn.Module:
    net = two_layers()
    net[1].forward = lambda x: x.relu()  # type: ignore[method-assign]
    return net


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(7, 3)))


@pytest.mark.parametrize(
    "make",
    [
        Own,
        lambda: nn.Sequential(Own()),
        lambda: nn.Sequential(Mine(7, 3)),
        patched,
        normed,
        hooked("register_forward_hook"),
        hooked("register_forward_pre_hook"),
        hooked("register_full_backward_hook"),
        hooked("register_full_backward_pre_hook"),
    ],
)
def test_only_stacks_of_torchs_own_layers(make: Callable[[], nn.Module]) -> None:
    trainee = Trainee(make)
    trainee.backward(torch.randn(4, 7))
    assert not any(trainee.check())


def test_what_callbacks_change_is_seen() -> None:
    trainee, x = Trainee(two_layers), torch.randn(4, 7)
    trainee.backward(x)
    assert any(trainee.check())
    trainee.module[1].register_forward_hook(lambda *args: None)  # type: ignore[index]
    for p in (*trainee.module.parameters(), *trainee.plain.parameters()):
        p.grad = None
    trainee.backward(x)
    assert not any(trainee.check())


def test_hooks_on_all_modules_and_layers_that_were_patched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainee, x = Trainee(two_layers), torch.randn(4, 7)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None, with_kwargs=True)
    trainee.backward(x)
    handle.remove()
    assert not any(trainee.check())
    trainee = Trainee(two_layers)
    trainee.backward(x)
    assert any(trainee.check())
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight.t() * 2)
    trainee = Trainee(two_layers)
    trainee.backward(x)
    assert not any(trainee.check())


def test_tensor_hooks_keep_what_they_were_given() -> None:
    trainee = Trainee(two_layers)
    kept: list[list[Tensor]] = [[], []]
    for net, seen in zip((trainee.module, trainee.plain), kept, strict=True):
        net[0].weight.register_hook(seen.append)  # type: ignore[index]
    for _ in range(2):
        for p in (*trainee.module.parameters(), *trainee.plain.parameters()):
            p.grad = None
        trainee.backward(torch.randn(4, 7))
        assert trainee.check() == [False, False, True]
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_gradients_that_somebody_else_asks_for_are_theirs() -> None:
    """A loss that reads gradients itself, before and in the middle of backward."""
    trainee = Trainee(two_layers)
    found: list[Tensor] = []

    def loss(y: Tensor) -> Tensor:
        net = trainee.module if not found else trainee.plain
        weight = net[0].weight  # type: ignore[index]
        (own,) = torch.autograd.grad(y.sum(), weight, create_graph=True)
        found.append(own)
        aside = y.exp().sum()

        def look(grad: Tensor) -> None:
            found.extend(torch.autograd.grad(aside, weight, retain_graph=True))

        z = y * 1
        z.register_hook(look)
        return z.sum() + own.square().sum()

    trainee.backward(torch.randn(4, 7), loss)
    trainee.check()
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    home = trainee.buckets.views[0]
    assert all(one.data_ptr() != home.data_ptr() for one in found)


def test_a_backward_inside_the_loss() -> None:
    trainee, x = Trainee(two_layers), torch.randn(4, 7)

    def loss(y: Tensor) -> Tensor:
        y.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return y.sum()

    trainee.backward(x, loss)
    assert not any(trainee.check())


def test_other_kinds_of_products_stay_as_they_are() -> None:
    trainee, x = Trainee(two_layers), torch.randn(4, 7)
    for odd in (x[None], x[0], x.to_sparse()):
        trainee.backward(odd)
        assert not trainee.check()[0]
        for p in (*trainee.module.parameters(), *trainee.plain.parameters()):
            p.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        trainee.backward(x)
    assert not any(trainee.check())


def test_frozen_and_complex_weights() -> None:
    def frozen() -> nn.Module:
        net = two_layers()
        net[0].weight.requires_grad_(False)
        return net

    trainee = Trainee(frozen)
    trainee.backward(torch.randn(4, 7))
    assert trainee.check() == [False, True]
    trainee = Trainee(lambda: nn.Linear(7, 3, dtype=torch.complex64))
    trainee.backward(torch.randn(4, 7, dtype=torch.complex64), lambda y: y.abs().sum())
    assert not any(trainee.check())


def test_nothing_is_left_on_the_layers() -> None:
    trainee = Trainee(two_layers)
    with pytest.raises(ZeroDivisionError), trainee.at_home.forward():
        assert "forward" in vars(trainee.module[0])  # type: ignore[index]
        raise ZeroDivisionError
    assert not any("forward" in vars(layer) for layer in trainee.module.modules())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_replicas_equal_one_device(accumulate: int) -> None:
    """Layers that are large enough, in real processes."""
    gradient_placement.WORTH = 1 << 16
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
