"""`make demo`: the same network on one device and on a local cluster, and how far apart they end.

    python examples/demo.py [--epochs 8]

A small convolutional network learns scikit-learn's handwritten digits three times: on one device,
on two replicas and on three (with several GPUs: on one GPU and on all of them). Every arm starts
from the same weights and sees the same global batches, so all of them must end at the same
weights. The exit code is 1 if they do not, or if the network did not learn.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import stratagem as sg

BATCH = 100
TRAINING = 1437  # of 1797 images; the others are the test set
LARGEST_DIFFERENCE = 1e-4
LEAST_ACCURACY = 0.9


@dataclass
class Arm:
    """One row of the table."""

    name: str
    replicas: int
    threads: int
    starting: float
    training: float
    accuracy: float
    module: nn.Module


def digits() -> tuple[Tensor, Tensor]:
    """1797 images of 8 x 8 pixels, in an order of our own: the data set is sorted by writer."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.3
    return images[order], torch.tensor(found.target)[order]


def network() -> nn.Module:
    # Smooth activations: a ReLU's kink turns a difference in the last bit into one that grows
    # from step to step, on one device too (docs/guide.md, "The same answer").
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.Tanh(),
        nn.Linear(64, 10),
    )


def settle() -> int:
    """On every replica: full 32-bit floats on a GPU, too. Returns the threads it may use."""
    from torch.backends import cudnn  # inside: a function of a script cannot take it along

    cudnn.allow_tf32 = False
    cudnn.deterministic = True
    return torch.get_num_threads()


def train(name: str, devices: list[str], epochs: int, x: Tensor, y: Tensor) -> Arm:
    """One arm: only the strategy differs between them."""
    started = time.perf_counter()
    strategy = sg.MirroredStrategy(devices)
    threads = strategy.run(settle)[0]
    torch.manual_seed(0)
    with strategy.scope():
        model = sg.Model(network())
        model.compile(
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
            loss="cross_entropy",
            metrics=["accuracy"],
        )
    history = model.fit(x[:TRAINING], y[:TRAINING], batch_size=BATCH, epochs=epochs, verbose=1)
    seconds = time.perf_counter() - started
    training = sum(TRAINING / speed for speed in history.history["examples_per_second"])
    accuracy = model.evaluate(x[TRAINING:], y[TRAINING:], batch_size=BATCH)["accuracy"]
    strategy.close()
    module = model.module.cpu()
    return Arm(name, len(devices), threads, seconds - training, training, accuracy, module)


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between any two corresponding weights."""
    ours, theirs = one.state_dict(), other.state_dict()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def plan() -> list[tuple[str, list[str]]]:
    """Which arms this machine runs."""
    gpus = torch.cuda.device_count()
    if gpus > 1:
        return [("one GPU", ["cuda:0"]), (f"{gpus} GPUs", [f"cuda:{i}" for i in range(gpus)])]
    counts = [1, 2, 3]
    names = ["one device", "2 replicas", "3 replicas"]
    return [
        (name, [f"cpu:{i}" for i in range(count)])
        for name, count in zip(names, counts, strict=True)
    ]


def report(console: Console, arms: list[Arm]) -> None:
    """The table, and what its last column means."""
    table = Table(title=f"scikit-learn's digits, global batch {BATCH}, SGD with momentum")
    table.add_column("arm")
    for head in ("replicas", "threads", "start", "training", "accuracy", "difference"):
        table.add_column(head, justify="right")
    for arm in arms:
        apart = "-" if arm is arms[0] else f"{difference(arms[0].module, arm.module):.1e}"
        table.add_row(
            arm.name,
            str(arm.replicas),
            str(arm.threads),
            f"{arm.starting:.1f} s",
            f"{arm.training:.1f} s",
            f"{arm.accuracy:.3f}",
            apart,
        )
    console.print(table)
    console.print(
        "difference: the largest gap between any weight and the same weight after training on "
        "one device; about 1e-7 is the rounding of 32-bit floats, so the replicas computed the "
        "same thing. accuracy: on the test images. start: processes and imports. threads: of "
        f"each replica; this machine has {os.cpu_count()} cores, and more replicas than cores "
        "gain no time.",
        highlight=False,
    )


def verdict(arms: list[Arm]) -> list[str]:
    """What went wrong; empty if nothing did."""
    wrong = []
    for arm in arms:
        apart = difference(arms[0].module, arm.module)
        if not apart <= LARGEST_DIFFERENCE:
            wrong.append(f"{arm.name}: a weight is {apart:.1e} away from one device's")
        if not arm.accuracy >= LEAST_ACCURACY:
            wrong.append(f"{arm.name}: test accuracy {arm.accuracy:.3f} is below {LEAST_ACCURACY}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)  # one device may use every core, too
    console = Console()
    x, y = digits()
    arms = []
    for name, devices in plan():
        console.print(f"\n[bold]{name}[/]: MirroredStrategy({devices})", highlight=False)
        arms.append(train(name, devices, args.epochs, x, y))
    console.print()
    report(console, arms)
    wrong = verdict(arms)
    for line in wrong:
        console.print(f"[red]{line}[/]", highlight=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
