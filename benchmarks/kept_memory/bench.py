"""What it costs that the C library gives freed memory back in every step.

    python benchmarks/kept_memory/bench.py [--rounds 3] [--steps 20]

The nets of benchmarks/plan_accuracy. By hand: a loop of plain torch. Given back: `sg.Model.fit`
with glibc's own settings (an empty GLIBC_TUNABLES leaves them alone). Kept: as it is. Each arm is a
fresh process tree with one thread a replica; arms take turns within a round. Printed are medians.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import stratagem as sg

sys.path.insert(0, str(Path(__file__).parents[1] / "plan_accuracy"))
import divided

#: page faults of this process, and seconds, of one step
Step = tuple[float, float]


def measured(epoch: Callable[[], object], steps: int) -> Step:
    """The fastest of three epochs, after one that is not counted."""
    epoch()
    found = []
    for _ in range(3):
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        began = time.perf_counter()
        epoch()
        seconds = time.perf_counter() - began
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        found.append((seconds / steps, faults / steps))
    return min(found)


def by_hand(net: nn.Module, x: torch.Tensor, y: torch.Tensor, rows: int, steps: int) -> Step:
    optimizer = torch.optim.Adam(net.parameters(), fused=True)

    def epoch() -> None:
        for at in range(0, len(x), rows):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[at : at + rows]), y[at : at + rows]).backward()
            optimizer.step()

    return measured(epoch, steps)


def by_fit(name: str, x: torch.Tensor, y: torch.Tensor, replicas: int, steps: int) -> Step:
    with sg.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as strategy, strategy.scope():
        model = sg.Model(divided.NETS[name][0]())
        model.compile(torch.optim.Adam(model.module.parameters(), fused=True), "cross_entropy")
        given = {"batch_size": len(x) // steps, "shuffle": False, "verbose": 0}
        return measured(lambda: model.fit(x, y, **given), steps)


def arm(name: str, replicas: int, how: str, steps: int) -> None:
    torch.set_num_threads(1)
    make, rows, shape = divided.NETS[name]
    x, y = (
        torch.randn(rows * replicas * steps, *shape),
        torch.randint(10, (rows * replicas * steps,)),
    )
    if how == "by hand":
        seconds, faults = by_hand(make(), x, y, rows, steps)
    else:
        seconds, faults = by_fit(name, x, y, replicas, steps)
    print(seconds, faults)


def run(name: str, replicas: int, how: str, steps: int) -> Step:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if how == "given back":
        environ["GLIBC_TUNABLES"] = ""
    command = [sys.executable, __file__, "--arm", f"{name},{replicas},{how}", "--steps", str(steps)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    seconds, faults = map(float, done.stdout.split()[-2:])
    return seconds, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        name, replicas, how = args.arm.split(",")
        arm(name, int(replicas), how, args.steps)
        return
    print(f"{platform.machine()}, {' '.join(platform.libc_ver())}, torch {torch.__version__}\n")
    heads = ["net", "replicas", "by hand, ms", "given back", "kept", "kept/given back"]
    heads += ["kept/by hand", "page faults"]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for replicas, name in ((n, name) for n in (1, 2) for name in divided.NETS):
        arms = ["by hand", "given back", "kept"][replicas > 1 :]
        rounds = [{a: run(name, replicas, a, args.steps) for a in arms} for _ in range(args.rounds)]

        def ms(how: str, rounds: list[dict[str, Step]] = rounds) -> str:
            return f"{1000 * statistics.median(each[how][0] for each in rounds):.2f}"

        def ratio(beside: str, rounds: list[dict[str, Step]] = rounds) -> str:
            of = statistics.median(each["kept"][0] / each[beside][0] for each in rounds)
            return f"**{of:.2f}**"

        faults = [round(statistics.median(e[a][1] for e in rounds)) for a in ("given back", "kept")]
        hand = (ms("by hand"), ratio("by hand")) if replicas == 1 else ("", "")
        cells = [name, str(replicas), hand[0], ms("given back"), ms("kept"), ratio("given back")]
        print(f"| {' | '.join(cells)} | {hand[1]} | {faults[0]}, {faults[1]} |", flush=True)


if __name__ == "__main__":
    main()
