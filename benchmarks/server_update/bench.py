"""A server's update: `Store` against torch's fused Adam on the same parameters.

    python benchmarks/server_update/bench.py [--rounds 15] [--million 10] [--threads 1]

All arms run in one process and take turns within a round, on gradients of the same sizes: torch's
`Adam(fused=True).step()` on parameters with their gradients; `store.apply_one` of one push, its
factor 1 and another; `store.add` and `store.apply` of one push. Printed: medians of the rounds in
milliseconds, and of the rounds' ratios of ours to torch's (1.00 is as fast, 1.10 the goal).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stratagem.state.optimizer_recipe import describe
from stratagem.state.partition import cut_values, partition
from stratagem.state.store import Store


def shapes_of(million: float) -> list[tuple[int, ...]]:
    """A perceptron of about so many parameters: two large matrices, a few small ones."""
    width = int((million * 1e6 / 2) ** 0.5)
    return [(width, width), (width,), (width, width), (width,), (10, width // 2), (10,)]


def arms(million: float) -> dict[str, Callable[[], object]]:
    shapes = shapes_of(million)
    params = [nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    plain = torch.optim.Adam(params, fused=True)
    recipe, pieces = describe(torch.optim.Adam(params), params), partition(shapes, 4, 1)

    def store() -> tuple[Store, torch.Tensor]:
        made = Store(pieces, shapes, torch.float32, recipe)
        made.restore(cut_values(params, pieces), None)
        return made, torch.randn(made.count)

    (one, grad), (scaled, other), (summed, third) = store(), store(), store()

    def add_and_apply() -> None:
        summed.add(third, 64.0)
        summed.apply(1 / 64)

    return {
        "torch, fused": plain.step,
        "apply_one": lambda: one.apply_one(grad, 1.0),
        "apply_one, scaled": lambda: scaled.apply_one(other, 0.999),
        "add + apply": add_and_apply,
    }


def measure(million: float, rounds: int) -> list[dict[str, Any]]:
    todo = arms(million)
    times: dict[str, list[float]] = {name: [] for name in todo}
    for turn in range(rounds + 3):
        for name, run in todo.items():
            begin = time.perf_counter()
            run()
            if turn >= 3:  # state is made, memory is touched
                times[name].append(1000 * (time.perf_counter() - begin))
    peer = times["torch, fused"]
    return [
        {
            "arm": name,
            "ms": round(statistics.median(took), 2),
            "ratio": round(statistics.median(a / b for a, b in zip(took, peer, strict=True)), 3),
        }
        for name, took in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--million", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}, {platform.machine()}, {given.threads} threads")
    for row in measure(given.million, given.rounds):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
