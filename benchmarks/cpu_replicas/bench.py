"""CPU replicas of one machine: stratagem against DDP on Gloo, and against no communication at all.

    python benchmarks/cpu_replicas/bench.py [--replicas 2] [--models mlp,cnn] [--rounds 5]
                                            [--central]

Every arm is a fresh process tree with the same model, data, optimizer (fused Adam) and threads per
replica; arms take turns within a round. Printed are medians over the rounds and of the rounds'
ratios, and the ratios of each arm's best round, which say what a quiet machine would have given.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

BATCH = 64  # a replica
WARM, STEPS = 10, {"mlp": 60, "cnn": 25}
OURS = ("ours", "central")


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
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
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 784), torch.randint(0, 10, (rows,))


def peer(rank: int, replicas: int, name: str, ddp: bool) -> float:
    """A hand-written loop on this rank's rows; with DDP, or without any communication."""
    net = model(name)
    if ddp:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{os.environ['BENCH_PORT']}",
            rank=rank,
            world_size=replicas,
        )
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    x, y = data(BATCH * STEPS[name])

    def epoch(steps: int) -> None:
        order = torch.randperm(len(x))
        for i in range(steps):
            rows = order[i * BATCH : (i + 1) * BATCH]
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()

    epoch(WARM)
    if ddp:
        dist.barrier()
    started = time.perf_counter()
    epoch(STEPS[name])
    return (time.perf_counter() - started) / STEPS[name]


def ours(replicas: int, name: str, *, central: bool) -> float:
    import stratagem as sg

    kind = sg.CentralStorageStrategy if central else sg.MirroredStrategy
    strategy = kind([f"cpu:{i}" for i in range(replicas)])
    with strategy.scope():
        net = sg.Model(model(name))
        net.compile(optimizer="adam", loss="cross_entropy")
    batch = BATCH * replicas
    x, y = data(batch * STEPS[name])
    net.fit(x[: batch * WARM], y[: batch * WARM], batch_size=batch, verbose=0)
    history = net.fit(x, y, batch_size=batch, epochs=2, verbose=0).history
    return batch / history["examples_per_second"][-1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(arm: str, replicas: int, name: str, threads: int) -> float:
    """Milliseconds a step of the slowest process of one arm."""
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "BENCH_PORT": str(free_port())}
    ranks = range(1 if arm in OURS else replicas)
    children = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                "--child",
                arm,
                str(rank),
                str(replicas),
                name,
                str(threads),
            ],
            stdout=subprocess.PIPE,
            env=environ,
        )
        for rank in ranks
    ]
    return max(float(child.communicate(timeout=300)[0].split()[-1]) for child in children)


def child(arm: str, rank: str, replicas: str, name: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    seconds = (
        ours(int(replicas), name, central=arm == "central")
        if arm in OURS
        else peer(int(rank), int(replicas), name, ddp=arm == "ddp")
    )
    print(seconds * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", default="2")
    parser.add_argument("--models", default="mlp,cnn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--central", action="store_true", help="CentralStorageStrategy, too")
    parser.add_argument("--child", nargs=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return
    cores = len(os.sched_getaffinity(0))
    print(
        f"{platform.machine()}, {cores} cores, torch {torch.__version__}; ms a step, {BATCH} "
        f"examples a replica, median of {args.rounds} rounds"
    )
    print(
        f"{'model':6}{'replicas':>9}{'limit':>9}{'DDP':>9}{'ours':>9}{'DDP/ours':>10}"
        f"{'limit/ours':>12}{'  of the best rounds':>20}"
    )
    rows = []
    for name in args.models.split(","):
        for replicas in map(int, args.replicas.split(",")):
            threads = max(1, cores // replicas)
            rounds = []
            for _ in range(args.rounds):
                arms = ("limit", "ddp", "ours", *(("central",) if args.central else ()))
                rounds.append({arm: measure(arm, replicas, name, threads) for arm in arms})
                print({arm: round(ms, 2) for arm, ms in rounds[-1].items()}, file=sys.stderr)
            row = {arm: statistics.median(r[arm] for r in rounds) for arm in rounds[0]}
            faster = statistics.median(r["ddp"] / r["ours"] for r in rounds)
            ideal = statistics.median(r["limit"] / r["ours"] for r in rounds)
            best = {arm: min(r[arm] for r in rounds) for arm in rounds[0]}
            print(
                f"{name:6}{replicas:9}{row['limit']:9.2f}{row['ddp']:9.2f}{row['ours']:9.2f}"
                f"{faster:10.2f}{ideal:12.2f}{best['ddp'] / best['ours']:10.2f}"
                f"{best['limit'] / best['ours']:10.2f}",
                flush=True,
            )
            if args.central:
                print(
                    f"central {row['central']:.2f}, to ours: "
                    f"{statistics.median(r['ours'] / r['central'] for r in rounds):.2f}"
                )
            rows.append(
                {
                    "model": name,
                    "replicas": replicas,
                    "rounds": rounds,
                    **row,
                    "ddp/ours": faster,
                    "limit/ours": ideal,
                }
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
