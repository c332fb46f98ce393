"""The same in virtual time: the measured runs predicted, and many more workers than cores."""

from __future__ import annotations

from math import inf
from statistics import mean
from typing import Any

from size import KINDS, Size, traffic

import stratagem as sg
from stratagem.plan.simulate import simulate
from stratagem.plan.simulation.scenario import Scenario, Work
from stratagem.plan.simulation.spread import Constant, Lognormal
from stratagem.wire.simulated import Topology

COMPUTE = 0.1  # seconds of a step of the simulated jobs
LINKS = {"1 Gbit/s": 0.125e9, "10 Gbit/s": 1.25e9}
NAMES = ("kind", "way", "rule", "workers", "servers")


def rule(name: str) -> Any:
    return sg.Synchronous() if name == "synchronous" else sg.Asynchronous()


def costs(server: dict[str, float], name: str) -> dict[str, float]:
    """A server's seconds: asynchronous gradients are added and applied at once."""
    if name == "synchronous":
        return {"update": server["step"], "add": server["add"]}
    return {"update": server["step"] + server["add"]}


def predict(size: Size, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Every real run: how far off is the simulator?

    A server's seconds are those of its store. The rest of a step of one asynchronous worker on one
    server is the worker's; with half of the examples, by as much less as one device needs less.
    """
    first = ("asynchronous", 1, 1)
    seconds = {
        (arm["kind"], arm["way"]):
        1 / arm["updates_per_s"] - sum(found["server"][arm["kind"]].values())
        for arm in found["arms"] if (arm["rule"], arm["workers"], arm["servers"]) == first
    }  # fmt: skip
    rows = []
    for arm in found["arms"]:
        server, alone = found["server"][arm["kind"]], found["alone"][arm["kind"]]
        compute = max(0.0, seconds[arm["kind"], arm["way"]])
        if arm["rule"] == "synchronous":
            share = str(size.batch // arm["workers"])
            compute = max(alone[share], compute - alone[str(size.batch)] + alone[share])
        run = simulate(Scenario(
            arm["workers"], 200, Work(Constant(compute), **costs(server, arm["rule"])),
            Topology(rate=inf), rule(arm["rule"]), arm["servers"],
        ))  # fmt: skip
        rows.append({
            **{name: arm[name] for name in NAMES}, "measured": arm["updates_per_s"],
            "predicted": run.rate, "error": run.rate / arm["updates_per_s"] - 1,
            "fitted": (arm["rule"], arm["workers"], arm["servers"]) == first,
        })  # fmt: skip
    return rows


def at_scale(size: Size, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Many workers; `needed` is a wish, not what stratagem does."""
    rows = []
    for kind in (*KINDS, "needed"):
        server = found["server"]["dense" if kind == "dense" else "sparse"]
        for name in ("asynchronous", "synchronous"):
            for link, rate in LINKS.items():
                for servers in size.simulated_servers:
                    for workers in size.simulated_workers:
                        push, pull = traffic(size, kind, workers, size.batch)
                        work = Work(Lognormal(COMPUTE, 0.05), push, pull, **costs(server, name))
                        topology = Topology(rate=rate, latency=50e-6)
                        busy = speedup(name, servers, workers, work, topology)
                        rows.append({"kind": kind, "rule": name, "link": link, "servers": servers,
                                     "workers": workers, "push": push, "pull": pull,
                                     "speedup": busy})  # fmt: skip
    return rows


def speedup(name: str, servers: int, workers: int, work: Work, topology: Topology) -> float:
    """Gradients a second times the seconds that computing one takes."""
    together = name == "synchronous"
    each = 1 if together else workers  # updates that all workers make once around
    run = simulate(Scenario(workers, 10 * each, work, topology, rule(name), servers))
    # by the third round all are under way, in the eighth nobody has run dry
    begin, end = (mean(run.updates[n * each : (n + 1) * each]) for n in (2, 7))
    return 5 * workers / (end - begin) * COMPUTE


def knees(simulated: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By kind, rule, link and servers: the best speedup, and how far half of it is kept."""
    curves: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in simulated:
        key = (row["rule"], row["link"], row["servers"], row["kind"])
        curves.setdefault(key, []).append(row)
    found = []
    for (name, link, servers, kind), curve in curves.items():
        best = max(curve, key=lambda row: row["speedup"])
        enough = next(r for r in curve if r["speedup"] >= 0.95 * best["speedup"])
        good = [row["workers"] for row in curve if row["speedup"] >= 0.5 * row["workers"]]
        found.append({"rule": name, "link": link, "servers": servers, "kind": kind,
                      "best": best["speedup"], "saturates": enough["workers"],
                      "half": max(good, default=0)})  # fmt: skip
    return found
