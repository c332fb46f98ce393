"""A deep LSTM in columns over CPU stages against one process with any number of threads.

    python benchmarks/columns/bench.py [--stages 2] [--chunks 4,8] [--threads 1] [--rounds 5]

The same net, batches and SGD in every arm; each arm is a fresh process tree, and they take turns
within a round. One process is timed with one thread, with the threads of a stage, and with as many
as all stages have together, each also without oneDNN, whose recurrent layers are slow on ARM; its
best is the baseline. Printed are the medians of a step and of the
rounds' ratios, and the part of the limit S K / (K + S - 1) over one process with a stage's threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import stratagem as sg

WIDTH, LAYERS, LENGTH, BATCH, STEPS = 256, 4, 64, 16, 12


class Recurrent(nn.Module):
    """A stack of LSTM layers and a linear layer over its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.stack(x)
        answer: Tensor = self.head(y[:, -1])
        return answer


class Pace(sg.callbacks.Callback):
    """When each batch ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def child(stages: int, chunks: int) -> None:
    torch.manual_seed(0)
    torch.backends.mkldnn.set_flags(chunks > 0, None, None, None)
    x, y = torch.randn(BATCH * STEPS, LENGTH, WIDTH), torch.randint(0, 10, (BATCH * STEPS,))
    devices = [f"cpu:{i}" for i in range(stages)]
    strategy = (
        sg.PipelineStrategy(devices, columns=chunks) if stages > 1 else sg.MirroredStrategy(devices)
    )
    with strategy.scope(check=False):
        model = sg.Model(Recurrent())
        model.compile("sgd", "cross_entropy")
    pace = Pace()
    model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, callbacks=[pace])
    strategy.close()
    print(json.dumps(statistics.median(b - a for a, b in itertools.pairwise(pace.ends[1:]))))


def measured(stages: int, chunks: int, threads: int) -> float:
    words = [sys.executable, __file__, "--child", str(stages), str(chunks)]
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--chunks", default="4,8")
    parser.add_argument("--threads", type=int, default=1, help="of one stage")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=2, type=int)
    args = parser.parse_args()
    if args.child:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        child(*args.child)
        return
    alone = {f"one process, {t} threads": (1, 1, t) for t in _counts(args)}
    alone |= {f"{arm}, without oneDNN": (1, 0, work[2]) for arm, work in list(alone.items())}
    columns = {
        f"{args.stages} stages, {k} chunks": (args.stages, int(k), args.threads)
        for k in args.chunks.split(",")
    }
    arms = alone | columns
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.stages * args.threads])
    rounds = [{arm: measured(*work) for arm, work in arms.items()} for _ in range(args.rounds)]
    ms = {arm: 1000 * statistics.median(each[arm] for each in rounds) for arm in arms}
    best = min(alone, key=ms.__getitem__)
    like = f"one process, {args.threads} threads"
    like = min((like, f"{like}, without oneDNN"), key=ms.__getitem__)
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"{LAYERS} LSTM layers of {WIDTH}, {LENGTH} steps, {args.threads} threads a stage\n")
    print("| arm | ms a step | faster than the best process | of the limit |")
    print("| --- | --- | --- | --- |")
    for arm, (stages, chunks, _) in arms.items():
        faster = statistics.median(each[best] / each[arm] for each in rounds)
        limit = stages * chunks / (chunks + stages - 1) if stages > 1 else 1.0
        part = statistics.median(each[like] / each[arm] / limit for each in rounds)
        print(f"| {arm} | {ms[arm]:.1f} | {faster:.2f} | {f'{part:.2f}' if stages > 1 else ''} |")


def _counts(args: argparse.Namespace) -> list[int]:
    return sorted({1, args.threads, args.threads * args.stages})


if __name__ == "__main__":
    main()
