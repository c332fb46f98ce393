"""What the goals for 16 cores ask of stages, in one run of less than seven minutes.

    python benchmarks/pipeline/sixteen.py [--stages 4] [--threads 4] [--rounds 2] [--seconds 390]

1. Stages with a core each (by affinity) beside torch's 1F1B and one device, and beside the bubble's
   limit with the measured cost of small microbatches: w(M) is what one device takes for a batch in
   M pieces, over what it takes for the batch; the limit is w(M) (M + S - 1) / (S M).
2. The most memory of the largest stage in a fit of a net of 200 MB of parameters with Adam, beside
   that of one device: proportional set size, without what the process had before. What comes before
   the first step is in it: the whole model on its way to every process.
3. An LSTM in columns over stages of several threads beside one process with the best number of
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
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stratagem as sg

HERE = Path(__file__).parent
WIDE, DEEP, ROWS, STEPS = 2048, 12, 256, 6
CHUNKS = 8


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
    if arm == "pipeline":
        made = _pinned(sg.PipelineStrategy(devices, microbatches=microbatches), stages)
        return {arm: bench.by_fit(made)}
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


# --- 2. memory ------------------------------------------------------------------------------------


def _peak() -> dict[str, int]:
    """Of this process: what this file has in mind is sent along to others, and would be the first
    one's."""
    found: dict[str, int] = vars(sys).setdefault("stratagem_peak", {"before": 0, "most": 0})
    return found


def _held() -> int:
    """Bytes of this process; of those that several share, its part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _watch() -> None:
    def look() -> None:
        while True:
            peak["most"] = max(peak["most"], _held())
            time.sleep(0.1)

    peak = _peak()
    peak["before"] = _held()
    threading.Thread(target=look, daemon=True).start()


def held(stages: int, microbatches: int) -> dict[str, float]:
    devices = [f"cpu:{i}" for i in range(stages)]
    many = stages > 1
    strategy: Any = sg.PipelineStrategy(devices, microbatches) if many else sg.MirroredStrategy()
    strategy.run(_watch)
    torch.manual_seed(0)
    hidden = [part for _ in range(DEEP) for part in (nn.Linear(WIDE, WIDE), nn.ReLU())]
    with strategy.scope(check=False):
        model = sg.Model(nn.Sequential(*hidden, nn.Linear(WIDE, 10)))
        model.compile("adam", "cross_entropy")
    x, y = torch.randn(ROWS * STEPS, WIDE), torch.randint(0, 10, (ROWS * STEPS,))
    model.fit(x, y, batch_size=ROWS, epochs=1, verbose=0)
    found = strategy.run(lambda: _peak()["most"] - _peak()["before"])
    strategy.close()
    return {"MB": max(found) / 1e6, "all": [round(each / 1e6) for each in found]}  # type: ignore[dict-item]


def _loaded(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_bench", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- 3. columns -----------------------------------------------------------------------------------


def threads(most: int) -> dict[str, float]:
    """One process with 1, 2, 4, ... threads."""
    columns: Any = _loaded(HERE.parent / "columns" / "bench.py")
    found = {}
    for count in (n for n in (1, 2, 4, 8, 16, 32) if n <= most):
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
        found[str(count)] = statistics.median(b - a for a, b in itertools.pairwise(ends[2:]))
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
    if what == "memory":
        return held(args.stages, args.microbatches)
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
    parser.add_argument("--seconds", type=float, default=390)
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, args)))
        return
    clock = Clock(args.seconds)
    size = ["--stages", str(args.stages), "--microbatches", str(args.microbatches)]
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}", flush=True)
    alone = run(["--child", "memory", *size[2:], "--stages", "1"], 1)
    staged = run(["--child", "memory", *size], 1)
    part = staged["MB"] / alone["MB"]
    print(
        f"memory: one device {alone['MB']:.0f} MB, stages {staged['all']} MB: the largest is "
        f"**{part:.2f}** of one device",
        flush=True,
    )
    arms = ("one device", "pipeline", "torch 1F1B")
    rounds: list[dict[str, float]] = []
    recurrent: list[tuple[dict[str, float], float]] = []
    columns = HERE.parent / "columns" / "bench.py"
    for _ in clock.rounds(args.rounds):
        rounds.append({})
        for arm in arms:
            rounds[-1] |= run(["--child", arm, *size], 1)
        total = str(args.stages * args.threads)
        one = run(["--child", "threads", "--stages", total], int(total))
        many = run(["--child", str(args.stages), str(CHUNKS)], args.threads, columns)
        recurrent.append((one, many))
    _report(args, rounds, recurrent)


def _report(args: argparse.Namespace, rounds: Any, recurrent: Any) -> None:
    def median(of: Any) -> float:
        return statistics.median(of(each) for each in rounds)

    stages, m = args.stages, args.microbatches
    bubble = (m + stages - 1) / (stages * m)
    w = median(lambda each: each["w"])
    print(f"\n{stages} stages, a core each, {m} microbatches; {len(rounds)} rounds")
    print(f"the bubble's limit is {bubble:.3f} of one device; w({m}) = {w:.3f}")
    print("| arm | ms a step | of one device | of torch 1F1B |\n| --- | --- | --- | --- |")
    for arm in ("one device", "pipeline", "torch 1F1B"):
        ms = 1000 * median(lambda each, arm=arm: each[arm])
        one = median(lambda each, arm=arm: each[arm] / each["one device"])
        other = median(lambda each, arm=arm: each[arm] / each["torch 1F1B"])
        print(f"| {arm} | {ms:.1f} | {one:.3f} | {other:.3f} |")
    part = median(lambda each: bubble * each["w"] * each["one device"] / each["pipeline"])
    print(f"the pipeline reaches **{part:.2f}** of the limit w (M + S - 1) / (S M)\n")
    best = min(recurrent[0][0], key=lambda n: statistics.median(one[n] for one, _ in recurrent))
    print("| LSTM | ms a step | of the best process |\n| --- | --- | --- |")
    for n in recurrent[0][0]:
        ms = 1000 * statistics.median(one[n] for one, _ in recurrent)
        ratio = statistics.median(one[best] / one[n] for one, _ in recurrent)
        print(f"| one process, {n} threads | {ms:.1f} | {ratio:.2f} |")
    ms = 1000 * statistics.median(many for _, many in recurrent)
    ratio = statistics.median(one[best] / many for one, many in recurrent)
    print(
        f"| {stages} stages of {args.threads} threads, {CHUNKS} chunks | {ms:.1f} | "
        f"**{ratio:.2f}** |"
    )


if __name__ == "__main__":
    main()
