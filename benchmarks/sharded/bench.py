"""Sharded against mirrored CPU replicas of one machine: time of a step, memory of gradients.

    python benchmarks/sharded/bench.py [--replicas 2] [--models mlp,cnn,transformer] [--rounds 5]

Both arms are `sg.Model.fit` with fused Adam on the same model, data and threads, each a fresh
process tree; they take turns within a round. Time is that of a fit's second epoch, processor
time that of both and of all processes: it says more on a machine that others use. Memory is of a
fit before it: the shared pages (/proc/<pid>/smaps_rollup, each counted once) that there are after
four steps and were not before the first, less Adam's two averages, which both arms share, and with
the slices of the sum, which mirrored replicas keep in memory of their own (known, not measured).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stratagem as sg

ROWS = {"mlp": 64, "cnn": 16, "transformer": 8}  # a replica
STEPS = {"mlp": 40, "cnn": 8, "transformer": 10}
ARMS = {"mirrored": sg.MirroredStrategy, "sharded": sg.ShardedStrategy}


class Transformer(nn.Module):
    """Four layers of 256 over 32 tokens; a forward of its own, so no gradient comes in factors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)).mean(1))  # type: ignore[no-any-return]


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "transformer":
        return Transformer()
    if name == "mlp":
        return nn.Sequential(
            nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 256, 3, stride=3),
        nn.ReLU(),
        nn.Conv2d(256, 1024, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1024, 10),
    )


def data(name: str, rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randint(0, 1000, (rows, 32)) if name == "transformer" else torch.randn(rows, 784)
    return x, torch.randint(0, 10, (rows,))


def family() -> list[int]:
    """This process and all that descend from it."""
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                stat = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(path.name)] = int(stat[1])
    found, fresh = [os.getpid()], [os.getpid()]
    while fresh:
        fresh = [child for child, parent in parents.items() if parent in fresh]
        found += fresh
    return found


def shared_megabytes() -> float:
    """Shared memory of all processes, each page counted once."""
    total = 0
    for pid in family():
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem:"))
    return total / 1024


def processor_seconds() -> float:
    """What all processes have computed so far."""
    ticks = 0
    for pid in family():
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(stat[11]) + int(stat[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Look(sg.callbacks.Callback):
    """What the steps of a fit leave behind."""

    def __init__(self) -> None:
        self.before = self.after = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.before = shared_megabytes()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.after = shared_megabytes()


def child(arm: str, replicas: int, name: str) -> None:
    strategy = ARMS[arm]([f"cpu:{i}" for i in range(replicas)])
    with strategy.scope():
        net = sg.Model(model(name))
        net.compile(optimizer="adam", loss="cross_entropy", check=False)
    batch = ROWS[name] * replicas
    x, y = data(name, batch * STEPS[name])
    look = Look()
    net.fit(x, y, batch_size=batch, steps_per_epoch=4, verbose=0, callbacks=[look])
    computed = processor_seconds()
    net.fit(x, y, batch_size=batch, epochs=2, verbose=0)
    computed = processor_seconds() - computed
    assert net.history is not None
    size = sum(p.numel() * 4 for p in net.module.parameters()) / 2**20
    grown = look.after - look.before
    found = {
        "ms": batch / net.history.history["examples_per_second"][-1] * 1e3,
        "computed": computed / (2 * STEPS[name]) * 1e3,
        # of the sum, a mirrored replica has its slice in memory of its own
        "gradients": grown - 2 * size + (size if arm == "mirrored" else 0.0),
        "size": size,
    }
    print(json.dumps(found))


def measure(arm: str, replicas: int, name: str) -> dict[str, float]:
    threads = max(1, len(os.sched_getaffinity(0)) // replicas)
    told = subprocess.run(
        [sys.executable, __file__, "--child", arm, str(replicas), name],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    found: dict[str, float] = json.loads(told.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", default="2")
    parser.add_argument("--models", default="mlp,cnn,transformer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=3)
    args = parser.parse_args()
    if args.child:
        arm, replicas, name = args.child
        child(arm, int(replicas), name)
        return
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores, torch {torch.__version__}, {args.rounds} rounds")
    print("| model | replicas | parameters | mirrored | sharded | sharded/mirrored | best rounds |")
    print("| --- " * 7 + "|")
    for name in args.models.split(","):
        for replicas in map(int, args.replicas.split(",")):
            rounds = [{a: measure(a, replicas, name) for a in ARMS} for _ in range(args.rounds)]
            say(name, replicas, rounds)


def say(name: str, replicas: int, rounds: list[dict[str, dict[str, float]]]) -> None:
    """A line for time, a line for memory."""
    size = rounds[0]["sharded"]["size"]
    of = {
        "ms a step": lambda found: found["ms"],
        "ms of processor time a step": lambda found: found["computed"],
        "MB of gradients": lambda found: found["gradients"],
    }
    for what, value in of.items():
        by_arm = {arm: [value(r[arm]) for r in rounds] for arm in ARMS}
        pairs = zip(by_arm["sharded"], by_arm["mirrored"], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        mirrored, sharded = (statistics.median(by_arm[arm]) for arm in ARMS)
        best = min(by_arm["sharded"]) / min(by_arm["mirrored"])
        print(
            f"| {name}, {what} | {replicas} | {size:.1f} MB | {mirrored:.1f} | {sharded:.1f} "
            f"| **{ratio:.2f}** | {best:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
