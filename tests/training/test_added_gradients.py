"""Gradients of microbatches, added up in place, are the sum that autograd makes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from stratagem.training.gradient_placement import AddedGradients
from stratagem.training.layer_costs import LayerMeter
from stratagem.training.layer_graph import trace
from tests.strategies.test_pipeline import adam, fitted
from tests.support import cpus, distance, moved


def wide() -> nn.Sequential:
    torch.manual_seed(2)
    same = nn.Linear(256, 256)
    parts = [nn.Linear(8, 256), same, nn.Tanh(), nn.Linear(256, 256, bias=False), nn.Tanh(), same]
    return nn.Sequential(*parts, nn.Linear(256, 4)).double()


def batches(*rows: int) -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(n, 8, generator=dice, dtype=torch.float64),
            torch.randint(0, 4, (n,), generator=dice),
        )
        for n in rows
    ]


def summed(net: nn.Module, how: Any, single: bool = False) -> list[Tensor]:
    for x, y in batches(5, 3, 150, 1):
        with how():
            found = net(x.float() if single else x)
        F.cross_entropy(found, y, reduction="sum").backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def test_the_sum_is_that_of_autograd() -> None:
    plain, net = wide(), wide()
    gradients = AddedGradients(net)
    expected = summed(plain, lambda: torch.enable_grad())
    summed(net, gradients.forward)
    # what is kept is no larger than the gradient
    assert all(sum(len(x) for _, x in kept) <= 128 for kept in gradients._waiting.values())
    gradients.settle()
    assert gradients.added == 4 * 3  # two layers, of which one is used twice
    found = [p.grad for p in net.parameters() if p.grad is not None]
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("why", ["hook", "post hook", "own layer", "autograd.grad", "bfloat16"])
def test_where_somebody_looks_autograd_adds(why: str) -> None:
    net = wide()
    weight: Any = net[3].weight
    if why == "hook":
        net[1].weight.register_hook(lambda g: 2 * g)
        weight.register_hook(lambda g: 2 * g)
    elif why == "post hook":
        for param in net.parameters():
            param.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[no-untyped-call]
    elif why == "own layer":
        net[2] = type("Own", (nn.Tanh,), {})()
    gradients = AddedGradients(net)
    if why == "autograd.grad":
        weight.grad = torch.zeros_like(weight)
        (x, y), *_ = batches(5)
        with gradients.forward():
            loss = F.cross_entropy(net(x), y)
        (found,) = torch.autograd.grad(loss, weight)
        assert bool(found.any()) and not weight.grad.any()
    elif why == "bfloat16":
        with torch.autocast("cpu", torch.bfloat16):
            summed(net.float(), gradients.forward, single=True)
    else:
        summed(net, gradients.forward)
    assert gradients.added == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_wide_layers_in_a_pipeline(accumulate: int) -> None:
    """Uneven microbatches, a layer on both stages, clipping by the norm of all."""
    module = wide()
    (x, y), *_ = batches(23)
    strategy = sg.PipelineStrategy(cpus(2), 3)
    try:
        made = fitted(
            strategy, module, x, y, optimizer=adam, batch=7, clip_norm=0.5, accumulate=accumulate
        )
    finally:
        strategy.close()
    alone = sg.MirroredStrategy(["cpu:0"])
    one = fitted(alone, module, x, y, optimizer=adam, batch=7, clip_norm=0.5, accumulate=accumulate)
    alone.close()
    assert distance(one.module, made.module) < 1e-12 and moved(module, made.module)


class Idle(nn.Linear):
    """Sleeps for a while, as a process does that shares its core."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().forward(x)


def test_what_others_take_of_the_processor_is_no_cost_of_a_layer() -> None:
    net = nn.Sequential(nn.Linear(64, 64), Idle(64, 64), nn.Linear(64, 64))
    costs = LayerMeter(trace(net, x := torch.randn(8, 64))).measure([x])
    assert all(0.0 < cost.forward < cost.seconds < 0.03 for cost in costs), costs


def test_layers_that_are_alike_cost_the_same() -> None:
    """Split an even net evenly, whatever else runs on the machine."""
    net = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(16, 16), nn.Tanh())))
    net.append(nn.Linear(16, 16, bias=False))
    costs = LayerMeter(trace(net, x := torch.randn(3, 16))).measure([x])
    assert len({cost.seconds for cost in costs[2:8:2]}) == 1
    assert len({cost.seconds for cost in costs[1:8:2]}) == 1
    assert costs[0].seconds <= costs[2].seconds  # its input has no gradient
    assert len({*(cost.seconds for cost in costs[1:])}) == 3
