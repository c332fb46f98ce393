"""Steps a second between two hosts behind a shaped link: each codec and cadence, DDP beside them.

python benchmarks/shaped_links/bench.py                  100 Mbit/s, 1 and 10 Gbit/s; root only
python benchmarks/shaped_links/bench.py --rates 1gbit --rounds 1 --ways dense int8 DDP
python benchmarks/shaped_links/bench.py --rates 1gbit --ways int8 "int8, after"   and not beside
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.nn.functional as F
from task import OURS, ROWS, TORCHS, WIDE, model

from stratagem.plan.choose import choose
from stratagem.plan.hardware import Hardware
from stratagem.plan.machine import measure_hardware
from stratagem.plan.notebook import profile
from stratagem.plan.profile import Profile
from tests.hosts import Hosts

#: and how many steps are timed
RATES = {"100mbit": 5, "1gbit": 20, "10gbit": 20}
TASK = Path(__file__).parent / "task.py"
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
    """What the planner knows of this model, and of one such host."""
    torch.set_num_threads(1)  # as the workers have it
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    batch = torch.randn(ROWS, WIDE), torch.randint(10, (ROWS,))
    tries = [
        profile(module, batch, loss=F.cross_entropy, optimizer=optimizer, lossy=True)
        for _ in range(3)
    ]
    found = min(tries, key=lambda each: each.compute)  # the fastest, as of the steps
    return found, measure_hardware(found.device)


def predicted(rate: str, found: Profile, here: Hardware) -> dict[str, float]:
    """By way: seconds a step that the planner predicts for two such hosts, and this model."""
    link = rate.replace("mbit", "Mbit").replace("gbit", "Gbit")
    hardware = Hardware.of(link=link, latency="50us", hosts=2, per_host=1, base=here)
    steps: dict[str, float] = {}
    for each in choose(found, hardware, most=2, lossy=True).predictions:
        cfg = each.configuration
        if cfg.strategy == "MultiWorkerMirroredStrategy" and not cfg.hierarchical:
            for way in ("local 20", "DiLoCo 20") if cfg.every > 1 else [PLANNED[cfg.wire]]:
                steps[way] = each.step
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", default=list(RATES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=[*OURS, *TORCHS])
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("only root may make network namespaces; run it as root.")
    port, known = 21000, measured()
    sides = [[way for way in args.ways if (way in TORCHS) == theirs] for theirs in (False, True)]
    for rate in args.rates:
        times: dict[str, list[float]] = {way: [] for way in args.ways}
        steps = RATES.get(rate, 20)
        with Hosts(2) as hosts:
            for host in range(2):
                hosts.shape(host, rate)
            for _ in range(args.rounds):  # in turn, so that whatever else runs here hits all
                for ways in filter(None, sides):
                    for way, seconds in once(hosts, ways, port := port + 100, steps).items():
                        times[way].append(seconds)
        _show(rate, times, predicted(rate, *known))


def _show(rate: str, times: dict[str, list[float]], planned: dict[str, float]) -> None:
    fastest = {way: min(each) for way, each in times.items() if each}
    heads = (
        "ms a step (of each round) | predicted ms | steps/s, dense 1 | predicted | off | DDP is 1"
    )
    print(f"\n| {rate} | {heads} |")
    print("| --- " * 7 + "|")
    for way, best in fastest.items():
        rounds = ", ".join(f"{1e3 * each:.1f}" for each in times[way])
        dense, ddp = (
            f"{fastest[peer] / best:.2f}" if peer in fastest else "" for peer in ("dense", "DDP")
        )
        step, gain, off = "", "", ""
        if way in planned:
            step, promised = f"{1e3 * planned[way]:.1f}", planned["dense"] / planned[way]
            gain = f"{promised:.2f}"
            off = f"{promised * best / fastest['dense'] - 1:+.0%}" if dense else ""
        cells = [step, dense, gain, off, ddp]
        print(f"| {way} | {1e3 * best:.1f} ({rounds}) | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
