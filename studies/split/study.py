"""A network split over two devices, between layers or within, timed against one: three kinds."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

import stratagem as sg

TWO = ["cpu:0", "cpu:1"]
PIECES = 4
ROUNDS, STEPS = 5, 8
ONE, THREADS = "one device, 1 thread", "one device, 2 threads"
STAGES, COLUMNS, MIRRORED = "2 stages, rows", "2 stages, columns", "2 replicas"
WITHIN = "within layers"
#: pieces of a batch keep two stages busy for so much of the time
LIMIT = (PIECES + 1) / (2 * PIECES)


class LastStep(nn.Module):
    """A recurrent net that judges a sequence by its end."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        # one by one: to microbatches of rows nn.LSTM(num_layers=4) would be one layer
        self.memory = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Any:
        for layer in self.memory:
            x, _ = layer(x)
        return self.head(x[:, -1])


class Kind(NamedTuple):
    """One of the networks, with the rows of a batch and the shape of one."""

    make: Callable[[], nn.Module]
    rows: int
    shape: tuple[int, ...]


def connected(width: int, layers: int) -> nn.Module:
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def convolutional(channels: int, layers: int) -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU())
    hidden = [
        nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())
        for _ in range(layers - 1)
    ]
    end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return nn.Sequential(first, *hidden, end)


def kinds(small: bool) -> dict[str, Kind]:
    if small:
        return {
            "fully connected": Kind(lambda: connected(16, 4), 8, (16,)),
            "convolutional": Kind(lambda: convolutional(4, 4), 8, (3, 8, 8)),
            "recurrent": Kind(lambda: LastStep(8, 2), 8, (8, 8)),
        }
    return {
        "fully connected": Kind(lambda: connected(1024, 8), 256, (1024,)),
        "convolutional": Kind(lambda: convolutional(32, 8), 32, (3, 16, 16)),
        "recurrent": Kind(lambda: LastStep(256, 4), 16, (32, 256)),
    }


def arms(kind: str) -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {
        ONE: lambda: sg.MirroredStrategy(["cpu:0"]),
        THREADS: lambda: sg.MirroredStrategy(["cpu:0"]),
        STAGES: lambda: sg.PipelineStrategy(TWO, microbatches=PIECES),
        MIRRORED: lambda: sg.MirroredStrategy(TWO),
    }
    if kind == "recurrent":  # whose layers cannot be divided
        made[COLUMNS] = lambda: sg.PipelineStrategy(TWO, columns=PIECES)
    else:
        made[WITHIN] = lambda: sg.TensorParallelStrategy(TWO)
    return made


class Pace(sg.callbacks.Callback):
    """When each batch ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def timed(net: Kind, arm: str, strategy: Any, steps: int) -> tuple[float, float]:
    """Seconds of a step, the median without the first two, and the loss at the end."""
    torch.manual_seed(0)
    module = net.make()
    dice = torch.Generator().manual_seed(1)
    x = torch.randn(net.rows * steps, *net.shape, generator=dice)
    y = torch.randint(0, 10, (len(x),), generator=dice)
    torch.set_num_threads(2 if arm == THREADS else 1)
    model = sg.Model(module, strategy)
    model.compile(lambda p: torch.optim.SGD(p, lr=0.05), "cross_entropy")
    pace = Pace()
    told = model.fit(x, y, batch_size=net.rows, shuffle=False, callbacks=[pace], verbose=0)
    seconds = statistics.median(b - a for a, b in itertools.pairwise(pace.ends[1:]))
    return seconds, told.history["loss"][-1]


def study(small: bool) -> dict[str, Any]:
    """All arms of a kind are up at once and take turns; whoever has no work sleeps."""
    rounds, steps = (1, 4) if small else (ROUNDS, STEPS)
    load, runs = os.getloadavg()[0], []
    for kind, net in kinds(small).items():
        made = {arm: make() for arm, make in arms(kind).items()}
        try:
            for number in range(-1, rounds):  # the first starts everybody, and measures
                for arm, strategy in made.items():
                    seconds, loss = timed(net, arm, strategy, steps)
                    if number >= 0:
                        run = {"kind": kind, "arm": arm, "round": number}
                        runs.append({**run, "seconds": seconds, "loss": loss})
                print(f"{kind}: round {number + 1} of {rounds}", file=sys.stderr)
        finally:
            for strategy in made.values():
                strategy.close()
    torch.set_num_threads(1)
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "kind": platform.machine(),
        "torch": torch.__version__,
        "load before": load,
        "load after": os.getloadavg()[0],
    }
    return {"machine": machine, "pieces": PIECES, "runs": runs}


def ratios(data: dict[str, Any], kind: str, arm: str) -> list[float]:
    """Of each round: the arm's time over that of one device with one thread."""
    by = {(r["arm"], r["round"]): r["seconds"] for r in data["runs"] if r["kind"] == kind}
    return [by[arm, number] / by[ONE, number] for a, number in by if a == arm]


def report(data: dict[str, Any]) -> str:
    machine = data["machine"]
    said = (
        f"{machine['kind']}, {machine['cores']} cores, torch {machine['torch']}, load "
        f"{machine['load before']:.1f} before and {machine['load after']:.1f} after; "
        f"{data['pieces']} pieces of a batch, whose bubble allows {LIMIT:.3f}.\n\n"
    )
    rows = []
    for kind in dict.fromkeys(run["kind"] for run in data["runs"]):
        mine = [run for run in data["runs"] if run["kind"] == kind]
        for arm in dict.fromkeys(run["arm"] for run in mine):
            took = [run["seconds"] * 1e3 for run in mine if run["arm"] == arm]
            rows.append([kind, arm, common.middle(took), common.middle(ratios(data, kind, arm))])
    return said + common.table(["network", "arm", "ms a step", "of one thread"], rows)


def _last_with(data: dict[str, Any], arm: str) -> str:
    return [str(run["kind"]) for run in data["runs"] if run["arm"] == arm][-1]


def draw(data: dict[str, Any], out: Path) -> None:
    plt = common.pyplot()
    if plt is None:
        return
    figure, axis = plt.subplots(figsize=(7.5, 3.6))
    names = list(dict.fromkeys(run["kind"] for run in data["runs"]))
    shown = [THREADS, STAGES, COLUMNS, WITHIN, MIRRORED]
    for number, arm in enumerate(shown):
        for place, kind in enumerate(names):
            found = ratios(data, kind, arm)
            if found:
                axis.bar(
                    place + (number - 2) * 0.16,
                    statistics.median(found),
                    0.14,
                    color=f"C{number}",
                    yerr=[
                        [statistics.median(found) - min(found)],
                        [max(found) - statistics.median(found)],
                    ],
                    label=arm if kind == _last_with(data, arm) else None,
                )
    axis.axhline(1.0, color="black", lw=0.8)
    axis.axhline(LIMIT, color="black", lw=0.8, ls=":", label="what the bubble allows")
    axis.set_xticks(range(len(names)), names)
    axis.set(ylabel="time of a step, of one thread's", title="a network on two devices")
    axis.set_ylim(top=1.25 * axis.get_ylim()[1])  # room for the legend
    axis.legend(fontsize=8, ncols=3, loc="upper left")
    figure.tight_layout()
    figure.savefig(out / "figure.png", dpi=75)


if __name__ == "__main__":
    common.main(__file__, __doc__ or "", study, report, draw)
