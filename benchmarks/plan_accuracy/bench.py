"""The planner on CPU replicas of one machine: predicted against measured steps.

    python benchmarks/plan_accuracy/bench.py [--models mlp,cnn] [--rounds 3] [--replicas 2,3,4]

The profile comes from one replica and from 2, half and all of the cores computing at once with
nothing exchanged; every number of replicas is then predicted and really trained. Those that were
not among the profile's are held out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from typing import Any

import torch
from torch import nn

import stratagem as sg
from stratagem.cluster.environment import cores
from stratagem.launch.validate import validate
from stratagem.plan.choose import choose
from stratagem.plan.configuration import MIRRORED, SERVERS, Configuration
from stratagem.plan.machine import measure_hardware
from stratagem.plan.measure import rehearse
from stratagem.training.dry_run import DryRun, DryRunHandedOver, instead_of_fit

BATCH = 64  # a replica


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


def trial(name: str) -> DryRun:
    """What `fit` would do with its first batch."""
    found: list[DryRun] = []
    trained = sg.Model(model(name), sg.MirroredStrategy(["cpu:0"]))
    trained.compile("adam", "cross_entropy")
    with instead_of_fit(found.append):
        try:
            trained.fit(torch.randn(BATCH, 784), torch.randint(0, 10, (BATCH,)), batch_size=BATCH)
        except DryRunHandedOver:
            return found[0]
    raise AssertionError("fit handed nothing over")


def configurations(replicas: list[int]) -> list[Configuration]:
    counts = [n for n in replicas if n <= cores()]
    served = [Configuration(SERVERS, per_host=n, servers=1) for n in (2, 4) if n in counts]
    return [Configuration(MIRRORED, per_host=n) for n in counts] + served


def measured(
    name: str, rounds: int, replicas: list[int]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A profile, then rounds over all configurations; the median of each."""
    dry_run = trial(name)
    profile = rehearse(dry_run, say=print)
    machine = measure_hardware()
    plan = choose(profile, machine)
    found = validate(plan, dry_run, configurations(replicas), rounds=rounds, say=print)
    known = {1, *(n for n, _ in profile.crowd)}
    rows = [
        {
            "model": name,
            "configuration": str(row.configuration),
            "replicas": row.configuration.replicas,
            "held_out": row.configuration.replicas not in known,
            "predicted_ms": row.predicted * 1e3,
            "measured_ms": row.measured * 1e3,
            "error": row.error,
            "spread": row.spread,
        }
        for row in found
    ]
    return rows, {"profile": profile.to_json(), "hardware": machine.to_json()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="mlp,cnn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", default="1,2,3,4,6,8,12,16")
    parser.add_argument("--json")
    args = parser.parse_args()
    print(
        f"{platform.machine()}, {cores()} cores, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    rows: list[dict[str, Any]] = []
    about = {}
    for name in args.models.split(","):
        found, about[name] = measured(name, args.rounds, [int(n) for n in args.replicas.split(",")])
        rows += found
    print("| model | configuration | held out | predicted ms | measured ms | error |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        out = "yes" if row["held_out"] else ""
        print(
            f"| {row['model']} | {row['configuration']} | {out} | {row['predicted_ms']:.2f} | "
            f"{row['measured_ms']:.2f} | {row['error']:+.0%} |"
        )
    for title, some in (("all", rows), ("held out", [r for r in rows if r["held_out"]])):
        if some:
            sizes = [abs(row["error"]) for row in some]
            print(f"{title}: median {statistics.median(sizes):.0%}, worst {max(sizes):.0%}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"rows": rows, "about": about}, file, indent=1)


if __name__ == "__main__":
    main()
