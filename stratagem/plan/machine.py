"""Measure this machine, besides the model's own step.

    measure_hardware()    what replicas on one host share: memory, loopback, processors
    crowd()               the same step while other replicas of this machine compute, too
    update_seconds()      the update of a real parameter server with this optimizer

Replicas share caches, memory and processors, and how much that costs depends on the model: a large
matrix waits for memory, a convolution does not. So `crowd` measures the model in the strategies'
own processes and threads, without communication.
"""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.cluster.environment import cores
from stratagem.errors import NotDistributable, UsageError
from stratagem.plan.hardware import Hardware
from stratagem.plan.host_memory import all_memory
from stratagem.state.optimizer_recipe import describe
from stratagem.state.partition import Piece
from stratagem.state.store import Store
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.training.dry_run import DryRun
from stratagem.training.replica import current_replica
from stratagem.wire.device_kinds import KINDS

_FLOATS = 4 << 20
_ROUNDS = 5


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch computes with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def measure_hardware(device: str = "cpu") -> Hardware:
    """Measure one host with this machine's processors, or with its GPUs if `device` is a GPU."""
    with one_thread():
        adding, updating = _adding(), _updating()
    cuda = KINDS["cuda"]
    gpus = cuda.count() if device.startswith("cuda") else 0
    local = _between_gpus(gpus) if gpus else adding
    return Hardware(
        per_host=gpus or cores(),
        local=local,
        local_latency=_round_trip() / 2,
        update=updating,
        cores=cores(),
        sockets=_through_sockets(),
        memory=cuda.memory(cuda.place(0)) if gpus else None,
        host_memory=all_memory(),
    )


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
    """Bytes a second from one GPU to the next, or to the host's memory if there is only one."""
    one = torch.empty(_FLOATS * 4, device="cuda:0")
    if count > 1:
        other = torch.empty_like(one, device="cuda:1")
    else:
        other = torch.empty(_FLOATS * 4, pin_memory=True)

    def copy() -> None:
        other.copy_(one)
        KINDS["cuda"].synchronize(one.device)

    return one.nbytes / _best(copy)


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)


def _round_trip() -> float:
    """Seconds of a round trip over loopback."""
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


def _through_sockets() -> float:
    """Bytes that the strategies' ring over sockets all-reduces in a second of processor time."""
    with MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops="ring") as strategy:
        taken: list[float] = strategy.run(_carried)
    return _FLOATS * 4 / max(*taken, 1e-9)


def _carried() -> float:
    """Processor seconds of an all-reduce, in all threads of this replica."""
    collective = current_replica().collective
    flat = collective.buffer(_FLOATS, torch.float32, torch.device("cpu"))
    times = []
    for _ in range(_ROUNDS + 1):
        begun = time.process_time()
        collective.all_reduce(flat).wait()
        times.append(time.process_time() - begun)
    return statistics.median(times[1:])


def waited_for_processor() -> float:
    """Return how long this thread has waited for a processor, in seconds; 0 if unknown."""
    file = Path("/proc/thread-self/schedstat")
    return int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0


_LEAST_STEPS, _MOST_STEPS = 5, 100


def counts(wanted: int | None = None) -> list[int]:
    """Return the numbers of replicas to measure.

    A few are enough, since the curve is nearly straight; `wanted` is added if it is more than there
    are processors.
    """
    most = cores()
    found = {n for n in (2, most // 2, most) if 2 <= n <= most}
    return sorted(found | ({wanted} if wanted is not None and wanted > most else set()))


def crowd(
    trial: DryRun, batch: Any, many: Sequence[int], seconds: float = 1.0
) -> tuple[tuple[int, float], ...]:
    """Measure (n, seconds of forward and backward) with n CPU replicas at once.

    The slowest replica of each step counts: cores are not equal, and synchronous replicas wait.
    """
    found = []
    for n in many:
        strategy = MirroredStrategy([f"cpu:{i}" for i in range(n)])
        try:
            times = strategy.run(_compute, trial.module, trial.loss, batch, seconds)
        finally:
            strategy.close()
        found.append((n, statistics.fmean(max(step) for step in zip(*times, strict=False))))
    return tuple(found)


def _compute(
    module: nn.Module, loss: Callable[[Any], Tensor], batch: Any, seconds: float
) -> list[float]:
    """Return the seconds of each step of one replica, which does not wait for the others."""
    module.train()
    times: list[float] = []
    _timed_step(module, loss, batch)
    current_replica().barrier()
    end = time.perf_counter() + seconds
    while len(times) < _LEAST_STEPS or (len(times) < _MOST_STEPS and time.perf_counter() < end):
        times.append(_timed_step(module, loss, batch))
    current_replica().barrier()
    return times[1:]


def _timed_step(module: nn.Module, loss: Callable[[Any], Tensor], batch: Any) -> float:
    for param in module.parameters():
        param.grad = None
    start = time.perf_counter()
    loss(batch).backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - start


#: the most elements to time; times of larger models are extrapolated
_MOST_ELEMENTS = 8 << 20


def update_seconds(
    params: Sequence[nn.Parameter], dense: Sequence[int], optimizer: Optimizer
) -> float | None:
    """Measure the update of one server with the `dense` variables of `params`, on one core.

    None if servers do not support that optimizer.
    """
    total = sum(params[i].numel() for i in dense)
    if not total:
        return None
    shapes = [_cut(tuple(p.shape), min(1.0, _MOST_ELEMENTS / total)) for p in params]
    pieces = [Piece(i, 0, shapes[i][0] if shapes[i] else 1, 0) for i in dense]
    try:
        store = Store(pieces, shapes, params[dense[0]].dtype, describe(optimizer, params))
        return _median(store) * total / store.count
    except (NotDistributable, UsageError):
        return None


def refusal(params: Sequence[nn.Parameter], optimizer: Optimizer) -> str:
    """Return why servers do not support that optimizer; empty if they do."""
    try:
        describe(optimizer, params)
    except (NotDistributable, UsageError) as problem:
        return str(problem)
    return ""


def _cut(shape: tuple[int, ...], part: float) -> tuple[int, ...]:
    """Return the shape with that fraction of its rows."""
    return (math.ceil(shape[0] * part), *shape[1:]) if shape else ()


def _median(store: Store) -> float:
    """Return the seconds of an update."""
    with one_thread():
        grad = torch.full((store.count,), 1e-3, dtype=store.values.dtype)
        return statistics.median([_once(store, grad) for _ in range(_ROUNDS + 1)][1:])


def _once(store: Store, grad: torch.Tensor) -> float:
    store.add(grad, 1.0)
    start = time.perf_counter()
    store.apply(0.5)
    return time.perf_counter() - start
