"""The exercise: train synchronously and asynchronously; which is at a good accuracy first?"""

from __future__ import annotations

import os
import platform
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import common
import report

import stratagem as sg

#: by arm: whose rate it takes (three arms make the same updates) and what a batch is
ARMS = {
    "mirrored": ("mirrored", 2),
    "central storage": ("mirrored", 2),
    "servers, synchronous": ("mirrored", 2),
    "servers, 1 spare": ("servers, 1 spare", 2),
    "servers, asynchronous": ("servers, asynchronous", 1),
}
CONDITIONS = {"undisturbed": 0.0, "disturbed": 0.02}


@dataclass(frozen=True)
class Size:
    """What is run.

    share    examples of a worker's step, which takes `step` seconds, most of them asleep
    times    how much longer one of the disturbed steps takes
    """

    train: int = 1200
    target: float = 0.95
    share: int = 32
    step: float = 0.01
    times: float = 10.0
    epochs: int = 20
    rates: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    tuning_seeds: tuple[int, ...] = (100, 101)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


SMALL = Size(train=640, target=0.7, step=0.002, rates=(0.3,), tuning_seeds=(100,), seeds=(0,))


def net(size: Size, chance: float, seed: int) -> Any:
    """An MLP whose layers take their time while it trains, by examples: a third forward."""

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, seconds: float) -> Any:
            ctx.seconds = seconds
            time.sleep(seconds / 3)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            time.sleep(ctx.seconds * 2 / 3)
            return grads[0], None

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)])
            self.dice, self.process = random.Random(), 0

        def forward(self, x: Any) -> Any:
            seconds = self.seconds(len(x)) if self.training else 0.0
            for layer in self.layers[:-1]:
                x = layer(x).relu()
                if seconds:
                    x = Sleep.apply(x, seconds / (len(self.layers) - 1))
            return self.layers[-1](x)

        def seconds(self, rows: int) -> float:
            """Of this step: each worker throws its own dice."""
            if self.process != os.getpid():
                torch.set_num_threads(1)
                self.process = os.getpid()
                self.dice.seed(1000 * seed + sg.current_replica().index)
            slow = self.dice.random() < chance
            return size.step * rows / size.share * (size.times if slow else 1.0)

    torch.manual_seed(seed)
    return Slow()


def digits(size: Size, seed: int) -> dict[str, tuple[Any, Any]]:
    """Some to train on, 200 to choose rates by, the rest to test; a split for each seed."""
    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    pixels, labels = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(y)[order]
    a, b = size.train, size.train + 200
    cuts = {"train": slice(0, a), "validation": slice(a, b), "test": slice(b, None)}
    return {name: (pixels[cut], labels[cut]) for name, cut in cuts.items()}


def strategies() -> dict[str, Any]:
    """All of them at once, so that arms can take turns; whoever has no work sleeps."""

    def served(workers: int, updates: Any) -> Any:
        return sg.ParameterServerStrategy(sg.LocalCluster(workers=workers, ps=1), updates=updates)

    return {
        "mirrored": sg.MirroredStrategy(["cpu:0", "cpu:1"]),
        "central storage": sg.CentralStorageStrategy(["cpu:0", "cpu:1"]),
        "servers, synchronous": served(2, sg.Synchronous()),
        "servers, 1 spare": served(3, sg.Synchronous(spares=1)),
        "servers, asynchronous": served(2, sg.Asynchronous()),
    }


def train(
    size: Size, arm: str, strategy: Any, rate: float, chance: float, seed: int, judge: str
) -> dict[str, Any]:
    """Until the target is reached, or epochs run out: seconds of training and the curve."""
    data = digits(size, seed)
    model = sg.Model(net(size, chance, seed), strategy)
    model.compile(lambda p: torch.optim.SGD(p, lr=rate), "cross_entropy")
    curve: list[tuple[float, float]] = []

    class Watch(sg.callbacks.Callback):
        """Looks after each epoch; the time of looking does not count."""

        begin = 0.0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begin = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            took = time.perf_counter() - self.begin
            found = accuracy(self.model.module, *data[judge])
            curve.append(((curve[-1][0] if curve else 0.0) + took, found))
            self.model.stop_training = found >= size.target

    batch = size.share * ARMS[arm][1]
    model.fit(*data["train"], batch_size=batch, epochs=size.epochs, callbacks=[Watch()], verbose=0)
    reached = curve[-1][1] >= size.target
    return {"seconds": curve[-1][0] if reached else None, "epochs": len(curve), "curve": curve}


def accuracy(module: Any, x: Any, y: Any) -> float:
    before = module.training
    module.eval()
    with torch.no_grad():
        found = float((module(x).argmax(1) == y).float().mean())
    module.train(before)
    return found


def tune(size: Size, made: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rate on the validation digits, where nobody is slow."""
    rows = []
    for seed in size.tuning_seeds:
        for rate in size.rates:
            for arm in dict.fromkeys(leader for leader, _ in ARMS.values()):
                found = train(size, arm, made[arm], rate, 0.0, seed, "validation")
                rows.append({"arm": arm, "rate": rate, "seed": seed, **found})
            print(f"rate {rate} with seed {seed} tried", file=sys.stderr)
    return rows


def best(rows: list[dict[str, Any]], arm: str) -> float:
    """The rate that reached the target most often, then soonest."""

    def merit(rate: float) -> tuple[int, float]:
        times = [r["seconds"] for r in rows if (r["arm"], r["rate"]) == (arm, rate)]
        reached = [t for t in times if t is not None]
        return -len(reached), statistics.mean(reached) if reached else 0.0

    return min(sorted({row["rate"] for row in rows}), key=merit)


def compare(size: Size, made: dict[str, Any], rates: dict[str, float]) -> list[dict[str, Any]]:
    """Every arm with each seed in both conditions, taking turns, in another order each time."""
    rows = []
    for number, seed in enumerate(size.seeds):
        for condition, chance in CONDITIONS.items():
            arms = list(ARMS)
            random.Random(number).shuffle(arms)
            for arm in arms:
                found = train(size, arm, made[arm], rates[arm], chance, seed, "test")
                rows.append({"arm": arm, "condition": condition, "seed": seed, **found})
            print(f"seed {seed}, {condition}, done", file=sys.stderr)
    return rows


def study(size: Size) -> dict[str, Any]:
    torch.set_num_threads(1)
    load, made = os.getloadavg()[0], strategies()
    try:
        for arm, strategy in made.items():  # starts everybody
            once = Size(**{**asdict(size), "epochs": 1})
            train(once, arm, strategy, 0.1, 0.0, 0, "validation")
        tuning = tune(size, made)
        rates = {arm: best(tuning, leader) for arm, (leader, _) in ARMS.items()}
        runs = compare(size, made, rates)
    finally:
        for strategy in made.values():
            strategy.close()
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "kind": platform.machine(),
        "torch": torch.__version__,
        "load before": load,
        "load after": os.getloadavg()[0],
    }
    return {
        "machine": machine,
        "size": asdict(size),
        "tuning": tuning,
        "rates": rates,
        "runs": runs,
    }


def main() -> None:
    args = common.options(__file__, __doc__ or "")
    if not args.plot:
        common.write(args.out, study(SMALL if args.small else Size()))
    data = common.read(args.out)
    report.tables(data)
    report.figure(data, args.out / "figure.png")


if __name__ == "__main__":
    main()
