"""Sparse models scale further: an embedding whose gradients travel as rows, and the same, dense."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import common
import real
import report
import virtual
from overhead import measure_overhead
from size import SMALL, Size, rows_touched, traffic

HERE = Path(__file__).parent
TIMEOUT = 400


def in_child(small: bool, way: str, turn: int) -> dict[str, Any]:
    """Measure in a fresh process, which may or may not share memory with its servers."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environ["STRATAGEM_SHARED_MEMORY"] = "1" if way == "shared memory" else "0"
    done = subprocess.run(
        [sys.executable, HERE / "real.py", json.dumps([way, turn, small])],
        capture_output=True,
        env=environ,
        timeout=TIMEOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"measuring over {way} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measured(size: Size, small: bool) -> dict[str, Any]:
    """Medians over the rounds; the ways take turns."""
    rounds = []
    for turn in range(size.rounds):
        for way in size.ways[:: 1 if turn % 2 == 0 else -1]:
            rounds.append(in_child(small, way, turn))
            print(f"round {turn + 1} of {size.rounds} over {way} done", file=sys.stderr)
    arms: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in (row for one in rounds for row in one["arms"]):
        key = tuple(row[name] for name in ("kind", "way", "rule", "workers", "servers"))
        arms.setdefault(key, []).append(row)
    merged = [
        {
            **rows[0],
            "apart": max(r["apart"] for r in rows),
            "updates_per_s": statistics.median(r["updates_per_s"] for r in rows),
            "all_updates_per_s": sorted(r["updates_per_s"] for r in rows),
            "accuracy": statistics.median(r["accuracy"] for r in rows),
        }
        for rows in arms.values()
    ]
    alone, server = (
        {
            kind: {n: statistics.median(r[what][kind][n] for r in rounds) for n in seconds}
            for kind, seconds in rounds[0][what].items()
        }
        for what in ("alone", "server")
    )
    return {
        "arms": sorted(merged, key=lambda r: [str(r[k]) for k in ("way", "rule", "workers")]),
        "alone": alone,
        "server": server,
        "one device": rounds[0]["one device"],
        "tables": _medians(rounds),
        "overhead": asdict(measure_overhead(20 if small else 300)),
    }


def _medians(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    speeds: dict[tuple[Any, ...], list[float]] = {}
    for row in (row for one in rounds for row in one["tables"]):
        key = (row["way"], row["rows"], row["kind"])
        speeds.setdefault(key, []).append(row["updates_per_s"])
    return [
        {"way": way, "rows": rows, "kind": kind, "updates_per_s": statistics.median(found)}
        for (way, rows, kind), found in speeds.items()
    ]


def study(size: Size, small: bool) -> dict[str, Any]:
    load = os.getloadavg()[0]
    found = measured(size, small)
    count = size.batch * size.steps
    ids = real.examples_of(size, count)[0].view(size.steps, -1)
    simulated = virtual.at_scale(size, found)
    return {
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "kind": platform.machine(),
            "torch": torch.__version__,
            "load before": load,
            "load after": os.getloadavg()[0],
        },
        "size": asdict(size),
        "compute": virtual.COMPUTE,
        "traffic": {
            "rows by formula": rows_touched(size, size.batch),
            "rows counted": statistics.mean(len(step.unique()) for step in ids),
            "sparse": traffic(size, "sparse", 1, size.batch)[0],
            "dense": traffic(size, "dense", 1, size.batch)[0],
        },
        "real": found,
        "predicted": virtual.predict(size, found),
        "simulated": simulated,
        "knees": virtual.knees(simulated),
    }


def main() -> None:
    args = common.options(__file__, __doc__ or "")
    if not args.plot:
        common.write(args.out, study(SMALL if args.small else Size(), args.small))
    data = common.read(args.out)
    report.tables(data)
    report.figure(data, args.out / "figure.png")


if __name__ == "__main__":
    main()
