"""This machine, measured in well under a second: what replicas on one host share."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable

import torch

from stratagem.cluster.cores import cores
from stratagem.plan.hardware import Hardware

_FLOATS = 4 << 20
_ROUNDS = 5


def measure(device: str = "cpu") -> Hardware:
    """One host with this machine's processors, or GPUs if `device` is one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        adding, updating = _adding(), _updating()
    finally:
        torch.set_num_threads(threads)
    gpus = torch.cuda.device_count() if device.startswith("cuda") else 0
    local = _between_gpus(gpus) if gpus else adding
    return Hardware(
        per_host=gpus or cores(), local=local, local_latency=_round_trip() / 2, update=updating,
        cores=cores(),
    )  # fmt: skip


def _adding() -> float:
    """Bytes a second that one core adds up."""
    total, other = torch.zeros(_FLOATS), torch.ones(_FLOATS)
    return _FLOATS * 4 / _best(lambda: total.add_(other))


def _updating() -> float:
    """Bytes a second of gradient that Adam takes in on one core."""
    param = torch.nn.Parameter(torch.zeros(_FLOATS // 2))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.Adam([param], fused=True)
    return _FLOATS * 2 / _best(optimizer.step)


def _between_gpus(count: int) -> float:
    """Bytes a second from one GPU to the next; where it is alone, to the host and no faster."""
    one = torch.empty(_FLOATS * 4, device="cuda:0")
    if count > 1:
        other = torch.empty_like(one, device="cuda:1")
    else:
        other = torch.empty(_FLOATS * 4, pin_memory=True)

    def copy() -> None:
        other.copy_(one)
        torch.cuda.synchronize()

    return one.nbytes / _best(copy)


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)


def _round_trip() -> float:
    """Seconds there and back over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = socket.create_connection(door.getsockname(), timeout=5)
        far, _ = door.accept()
    with near, far:
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(100):
            start = time.perf_counter()
            near.send(b".")
            far.recv(1)
            far.send(b".")
            near.recv(1)
            times.append(time.perf_counter() - start)
    return statistics.median(times)
