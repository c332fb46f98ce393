"""Custom loops whose step is many calls: all are replayed, as plain torch ran them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from stratagem.errors import UsageError
from stratagem.plan import advice
from stratagem.plan.choose import choose
from stratagem.plan.hardware import Hardware
from stratagem.plan.measure import rehearse
from stratagem.plan.profile import Profile
from stratagem.plan.report import heading, warnings
from stratagem.training.dry_run import DryRun
from tests.launch.test_loop_recorder import gradients
from tests.launch.test_loop_recorder import seen as handed

pytestmark = pytest.mark.timeout(60)


class Seen:
    """Records which modules are called, with how many rows."""

    def __init__(self, **modules: nn.Module) -> None:
        self.calls: list[tuple[str, int]] = []
        for name, module in modules.items():
            module.register_forward_hook(lambda m, args, out, name=name: self.note(name, args[0]))

    def note(self, name: str, x: Tensor) -> None:
        self.calls.append((name, len(x)))

    def __getstate__(self) -> dict[str, Any]:
        return {"calls": []}

    def taken(self) -> list[tuple[str, int]]:
        calls, self.calls = self.calls, []
        return calls


def same_again(trial: DryRun, module: nn.Module) -> None:
    """Check that the replayed step gives the gradients of the loop."""
    own = gradients(module)
    module.zero_grad()
    trial.loss(trial.batch).backward()  # type: ignore[no-untyped-call]
    for a, b in zip(own, gradients(module), strict=True):
        torch.testing.assert_close(a, b)


def measured(trial: DryRun, batch: int | None = None) -> Profile:
    return rehearse(trial, batch=batch, steps=2, crowded=False)


@pytest.mark.parametrize("watched", [True, False])
def test_a_frozen_backbone_is_run_forward(watched: bool) -> None:
    """Its forward is a part of the step, with a graph or without."""
    back, head = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), nn.Linear(6, 2)
    back.requires_grad_(False)
    optimizer, seen = torch.optim.SGD(head.parameters(), 0.1), Seen(back=back, head=head)

    def loop() -> None:
        with torch.set_grad_enabled(watched):
            z = back(torch.randn(8, 4))
        head(z).pow(2).mean().backward()
        optimizer.step()

    trial = handed(loop)
    assert trial.module is head and seen.taken() == [("back", 8), ("head", 8)]
    same_again(trial, head)
    assert seen.taken() == [("back", 8), ("head", 8)]
    before = back[1].running_mean.clone()
    profile = measured(trial, 20)
    assert seen.taken()[-2:] == [("back", 20), ("head", 20)]
    assert torch.equal(before, back[1].running_mean)  # put back
    assert profile.batch == 20 and profile.dense_bytes == (6 * 2 + 2) * 4
    assert "1 call of Sequential (forward only) and 1 call of Linear" in warnings(profile)[0]


def test_a_loss_that_is_a_frozen_network() -> None:
    """Gradients pass through it, and it has none itself."""
    net, critic = nn.Linear(4, 6), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 1))
    critic.requires_grad_(False)
    optimizer, seen = torch.optim.SGD(net.parameters(), 0.1), Seen(net=net, critic=critic)

    def loop() -> None:
        critic(net(torch.randn(8, 4))).mean().backward()
        optimizer.step()

    trial = handed(loop)
    assert trial.module is net and len(seen.taken()) == 2
    trial.loss(trial.batch).backward()  # type: ignore[no-untyped-call]
    trial.loss(trial.batch).backward()  # type: ignore[no-untyped-call]
    assert seen.taken() == [("net", 8), ("critic", 8)] * 2


def test_two_optimizers_are_said() -> None:
    maker, judge = nn.Linear(4, 8), nn.Linear(8, 1)
    of_maker, of_judge = torch.optim.Adam(maker.parameters()), torch.optim.SGD(judge.parameters())
    seen = Seen(maker=maker, judge=judge)

    def loop() -> None:
        judge(maker(torch.randn(8, 4)).detach()).mean().backward()
        of_judge.step()
        of_maker.step()

    trial = handed(loop)
    same_again(trial, judge)
    assert seen.taken() == [("maker", 8), ("judge", 8)] * 2
    assert any("another optimizer" in note and "Adam" in note for note in trial.notes)


def test_one_module_called_twice_before_backward() -> None:
    net = nn.Linear(4, 3)
    optimizer, seen = torch.optim.SGD(net.parameters(), 0.1), Seen(net=net)

    def loop() -> None:
        (net(torch.randn(8, 4)) - net(torch.randn(8, 4))).pow(2).mean().backward()
        optimizer.step()

    trial = handed(loop)
    same_again(trial, net)
    assert seen.taken() == [("net", 8)] * 4
    assert measured(trial).batch == 8  # pairs


def test_a_gradient_that_is_a_part_of_the_loss_makes_no_micro_batch() -> None:
    """As in a gradient penalty: of two backwards only the one that trains counts."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    optimizer, x = torch.optim.SGD(net.parameters(), 0.1), torch.randn(8, 4, requires_grad=True)

    def loop() -> None:
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (net(torch.randn(8, 4)).mean() + slope.pow(2).mean()).backward()
        optimizer.step()

    trial = handed(loop)
    assert trial.accumulated == 1 and len(trial.batch) == 8
    trial.loss(trial.batch).backward()  # type: ignore[no-untyped-call]


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Embedding(1000, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.rows(x))
        return out


def accumulating(net: nn.Module, batches: list[Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def loop() -> None:
        for x in batches:
            net(x).pow(2).mean().backward()
        optimizer.step()

    return loop


def test_micro_batches_are_one_step() -> None:
    net = nn.Linear(4, 3)
    seen = Seen(net=net)
    trial = handed(accumulating(net, [torch.randn(8, 4) for _ in range(4)]))
    seen.taken()
    same_again(trial, net)
    assert seen.taken() == [("net", 8)] * 4
    far, step = cloudpickle.loads(cloudpickle.dumps((net, trial.loss)))  # to others here
    assert all(call.module is far for call in step.calls)
    profile = measured(trial)
    assert profile.batch == 32 and "32 examples a replica in 4 micro-batches" in heading(profile)
    assert profile.buckets[-1].ready <= profile.backward
    assert Profile.from_json(profile.to_json()) == profile
    seen.taken()
    assert measured(trial, 12).batch == 12 and set(seen.taken()) == {("net", 3)}
    with pytest.raises(UsageError, match="4 micro-batches, so 3 examples are too few"):
        measured(trial, 3)
    pasted = advice.code(choose(profile, Hardware()))
    assert "batch_size = 8  # 1 x 32, in 4 micro-batches" in pasted


def test_rows_that_micro_batches_touch_are_counted_together() -> None:
    trial = handed(accumulating(Bag(), [torch.arange(10), torch.arange(5, 25)]))
    assert measured(trial).sparse[0].touched == 25


def test_what_comes_before_the_loop_is_left_out_and_said() -> None:
    back, head = nn.Linear(4, 6).requires_grad_(False), nn.Linear(6, 2)
    optimizer, seen = torch.optim.SGD(head.parameters(), 0.1), Seen(back=back, head=head)

    def loop() -> None:
        for _ in range(5):
            with torch.no_grad():
                head(back(torch.randn(8, 4)))
        seen.taken()
        head(back(torch.randn(8, 4))).mean().backward()
        optimizer.step()

    trial = handed(loop)
    same_again(trial, head)
    assert seen.taken() == [("back", 8), ("head", 8)] * 2
    assert "Linear was called 5 times before its first gradient" in trial.notes[0]


def test_features_that_were_prepared_are_no_part_of_a_step() -> None:
    back, head = nn.Sequential(nn.Linear(4, 6)).requires_grad_(False), nn.Linear(6, 2)
    optimizer, seen = torch.optim.SGD(head.parameters(), 0.1), Seen(back=back, head=head)

    def loop() -> None:
        features = [back(torch.randn(8, 4)) for _ in range(20)]
        seen.taken()
        head(features[0]).mean().backward()
        optimizer.step()

    trial = handed(loop)
    same_again(trial, head)
    assert seen.taken() == [("head", 8)] * 2
    assert "Sequential was run forward 20 times" in trial.notes[0]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return out


def test_what_backward_computes_again_is_no_call_of_the_loop() -> None:
    net = Checkpointed()
    trial = handed(accumulating(net, [torch.randn(8, 4), torch.randn(8, 4)]))
    same_again(trial, net)
    assert trial.accumulated == 2 and "is 2 calls of Checkpointed;" in trial.notes[0]


class Weighted(nn.Linear):
    def forward(self, weights: Tensor, x: Tensor | None = None) -> Tensor:
        assert x is not None
        return super().forward(x) * weights


def test_rows_are_those_of_most_that_goes_in_and_comes_out() -> None:
    net = Weighted(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def loop() -> None:
        net(torch.ones(3), torch.randn(12, 4)).mean().backward()
        optimizer.step()

    assert len(handed(loop).batch) == 12


class Own(nn.Linear):
    def forward(self, weights: Tensor, x: Tensor | None = None) -> Tensor:
        assert x is not None
        return (super().forward(x) * weights).mean()


@pytest.mark.parametrize(
    ("net", "given", "said"),
    [
        (nn.LSTM(4, 3), [torch.randn(9, 2, 4)], "LSTM has layers with batch_first=False"),
        (Own(4, 3), [torch.ones(3), torch.randn(12, 4)], "Own is given tensors of 3 and 12 rows"),
    ],
)
def test_rows_that_are_not_clear_are_said(net: nn.Module, given: list[Tensor], said: str) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def loop() -> None:
        out = net(*given)
        (out if isinstance(out, Tensor) else out[0]).mean().backward()
        optimizer.step()

    (note,) = [each for each in handed(loop).notes if said in each]
    assert f"{len(given[0])} examples are planned with" in note
