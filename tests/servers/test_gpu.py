"""Central parameters with a GPU: kept on the CPU, kept on the GPU, several workers on one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stratagem as sg
from tests.served_support import apart, digits, net

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


def trained(where: Any) -> sg.Model:
    x, y, _, _ = digits()
    one = sg.Model(net(), where)
    one.compile(lambda p: torch.optim.Adam(p, lr=0.01), "cross_entropy", ["accuracy"])
    torch.manual_seed(5)
    one.fit(x[:500], y[:500], epochs=2, batch_size=55, verbose=0)
    one.module.cpu()
    return one


PLACES: dict[str, Any] = {
    "on the cpu": lambda: sg.CentralStorageStrategy("cuda:0", "cpu"),
    "cpu and gpu compute": lambda: sg.CentralStorageStrategy(["cuda:0", "cpu:0"], "cpu"),
    "on the gpu": lambda: sg.CentralStorageStrategy(["cuda:0", "cpu:0"], "cuda:0"),
    "two share a gpu": lambda: sg.ParameterServerStrategy(
        sg.LocalCluster(workers=2, ps=2), updates=sg.Synchronous(), devices="cuda:0"
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_in_step_as_one_device(name: str) -> None:
    where = PLACES[name]()
    try:
        ours = trained(where)
    finally:
        where.close()
    theirs = sg.Model(net(), sg.MirroredStrategy("cpu:0"))
    theirs.compile(lambda p: torch.optim.Adam(p, lr=0.01), "cross_entropy", ["accuracy"])
    x, y, _, _ = digits()
    torch.manual_seed(5)
    theirs.fit(x[:500], y[:500], epochs=2, batch_size=55, verbose=0)
    assert apart(ours.module, theirs.module) < 2e-3
    assert ours.history is not None and theirs.history is not None
    mine, plain = ours.history.history["loss"], theirs.history.history["loss"]
    assert mine == pytest.approx(plain, abs=1e-3)


def test_defaults_are_the_books() -> None:
    where = sg.CentralStorageStrategy()
    try:
        assert where.devices[0] == "cuda:0"
        alone = torch.cuda.device_count() == 1
        assert where.parameter_device == ("cuda:0" if alone else "cpu:0")
    finally:
        where.close()


def test_asynchronous_on_a_gpu_learns() -> None:
    x, y, test_x, test_y = digits()
    where = sg.CentralStorageStrategy(["cuda:0", "cpu:0"], "cpu", updates=sg.Asynchronous())
    try:
        one = sg.Model(net(), where)
        one.compile(lambda p: torch.optim.Adam(p, lr=0.01), "cross_entropy", ["accuracy"])
        one.fit(x, y, epochs=6, batch_size=50, verbose=0)
        assert one.evaluate(test_x, test_y, verbose=0)["accuracy"] >= 0.95
    finally:
        where.close()
