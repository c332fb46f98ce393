"""Step times over shaped links: real processes, a network namespace a host.

    python studies/saturation/measure.py [--small] [--json FILE] [--only ring,sync]

Every host and every server is a process with a cable of its own (hosts.py). The global batch is the
same for every number of hosts, so that a host of N computes 1/N of it. The computation sleeps
(task.py): it takes its time without taking the cores, which carry the bytes. A step is the time
from one forward pass to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
if __name__ == "__main__":  # before torch is imported; the hosts' processes inherit it
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
from hosts import Hosts, Unshaped  # noqa: E402
from processes import Cast, Troupe  # noqa: E402

BATCH = 12  # examples of a global batch: 1, 2, 3, 4 and 6 hosts have equal shares
WARM, STEPS = 3, 11
CALM = 0.05  # a spread with which a row is left alone


@dataclass(frozen=True)
class Leg:
    """One measurement: the link, the model, and what a step of the whole batch computes."""

    link_bits: float
    bytes: int
    compute_s: float


LEGS = (
    Leg(100e6, 1_179_648, 0.27),
    Leg(300e6, 2_359_296, 0.18),
    Leg(1000e6, 6_291_456, 0.15),
)
WIDE = Leg(1000e6, 25_165_824, 0.30)  # four buckets
UNSEEN = (Leg(200e6, 1_835_008, 0.12), Leg(500e6, 4_194_304, 0.20))
SMALL = Leg(300e6, 1_179_648, 0.06)


def grid() -> list[tuple[Cast, tuple[Leg, ...]]]:
    """Everything that the study measures; each cast starts once and runs all its legs."""
    found = [(Cast("one", 1, 0, "float32"), (*LEGS, WIDE))]
    for wire in ("float32", "bfloat16"):
        for hosts in (2, 3, 4):
            wide = (WIDE,) if hosts == 2 else ()
            found.append((Cast("ring", hosts, 0, wire), LEGS + wide))
            for servers in (1, 2):
                found.append((Cast("sync", hosts, servers, wire), LEGS))
                found.append((Cast("async", hosts, servers, wire), LEGS))
    return found


def blind() -> list[tuple[Cast, tuple[Leg, ...]]]:
    """Hosts, links, sizes and servers that no formula was looked at with."""
    found = [(Cast("one", 1, 0, "float32"), UNSEEN)]
    for wire in ("float32", "bfloat16"):
        for hosts in (3, 6):
            found.append((Cast("ring", hosts, 0, wire), UNSEEN))
            for servers in (1, 2, 3) if hosts == 3 else (1, 2):
                found.append((Cast("sync", hosts, servers, wire), UNSEEN))
            for servers in (1, 2):
                found.append((Cast("async", hosts, servers, wire), UNSEEN))
    return found


def small() -> list[tuple[Cast, tuple[Leg, ...]]]:
    """Two hosts, one link: what a test can wait for."""
    return [
        (Cast("one", 1, 0, "float32"), (SMALL,)),
        (Cast("ring", 2, 0, "float32"), (SMALL,)),
        (Cast("sync", 2, 1, "float32"), (SMALL,)),
    ]


def summary(cast: Cast, leg: Leg, stamps: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The row of one leg: the middle of the step times of all hosts, and how they spread."""
    steps = [b - a for mine in stamps for a, b in zip(mine[WARM:], mine[WARM + 1 :], strict=False)]
    quarters = statistics.quantiles(steps, n=4)
    rate = sum((len(mine) - 1 - WARM) / (mine[-1] - mine[WARM]) for mine in stamps)
    return {
        **named(cast, leg),
        "step_s": round(statistics.median(steps), 5),
        "mean_s": round(cast.hosts / rate, 5),
        "spread": round((quarters[2] - quarters[0]) / quarters[1], 4),
        "steps": len(steps),
    }


def named(cast: Cast, leg: Leg) -> dict[str, Any]:
    """What a row says of what was measured."""
    return {
        **asdict(cast),
        "link_bits": leg.link_bits,
        "bytes": leg.bytes,
        "compute_s": round(leg.compute_s / cast.hosts, 6),
    }


@contextmanager
def ended_politely() -> Iterator[None]:
    """SIGTERM takes the same way out as Ctrl-C."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def measure(
    casts: Sequence[tuple[Cast, Sequence[Leg]]], steps: int = STEPS
) -> Iterator[dict[str, Any]]:
    """The rows, one by one, as they are measured."""
    with ended_politely():
        for cast, legs in casts:
            with Hosts(cast.hosts + cast.servers) as hosts:
                troupe = Troupe(cast, hosts)
                try:
                    for leg in legs:
                        hosts.shape(leg.link_bits)
                        yield summary(cast, leg, troupe.run(task_of(cast, leg, WARM + steps)))
                finally:
                    troupe.end()


def task_of(cast: Cast, leg: Leg, batches: int) -> dict[str, Any]:
    """What a worker is told of a leg. Asynchronous workers have a batch of their own each."""
    alone = cast.hosts if cast.strategy == "async" else 1
    return {
        "bytes": leg.bytes,
        "seconds": leg.compute_s / BATCH,
        "batch": BATCH // alone,
        "batches": batches * alone,
    }


def heading() -> str:
    return (
        f"{'strategy':9}{'hosts':>6}{'servers':>8} {'wire':9}{'Mbit/s':>7}{'MB':>6}"
        f"{'compute':>9}{'step ms':>9}{'mean':>8}{'spread':>8}"
    )


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['strategy']:9}{row['hosts']:6}{row['servers']:8} {row['wire']:9}"
        f"{row['link_bits'] / 1e6:7.0f}{row['bytes'] / 1e6:6.1f}{row['compute_s'] * 1e3:9.1f}"
        f"{row['step_s'] * 1e3:9.1f}{row['mean_s'] * 1e3:8.1f}"
        f"{row['spread']:8.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="2 hosts, one link: under 30 s")
    parser.add_argument("--blind", action="store_true", help="what no formula has seen: 3 minutes")
    parser.add_argument("--only", help="strategies to measure: one,ring,sync,async")
    parser.add_argument("--json", type=Path, help="where the rows are written")
    parser.add_argument(
        "--again",
        action="store_true",
        help="measure again what spreads much; keep what spreads less",
    )
    args = parser.parse_args()
    casts = small() if args.small else blind() if args.blind else grid()
    if args.only:
        casts = [entry for entry in casts if entry[0].strategy in args.only.split(",")]
    before = json.loads(args.json.read_text()) if args.again else {"runs": [], "rows": []}
    if args.again:
        casts = unsettled(casts, before["rows"])
    begun, load = time.monotonic(), os.getloadavg()[0]
    print(heading())
    rows = []
    try:
        for row in measure(casts):
            rows.append(row)
            print(line(row), flush=True)
    except Unshaped as problem:
        sys.exit(f"measure.py: {problem}")
    run = {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
        "seconds": round(time.monotonic() - begun),
    }
    print(run)
    if args.json:
        runs = json.dumps([*before["runs"], run])
        text = ",\n".join(json.dumps(row) for row in calmer(before["rows"], rows))
        args.json.write_text(f'{{"runs": {runs}, "rows": [\n{text}\n]}}\n')


def unsettled(
    casts: Sequence[tuple[Cast, Sequence[Leg]]], rows: Sequence[dict[str, Any]]
) -> list[tuple[Cast, Sequence[Leg]]]:
    """What has not been measured well yet: its steps differ by more than `CALM`."""
    calm = {identity(row) for row in rows if row["spread"] <= CALM}
    left = [
        (cast, [leg for leg in legs if identity(named(cast, leg)) not in calm])
        for cast, legs in casts
    ]
    return [(cast, legs) for cast, legs in left if legs]


def calmer(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of two measurements of the same the one that spreads less: others were less in its way."""
    found = {identity(row): row for row in old}
    for row in new:
        before = found.get(identity(row))
        if before is None or row["spread"] < before["spread"]:
            found[identity(row)] = row
    return list(found.values())


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """What is measured, without what came out."""
    names = ("strategy", "hosts", "servers", "wire", "link_bits", "bytes", "compute_s")
    return tuple(row[name] for name in names)


if __name__ == "__main__":
    main()
