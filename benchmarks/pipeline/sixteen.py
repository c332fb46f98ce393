"""What the goals for 16 cores ask of stages; each part in one run of less than three minutes.

    python benchmarks/pipeline/sixteen.py --only pipeline|columns [--stages 4] [--threads 4]

1. Stages with a core each (by affinity) beside torch's 1F1B and one device, and beside the bubble's
   limit with the measured cost of small microbatches: w(M) is what one device takes for a batch in
   M pieces, over what it takes for the batch; the limit is w(M) (M + S - 1) / (S M).
2. An LSTM in columns over stages of several threads beside one process with the best number of
   threads.

Every arm is a fresh process tree, and arms take turns within a round. A round is left out when
there is no time for it.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stratagem as sg
from stratagem.wire.freed_memory import keep_freed_memory

HERE = Path(__file__).parent
CHUNKS = (2, 4, 8)
#: arms, and their schedules
PIPELINES = {"pipeline": "1f1b", "eager pipeline": "eager"}


def cores(count: int) -> list[int]:
    """So many cores, far from each other: neighbours may be threads of one."""
    have = sorted(os.sched_getaffinity(0))
    return have[:: max(1, len(have) // count)][:count]


# --- 1. stages beside torch's ---------------------------------------------------------------------


def _pinned(strategy: Any, count: int) -> Any:
    mine = cores(count)
    strategy.run(lambda: os.sched_setaffinity(0, {mine[sg.current_replica().index]}))
    return strategy


def timed(arm: str, stages: int, microbatches: int) -> dict[str, float]:
    sys.path.insert(0, str(HERE))
    bench: Any = importlib.import_module("bench")
    os.sched_setaffinity(0, cores(stages))
    devices = [f"cpu:{i}" for i in range(stages)]
    if arm == "torch 1F1B":
        return {arm: bench.by_torch(stages, microbatches)}
    if arm in PIPELINES:
        made = sg.PipelineStrategy(devices, microbatches, PIPELINES[arm])
        return {arm: bench.by_fit(_pinned(made, stages))}
    os.sched_setaffinity(0, cores(stages)[:1])
    one = bench.by_fit(sg.MirroredStrategy(["cpu:0"]))
    whole, pieces = (in_pieces(bench, m) for m in (1, microbatches))
    return {arm: one, "w": pieces / whole}


def in_pieces(bench: Any, microbatches: int) -> float:
    """A step by hand, with the batch cut into so many pieces."""
    net = nn.Sequential(*bench.blocks())
    optimizer = torch.optim.Adam(net.parameters())
    x, y = bench.data()
    ends = []
    for start in range(0, len(x), bench.BATCH):
        rows = slice(start, start + bench.BATCH)
        for a, b in zip(x[rows].chunk(microbatches), y[rows].chunk(microbatches), strict=True):
            (nn.functional.cross_entropy(net(a), b) / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(ends[2:]))


def _loaded(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_bench", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- 2. columns -----------------------------------------------------------------------------------


def threads(most: int) -> dict[str, float]:
    """One process with 1, 2, 4, ... threads: plain torch, and then with memory kept as ours is."""
    columns: Any = _loaded(HERE.parent / "columns" / "bench.py")
    counts, found = [n for n in (1, 2, 4, 8, 16, 32) if n <= most], {}
    for count, how in [(n, how) for how in ("", ", memory kept") for n in counts]:
        if how:
            keep_freed_memory()
        torch.set_num_threads(count)
        net = columns.Recurrent()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        x, y = torch.randn(columns.BATCH, columns.LENGTH, columns.WIDTH), torch.zeros(16).long()
        ends = []
        for _ in range(columns.STEPS):
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
        found[f"{count} threads{how}"] = statistics.median(
            b - a for a, b in itertools.pairwise(ends[2:])
        )
    return found


# --- the run --------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def run(words: list[str], threads: int, script: Path = Path(__file__)) -> Any:
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "BENCH_PORT": str(free_port())}
    command = [sys.executable, str(script), *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def child(what: str, args: argparse.Namespace) -> Any:
    if what == "threads":
        return threads(args.stages)
    torch.set_num_threads(1)
    return timed(what, args.stages, args.microbatches)


class Clock:
    """Whether there is time for another round."""

    def __init__(self, seconds: float) -> None:
        self._until, self._longest = time.monotonic() + seconds, 0.0

    def rounds(self, most: int) -> Any:
        for number in range(most):
            started = time.monotonic()
            if number and started + self._longest > self._until:
                return
            yield number
            self._longest = time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--threads", type=int, default=4, help="of a stage in columns")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--only", choices=("pipeline", "columns"))
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args)))
        return
    clock = Clock(args.seconds)
    size = ["--stages", str(args.stages), "--microbatches", str(args.microbatches)]
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
    arms = ("one device", *PIPELINES, "torch 1F1B")
    rounds: list[dict[str, float]] = []
    recurrent: list[tuple[dict[str, float], dict[str, float]]] = []
    columns = HERE.parent / "columns" / "bench.py"
    for _ in clock.rounds(args.rounds):
        if args.only != "columns":
            rounds.append({})
            for arm in arms:
                rounds[-1] |= run(["--child", arm, *size], 1)
        if args.only == "pipeline":
            continue
        total = str(args.stages * args.threads)
        one = run(["--child", "threads", "--stages", total], int(total))
        many = {}
        for stages in (args.stages, args.stages // 2):
            threads = int(total) // stages
            for chunks in CHUNKS:
                name = f"{stages} stages of {threads} threads, {chunks} chunks"
                many[name] = run(["--child", str(stages), str(chunks)], threads, columns)
        recurrent.append((one, many))
    if rounds:
        _report(args, rounds)
    if recurrent:
        _report_columns(recurrent)


def _report(args: argparse.Namespace, rounds: Any) -> None:
    def median(of: Any) -> float:
        return statistics.median(of(each) for each in rounds)

    stages, m = args.stages, args.microbatches
    bubble = (m + stages - 1) / (stages * m)
    w = median(lambda each: each["w"])
    print(f"\n{stages} stages, a core each, {m} microbatches; {len(rounds)} rounds")
    print(f"the bubble's limit is {bubble:.3f} of one device; w({m}) = {w:.3f}")
    print("| arm | ms a step | of one device | of torch 1F1B |\n| --- | --- | --- | --- |")
    for arm in ("one device", *PIPELINES, "torch 1F1B"):
        ms = 1000 * median(lambda each, arm=arm: each[arm])
        one = median(lambda each, arm=arm: each[arm] / each["one device"])
        other = median(lambda each, arm=arm: each[arm] / each["torch 1F1B"])
        print(f"| {arm} | {ms:.1f} | {one:.3f} | {other:.3f} |")
    for arm in PIPELINES:
        part = median(
            lambda each, arm=arm: bubble * each["w"] * each["one device"] / each[arm],
        )
        print(f"the {arm} reaches **{part:.2f}** of the limit w (M + S - 1) / (S M)")
    print()


def _report_columns(recurrent: Any) -> None:
    best = min(recurrent[0][0], key=lambda n: statistics.median(one[n] for one, _ in recurrent))
    print("| LSTM | ms a step | of the best process |\n| --- | --- | --- |")
    for n in recurrent[0][0]:
        ms = 1000 * statistics.median(one[n] for one, _ in recurrent)
        ratio = statistics.median(one[best] / one[n] for one, _ in recurrent)
        print(f"| one process, {n} | {ms:.1f} | {ratio:.2f} |")
    for name in recurrent[0][1]:
        ms = 1000 * statistics.median(many[name] for _, many in recurrent)
        ratio = statistics.median(one[best] / many[name] for one, many in recurrent)
        print(f"| {name} | {ms:.1f} | **{ratio:.2f}** |")


if __name__ == "__main__":
    main()
