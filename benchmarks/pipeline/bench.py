"""A pipeline of two or more CPU stages against one device and torch's own 1F1B.

    python benchmarks/pipeline/bench.py [--stages 2] [--microbatches 4] [--rounds 5]

The same net, batches, Adam and one thread a process in every arm; each arm is a fresh process tree,
and they take turns within a round. Printed are the medians of a step, and of the rounds' ratios.
The limit is that of the bubble alone: (M + S - 1) / (S M).
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
from torch import nn

import stratagem as sg

WIDTH, LAYERS, BATCH, STEPS = 1024, 8, 256, 12


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return [*made[:-1], nn.Sequential(*made[-1], nn.Linear(WIDTH, 10))]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * STEPS, WIDTH, generator=dice)
    return x, torch.randint(0, 10, (BATCH * STEPS,), generator=dice)


class Pace(sg.callbacks.Callback):
    """When each batch ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def by_fit(strategy: Any) -> float:
    with strategy.scope(check=False):
        model = sg.Model(nn.Sequential(*blocks()))
        model.compile("adam", "cross_entropy")
    pace = Pace()
    model.fit(*data(), batch_size=BATCH, epochs=1, verbose=0, callbacks=[pace])
    strategy.close()
    return _median(pace.ends)


def by_torch(stages: int, microbatches: int) -> float:
    """torch.distributed.pipelining over Gloo; every stage is a process of ours."""
    import torch.multiprocessing as mp

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["BENCH_PORT"]}
    context = mp.get_context("spawn")
    answers: Any = context.SimpleQueue()
    work = (stages, microbatches, answers)
    started = [context.Process(target=_stage, args=(rank, *work)) for rank in range(stages)]
    for process in started:
        process.start()
    found = answers.get()
    for process in started:
        process.join()
    return float(found)


def _stage(rank: int, stages: int, microbatches: int, answers: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", rank=rank, world_size=stages)
    made = blocks()
    size = len(made) // stages
    mine = nn.Sequential(*made[rank * size : (rank + 1) * size])
    stage = PipelineStage(mine, rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.Adam(mine.parameters())
    x, y = data()
    ends = []
    for i in range(0, len(x), BATCH):
        given = (x[i : i + BATCH],) if rank == 0 else ()
        target = y[i : i + BATCH] if rank == stages - 1 else None
        schedule.step(*given, target=target)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        ends.append(time.perf_counter())
    if rank == 0:
        answers.put(_median(ends))
    dist.destroy_process_group()


def _median(ends: list[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(ends[2:]))


def child(arm: str, stages: int, microbatches: int) -> None:
    torch.set_num_threads(1)
    devices = [f"cpu:{i}" for i in range(stages)]
    arms = {
        "one device": lambda: by_fit(sg.MirroredStrategy(["cpu:0"])),
        "pipeline": lambda: by_fit(sg.PipelineStrategy(devices, microbatches)),
        "eager": lambda: by_fit(sg.PipelineStrategy(devices, microbatches, "eager")),
        "torch 1F1B": lambda: by_torch(stages, microbatches),
    }
    print(json.dumps(arms[arm]()))


def measured(arm: str, args: argparse.Namespace, port: int) -> float:
    words = [sys.executable, __file__, "--child", arm]
    words += ["--stages", str(args.stages), "--microbatches", str(args.microbatches)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_PORT": str(port)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        child(args.child, args.stages, args.microbatches)
        return
    arms = ("one device", "pipeline", "eager", "torch 1F1B")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.stages])  # a core a stage
    rounds = [{arm: measured(arm, args, 29600 + r) for arm in arms} for r in range(args.rounds)]
    stages, m = args.stages, args.microbatches
    machine = f"{platform.machine()}, {stages} of {os.cpu_count()} cores"
    print(f"{machine}, torch {torch.__version__}, {stages} stages")
    print(f"{m} microbatches of {BATCH // m} rows, {args.rounds} rounds; the bubble's limit is")
    print(f"{(m + stages - 1) / (stages * m):.3f} of one device\n")
    print("| arm | ms a step | of one device | of torch 1F1B |\n| --- | --- | --- | --- |")
    for arm in arms:
        ms = 1000 * statistics.median(each[arm] for each in rounds)
        ratios = [
            statistics.median(each[arm] / each[other] for each in rounds)
            for other in ("one device", "torch 1F1B")
        ]
        print(f"| {arm} | {ms:.1f} | **{ratios[0]:.3f}** | {ratios[1]:.3f} |")


if __name__ == "__main__":
    main()
