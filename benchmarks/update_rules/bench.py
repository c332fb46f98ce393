"""What each rule does to accuracy: the digits, trained by W real workers at one high rate.

    python benchmarks/update_rules/bench.py                      8 workers, 3 seeds
    python benchmarks/update_rules/bench.py --workers 4 --rate 0.3 --seeds 1

Rules take turns, seed by seed, in the same processes where the rule allows. Printed: test accuracy
(mean and worst over the seeds), how old gradients were, what was dropped, updates a second.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import stratagem as sg


def rules(workers: int) -> dict[str, Any]:
    free = sg.Asynchronous
    return {
        "synchronous": sg.Synchronous(),
        "synchronous, 1 spare": sg.Synchronous(spares=1),
        "asynchronous": free(),
        "  lower rate": free(staleness=[sg.LowerRate()]),
        "  scale down": free(staleness=[sg.ScaleDown()]),
        "  drop older than W/4": free(staleness=[sg.Drop(older_than=max(1, workers // 4))]),
        "  delay-compensated": free(staleness=[sg.DelayCompensated()]),
        "  gap-aware": free(staleness=[sg.GapAware()]),
        "  bound 2": free(bound=2),
        "  buffer W/2": free(buffer=max(2, workers // 2)),
        "  ramp": free(warmup=sg.Ramp(steps=200)),
    }


def main() -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.25)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x, y = load_digits(return_X_y=True)
    pixels, labels = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    table: dict[str, list[tuple[float, float, float, float]]] = {}
    for seed in range(args.seeds):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        data = [part[order] for part in (pixels, labels)]
        for name, rule in rules(args.workers).items():
            table.setdefault(name, []).append(one(args, rule, data, seed))
    print(
        f"{args.workers} workers, rate {args.rate}, momentum {args.momentum}, "
        f"batch {args.batch}, {args.epochs} epochs, {args.seeds} seeds\n"
    )
    print("| rule | accuracy | worst | age of gradients | dropped | updates/s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, rows in table.items():
        accuracy, age, dropped, speed = zip(*rows, strict=True)
        print(
            f"| {name.strip()} | {statistics.mean(accuracy):.3f} | {min(accuracy):.3f} | "
            f"{statistics.mean(age):.1f} | {statistics.mean(dropped):.0%} | "
            f"{statistics.mean(speed):.0f} |"
        )


def one(args: Any, rule: Any, data: list[Any], seed: int) -> tuple[float, float, float, float]:
    """Train once; accuracy, mean age, share dropped, updates a second."""
    (x, y), split = data, 1400
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    strategy = sg.ParameterServerStrategy(sg.LocalCluster(workers=args.workers, ps=1), updates=rule)
    try:
        model = sg.Model(net, strategy)
        model.compile(
            lambda p: torch.optim.SGD(p, lr=args.rate, momentum=args.momentum),
            "cross_entropy",
            ["accuracy"],
        )
        log = model.fit(x[:split], y[:split], epochs=args.epochs, batch_size=args.batch, verbose=0)
        books = strategy.stats()
        found = model.evaluate(x[split:], y[split:], verbose=0)["accuracy"]
    finally:
        strategy.close()
    count = max(1, books.received)
    age = sum(tau * n for tau, n in books.staleness.items()) / count
    seconds = sum(split / speed for speed in log.history["examples_per_second"])
    return found, age, books.dropped / count, books.updates / seconds


if __name__ == "__main__":
    main()
