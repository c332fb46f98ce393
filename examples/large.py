"""`make demo-large`: a network that does not fit into one process, and trains in two stages.

    python examples/large.py [--limit 180]
    python examples/large.py --gpu        # or make demo-large GPU=1

Every process may take so many megabytes of its own beyond what Python and torch take for themselves
(RLIMIT_DATA, which needs no rights). Under that limit twelve layers of 1024 with Adam do not train
on one device; split over two stages they do. With --gpu the limit is torch's for each process on
one GPU (set_per_process_memory_fraction): twenty-four layers of 2048 do not train in one process on
it, and in two on the same GPU they do. The exit code is 1 if either is not so.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

BATCH = 64
#: width and number of layers, and megabytes a process
ON_CPU, ON_GPU = (1024, 12, 180.0), (2048, 24, 1450.0)


def own_megabytes() -> float:
    """What RLIMIT_DATA counts of this process."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def train(arm: str, limit: float) -> None:
    """One arm on CPUs, in a process of its own: it is limited from here on."""
    import torch
    from torch import nn

    import stratagem as sg

    torch.set_num_threads(1)
    torch.manual_seed(0)
    small = sg.Model(
        nn.Linear(64, 1)
    )  # libraries take memory of their own when they are first used
    small.compile(optimizer="adam", loss="mse")
    small.fit(torch.randn(64, 64), torch.randn(64, 1), verbose=0)
    most = int((own_megabytes() + limit) * 2**20)
    module, x = network(*ON_CPU[:2])
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    strategy = sg.PipelineStrategy(["cpu:0", "cpu:1"], microbatches=4) if arm == "two" else None
    fit(module, x, strategy)


def train_on_gpu(arm: str) -> None:
    """One arm, or one of its two tasks, on a GPU; STRATAGEM_GPU_MEMORY is its limit."""
    import torch

    import stratagem as sg

    torch.manual_seed(0)
    module, x = network(*ON_GPU[:2])
    if arm == "one":
        fit(module, x, sg.MirroredStrategy(["cuda:0"]))
        return
    half = str(ON_GPU[1])  # every layer has an activation behind it
    fit(module, x, sg.PipelineStrategy(["cuda:0"], microbatches=4, split=[half]))


def network(width: int, layers: int) -> tuple[Any, Any]:
    """The network and its inputs."""
    import torch
    from torch import nn

    x = torch.randn(4 * BATCH, width)
    body = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*body, nn.Linear(width, 1)), x


def fit(module: Any, x: Any, strategy: Any) -> None:
    """Train two epochs, and say how it went."""
    import stratagem as sg

    model = sg.Model(module, strategy)
    model.compile(optimizer="adam", loss="mse")
    losses = model.fit(x, x[:, :1], batch_size=BATCH, epochs=2, verbose=0).history["loss"]
    if model.strategy.is_chief:
        print(f"trained: loss {losses[0]:.3f}, then {losses[1]:.3f}")
    if strategy is not None:
        strategy.close()


def attempt(arm: str, limit: float, *, gpu: bool) -> tuple[bool, str]:
    """Whether an arm trains, and what it says."""
    command = [sys.executable, __file__, "--arm", arm, "--limit", str(limit)]
    # the allocator of torch's ARM wheels takes a gigabyte at once otherwise
    environ = {**os.environ, "MIMALLOC_ARENA_RESERVE": "0"}
    if gpu:
        if arm == "two":
            command[1:1] = ["-m", "stratagem", "run", "--workers", "2"]
        command.append("--gpu")
        environ["STRATAGEM_GPU_MEMORY"] = f"{limit:.0f}MiB"
        environ["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)
    said = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode == 0:
        return True, next(line[line.index("trained") :] for line in said if "trained: " in line)
    words = [line for line in said if "ot enough memory" in line or "ut of memory" in line]
    return False, "\n    ".join(words or said[-1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", action="store_true", help="on one GPU, instead of the CPU")
    parser.add_argument("--limit", type=float, help="megabytes a process")
    parser.add_argument("--arm", choices=["one", "two"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    width, layers, usual = ON_GPU if args.gpu else ON_CPU
    limit = usual if args.limit is None else args.limit
    if args.arm and args.gpu:
        train_on_gpu(args.arm)
        return
    if args.arm:
        train(args.arm, limit)
        return
    size = (layers * width * width) * 4 / 2**20
    print(f"{size:.0f} MB of weights, {4 * size:.0f} MB with gradients and Adam's state;")
    print(f"each process may take {limit:.0f} MB{' of the GPU' if args.gpu else ''}")
    one, said_one = attempt("one", limit, gpu=args.gpu)
    print(f"one device:  {said_one}")
    two, said_two = attempt("two", limit, gpu=args.gpu)
    print(f"two stages:  {said_two}")
    sys.exit(0 if two and not one and "Out of memory on" in said_one else 1)


if __name__ == "__main__":
    main()
