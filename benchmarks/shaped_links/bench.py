"""Steps a second between two hosts behind a shaped link: each codec and cadence, DDP beside them.

python benchmarks/shaped_links/bench.py                  100 Mbit/s, 1 and 10 Gbit/s; root only
python benchmarks/shaped_links/bench.py --rates 1gbit --rounds 1 --ways dense int8 DDP
python benchmarks/shaped_links/bench.py --rates 1gbit --ways int8 "int8, after"   and not beside
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.nn.functional as F
from task import OURS, ROWS, TORCHS, WIDE, model

from stratagem.plan.choose import choose
from stratagem.plan.configuration import MULTI_WORKER, Configuration
from stratagem.plan.cost import predict
from stratagem.plan.hardware import Hardware
from stratagem.plan.machine import measure_hardware
from stratagem.plan.notebook import profile
from stratagem.plan.profile import Profile
from tests.hosts import Hosts

#: and how many steps are timed
RATES = {"100mbit": 5, "1gbit": 20, "10gbit": 20}
#: what a shaped link lets through at once; a cable none, and a codec may send no more than 256 kB
BURSTS = {"100mbit": "16kb", "1gbit": "64kb"}
TASK = Path(__file__).parent / "task.py"
#: what of torch's each of ours is beside
PEERS = {"dense": "DDP", "bf16": "DDP bf16", "PowerSGD 4": "DDP PowerSGD 4"}
#: what a prediction may be off
GOAL = 0.2
#: how the planner names the ways that it knows
PLANNED = {
    None: "dense",
    "bfloat16": "bf16",
    "Int8()": "int8",
    "TopK(share=0.01)": "top-k 1%",
    "PowerSGD()": "PowerSGD 4",
    "Sign()": "sign",
}


def once(hosts: Hosts, ways: list[str], port: int, steps: int) -> dict[str, float]:
    """By way: seconds a step on the slower of both hosts; says the last words where one failed."""
    environ = {
        "STRATAGEM_SECRET": secrets.token_hex(16),
        "GLOO_SOCKET_IFNAME": "e0",
        "SHAPED_LINKS_STEPS": str(steps),
    }
    places = [hosts.address(i) for i in range(2)]
    running = [
        hosts.start(i, sys.executable, TASK, i, port, *places, *ways, **environ) for i in range(2)
    ]
    said = [each.communicate(timeout=240)[0] for each in running]
    found: dict[str, list[float]] = {way: [] for way in ways}
    for line in (
        line for text in said for line in text.splitlines() if line.startswith("seconds ")
    ):
        _, seconds, way = line.split(" ", 2)
        found[way].append(float(seconds))
    if any(len(each) < 2 for each in found.values()):
        print("failed:", *(text[-1500:] for text in said), sep="\n", file=sys.stderr)
    return {way: max(each) for way, each in found.items() if len(each) == 2}


def measured() -> tuple[Profile, Hardware]:
    """What the planner knows of this model, and of one such host.

    Both hosts are this machine, and share its memory and caches. So two processes measure at the
    same time, as both hosts compute at the same time in a step.
    """
    asked = [sys.executable, __file__, "--measure"]
    both = [subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [json.loads(each.communicate(timeout=240)[0].splitlines()[-1]) for each in both]
    found = [(Profile.from_json(each["model"]), Hardware.from_json(each["host"])) for each in told]
    return max(found, key=lambda each: each[0].compute)  # the slower, as of the steps


def measure() -> None:
    """As one of two that measure: print what was found."""
    torch.set_num_threads(1)  # as the workers have it
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    batch = torch.randn(ROWS, WIDE), torch.randint(10, (ROWS,))
    tries = [
        profile(module, batch, loss=F.cross_entropy, optimizer=optimizer, lossy=True)
        for _ in range(3)
    ]
    found = min(tries, key=lambda each: each.compute)  # the fastest, as of the rounds
    host = measure_hardware(found.device)
    print(json.dumps({"model": found.to_json(), "host": host.to_json()}))


def predicted(rate: str, found: Profile, here: Hardware) -> dict[str, float]:
    """By way: seconds a step that the planner predicts for two such hosts, and this model."""
    link = rate.replace("mbit", "Mbit").replace("gbit", "Gbit")
    # both hosts share the cores of this machine
    half = replace(here, cores=max(1, here.cores // 2))
    hardware = Hardware.of(link=link, latency="50us", hosts=2, per_host=1, base=half)
    steps: dict[str, float] = {}
    for each in choose(found, hardware, most=2, lossy=True).predictions:
        cfg = each.configuration
        if cfg.strategy == MULTI_WORKER and not cfg.hierarchical:
            seldom = ["DiLoCo 20, parts"] if cfg.fragments > 1 else ["local 20", "DiLoCo 20"]
            for way in seldom if cfg.every > 1 else [PLANNED[cfg.wire]]:
                steps[way] = each.step
    others = {
        "DiLoCo 20, int8": Configuration(MULTI_WORKER, 2, wire="Int8()", every=20),
        "DiLoCo 20, parts, after": Configuration(MULTI_WORKER, 2, every=20, fragments=4, overlap=0),
    }
    return steps | {way: predict(found, hardware, cfg).step for way, cfg in others.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=[*OURS, *TORCHS])
    parser.add_argument("--json", type=Path, help="data.json beside this file, for a whole run")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure()
        return
    if os.geteuid() != 0:
        sys.exit("only root may make network namespaces; run it as root.")
    port, known = 21000, measured()
    found: dict[str, dict[str, dict[str, list[float] | float]]] = {}
    sides = [[way for way in args.ways if (way in TORCHS) == theirs] for theirs in (False, True)]
    for rate in args.rates:
        times: dict[str, list[float]] = {way: [] for way in args.ways}
        steps = RATES.get(rate, 20)
        with Hosts(2) as hosts:
            for host in range(2):
                hosts.shape(host, rate, BURSTS.get(rate, "256kb"))
            for _ in range(args.rounds):  # in turn, so that whatever else runs here hits all
                for ways in filter(None, sides):
                    for way, seconds in once(hosts, ways, port := port + 100, steps).items():
                        times[way].append(seconds)
        planned = predicted(rate, *known)
        found[rate] = {"seconds a step": {**times}, "predicted": {**planned}}
        _show(rate, times, planned)
    if args.json is None and args.ways == [*OURS, *TORCHS] and args.rates == list(RATES):
        args.json = Path(__file__).with_name("data.json")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def _show(rate: str, times: dict[str, list[float]], planned: dict[str, float]) -> None:
    fastest = {way: min(each) for way, each in times.items() if each}
    heads = (
        "ms a step (of each round) | predicted ms | steps/s, dense 1 | predicted | off | "
        f"within {GOAL:.0%} | torch's is 1"
    )
    print(f"\n| {rate} | {heads} |")
    print("| --- " * 8 + "|")
    met, asked = 0, 0
    for way, best in fastest.items():
        rounds = ", ".join(f"{1e3 * each:.1f}" for each in times[way])
        dense = f"{fastest['dense'] / best:.2f}" if "dense" in fastest else ""
        hook = PEERS.get(way, "")
        peer = f"{fastest[hook] / best:.2f}" if hook in fastest else ""
        step, gain, off, within = "", "", "", ""
        if way in planned:
            step, promised = f"{1e3 * planned[way]:.1f}", planned["dense"] / planned[way]
            gain = f"{promised:.2f}"
        if way in planned and dense and way != "dense":
            error = promised * best / fastest["dense"] - 1
            off, within = f"{error:+.0%}", "yes" if abs(error) <= GOAL else "NO"
            met, asked = met + (within == "yes"), asked + 1
        cells = [step, dense, gain, off, within, peer]
        print(f"| {way} | {1e3 * best:.1f} ({rounds}) | {' | '.join(cells)} |", flush=True)
    print(f"\n{met} of {asked} predicted gains within {GOAL:.0%} at {rate}.", flush=True)


if __name__ == "__main__":
    main()
