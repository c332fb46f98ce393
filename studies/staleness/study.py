"""Stale gradients: what the age of the weights does to accuracy, and what each remedy does."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

from stratagem.plan.simulation.scenario import Kill, Scenario, Work
from stratagem.plan.simulation.spread import Lognormal
from stratagem.plan.simulation.training import Data, train
from stratagem.rules.updates import (
    Asynchronous,
    DelayCompensated,
    Drop,
    GapAware,
    LowerRate,
    Ramp,
    ScaleDown,
    Synchronous,
    Updates,
)
from stratagem.wire.simulated import Topology

CROWD, EACH, EPOCHS, BATCHES = 16, 32, 15, 35
WARM = 4 * BATCHES  # updates of warm-up: a quarter of the training
REMEDIES: dict[str, Updates] = {
    "none": Asynchronous(),
    "lower rate (1/sqrt W)": Asynchronous(staleness=[LowerRate()]),
    "lower rate (1/4)": Asynchronous(staleness=[LowerRate(0.25)]),
    "scale by 1/sqrt(1+age)": Asynchronous(staleness=[ScaleDown()]),
    "scale by 1/age": Asynchronous(staleness=[ScaleDown(power=1.0, linear=True)]),
    "drop older than W/4": Asynchronous(staleness=[Drop(CROWD // 4)]),
    "drop older than W": Asynchronous(staleness=[Drop(CROWD)]),
    "delay-compensated": Asynchronous(staleness=[DelayCompensated()]),
    "gap-aware": Asynchronous(staleness=[GapAware()]),
    "bound 1": Asynchronous(bound=1),
    "buffer of 4": Asynchronous(buffer=4),
    "ramped warm-up": Asynchronous(warmup=Ramp(WARM)),
    "abrupt warm-up": Asynchronous(),
    "synchronous": Synchronous(),
}
RATES = [0.125, 0.25, 0.5]
CROWDS = [1, 2, 4, 8, 16, 32]


def one(job: dict[str, Any]) -> dict[str, Any]:
    """One training on the digits, each gradient of 32 examples, fifteen epochs."""
    split = common.digits()
    module = common.mlp(job["seed"])
    updates, workers = REMEDIES[job["remedy"]], job["workers"]
    together = workers if isinstance(updates, Synchronous) else 1
    # one worker alone until it has made its updates, then all the others at once
    late = job["remedy"] == "abrupt warm-up"
    faults = tuple(Kill(w, 0.0, back=WARM * 0.1) for w in range(1, workers) if late)
    scenario = Scenario(
        workers,
        1,
        Work(Lognormal(0.1, 0.2)),
        Topology(1.25e9, 50e-6),
        updates,
        faults=faults,
        seed=job["seed"],
    )
    optimizer = torch.optim.SGD(module.parameters(), job["rate"], momentum=job["momentum"])
    trained = train(
        scenario,
        module,
        optimizer,
        F.cross_entropy,
        Data(split.x, split.y, EACH * together, EPOCHS),
        common.accuracy(split.x_test, split.y_test),
    )
    ages = trained.run.stats.staleness
    return {
        **job,
        "accuracy": trained.curve[-1][2],
        "seconds": trained.curve[-1][0],
        "age": sum(t * n for t, n in ages.items()) / max(1, sum(ages.values())),
    }


def study(small: bool) -> list[dict[str, Any]]:
    global EPOCHS
    EPOCHS = 4 if small else EPOCHS
    seeds = range(1 if small else 5)
    crowds = [1, CROWD] if small else CROWDS
    rates = [0.25] if small else RATES
    remedies = ["none", "scale by 1/sqrt(1+age)"] if small else list(REMEDIES)
    usual = {"momentum": 0.0}
    jobs = (
        [
            {**usual, "remedy": "none", "workers": w, "rate": rate, "seed": seed}
            for seed in seeds
            for w in crowds
            for rate in rates
        ]
        + [
            {**usual, "remedy": remedy, "workers": CROWD, "rate": rate, "seed": seed}
            for seed in seeds
            for remedy in remedies
            for rate in rates
            if remedy != "none" or CROWD not in crowds
        ]
        + [
            {"momentum": m, "remedy": "none", "workers": w, "rate": 0.05, "seed": seed}
            for seed in seeds
            for m in (0.5, 0.9)
            for w in (1, CROWD)
            if not small
        ]
    )
    return common.on_all_cores(one, jobs)


def pick(data: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    return [run for run in data if all(run[k] == v for k, v in wanted.items())]


def _cell(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return ""
    failed = sum(run["accuracy"] < 0.9 for run in runs)
    middle = statistics.median(run["accuracy"] for run in runs)
    return f"{middle:.3f}" + (f" ({failed} of {len(runs)} below 0.9)" if failed else "")


def report(data: list[dict[str, Any]]) -> str:
    rates = sorted({run["rate"] for run in data if not run["momentum"]})
    crowds = sorted({run["workers"] for run in pick(data, remedy="none")})
    by_crowd = [
        [
            w,
            f"{statistics.mean(r['age'] for r in pick(data, remedy='none', workers=w)):.1f}",
            *(
                _cell(pick(data, remedy="none", workers=w, rate=rate, momentum=0.0))
                for rate in rates
            ),
        ]
        for w in crowds
    ]
    names = [name for name in REMEDIES if pick(data, remedy=name, workers=CROWD)]
    by_remedy = [
        [
            name,
            f"{statistics.mean(r['age'] for r in pick(data, remedy=name, workers=CROWD)):.1f}",
            *(
                _cell(pick(data, remedy=name, workers=CROWD, rate=rate, momentum=0.0))
                for rate in rates
            ),
        ]
        for name in names
    ]
    heads = ["mean age", *(f"rate {rate:g}" for rate in rates)]
    parts = [
        common.table(["workers", *heads], by_crowd),
        common.table([f"remedy, {CROWD} workers", *heads], by_remedy),
    ]
    moving = [
        [m, *(_cell(pick(data, momentum=m, workers=w)) for w in (1, CROWD))] for m in (0.5, 0.9)
    ]
    if pick(data, momentum=0.9):
        parts.append(common.table(["momentum, rate 0.05", "1 worker", f"{CROWD} workers"], moving))
    return "\n\n".join(parts)


def draw(data: list[dict[str, Any]], out: Path) -> None:
    plt = common.pyplot()
    if plt is None:
        return

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=[1, 1.3])
    for rate in RATES:
        found = [
            (
                w,
                [
                    r["accuracy"]
                    for r in pick(data, remedy="none", workers=w, rate=rate, momentum=0.0)
                ],
            )
            for w in CROWDS
        ]
        left.plot(
            [w for w, _ in found],
            [statistics.median(a) for _, a in found],
            marker="o",
            ms=3,
            label=f"rate {rate:g}",
        )
    left.set(
        xscale="log",
        xticks=CROWDS,
        xticklabels=CROWDS,
        xlabel="workers, no remedy",
        ylabel="accuracy",
        ylim=(0, 1.02),
    )
    left.legend(fontsize=8)
    names = list(REMEDIES)
    for row, name in enumerate(names):
        for number, rate in enumerate(RATES):
            runs = pick(data, remedy=name, workers=CROWD, rate=rate, momentum=0.0)
            right.scatter(
                [r["accuracy"] for r in runs],
                [row + (number - 1.5) * 0.17] * len(runs),
                s=9,
                color=f"C{number}",
            )
    right.set(
        yticks=range(len(names)),
        yticklabels=names,
        xlabel=f"accuracy, {CROWD} workers",
        xlim=(0, 1.02),
    )
    right.invert_yaxis()
    right.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(out / "figure.png", dpi=75)


if __name__ == "__main__":
    common.main(__file__, __doc__ or "", study, report, draw)
