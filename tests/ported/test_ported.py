"""Scripts with loops of their own: as one device trains them, or refused with a sentence."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from typing import Any

import pytest
import torch

import stratagem as sg
from tests.support import cpus

#: by script: what a strategy says that cannot do it exactly
SCRIPTS: dict[str, dict[str, str]] = {
    "vae": {},
    "gan": {"servers": "give prepare the DataLoader"},
    "siamese": {},
    "carried_state": {"servers": "Gradients were changed between backward"},
    "resnet": {"servers": "each replica normalises over its own rows"},
    "distillation": {},
    "graph": {"servers": "give prepare the DataLoader"},
    "line_search": {
        "mirrored": "LBFGS evaluates the loss several times",
        "servers": "LBFGS",
    },
    "forward_forward": {"servers": "give prepare the DataLoader"},
    "gpt": {"servers": "gradients are added up over batches"},
    "segmentation": {},
    "policy_gradient": {"servers": "give prepare the DataLoader"},
    "root_mean_square": {
        "mirrored": r"a function \(sqrt\) of a sum or mean over rows",
        "servers": r"a function \(sqrt\) of a sum or mean over rows",
    },
}


@pytest.fixture(scope="module", params=["2 replicas", "3 replicas", "servers"])
def strategy(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    made: sg.Strategy
    if request.param == "servers":
        made = sg.ParameterServerStrategy(
            sg.LocalCluster(workers=2, ps=1), updates=sg.Synchronous(), devices="cpu:0"
        )
    else:
        made = sg.MirroredStrategy(cpus(int(request.param[0])), sync_batchnorm=True)
    with closing(made):
        yield made


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def changed(name: str, strategy: sg.Strategy) -> tuple[dict[str, torch.Tensor], int]:
    """What the script gives, and how many rows this replica has computed."""
    rows = 0

    def count(module: Any, args: Any) -> None:
        nonlocal rows
        found = next((a for a in args if isinstance(a, torch.Tensor)), None)
        rows += 0 if found is None else len(found)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        script = importlib.import_module(f"tests.ported.{name}")
        state = script.train(strategy)
        return {key: value.detach().clone() for key, value in state.items()}, rows
    finally:
        handle.remove()


@cache
def alone(name: str) -> dict[str, torch.Tensor]:
    """What the script gives on one device."""
    torch.manual_seed(99)
    state = importlib.import_module(f"tests.ported.{name}").train(None)
    return {key: value.detach().clone() for key, value in state.items()}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_what_one_device_gives_or_is_refused(
    name: str, strategy: sg.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    kind = "servers" if strategy.served else "mirrored"
    refusal = SCRIPTS[name].get(kind)
    if name == "resnet" and strategy.served:  # a thing that people choose: told, not refused
        strategy.run(changed, name, strategy)
        assert str(refusal) in caplog.text
        return
    if refusal is not None:
        with pytest.raises((sg.NotDistributable, sg.UsageError, sg.ReplicaFailed), match=refusal):
            strategy.run(changed, name, strategy)
        return
    expected = alone(name)
    results = strategy.run(changed, name, strategy)
    assert len(results) == len(strategy.devices) > 1
    for state, rows in results:
        assert rows > 0, "a replica has computed nothing"
        assert state.keys() == expected.keys()
        for key, value in state.items():
            assert float((value - expected[key]).abs().max()) < 1e-12, key


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_something(name: str) -> None:
    """Weights that never move would be equal everywhere."""
    script, first = importlib.import_module(f"tests.ported.{name}"), alone(name)
    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.LBFGS):
            patch.setattr(kind, "step", lambda self, *args: None)
        untrained = script.train(None)
    assert any(float((first[k] - untrained[k]).abs().max()) > 1e-4 for k in first)
