"""`make demo-large`: a network that does not fit into one process, and trains in two stages.

    python examples/large.py [--limit 180]

Every process may take so many megabytes of its own beyond what Python and torch take for themselves
(RLIMIT_DATA, which needs no rights). Under that limit twelve layers of 1024 with Adam do not train
on one device; split over two stages they do. The exit code is 1 if either is not so.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

WIDTH, LAYERS, BATCH = 1024, 12, 64


def own_megabytes() -> float:
    """What RLIMIT_DATA counts of this process."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def train(arm: str, limit: float) -> None:
    """One arm, in a process of its own: it is limited from here on."""
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
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    x = torch.randn(4 * BATCH, WIDTH)
    module = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    strategy = sg.PipelineStrategy(["cpu:0", "cpu:1"], microbatches=4) if arm == "two" else None
    model = sg.Model(module, strategy)
    model.compile(optimizer="adam", loss="mse")
    losses = model.fit(x, x[:, :1], batch_size=BATCH, epochs=2, verbose=0).history["loss"]
    print(f"trained: loss {losses[0]:.3f}, then {losses[1]:.3f}")
    if strategy is not None:
        strategy.close()


def attempt(arm: str, limit: float) -> tuple[bool, str]:
    """Whether an arm trains, and what it says."""
    command = [sys.executable, __file__, "--arm", arm, "--limit", str(limit)]
    # the allocator of torch's ARM wheels takes a gigabyte at once otherwise
    environ = {**os.environ, "MIMALLOC_ARENA_RESERVE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)
    said = (done.stdout + done.stderr).strip().splitlines()
    if done.returncode == 0:
        return True, next(line for line in said if line.startswith("trained"))
    words = [line for line in said if "not enough memory" in line or "Out of memory" in line]
    return False, "\n    ".join(words or said[-1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=float, default=180.0, help="megabytes a process")
    parser.add_argument("--arm", choices=["one", "two"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        train(args.arm, args.limit)
        return
    size = (LAYERS * WIDTH * WIDTH) * 4 / 2**20
    print(f"{size:.0f} MB of weights, {4 * size:.0f} MB with gradients and Adam's state;")
    print(f"each process may take {args.limit:.0f} MB")
    one, said_one = attempt("one", args.limit)
    print(f"one device:  {said_one}")
    two, said_two = attempt("two", args.limit)
    print(f"two stages:  {said_two}")
    sys.exit(0 if two and not one else 1)


if __name__ == "__main__":
    main()
