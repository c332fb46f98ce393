"""Mirrored replicas on a GPU: the result of one device, and several replicas on one GPU."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.cluster.membership import Membership
from stratagem.training import devices
from stratagem.wire.process_group import Meeting, MeetingStore, ProcessGroup
from tests.support import data, distance, mlp, moved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(start: nn.Module, precision: torch.dtype | None = None) -> nn.Module:
    """The reference: a loop by hand, on the GPU."""
    x, y = (t.cuda() for t in data())
    module = copy.deepcopy(start).cuda()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", enabled=precision is torch.float16)
    for _ in range(2):
        for i in range(0, len(x), 64):
            with torch.autocast("cuda", precision or torch.float32, enabled=precision is not None):
                loss = F.cross_entropy(module(x[i : i + 64]), y[i : i + 64])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return module.cpu()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def fitted(devices: list[str], start: nn.Module, **options: Any) -> sg.Model:
    strategy = sg.MirroredStrategy(devices)
    x, y = data()
    with strategy.scope():
        model = sg.Model(copy.deepcopy(start))
        model.compile(adam, "cross_entropy", ["accuracy"], **options)
    model.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0)
    results = model.evaluate(x, y)
    outputs = model.predict(x)
    assert results["loss"] == pytest.approx(float(F.cross_entropy(outputs, y)), abs=2e-2)
    strategy.close()
    model.module.cpu()
    return model


def test_the_default_is_every_gpu() -> None:
    assert sg.MirroredStrategy().devices[0] == "cuda:0"


@pytest.mark.parametrize("precision", [None, "bfloat16", "float16"])
def test_one_gpu_equals_the_loop_by_hand(precision: str | None) -> None:
    start = mlp()
    alone = on_gpu(start, getattr(torch, precision) if precision else None)
    model = fitted(["/gpu:0"], start, precision=precision)
    assert moved(start, alone)
    assert distance(alone, model.module) < 1e-5


@pytest.mark.parametrize("devices", [["cuda:0", "cpu:0"], ["cpu:0", "cuda:0", "cpu:1"]])
def test_cpu_and_gpu_replicas_together(devices: list[str]) -> None:
    """A follower forked from the zygote takes the GPU, and CPU followers join a GPU chief."""
    start = mlp()
    assert distance(on_gpu(start), fitted(devices, start).module) < 1e-4


SCRIPT = """
import torch, stratagem as sg
from tests.support import data, mlp
strategy = sg.MirroredStrategy()
assert strategy.num_replicas_in_sync == 2
x, y = data()
with strategy.scope():
    model = sg.Model(mlp())
    model.compile(lambda p: torch.optim.Adam(p, lr=0.01), "cross_entropy")
model.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0)
print(torch.cuda.current_device(), next(model.module.parameters()).device)
model.save({path!r})
"""


def test_two_tasks_share_one_gpu(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(path=str(tmp_path / "model")))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "stratagem",
            "run",
            "--replicas",
            "2",
            "--gpu-memory",
            "30%",
            str(script),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cuda:0" in done.stdout
    start = mlp()
    model = sg.Model(mlp())
    model.load(tmp_path / "model")
    assert distance(on_gpu(start), model.module) < 1e-4


def test_a_sharded_model_on_one_gpu_equals_the_loop_by_hand() -> None:
    start = mlp()
    strategy = sg.ShardedStrategy(["cuda:0"])
    with strategy.scope():
        model = sg.Model(copy.deepcopy(start))
        model.compile(lambda p: torch.optim.Adam(p, lr=0.01), "cross_entropy")
    x, y = data()
    model.fit(x, y, batch_size=64, epochs=2, shuffle=False, verbose=0)
    strategy.close()
    assert distance(on_gpu(start), model.module.cpu()) < 1e-5


def test_own_loop_on_the_gpu() -> None:
    strategy = sg.MirroredStrategy(["cuda:0"])
    start = mlp()
    model = copy.deepcopy(start)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = strategy.prepare(
        model, optimizer, DataLoader(TensorDataset(*data()), batch_size=64)
    )
    for _ in range(2):
        for x, y in loader:
            assert x.is_cuda
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert distance(on_gpu(start), model.cpu()) < 1e-5


def test_nccl_group_of_one() -> None:
    """NCCL refuses two ranks on one GPU; a group of one still shows that our calls fit its API."""
    limit = timedelta(seconds=60)
    store = MeetingStore(Membership.alone(), "x", limit)
    meeting = Meeting(store, "127.0.0.1", limit, lambda waited: None)
    group = ProcessGroup("alone", 0, 1, "nccl", meeting)
    group.size = 2  # else every operation returns at once
    flat = torch.arange(10.0, device="cuda")
    group.sum(flat).wait()
    group.reduce_to(flat, 0)
    group.broadcast(flat, 0)
    assert torch.equal(flat.cpu(), torch.arange(10.0))
    group.abort()


def test_after_an_abort_a_new_nccl_group_works() -> None:
    """After the loss of a replica an elastic job never uses the old group again."""
    limit = timedelta(seconds=60)
    for generation in range(3):
        store = MeetingStore(Membership.alone(), f"{generation}", limit)
        meeting = Meeting(store, "127.0.0.1", limit, lambda waited: None)
        group = ProcessGroup("main", 0, 1, "nccl", meeting)
        group.size = 2  # else every operation returns at once
        flat = torch.full((1 << 20,), 3.0, device="cuda")
        under_way = group.sum(flat)
        if generation < 2:
            group.abort()  # with something under way
            continue
        under_way.wait()
        assert bool((flat.cpu() == 3.0).all())
        group.abort()


def test_running_out_of_memory_says_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + torch.empty(1 << 40, device=x.device).sum()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fitted(["cuda:0"], Greedy())
    assert "batch_size" in "".join(caught.value.__notes__)


def test_the_memory_limit_holds() -> None:
    code = (
        "import torch, stratagem as sg\n"
        "sg.MirroredStrategy(['cuda:0']).replica_group.start()\n"
        "torch.empty(3 << 30, dtype=torch.uint8, device='cuda')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, devices.VARIABLE: "2GiB"},
    )
    assert "OutOfMemoryError" in done.stderr
