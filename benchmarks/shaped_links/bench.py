"""Steps a second between two hosts behind a shaped link: each codec and cadence, DDP beside them.

python benchmarks/shaped_links/bench.py                  100 Mbit/s, 1 and 10 Gbit/s; root only
python benchmarks/shaped_links/bench.py --rates 1gbit --rounds 1 --ways dense int8 DDP
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from task import OURS, TORCHS

from tests.hosts import Hosts

RATES = ["100mbit", "1gbit", "10gbit"]
TASK = Path(__file__).parent / "task.py"


def once(hosts: Hosts, way: str, port: int) -> float | None:
    """Seconds a step on the slower of both hosts; None, with its last words, where it failed."""
    addresses = [f"{hosts.address(i)}:{port}" for i in range(2)]
    environ = {
        "STRATAGEM_SECRET": secrets.token_hex(16),
        "GLOO_SOCKET_IFNAME": "e0",
    }
    running = [
        hosts.start(i, sys.executable, TASK, way, i, *addresses, **environ) for i in range(2)
    ]
    said = [each.communicate(timeout=600)[0] for each in running]
    found = [line.split()[1] for text in said for line in text.splitlines() if "seconds " in line]
    if len(found) < 2:
        print(f"{way} failed:", *(text[-400:] for text in said), sep="\n", file=sys.stderr)
        return None
    return max(map(float, found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=[*OURS, *TORCHS])
    args = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("only root may make network namespaces; run it as root.")
    port = 21000
    for rate in args.rates:
        times: dict[str, list[float]] = {way: [] for way in args.ways}
        with Hosts(2) as hosts:
            for host in range(2):
                hosts.shape(host, rate)
            for _ in range(args.rounds):  # in turn, so that whatever else runs here hits all
                for way in args.ways:
                    port += 7
                    if (seconds := once(hosts, way, port)) is not None:
                        times[way].append(seconds)
        _show(rate, times)


def _show(rate: str, times: dict[str, list[float]]) -> None:
    middles = {way: statistics.median(each) for way, each in times.items() if each}
    print(f"\n| {rate} | ms a step (least to most) | steps a second, dense is 1 | DDP is 1 |")
    print("| --- | --- | --- | --- |")
    for way, middle in middles.items():
        span = f"{1e3 * min(times[way]):.1f} to {1e3 * max(times[way]):.1f}"
        ratios = [
            f"{middles[peer] / middle:.2f}" if peer in middles else "" for peer in ("dense", "DDP")
        ]
        print(f"| {way} | {1e3 * middle:.1f} ({span}) | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
