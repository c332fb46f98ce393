"""What one host runs: a model of so many bytes, whose step takes so long, trained by a strategy.

Started by measure.py. Each line of its input is a leg (JSON): it trains, and answers with one line
of JSON, the moments at which its forward passes began.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import stratagem as sg

LAYERS = 4
#: the share of a step's computation that passes before backward begins
FORWARD = 1 / 3


class Slow(torch.autograd.Function):
    """A layer that takes its time both ways, and no processor: hosts share this machine's cores."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, there: float, back: float) -> Tensor:
        ctx.back, ctx.shape = back, weight.shape
        time.sleep(there)
        return x + weight.view(-1)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.back)
        return grads[0], torch.full(ctx.shape, float(grads[0].sum())), None, None


class Model(nn.Module):
    """`size` bytes of parameters in layers; a step takes `seconds` for each example."""

    def __init__(self, size: int, seconds: float) -> None:
        super().__init__()
        rows = size // 4 // LAYERS // 64
        self.weights = nn.ParameterList(torch.zeros(rows, 64) for _ in range(LAYERS))
        self.seconds = seconds
        self.stamps: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.stamps.append(time.monotonic())
        layer = self.seconds * len(x) / LAYERS
        for weight in self.weights:
            x = Slow.apply(x, weight, layer * FORWARD, layer * (1 - FORWARD))
        return x


def strategy(kind: str, wire: str | None) -> Any:
    """By the name in the rows: one, ring, sync or async."""
    if kind == "one":
        return None
    if kind == "ring":
        return sg.MultiWorkerMirroredStrategy(communication="ring", wire=wire)
    updates = sg.Synchronous() if kind == "sync" else sg.Asynchronous()
    return sg.ParameterServerStrategy(updates=updates, wire=wire)


def preload() -> None:
    """Import what a training needs, which takes seconds: before a process is forked, not in it."""
    importlib.import_module("torch._dynamo")  # optimizers do, when the first is made
    for name in ("Model", "MultiWorkerMirroredStrategy", "ParameterServerStrategy", "Synchronous"):
        getattr(sg, name)


def main(kind: str, wire: str) -> None:
    """Take part in legs until the input ends."""
    torch.set_num_threads(1)
    chosen = strategy(kind, None if wire == "float32" else wire)
    for line in sys.stdin:
        leg = json.loads(line)
        torch.manual_seed(0)
        module = Model(leg["bytes"], leg["seconds"])
        model = sg.Model(module, chosen)
        model.compile(lambda p: torch.optim.SGD(p, lr=1e-6), "mse")
        rows = leg["batch"] * leg["batches"]
        x = torch.randn(rows, 1)
        model.fit(x, torch.zeros(rows, 1), batch_size=leg["batch"], verbose=0, shuffle=False)
        print("LEG " + json.dumps(module.stamps), flush=True)
