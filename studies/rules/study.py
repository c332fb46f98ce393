"""Synchronous, with spares, asynchronous: which is at a good accuracy first when some are late?"""

from __future__ import annotations

import sys
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

from stratagem.plan.simulation.scenario import Scenario, Work
from stratagem.plan.simulation.spread import Lognormal, Stragglers
from stratagem.plan.simulation.training import Data, train
from stratagem.rules.updates import Asynchronous, Synchronous, Updates
from stratagem.wire.simulated import Topology

WORKERS, EACH = 16, 32
ARMS: dict[str, Updates] = {
    "synchronous": Synchronous(),
    "1 spare": Synchronous(spares=1),
    "3 spares": Synchronous(spares=3),
    "asynchronous": Asynchronous(),
}
TASKS: dict[str, dict[str, Any]] = {
    "digits": {"target": 0.95, "seconds": 40.0, "rates": [0.05, 0.1, 0.8, 1.6]},
    "fashion": {"target": 0.78, "seconds": 24.0, "rates": [0.025, 0.05, 0.4, 0.8]},
}
#: a gradient takes 0.1 s, give or take; every fiftieth takes ten times as long
COMPUTE = Stragglers(Lognormal(0.1, 0.2), 0.02, 10.0)


def one(job: dict[str, Any]) -> dict[str, Any]:
    """One training: its curve on the examples to check or to test by."""
    split = common.digits() if job["task"] == "digits" else common.fashion(4000)
    module = (common.mlp if job["task"] == "digits" else common.cnn)(job["seed"])
    updates = ARMS[job["arm"]]
    counted = WORKERS - updates.spares if isinstance(updates, Synchronous) else 1
    size = sum(p.numel() for p in module.parameters()) * 4.0
    scenario = Scenario(
        WORKERS,
        1,
        Work(COMPUTE, push=size),
        Topology(1.25e9, 50e-6),
        updates,
        seed=job["seed"],
    )
    x, y = (split.x_check, split.y_check) if job["check"] else (split.x_test, split.y_test)
    trained = train(
        scenario,
        module,
        torch.optim.SGD(module.parameters(), job["rate"]),
        F.cross_entropy,
        Data(split.x, split.y, EACH * counted, 10_000, job["seconds"]),
        common.accuracy(x, y),
    )
    return {
        **job,
        "reached": trained.seconds_to(job["target"]),
        "final": trained.curve[-1][2],
        "updates": trained.curve[-1][1],
        "curve": _thin(trained.curve),
    }


def _thin(curve: Any) -> list[list[float]]:
    """Some sixty points are enough to draw."""
    step = max(1, len(curve) // 60)
    return [[round(t, 3), round(score, 4)] for t, _, score in curve[::step]]


def jobs(task: str, seeds: range, check: bool, rates: dict[str, list[float]]) -> list[Any]:
    settings = TASKS[task]
    return [
        {
            "task": task,
            "arm": arm,
            "rate": rate,
            "seed": seed,
            "check": check,
            "target": settings["target"],
            "seconds": settings["seconds"],
        }
        for seed in seeds
        for arm in ARMS
        for rate in rates[arm]
    ]


def best(runs: list[dict[str, Any]], arm: str) -> float:
    """The rate that is at the target first on the examples to check by; if none is, the best."""

    def merit(rate: float) -> tuple[float, float]:
        mine = [r for r in runs if r["arm"] == arm and r["rate"] == rate]
        late = sum(inf if r["reached"] is None else r["reached"] for r in mine)
        return late, -sum(r["final"] for r in mine)

    return min({r["rate"] for r in runs if r["arm"] == arm}, key=merit)


def study(small: bool) -> dict[str, Any]:
    tasks = ["digits"] if small else list(TASKS)
    if "fashion" in tasks:
        common.fashion_folder()  # now, not when the digits are done
    if small:
        TASKS["digits"] |= {"seconds": 2.0, "target": 0.6, "rates": [0.8]}
    found: dict[str, Any] = {}
    for task in tasks:
        rates = dict.fromkeys(ARMS, TASKS[task]["rates"])
        wanted = [] if small else jobs(task, range(100, 101), True, rates)
        tuning = common.on_all_cores(one, wanted)
        chosen = {arm: best(tuning, arm) if tuning else rates[arm][0] for arm in ARMS}
        runs = common.on_all_cores(
            one, jobs(task, range(1 if small else 5), False, {a: [r] for a, r in chosen.items()})
        )
        found[task] = {
            "target": TASKS[task]["target"],
            "rates": chosen,
            "runs": runs,
            "tuning": [{k: v for k, v in run.items() if k != "curve"} for run in tuning],
        }
    return found


def report(data: dict[str, Any]) -> str:
    parts = []
    for task, found in data.items():
        rows = []
        for arm in ARMS:
            mine = [r for r in found["runs"] if r["arm"] == arm]
            works = [t["rate"] for t in found["tuning"] if t["arm"] == arm and t["reached"]]
            rows.append(
                [
                    arm,
                    found["rates"][arm],
                    common.middle([r["reached"] for r in mine]),
                    common.middle([r["final"] for r in mine]),
                    f"{min(works):g} to {max(works):g}" if works else "none",
                ]
            )
        heads = [
            task,
            "rate",
            f"seconds to {found['target']:.0%}",
            "accuracy at the end",
            "rates that got there",
        ]
        parts.append(common.table(heads, rows))
    return "\n\n".join(parts)


def draw(data: dict[str, Any], out: Path) -> None:
    plt = common.pyplot()
    if plt is None:
        return

    figure, axes = plt.subplots(1, len(data), figsize=(5.5 * len(data), 3.6), squeeze=False)
    for axis, (task, found) in zip(axes[0], data.items(), strict=True):
        for number, arm in enumerate(ARMS):
            for run in (r for r in found["runs"] if r["arm"] == arm):
                axis.plot(
                    *zip(*run["curve"], strict=True),
                    color=f"C{number}",
                    alpha=0.6,
                    lw=1,
                    label=arm if run["seed"] == 0 else None,
                )
        axis.axhline(
            found["target"], color="black", lw=0.8, ls=":", label=f"target, {found['target']:.0%}"
        )
        axis.set(
            title=task,
            xlabel="simulated seconds",
            ylabel="accuracy",
            ylim=(max(0.0, found["target"] - 0.25), 1.0),
        )
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "figure.png", dpi=75)


if __name__ == "__main__":
    common.main(__file__, __doc__ or "", study, report, draw)
