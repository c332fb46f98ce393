"""The same in virtual time: the measured runs predicted, and many more workers than cores."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import common
from size import KINDS, Size, traffic

import stratagem as sg
from stratagem.plan.simulate import simulate
from stratagem.plan.simulation.scenario import Overhead, Scenario, Work
from stratagem.plan.simulation.spread import Constant, Lognormal
from stratagem.wire.simulated import Topology

COMPUTE = 0.1  # seconds of a step of the simulated jobs
LINKS = {"1 Gbit/s": 0.125e9, "10 Gbit/s": 1.25e9}
SLOW = "asynchronous, slower servers"
#: asynchronous workers that start together come apart in some thirty steps if they differ by 5%,
#: in three if they differ by 30%; until then they all send at once and all fetch at once
SPREADS = {"asynchronous": 0.3, SLOW: 0.3, "synchronous": 0.05}
#: gradients of each asynchronous worker: queues have filled by the time that counts
ROUNDS = 30
FIRST = ("asynchronous", 1, 1)
NAMES = ("kind", "way", "rule", "workers", "servers")


def rule(name: str) -> Any:
    return sg.Synchronous() if name == "synchronous" else sg.Asynchronous()


def costs(server: dict[str, float], name: str) -> dict[str, float]:
    """A server's seconds: asynchronous gradients are added and applied at once."""
    if name == "synchronous":
        return {"update": server["step"], "add": server["add"]}
    return {"update": server["all"] if name == SLOW else server["step"] + server["add"]}


def rests(size: Size, found: dict[str, Any]) -> dict[tuple[str, str], float]:
    """What of a step of one asynchronous worker on one server is not its computation."""
    return {
        (arm["kind"], arm["way"]): max(
            0.0, 1 / arm["updates_per_s"] - found["alone"][arm["kind"]][str(size.batch)]
        )
        for arm in found["arms"]
        if (arm["rule"], arm["workers"], arm["servers"]) == FIRST
    }


def predict(size: Size, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Every real run, from what was measured without it: how far off?

    alone       computing and the store's work only, as if messages cost nothing
    overhead    with what messages cost processors, as `overhead.py` has measured it
    one core    the same, but no faster than one core that does everything in turns
    """
    rows = []
    for arm in found["arms"]:
        seconds = _seconds(size, found, arm)
        row = {**{name: arm[name] for name in NAMES}, "measured": arm["updates_per_s"]}
        for name, took in seconds.items():
            row[f"error, {name}"] = 1 / took / arm["updates_per_s"] - 1
        rows.append(row)
    return rows


def _seconds(size: Size, found: dict[str, Any], arm: dict[str, Any]) -> dict[str, float]:
    """Of an update, as predicted."""
    server, together = found["server"][arm["kind"]], arm["rule"] == "synchronous"
    examples = size.batch // arm["workers"] if together else size.batch
    compute, costly = found["alone"][arm["kind"]][str(examples)], Overhead(**found["overhead"])
    near = arm["way"] == "shared memory"  # nothing to speak of travels
    push, pull = (0.0, 0.0) if near else traffic(size, arm["kind"], arm["workers"], examples)
    plain = Scenario(
        arm["workers"],
        200,
        Work(Constant(compute), push, pull, **costs(server, arm["rule"])),
        Topology(rate=inf),
        rule(arm["rule"]),
        arm["servers"],
    )
    alone, loaded = (1 / simulate(replace(plain, overhead=o)).rate for o in (Overhead(), costly))
    gradients = arm["workers"] if together else 1
    busy = gradients * (compute + processor(costly, arm["servers"], together, push + pull))
    busy += gradients * server["add"] + server["step"]
    return {"alone": alone, "overhead": loaded, "overhead, one core": max(loaded, busy)}


def processor(costs: Overhead, servers: int, together: bool, size: float) -> float:
    """Of all processes together: what the messages of one gradient take."""
    messages = 2 * servers - (not together)  # asynchronous tickets come with an answer
    orders = servers - 1  # half a message at either end
    return (
        messages * (costs.worker_message + costs.server_message)
        + orders * costs.server_message
        + size * (costs.worker_byte + costs.server_byte)
        + costs.worker_step
        + costs.server_step
    )


def at_scale(size: Size, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Many workers; `needed` is a wish, not what stratagem does."""
    rows, left = [], rests(size, found)
    for kind in (*KINDS, "needed"):
        like = "dense" if kind == "dense" else "sparse"
        server = {**found["server"][like], "all": left[like, size.ways[0]]}
        for name in SPREADS:
            for link, rate in LINKS.items():
                for servers in size.simulated_servers:
                    for workers in size.simulated_workers:
                        push, pull = traffic(size, kind, workers, size.batch)
                        work = Work(
                            Lognormal(COMPUTE, SPREADS[name]), push, pull, **costs(server, name)
                        )
                        topology = Topology(rate=rate, latency=50e-6)
                        busy = speedup(name, servers, workers, work, topology)
                        rows.append(
                            {
                                "kind": kind,
                                "rule": name,
                                "link": link,
                                "servers": servers,
                                "workers": workers,
                                "push": push,
                                "pull": pull,
                                "speedup": busy,
                            }
                        )
    return rows


def speedup(name: str, servers: int, workers: int, work: Work, topology: Topology) -> float:
    """Seconds of computing in a second, once all are under way and before the first have done."""
    if name != "synchronous":
        return common.speedup(
            Scenario(workers, ROUNDS * workers, work, topology, rule(name), servers)
        )
    run = simulate(Scenario(workers, 10, work, topology, rule(name), servers))
    return 5 * workers / (run.updates[7] - run.updates[2]) * work.compute.mean


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
        found.append(
            {
                "rule": name,
                "link": link,
                "servers": servers,
                "kind": kind,
                "best": best["speedup"],
                "saturates": enough["workers"],
                "half": max(good, default=0),
            }
        )
    return found
