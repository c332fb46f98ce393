"""One worker of the benchmark, on one host: seconds a step of some ways to send gradients.

python benchmarks/shaped_links/task.py RANK PORT ADDRESS ADDRESS WAY WAY ...
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDE = 64, 1024
#: updates to warm up, how many make a round, and of those who meet every 20
WARM, SHORT, ROUND = 3, 5, 20

OURS: dict[str, str] = {
    "dense": "",
    "bf16": "wire='bfloat16'",
    "int8": "wire=sg.Int8()",
    "top-k 1%": "wire=sg.TopK(0.01)",
    "PowerSGD 4": "wire=sg.PowerSGD(4)",
    "sign": "wire=sg.Sign()",
    "local 20": "sync=sg.LocalSteps(20)",
    "DiLoCo 20": "sync=sg.DiLoCo(20)",
    "DiLoCo 20, int8": "sync=sg.DiLoCo(20, wire=sg.Int8())",
    "ring": "sync=sg.Gossip('ring')",
}
#: what is sent beside the computation, and after it: only where they are named
PAIRS: dict[str, str] = {
    "int8, after": "wire=sg.Int8()",
    "top-k 1%, after": "wire=sg.TopK(0.01)",
    "PowerSGD 4, after": "wire=sg.PowerSGD(4)",
    "DiLoCo 20, parts": "sync=sg.DiLoCo(20, fragments=4)",
    "DiLoCo 20, parts, after": "sync=sg.DiLoCo(20, fragments=4, overlap=0)",
}
TORCHS = ["DDP", "DDP bf16", "DDP PowerSGD 4"]


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDE, 10))


def batches(rank: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(rank)
    for _ in range(count):
        yield torch.randn(ROWS, WIDE, generator=dice), torch.randint(10, (ROWS,), generator=dice)


def timed(way: str, module: Any, optimizer: Any, rank: int) -> float:
    """Seconds of a step in the mean of the fastest round."""
    steps = int(os.environ["SHAPED_LINKS_STEPS"])
    each, warm, count = (ROUND, ROUND, 3 * ROUND) if "20" in way else (SHORT, WARM, steps)
    marks, given = [0.0], list(batches(rank, WARM))  # making them is no part of a step
    for step in range(1, warm + count + 1):
        x, y = given[step % WARM]
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= warm and (step - warm) % each == 0:
            marks.append(time.perf_counter())
    return min(b - a for a, b in pairwise(marks[1:])) / each


def ours(way: str, rank: int, addresses: list[str]) -> float:
    task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
    os.environ["TF_CONFIG"] = json.dumps(task)
    import stratagem as sg

    options = eval(f"dict({(OURS | PAIRS)[way]})", {"sg": sg})  # the tables above, nothing else
    when = _sent_after_backward() if way.endswith("after") else nullcontext()
    with when, sg.MultiWorkerMirroredStrategy(devices=["cpu:0"], **options) as strategy:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        module, optimizer, _ = strategy.prepare(module, optimizer)
        return timed(way, module, optimizer, rank)


@contextmanager
def _sent_after_backward() -> Iterator[None]:
    """Inside of it compressions begin when all gradients are there."""
    from stratagem.codecs.feedback import Feedback

    plain = Feedback.__init__

    def made(self: Feedback, *given: Any) -> None:
        plain(self, *given)
        self.whole = True

    Feedback.__init__ = made  # type: ignore[method-assign]
    try:
        yield
    finally:
        Feedback.__init__ = plain  # type: ignore[method-assign]


def torchs(way: str, rank: int, addresses: list[str]) -> float:
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    if not dist.is_initialized():
        where = f"tcp://{addresses[0]}"
        dist.init_process_group("gloo", where, timedelta(seconds=120), len(addresses), rank)
    # one bucket for PowerSGD: on Gloo the messages of two met each other, and torch gave up
    bucket = 64 if "PowerSGD" in way else None
    module = DistributedDataParallel(model(), bucket_cap_mb=bucket)

    def bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """torch's own hook; by its name DDP refuses it on Gloo, which carries it all the same."""
        return default_hooks.bf16_compress_hook(state, bucket)

    bf16.__annotations__ = {}  # DDP compares them with types, and here they are text
    if way == "DDP bf16":
        module.register_comm_hook(None, bf16)
    elif way == "DDP PowerSGD 4":
        state = powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return timed(way, module, torch.optim.SGD(module.parameters(), lr=0.01), rank)


if __name__ == "__main__":
    place, port, first, second, *chosen = sys.argv[1:]
    torch.set_num_threads(1)
    for number, way in enumerate(chosen):
        there = [f"{host}:{int(port) + 7 * number}" for host in (first, second)]
        seconds = (torchs if way in TORCHS else ours)(way, int(place), there)
        print(f"seconds {seconds:.6f} {way}", flush=True)
    os._exit(0)  # torch's process group would wait for the other host
