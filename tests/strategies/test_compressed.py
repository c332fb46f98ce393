"""Compressed all-reduces between real processes against the formulas in one process."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import stratagem as sg
from stratagem.data.shares import share
from stratagem.wire.link_time import sockets
from tests.codecs.by_hand import Replicas
from tests.ports import free_ports
from tests.support import data, mlp, moved, strategy

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(120)

RECORDS = {
    "int8": sg.Int8(block=16),
    "topk": sg.TopK(0.1),
    "dgc": sg.TopK(0.2, momentum=0.5, dense_steps=2),
    "sign": sg.Sign(dense_steps=1),
    "power": sg.PowerSGD(rank=1),
}
#: over sockets and through shared memory; one of three is run, and all records are among those
BOTH: list[Any] = [("ring", name) for name in ("dgc", "int8", "topk")]
BOTH += [("shared_memory", "power"), ("ring", "power"), ("shared_memory", "int8")]
BOTH += [
    pytest.param(*each, marks=pytest.mark.slow)
    for each in [("ring", "sign"), *(("shared_memory", name) for name in ("dgc", "sign", "topk"))]
]
BATCH, EPOCHS, ROWS = 16, 3, 50  # the last batch has 2 rows, fewer than replicas


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def rows(count: int = ROWS) -> tuple[Tensor, Tensor]:
    x, y = data(count)
    return x.double(), y


def by_formula(
    wire: Any,
    count: int,
    epochs: int = EPOCHS,
    before: Callable[[int, Replicas], None] | None = None,
    module: nn.Module | None = None,
) -> nn.Module:
    """The training of `count` replicas in one process; `before` is called before each step."""
    module = copy.deepcopy(mlp().double()) if module is None else module
    optimizer = sgd(module.parameters())
    named = list(module.named_parameters())[::-1]  # gradients travel in the order of backward
    replicas = Replicas(wire, [(n, p.detach()) for n, p in named], count)
    x, y = rows()
    for _ in range(epochs):
        for start in range(0, len(x), BATCH):
            a, b = x[start : start + BATCH], y[start : start + BATCH]
            if before is not None:
                before(replicas.step, replicas)
            here = range(replicas.count)
            mine = [_gradient(module, a, b, *share(len(a), len(here), i)) for i in here]
            total, at = replicas.add_up(mine), 0
            for _, p in named:
                p.grad = total[at : at + p.numel()].view(p.shape).clone()
                at += p.numel()
            optimizer.step()
    return module


def _gradient(module: nn.Module, x: Tensor, y: Tensor, start: int, end: int) -> Tensor:
    params = list(module.parameters())[::-1]
    if start == end:
        return torch.zeros(sum(p.numel() for p in params)).double()
    loss = F.cross_entropy(module(x[start:end]), y[start:end], reduction="sum") / len(x)
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, params)])


def fitted(made: Any, epochs: int = EPOCHS, **options: Any) -> sg.Model:
    with made.scope():
        model = sg.Model(mlp().double())
        model.compile(optimizer=sgd, loss=F.cross_entropy)
    x, y = rows()
    options = {"verbose": 0, "shuffle": False, **options}
    model.fit(x, y, batch_size=BATCH, epochs=epochs, **options)
    return model


def far(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


@pytest.mark.parametrize(("op", "name"), BOTH)
def test_fit_is_what_the_formula_says(op: str, name: str) -> None:
    """With unequal shares and one empty share."""
    wire = RECORDS[name]
    expected = by_formula(wire, 3)
    with strategy(3, cross_device_ops=op, wire=wire) as made:
        model = fitted(made)
    assert moved(mlp().double(), expected)
    assert far(model.module, expected) < 1e-12
    with strategy(3, cross_device_ops=op) as made:
        assert far(fitted(made).module, expected) > 1e-6  # and it is no longer exact


def in_a_loop(made: Any, batches: int = 4, spoilt: int = -1) -> dict[str, Any]:
    """Train in a custom loop; in batch `spoilt` the last replica's loss is NaN."""
    module = mlp().double()
    loader = DataLoader(TensorDataset(*rows(18 * batches)), batch_size=18)
    model, optimizer, shares = made.prepare(module, sgd(module.parameters()), loader)
    bad = []
    for number, (x, y) in enumerate(shares):
        loss = F.cross_entropy(model(x), y)
        if number == spoilt and sg.current_replica().index == sg.current_replica().count - 1:
            loss = loss * float("inf")
        loss.backward()
        finite = [bool(p.grad.isfinite().all()) for p in model.parameters()]
        bad.append([bool(p.grad.isnan().all()) for p in model.parameters()])
        if all(finite):
            optimizer.step()
        optimizer.zero_grad()
    return {"weights": [p.detach().clone() for p in model.parameters()], "bad": bad}


@pytest.mark.parametrize(("op", "name"), BOTH)
def test_all_replicas_hold_the_same_bits_and_hear_of_a_nan(op: str, name: str) -> None:
    with strategy(3, cross_device_ops=op, wire=RECORDS[name]) as made:
        first, *others = made.run(in_a_loop, made, 6, 4)
    assert moved_from(first["weights"])
    assert first["bad"] == [[number == 4] * 4 for number in range(6)]
    for other in others:
        assert other["bad"] == first["bad"]
        assert all(map(torch.equal, first["weights"], other["weights"]))


def moved_from(weights: list[Tensor]) -> bool:
    pairs = zip(weights, mlp().double().parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs) > 1e-3


# --- bytes -------------------------------------------------------------------------------------

_SENT = 200  # where Linux has `tcpi_bytes_sent` in its `struct tcp_info`; `_retrans` follows
WIDE = 1500
STEPS = 5


def tcp_bytes() -> tuple[int, int]:
    """Return the bytes sent over all TCP connections of this process, by the kernel's counters.

    Retransmissions do not count; also returns the bytes that wait in the kernel.
    """
    total = waiting = 0
    for descriptor in sockets().values():
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT + 16)
            if len(told) == _SENT + 16 and told[0] == 1:  # a connection that is up
                sent, again = struct.unpack("QQ", told[_SENT:])
                total += sent - again
                waiting += struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0]
    return total, waiting


def at_rest() -> int:
    """Return the bytes sent, once nothing but heartbeats is under way."""
    seen, (sent, waiting) = -1, tcp_bytes()
    while sent - seen > 1000 or waiting > 1000:
        time.sleep(0.2)
        seen, (sent, waiting) = sent, tcp_bytes()
    return sent


def counted(made: Any) -> float:
    """Return the bytes that this replica sends in a step of a model of two layers."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 10))
    few = TensorDataset(torch.randn(6, WIDE), torch.arange(6))
    loader = DataLoader(ConcatDataset([few] * (STEPS + 1)), batch_size=6)
    model, optimizer, shares = made.prepare(module, sgd(module.parameters()), loader)
    before = 0
    for step, (x, y) in enumerate(shares):
        before = at_rest() if step == 1 else before  # connections may come with the first
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (at_rest() - before) / STEPS


def formula(name: str, count: int) -> float:
    """Twice (N-1)/N of a compressed gradient, in bytes."""
    matrices, vectors = [(WIDE, WIDE), (10, WIDE)], [WIDE, 10]
    numbers = sum(a * b for a, b in matrices) + sum(vectors)
    sizes = {
        "dense": 4 * numbers,
        "bf16": 2 * numbers,
        "int8": numbers * (1 + 4 / 1024),
        "topk": 8 * 0.01 * numbers,
        "sign": numbers / 8,
        "power": 4 * (sum(min(16, a) * (a + b) for a, b in matrices) + sum(vectors)),
    }
    return 2 * (count - 1) / count * sizes[name]


WIRES: dict[str, Any] = {"topk": sg.TopK(0.01), "dense": None, "bf16": "bfloat16"}
WIRES |= {"power": sg.PowerSGD(16), "int8": sg.Int8(), "sign": sg.Sign()}


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts of bytes are Linux's")
@pytest.mark.parametrize("name", WIRES)
def test_the_kernel_counts_as_many_bytes_as_the_formula(name: str) -> None:
    with strategy(3, cross_device_ops="ring", wire=WIRES[name]) as made:
        sent = made.run(counted, made)
    expected = formula(name, 3)
    for each in sent:
        assert 0.98 * expected < each < 1.02 * expected, (each / expected, sent)


# --- going on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["power", "dgc", "int8"])
def test_a_fit_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    plan = sg.Checkpoints(tmp_path / "whole", every=1, keep=99)
    with strategy(2, cross_device_ops="ring", wire=RECORDS[name]) as made:
        expected = fitted(made, checkpoint=plan)
        middle = sorted((tmp_path / "whole").iterdir(), key=lambda p: int(p.name.split("-")[-1]))[5]
        shutil.copytree(middle, tmp_path / "one" / middle.name)
        found = fitted(made, checkpoint=sg.Checkpoints(tmp_path / "one"), resume=True)
    assert moved(mlp().double(), expected.module)
    assert far(found.module, expected.module) == 0.0


# --- replicas that die and join ------------------------------------------------------------------


class Kill(sg.callbacks.Callback):
    """Kills a follower after some batches."""

    def __init__(self, made: Any, after: int, which: int) -> None:
        self.made, self.after, self.which, self.seen = made, after, which, 0

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1
        if self.seen == self.after:
            os.kill(self.made.replica_group._pool.followers[self.which].pid, signal.SIGKILL)


def test_on_one_machine_the_chief_keeps_what_it_has() -> None:
    """All followers restart; the interrupted step is repeated."""

    def lose(step: int, replicas: Replicas) -> None:
        if step == 5:
            for kept in (replicas.e[1], replicas.e[2], replicas.f[len(replicas.f) // 3 :]):
                kept.zero_()

    expected = by_formula(RECORDS["int8"], 3, before=lose)
    assert far(expected, by_formula(RECORDS["int8"], 3)) > 1e-9
    with strategy(3, cross_device_ops="ring", wire=RECORDS["int8"], elastic=True) as made:
        model = fitted(made, callbacks=[Kill(made, 5, 1)])
    assert far(model.module, expected) < 1e-12


def cluster_of(count: int, source: str, name: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start workers with TF_CONFIG."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    running = []
    for index in range(count):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        told = [name, str(folder / f"{index}.pt"), str(index)]
        environ = os.environ | {"TF_CONFIG": json.dumps(task)}
        running.append(
            subprocess.Popen([sys.executable, "-c", source, *told], env=environ, cwd=ROOT)
        )
    return running


LEAVER = """
import os, signal, sys, time
import torch
import stratagem as sg
from tests.strategies.test_compressed import RECORDS, fitted

torch.optim.SGD.steps = 0
plain = torch.optim.SGD.step

def step(self, *given):
    result = plain(self, *given)
    torch.optim.SGD.steps += 1
    if torch.optim.SGD.steps == 5 and sys.argv[3] == "2":
        time.sleep(1.0)  # the others wait in the next step by then
        os.kill(os.getpid(), signal.SIGKILL)
    return result

torch.optim.SGD.step = step
strategy = sg.MultiWorkerMirroredStrategy(
    wire=RECORDS[sys.argv[1]], devices=["cpu:0"], elastic=True
)
torch.save(list(fitted(strategy).module.state_dict().values()), sys.argv[2])
"""


@pytest.mark.parametrize("name", ["int8", "topk", "sign", "power"])
def test_a_worker_that_dies_takes_what_it_kept_along_and_the_others_keep_theirs(
    name: str, tmp_path: Path
) -> None:
    def lose(step: int, replicas: Replicas) -> None:
        if step == 5 and replicas.count == 3:
            replicas.f[len(replicas.f) * 2 // 3 :] = 0.0  # the slice that it added up
            replicas.e, replicas.u, replicas.count = replicas.e[:2], replicas.u[:2], 2

    running = cluster_of(3, LEAVER, name, tmp_path)
    assert [each.wait(100) for each in running] == [0, 0, -signal.SIGKILL]
    first, second = (torch.load(tmp_path / f"{index}.pt") for index in range(2))
    assert all(map(torch.equal, first, second))
    expected = by_formula(RECORDS[name], 3, before=lose).state_dict().values()
    assert max(float((a - b).abs().max()) for a, b in zip(first, expected, strict=True)) < 1e-12


# --- what cannot be ----------------------------------------------------------------------------


def compiled(made: Any, optimizer: Any, **options: Any) -> None:
    model = sg.Model(mlp(), made)
    model.compile(optimizer=optimizer, loss="cross_entropy", **options)
    model.fit(*data(20), batch_size=10, epochs=1, verbose=0)


def test_what_cannot_go_together_is_refused() -> None:
    with strategy(2, wire=sg.TopK(0.1, momentum=0.9)) as made:
        with pytest.raises(sg.NotDistributable, match="Adam divides by"):
            compiled(made, "adam")
        with pytest.raises(sg.NotDistributable, match="use SGD without momentum"):
            compiled(made, lambda params: torch.optim.SGD(params, 0.1, momentum=0.9))
        with pytest.raises(sg.NotDistributable, match='precision="bfloat16"'):
            compiled(made, sgd, precision="float16")
    alone = pytest.raises(sg.NotDistributable, match="give the momentum to the optimizer")
    with strategy(1, wire=sg.TopK(0.1, momentum=0.9)) as made, alone:
        compiled(made, sgd)
    with pytest.raises(sg.UsageError, match="elastic=True may leave one"):
        strategy(2, wire=sg.TopK(0.1, momentum=0.9), elastic=True)
    with pytest.raises(sg.UsageError, match=r"sg\.Int8"):
        strategy(2, wire=sg.Int8)


def test_it_is_said_once_that_weights_are_others(caplog: pytest.LogCaptureFixture) -> None:
    wire = sg.Int8(block=77)
    with strategy(2, wire=wire) as made:
        compiled(made, "adam")
        compiled(made, "adam")
    said = [r.getMessage() for r in caplog.records if "Int8(block=77)" in r.getMessage()]
    assert len(said) == 1 and "no longer those of one device" in said[0]


def test_one_replica_sends_nothing_and_is_exact() -> None:
    with strategy(1, wire=sg.Int8(block=8)) as made, strategy(1) as plain:
        assert far(fitted(made).module, fitted(plain).module) == 0.0


def twice(made: Any, optimizer: Any = sgd, scaled: bool = False) -> None:
    """A custom loop that adds up the gradients of its batches, or steps with a scaler."""
    module, scaler = mlp(), torch.amp.GradScaler("cpu", enabled=scaled)
    loader = DataLoader(TensorDataset(*data(40)), batch_size=10)
    model, optimizer, shares = made.prepare(module, optimizer(module.parameters()), loader)
    for x, y in shares:
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if scaled:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def test_loops_that_a_compression_leads_astray_are_refused() -> None:
    refused = (sg.NotDistributable, sg.ReplicaFailed)  # whichever replica comes there first
    with strategy(2, wire=sg.TopK(0.5, momentum=0.9)) as made:
        with pytest.raises(refused, match="call zero_grad before each backward"):
            made.run(twice, made)
        with pytest.raises(refused, match=r"Adam divides by.*use SGD, or sg\.Int8"):
            made.run(twice, made, torch.optim.Adam)
        with pytest.raises(refused, match=r"leave the scaler out.*leave wire out"):
            made.run(twice, made, sgd, True)
    with strategy(2, wire=sg.TopK(0.5)) as made:
        made.run(twice, made)


def resumed_loop(made: Any, folder: Path, end: int) -> list[Tensor]:
    """Train in a custom loop with a checkpoint after each batch; leave it after `end` batches."""
    torch.manual_seed(7)
    module = mlp().double()
    loader = DataLoader(TensorDataset(*rows()), batch_size=BATCH)
    plan = sg.Checkpoints(folder, every=1)
    model, optimizer, shares = made.prepare(module, sgd(module.parameters()), loader, resume=plan)
    seen = 0
    for _ in shares.epochs(EPOCHS):
        for x, y in shares:
            if seen == end:
                return []
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += 1
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ["dgc"])
def test_a_custom_loop_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    with strategy(2, cross_device_ops="ring", wire=RECORDS[name]) as made:
        expected = made.run(resumed_loop, made, tmp_path / "whole", -1)[0]
        made.run(resumed_loop, made, tmp_path / "parts", 5)
        found = made.run(resumed_loop, made, tmp_path / "parts", -1)[0]
    assert moved_from(expected)
    assert all(map(torch.equal, found, expected))


WORKER = """
import sys
import torch
import stratagem as sg
from tests.strategies.test_compressed import RECORDS, fitted

strategy = sg.MultiWorkerMirroredStrategy(wire=RECORDS[sys.argv[1]], devices=["cpu:0"])
torch.save(list(fitted(strategy).module.state_dict().values()), sys.argv[2])
"""


def test_workers_of_a_cluster_do_what_the_formula_says(tmp_path: Path) -> None:
    """Two processes with TF_CONFIG."""
    running = cluster_of(2, WORKER, "int8", tmp_path)
    assert [each.wait(100) for each in running] == [0, 0]
    first, second = (torch.load(tmp_path / f"{index}.pt") for index in range(2))
    assert all(map(torch.equal, first, second))
    expected = by_formula(RECORDS["int8"], 2).state_dict().values()
    assert max(float((a - b).abs().max()) for a, b in zip(first, expected, strict=True)) < 1e-12


class Freeze(sg.callbacks.Callback):
    """Freezes the first layer for the second epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.module[0].requires_grad_(epoch != 1)


def test_a_layer_may_be_frozen_between_two_epochs() -> None:
    """The training goes on with other trainable parameters, near the exact result."""

    def last_layer(wire: Any) -> Tensor:
        with strategy(2, wire=wire) as made:
            model = fitted(made, epochs=2, callbacks=[Freeze()])
        return model.module[2].weight.detach().clone()

    some, all_of_it = last_layer(sg.TopK(0.05)), last_layer(sg.TopK(1.0))
    assert 1e-6 < float((some - all_of_it).abs().max()) < 0.2
