"""Three headlines, 6x on 8, 32x on 50 and 300x on 500: what comes out of a simulation of each?"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

from stratagem.plan.simulation.scenario import Scenario, Work
from stratagem.plan.simulation.spread import Lognormal, Stragglers
from stratagem.rules.updates import Asynchronous, Synchronous, Updates
from stratagem.wire.simulated import Topology

GBIT = 1e9 / 8
#: what is ready after which part of a step: nothing in the forward pass, then evenly
OVERLAP = tuple((0.1, 0.35 + 0.65 * (i + 1) / 10) for i in range(10))


@dataclass(frozen=True)
class Model:
    """A model of the kind; the README says where the numbers come from.

    seconds of a step in 2016 and now, bytes that travel for each gradient, in fp32
    """

    name: str
    workers: int
    claim: float
    goal: float
    then: float
    now: float
    bytes: float
    servers: int
    sparse: bool = False


MODELS = [
    Model("translation", 8, 6.0, 7.8, then=2.5, now=0.04, bytes=1.0e9, servers=8),
    Model("Inception", 50, 32.0, 48.0, then=1.09, now=0.022, bytes=95e6, servers=17),
    Model("sparse ranking", 500, 300.0, 475.0, 0.10, 0.02, bytes=8.8e6, servers=32, sparse=True),
]
#: rate in bytes a second and latency of a host's link
NETWORKS = {"2016": (10 * GBIT, 100e-6), "present": (400 * GBIT, 5e-6)}
LINKS = [10, 25, 100, 400, 1600]
#: no link is looked for: it is there to show what sending in turn is for
NOT_SEARCHED = "asynchronous, at once"


def scenario(
    model: Model,
    workers: int,
    seconds: float,
    network: tuple[float, float],
    how: dict[str, Any],
    *,
    stragglers: bool = True,
) -> Scenario:
    """One job; `how`: servers (0: all-reduce), updates, overlap, half (bf16 on the wire)."""
    steady = Lognormal(seconds, 0.06)
    compute = Stragglers(steady, 0.002, 5.0) if stragglers else steady
    size = model.bytes * (0.5 if how.get("half") else 1.0)
    updates: Updates = how.get("updates", Synchronous())
    if isinstance(updates, Synchronous):  # few have fewer spares
        updates = Synchronous(spares=min(updates.spares, workers // 8))
    steps = max(12, 6000 // workers)
    if isinstance(updates, Asynchronous):  # of each worker, and so many that queues have filled
        steps = max(24, steps) * workers
    buckets = OVERLAP if how.get("overlap") else ((1.0, 1.0),)
    return Scenario(
        workers,
        steps,
        Work(compute, push=size, buckets=buckets),
        Topology(*network),
        updates,
        how.get("servers", 0),
        in_turn=how.get("in_turn", True),
    )


def ways(model: Model) -> dict[str, dict[str, Any]]:
    """Ways to train it, the book's first."""
    servers, spares = model.servers, max(1, model.workers // 16)
    found: dict[str, dict[str, Any]] = {
        "servers, as then": {"servers": servers, "in_turn": False},
        "servers, overlapped": {"servers": servers, "overlap": True},
        "with spares": {"servers": servers, "overlap": True, "updates": Synchronous(spares=spares)},
        "asynchronous": {"servers": servers, "overlap": True, "updates": Asynchronous()},
        "asynchronous, bf16": {
            "servers": servers,
            "overlap": True,
            "updates": Asynchronous(),
            "half": True,
        },
    }
    if model.sparse:
        found["asynchronous, at once"] = {**found["asynchronous"], "in_turn": False}
    else:
        found["all-reduce"] = {"overlap": True}
        found["all-reduce, bf16"] = {"overlap": True, "half": True}
    return found


def one(job: dict[str, Any]) -> dict[str, Any]:
    model = next(m for m in MODELS if m.name == job["model"])
    how = ways(model)[job["way"]]
    seconds = model.then if job["compute"] == "2016" else model.now
    network = NETWORKS[job["network"]]
    if job["gbit"] is not None:
        network = (job["gbit"] * GBIT, network[1])
    given = scenario(
        model, job["workers"], seconds, network, how, stragglers=job.get("kind") != "steady"
    )
    if job.get("servers"):
        given = replace(given, servers=job["servers"])
    return {**job, "speedup": common.speedup(given)}


def study(small: bool) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = []
    for model in MODELS[: 1 if small else None]:
        base = {"model": model.name, "workers": model.workers, "gbit": None}
        eras = [("2016", "2016"), ("present", "2016"), ("present", "present")]
        for compute, network in eras[: 1 if small else None]:
            for way in ways(model):
                jobs.append({**base, "way": way, "compute": compute, "network": network})
        if small:
            continue
        # the curve, and what it would take
        for n in sorted({1, 4, 8, 16, 50, 150, 500} - set(range(model.workers + 1, 999))):
            for way in ways(model):
                jobs.append(
                    {
                        **base,
                        "workers": n,
                        "way": way,
                        "compute": "2016",
                        "network": "2016",
                        "kind": "curve",
                    }
                )
        for way in (way for way in ways(model) if way.startswith("all-reduce")):
            jobs.append(
                {**base, "way": way, "compute": "2016", "network": "2016", "kind": "steady"}
            )
        for gbit in LINKS:
            for way in (way for way in ways(model) if way != NOT_SEARCHED):
                for compute in ("2016", "present"):
                    jobs.append(
                        {
                            **base,
                            "way": way,
                            "compute": compute,
                            "network": compute,
                            "gbit": gbit,
                            "kind": "links",
                        }
                    )
    once = {_same(job): job for job in jobs}
    found = dict(zip(once, common.on_all_cores(one, list(once.values())), strict=True))
    return [{**job, "speedup": found[_same(job)]["speedup"]} for job in jobs]


def _same(job: dict[str, Any]) -> tuple[Any, ...]:
    """What is simulated: a table, a curve and a search for links have some runs in common."""
    rate, latency = NETWORKS[job["network"]]
    rate = rate if job["gbit"] is None else job["gbit"] * GBIT
    return (
        job["model"],
        job["workers"],
        job["way"],
        job["compute"],
        rate,
        latency,
        job.get("kind") == "steady",
    )


def report(data: list[dict[str, Any]]) -> str:
    parts = []
    for model in MODELS:
        mine = [run for run in data if run["model"] == model.name]
        eras = list(dict.fromkeys((r["compute"], r["network"]) for r in mine if "kind" not in r))
        rows = []
        for way in ways(model):
            found = {
                (r["compute"], r["network"]): r["speedup"]
                for r in mine
                if r["way"] == way and "kind" not in r
            }
            cells = [f"{found[era]:.3g}" for era in eras if era in found]
            takes = [_takes(mine, way, model.goal, era) for era in ("2016", "present")]
            takes = takes if way != NOT_SEARCHED else ["not searched"] * 2
            rows.append([way, *cells, *(takes if any("kind" in r for r in mine) else [])])
        heads = [
            f"{model.name}: {model.claim:g}x on {model.workers}",
            *(f"GPUs of {c}, network of {n}" for c, n in eras),
        ]
        if any("kind" in r for r in mine):
            heads += [f"link for {model.goal:g}x, GPUs of {era}" for era in ("2016", "present")]
        if rows and mine:
            parts.append(common.table(heads, rows))
    return "\n\n".join(parts)


def _takes(mine: list[dict[str, Any]], way: str, goal: float, era: str) -> str:
    """The slowest link with which the goal is reached."""
    enough = [
        r["gbit"]
        for r in mine
        if r.get("kind") == "links"
        and r["way"] == way
        and r["compute"] == era
        and r["speedup"] >= goal
    ]
    return f"{min(enough)} Gbit/s" if enough else "none of these"


def draw(data: list[dict[str, Any]], out: Path) -> None:
    plt = common.pyplot()
    if plt is None:
        return

    names = list(dict.fromkeys(way for model in MODELS for way in ways(model)))
    figure, axes = plt.subplots(1, len(MODELS), figsize=(13, 3.8))
    for axis, model in zip(axes, MODELS, strict=True):
        mine = [r for r in data if r["model"] == model.name and r.get("kind") == "curve"]
        for way in ways(model):
            points = sorted((r["workers"], r["speedup"]) for r in mine if r["way"] == way)
            axis.plot(
                *zip(*points, strict=True),
                marker="o",
                ms=3,
                lw=1,
                label=way,
                color=f"C{names.index(way)}",
            )
        axis.plot(
            [1, model.workers],
            [1, model.workers],
            color="black",
            lw=0.8,
            ls=":",
            label="nothing lost",
        )
        axis.plot(model.workers, model.claim, "k*", ms=10, label="the headline")
        axis.set(title=f"{model.name}, 2016", xlabel="workers", ylabel="speedup")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out / "figure.png", dpi=75)


if __name__ == "__main__":
    common.main(__file__, __doc__ or "", study, report, draw)
