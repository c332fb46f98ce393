"""One replica: `sg.Model.fit` and `strategy.prepare` against a loop written by hand.

    python benchmarks/one_replica/bench.py [--device cpu|cuda] [--rounds 7]

All arms run in one process, take turns within a round, and do the same work: shuffled batches by
index, forward, backward, fused Adam. Each loop by hand runs twice, as two arms: how far these
differ is what the machine cannot tell. Printed: the median of the rounds' ratios of steps per
second, ours to the hand-written loops' (1.00 is as fast as by hand), and one of those to the other.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stratagem as sg

MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp 784-512-512-10": (lambda: dense(784, 512, 512, 10), 128),
    "cnn": (
        lambda: nn.Sequential(
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
        ),
        100,
    ),
    "mlp 10 M": (lambda: dense(784, 2750, 2750, 10), 128),
}


def dense(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Batches(Dataset):
    """A dataset of whole batches already on the device: what is timed is the loop, not loading."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, batch: int) -> None:
        self.x, self.y, self.batch = x, y, batch

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.tensor(rows, device=self.x.device)
        return self.x[index], self.y[index]


def loader(x: torch.Tensor, y: torch.Tensor, batch: int) -> DataLoader:
    return DataLoader(Batches(x, y, batch), batch_size=batch, shuffle=True, collate_fn=tuple)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def by_hand(net: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int) -> Callable[[], None]:
    optimizer = torch.optim.Adam(net.parameters(), fused=True)

    def epoch() -> None:
        net.train()
        order = torch.randperm(len(x)).to(x.device)
        for i in range(0, len(x), batch):
            rows = order[i : i + batch]
            loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def by_fit(net: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int) -> Callable[[], None]:
    model = sg.Model(net, sg.MirroredStrategy([str(x.device)]))
    model.compile(optimizer="adam", loss="cross_entropy")
    return lambda: model.fit(x, y, batch_size=batch, verbose=0) and None


def by_sharded(net: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int) -> Callable[[], None]:
    model = sg.Model(net, sg.ShardedStrategy([str(x.device)]))
    model.compile(optimizer="adam", loss="cross_entropy")
    return lambda: model.fit(x, y, batch_size=batch, verbose=0) and None


def loop(net: nn.Module, optimizer: torch.optim.Optimizer, data: DataLoader) -> None:
    for a, b in data:
        nn.functional.cross_entropy(net(a), b).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_loader(net: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int) -> Callable[[], None]:
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    data = loader(x, y, batch)
    return lambda: loop(net, optimizer, data)


def by_prepare(net: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int) -> Callable[[], None]:
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    strategy = sg.MirroredStrategy([str(x.device)])
    prepared = strategy.prepare(net, optimizer, loader(x, y, batch))
    return lambda: loop(*prepared)


ARMS = {
    "hand": by_hand,
    "again": by_hand,
    "fit": by_fit,
    "sharded": by_sharded,
    "loader": by_loader,
    "loader again": by_loader,
    "prepare": by_prepare,
}


def race(arms: dict[str, Callable[[], None]], device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of every arm in every round, each round in another order."""
    order, draw = list(arms), random.Random(0)
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(rounds + 1):
        draw.shuffle(order)
        for arm in order:
            synchronise(device)
            started = time.perf_counter()
            arms[arm]()
            synchronise(device)
            if number:  # the first round warms up
                times[arm].append(time.perf_counter() - started)
    return times


def faster(ours: list[float], *theirs: list[float]) -> float:
    """How much faster than the mean of theirs in the same round; the median of the rounds."""
    pairs = zip(ours, zip(*theirs, strict=True), strict=True)
    return statistics.median(statistics.mean(other) / own for own, other in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rounds = args.rounds or (21 if args.device == "cuda" else 7)
    device = "cuda:0" if args.device == "cuda" else "cpu"
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    print(f"{name}, torch {torch.__version__}, {args.threads} threads, {rounds} rounds")
    print(
        f"{'model':20}{'by hand':>10}{'again':>8}{'fit':>8}{'sharded':>9}{'':5}"
        f"{'by hand, loader':>16}{'again':>8}{'prepare':>9}"
    )
    print(
        f"{'':20}{'ms/step':>10}{'ratio':>8}{'ratio':>8}{'ratio':>9}{'':5}"
        f"{'ms/step':>16}{'ratio':>8}{'ratio':>9}"
    )
    rows = []
    for label, (make, batch) in MODELS.items():
        steps = 200 if args.device == "cuda" else (40 if "512" in label else 12)
        x = torch.randn(batch * steps, 784, device=device)
        y = torch.randint(0, 10, (batch * steps,), device=device)
        net = make().to(device)
        arms = {arm: build(copy.deepcopy(net), x, y, batch) for arm, build in ARMS.items()}
        times = race(arms, args.device, rounds)
        row = {
            "hand_ms": statistics.median(times["hand"]) / steps * 1e3,
            "again": faster(times["again"], times["hand"]),
            "fit": faster(times["fit"], times["hand"], times["again"]),
            "sharded": faster(times["sharded"], times["hand"], times["again"]),
            "loader_ms": statistics.median(times["loader"]) / steps * 1e3,
            "loader_again": faster(times["loader again"], times["loader"]),
            "prepare": faster(times["prepare"], times["loader"], times["loader again"]),
        }
        print(
            f"{label:20}{row['hand_ms']:10.3f}{row['again']:8.3f}{row['fit']:8.3f}"
            f"{row['sharded']:9.3f}{'':5}"
            f"{row['loader_ms']:16.3f}{row['loader_again']:8.3f}{row['prepare']:9.3f}",
            flush=True,
        )
        rows.append({"model": label, **row})
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
