"""Scripts with a custom loop are planned at their first step, which is the same step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.modules import module as every_module

import stratagem as sg
from stratagem.errors import UsageError
from stratagem.launch import cli
from stratagem.launch.loop_recorder import instead_of_step
from stratagem.plan.measure import rehearse
from stratagem.training.dry_run import DryRun, DryRunHandedOver, instead_of_fit

pytestmark = pytest.mark.timeout(60)


def seen(loop: Callable[[], Any]) -> DryRun:
    """The dry run that a loop hands over at its first step."""
    found: list[DryRun] = []
    with instead_of_fit(found.append), instead_of_step(), pytest.raises(DryRunHandedOver):
        loop()
    return found[0]


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


class Masked(nn.Module):
    """A module with an optional output, and a mask that has no row for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        x = x * mask
        return {"spare": self.two(x), "classes": self.one(x)}


def test_the_step_is_the_loop_s_own() -> None:
    """The stand-in for the loss sends the same gradients through the model."""
    net = Masked()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y, mask = torch.randn(8, 6), torch.randint(0, 3, (8,)), torch.rand(6)
    loss_of = nn.CrossEntropyLoss()  # a module, too, but without parameters

    def loop() -> None:
        with torch.no_grad():
            net(x, mask=mask)
        loss_of(net(x, mask=mask)["classes"], y).backward()
        optimizer.step()

    before = [p.detach().clone() for p in net.parameters()]
    trial = seen(loop)
    own = gradients(net)
    assert trial.module is net and trial.optimizer is optimizer
    net.zero_grad()
    far, same = cloudpickle.loads(cloudpickle.dumps((net, trial.loss)))  # to others here
    assert same.calls[-1].module is far
    trial.loss(trial.batch).backward()  # type: ignore[no-untyped-call]
    again = gradients(net)
    assert len(own) == len(again) == 2  # the unused output has none
    for a, b in zip(own, again, strict=True):
        torch.testing.assert_close(a, b)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    measured = rehearse(trial, batch=20, steps=2, crowded=False)  # more rows; the mask stays whole
    assert measured.batch == 20 and measured.dense_bytes == (6 * 3 + 3 + 6 + 1) * 4


def test_autocast_is_a_part_of_the_step() -> None:
    net, kinds = nn.Linear(4, 2), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.register_forward_hook(lambda module, args, out: kinds.append(out.dtype))

    def loop() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = net(torch.randn(3, 4))
        out.float().sum().backward()
        optimizer.step()

    trial = seen(loop)
    trial.loss(trial.batch)
    assert kinds == [torch.bfloat16] * 2


def test_several_modules_are_refused_in_a_sentence() -> None:
    one, two = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    said = r"SGD it called Linear, Sequential; put them into one"
    with (
        instead_of_fit(lambda trial: None),
        instead_of_step(),
        pytest.raises(UsageError, match=said),
    ):
        two(one(torch.randn(3, 4))).sum().backward()
        optimizer.step()
    assert not every_module._global_forward_hooks and not every_module._global_forward_pre_hooks
    optimizer.step()  # nobody watches any more


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]),
        lambda: sg.ParameterServerStrategy(
            sg.LocalCluster(workers=2, ps=1), updates=sg.Synchronous()
        ),
    ],
)
def test_replicas_are_not_started(strategy: Callable[[], sg.Strategy]) -> None:
    made, turns = strategy(), []

    def train() -> None:
        net = nn.Linear(4, 2)
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.randn(12, 4), torch.randn(12, 2))
        loader: Any = torch.utils.data.DataLoader(data, batch_size=6)
        net, optimizer, loader = made.prepare(net, optimizer, loader)
        for x, y in loader:
            turns.append(len(x))
            mse_loss(net(x), y).backward()
            optimizer.step()

    trial = seen(lambda: made.run(train))
    assert turns == [6] and trial.replicas == 2
    assert rehearse(trial, steps=1, crowded=False).batch == 3  # of each of the two


SCRIPT = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
optimizer = torch.optim.Adam(net.parameters())
data = torch.utils.data.TensorDataset(torch.randn(100, 20), torch.randint(0, 3, (100,)))
for epoch in range(100000):
    for x, y in torch.utils.data.DataLoader(data, batch_size=25):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        print("the script went on")
"""


def test_a_script_that_knows_nothing_of_stratagem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stratagem.plan.measure._SECONDS", 0.2)
    assert cli.main(["plan", "--quick", "--json", "plan.json", "train.py"]) == 0
    assert "the script went on" not in capsys.readouterr().out
    told = json.loads(Path("plan.json").read_text())["profile"]
    assert told["batch"] == 25 and told["buckets"][0]["size"] == (20 * 8 + 8 + 8 * 3 + 3) * 4


def test_loss_functions_are_not_needed() -> None:
    """A model that returns its own loss."""

    class Own(nn.Linear):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            assert y is not None
            return cross_entropy(super().forward(x), y)

    net = Own(4, 3)
    optimizer = torch.optim.Adam(net.parameters())

    def loop() -> None:
        net(torch.randn(5, 4), torch.randint(0, 3, (5,))).backward()
        optimizer.step()

    trial = seen(loop)
    own = gradients(net)
    net.zero_grad()
    trial.loss(trial.batch).backward()  # type: ignore[no-untyped-call]
    for a, b in zip(own, gradients(net), strict=True):
        torch.testing.assert_close(a, b)
