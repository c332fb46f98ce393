"""Users' hooks on parameters and optimizers are never ignored silently."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from tests.support import data, distance, mlp, moved, strategy

pytestmark = pytest.mark.timeout(60)

X, Y = data(48)


@pytest.fixture(scope="module")
def servers() -> Iterator[sg.ParameterServerStrategy]:
    made = sg.ParameterServerStrategy(sg.LocalCluster(workers=2, ps=1), updates=sg.Synchronous())
    with contextlib.closing(made):
        yield made


@pytest.fixture(scope="module")
def lone_worker() -> Iterator[sg.ParameterServerStrategy]:
    made = sg.ParameterServerStrategy(sg.LocalCluster(workers=1, ps=1), updates=sg.Synchronous())
    with contextlib.closing(made):
        yield made


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def on_gradient(net: Any, optimizer: torch.optim.Optimizer) -> Any:
    return net[0].weight.register_hook(lambda grad: grad * 0.5)


def after_gradient(net: Any, optimizer: torch.optim.Optimizer) -> Any:
    return net[0].weight.register_post_accumulate_grad_hook(halve)


def before_step(net: Any, optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.register_step_pre_hook(lambda *_: halve(net[0].weight))


def after_step(net: Any, optimizer: torch.optim.Optimizer) -> Any:
    return optimizer.register_step_post_hook(lambda *_: net[0].weight.data.clamp_(-0.1, 0.1))


Hook = Callable[[Any, torch.optim.Optimizer], Any]
ON_PARAMETERS: list[Hook] = [on_gradient, after_gradient]
ON_OPTIMIZER: list[Hook] = [before_step, after_step]


def hooked(on: sg.Strategy, hook: Hook) -> tuple[sg.Model, Any]:
    net = mlp()
    optimizer = sgd(net.parameters())
    model = sg.Model(net, on)
    model.compile(optimizer, "cross_entropy")
    return model, hook(net, optimizer)


def fit(model: sg.Model, **options: Any) -> nn.Module:
    model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0, **options)
    return model.module


def by_one(hook: Hook | None) -> nn.Module:
    """Train by hand on one device, with the hook registered."""
    net = mlp()
    optimizer = sgd(net.parameters())
    if hook is not None:
        hook(net, optimizer)
    for start in [*range(0, len(X), 16)] * 2:
        optimizer.zero_grad()
        F.cross_entropy(net(X[start : start + 16]), Y[start : start + 16]).backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("hook", ON_PARAMETERS + ON_OPTIMIZER)
@pytest.mark.parametrize("kind", ["two", "servers"])
def test_what_would_not_reach_the_others_is_refused(
    kind: str, hook: Hook, request: pytest.FixtureRequest
) -> None:
    model, handle = hooked(request.getfixturevalue(kind), hook)
    words = "parameter '0.weight' has a hook" if hook in ON_PARAMETERS else "optimizer has a hook"
    with pytest.raises(sg.NotDistributable, match=f"{words}.*clip_norm"):
        fit(model)
    assert model.evaluate(X, Y, batch_size=16, verbose=0)["loss"] > 0
    handle.remove()
    if kind == "two":
        assert distance(fit(model), by_one(None)) < 1e-6


@pytest.mark.parametrize("hook", ON_PARAMETERS + ON_OPTIMIZER)
def test_one_device_runs_them(hook: Hook) -> None:
    model, _ = hooked(strategy(1), hook)
    assert distance(fit(model), by_one(hook)) < 1e-6
    assert moved(model.module, by_one(None))


@pytest.mark.parametrize("hook", ON_PARAMETERS)
def test_a_worker_without_others_runs_those_on_parameters(
    lone_worker: sg.ParameterServerStrategy, hook: Hook
) -> None:
    model, _ = hooked(lone_worker, hook)
    assert distance(fit(model), by_one(hook)) < 1e-6


def test_servers_make_the_steps_so_hooks_on_them_are_refused(
    lone_worker: sg.ParameterServerStrategy,
) -> None:
    model, _ = hooked(lone_worker, before_step)
    with pytest.raises(sg.NotDistributable, match="optimizer has a hook"):
        fit(model)


def test_hooks_of_a_training_that_was_cut_short_are_not_the_users(two: sg.MirroredStrategy) -> None:
    model, handle = hooked(two, on_gradient)
    handle.remove()

    def stop(batch: int, logs: Any = None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[sg.callbacks.LambdaCallback(on_train_batch_end=stop)])
    fit(model)
