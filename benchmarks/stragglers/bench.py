"""Stragglers in real processes: synchronous updates with spare workers against none.

    python benchmarks/stragglers/bench.py [--workers 8] [--spares 0,1,2] [--rounds 3]

Every worker's step takes a fixed time, which it mostly sleeps, and with a chance of 2% ten times as
long. Arms are fresh process trees that take turns within a round; each trains the same model for
the same epochs on the same global batches. Printed are medians over the rounds, and of the rounds'
ratios to the first arm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

SHARE = 16  # examples a worker would have of a global batch without spares
LAYERS, WIDTH = 2, 16
TIMEOUT = 600


class Arm(NamedTuple):
    """Where `step` is the seconds of a step, `chance` that of a slow one, `times` how slow."""

    spares: int
    workers: int
    where: str
    step: float
    chance: float
    times: float
    updates: int
    epochs: int
    seed: int


def build(arm: Arm) -> Any:
    """An MLP whose layers take their time: by examples, so that larger parts take longer."""
    import torch
    from torch import nn

    import stratagem as sg

    class Sleep(torch.autograd.Function):
        """Takes a while on the way back, too."""

        @staticmethod
        def forward(ctx: Any, x: Any, there: float, back: float) -> Any:
            ctx.back = back
            time.sleep(there)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            time.sleep(ctx.back)
            return grads[0], None, None

    class Slow(nn.Module):
        """The model of one worker: it decides by itself which of its steps are slow."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
            self.head = nn.Linear(WIDTH, 10)
            self.dice, self.process = random.Random(), 0

        def forward(self, x: Any) -> Any:
            if self.process != os.getpid():  # the chief's own dice travel with the module
                torch.set_num_threads(1)
                self.process = os.getpid()
                self.dice.seed(1000 * arm.seed + sg.current_replica().index)
            seconds = arm.step * len(x) / SHARE
            if self.dice.random() < arm.chance:
                seconds *= arm.times
            if arm.where == "data":  # before anything is computed, in one piece
                time.sleep(seconds)
            for layer in self.layers:
                x = layer(x).relu()
                if arm.where == "layers":  # a third on the way there, the rest on the way back
                    x = Sleep.apply(x, seconds / LAYERS / 3, seconds / LAYERS * 2 / 3)
            return self.head(x)

    torch.manual_seed(0)
    return Slow()


def run(arm: Arm) -> dict[str, float]:
    import torch

    import stratagem as sg

    torch.set_num_threads(1)
    strategy = sg.ParameterServerStrategy(
        sg.LocalCluster(workers=arm.workers, ps=1), updates=sg.Synchronous(spares=arm.spares)
    )
    with strategy.scope():
        model = sg.Model(build(arm))
        model.compile(optimizer="sgd", loss="cross_entropy")
    batch = SHARE * arm.workers
    x, y = torch.randn(batch * arm.updates, WIDTH), torch.randint(0, 10, (batch * arm.updates,))
    model.fit(x[: 3 * batch], y[: 3 * batch], batch_size=batch, verbose=0)  # starts everybody
    clock: list[float] = []

    class Clock(sg.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if not clock:
                clock.append(time.perf_counter())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            clock.append(time.perf_counter())

    model.fit(x, y, batch_size=batch, epochs=arm.epochs, callbacks=[Clock()], verbose=0)
    took, stats = clock[-1] - clock[0], strategy.stats()
    assert stats.lost == 0
    return {
        "seconds": took,
        "updates/s": stats.updates / took,
        "updates": stats.updates,
        "examples/s": arm.epochs * len(x) / took,
        "received": stats.received,
        "dropped": stats.dropped,
        "abandoned": stats.abandoned,
        "requeued": stats.requeued,
    }


def measure(arm: Arm) -> dict[str, float]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(arm)],
        capture_output=True,
        env=environ,
        timeout=TIMEOUT,
        text=True,
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--spares", default="0,1,2")
    parser.add_argument("--where", default="data,layers")
    parser.add_argument("--step", type=float, default=0.05, help="seconds")
    parser.add_argument("--chance", type=float, default=0.02)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--updates", type=int, default=100, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run(Arm(*json.loads(args.child)))))
        return
    import torch

    cores = len(os.sched_getaffinity(0))
    print(
        f"{platform.machine()}, {cores} cores, torch {torch.__version__}; {args.workers} "
        f"workers, a step of {args.step * 1e3:g} ms, {args.chance:.0%} of them {args.times:g} "
        f"times slower; {args.epochs} epochs of {args.updates} updates, median of "
        f"{args.rounds} rounds; load {os.getloadavg()[0]:.1f} before"
    )
    rows = []
    for where in args.where.split(","):
        print(
            f"\nwaiting in the {where}\n{'spares':>7}{'seconds':>9}{'updates/s':>11}"
            f"{'to the first':>14}{'dropped':>9}{'abandoned':>11}{'requeued':>10}"
        )
        spares = [int(n) for n in args.spares.split(",")]
        found: list[dict[int, dict[str, float]]] = []
        for number in range(args.rounds):
            order = spares if number % 2 == 0 else spares[::-1]
            found.append(
                {
                    n: measure(
                        Arm(
                            n,
                            args.workers,
                            where,
                            args.step,
                            args.chance,
                            args.times,
                            args.updates,
                            args.epochs,
                            number,
                        )
                    )
                    for n in order
                }
            )
        for n in spares:
            row = {key: statistics.median(r[n][key] for r in found) for key in found[0][n]}
            ratio = statistics.median(r[n]["updates/s"] / r[spares[0]]["updates/s"] for r in found)
            print(
                f"{n:7}{row['seconds']:9.2f}{row['updates/s']:11.2f}{ratio:14.2f}"
                f"{row['dropped']:9.0f}{row['abandoned']:11.0f}{row['requeued']:10.0f}",
                flush=True,
            )
            rows.append(
                {
                    "where": where,
                    "spares": n,
                    "to the first": ratio,
                    **row,
                    "rounds": [r[n] for r in found],
                }
            )
    print(f"load {os.getloadavg()[0]:.1f} afterwards")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
