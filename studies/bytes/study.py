"""Fewer bytes, fewer meetings: accuracy against bytes and simulated time at 1 Gbit/s."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import common

import stratagem as sg
from stratagem.plan.simulation.replica_training import (
    SimulatedReplica,
    ThreadCollective,
    all_at_once,
)
from stratagem.wire.simulated import Topology

WORKERS, SEEDS, COMPUTE = 8, 5, 5e-3  # seconds that a gradient takes: an assumption
LINK = Topology(rate=1e9 / 8, latency=50e-6)  # 1 Gbit/s
STEPS = {"clothes": 200, "text": 200}
EACH = {"clothes": 16, "text": 32}  # rows a worker
CONTEXT = 8
#: what is tried: the optimizer, `wire=`, `sync=`; a tenth of the steps is dense for two of them
ROWS: dict[str, tuple[str, Any, Any]] = {
    "every step": ("sgd", None, None),
    "int8": ("sgd", sg.Int8(), None),
    "top-k 1%": ("sgd", sg.TopK(0.01, momentum=0.9, dense_steps=20), None),
    "PowerSGD 4": ("sgd", sg.PowerSGD(4, dense_steps=20), None),
    "sign": ("sgd", sg.Sign(), None),
    "local 20": ("sgd", None, sg.LocalSteps(20)),
    "ring": ("sgd", None, sg.Gossip("ring")),
    "every step, AdamW": ("adamw", None, None),
    "DiLoCo 20, AdamW": ("adamw", None, sg.DiLoCo(20)),
}
#: tried with the clothes alone
CLOTHES_ONLY = ("sign", "local 20", "ring")
#: a row, what it is held against, and how far it may be behind: points
GOALS = [
    ("int8", "every step", 0.3),
    ("top-k 1%", "every step", 1.0),
    ("PowerSGD 4", "every step", 1.0),
    ("DiLoCo 20, AdamW", "every step, AdamW", 0.5),
]
RATES = {"sgd": [0.01, 0.03, 0.1, 0.3], "adamw": [5e-4, 1.5e-3, 5e-3, 1.5e-2]}


def clothes() -> common.Split:
    return common.fashion(20000)


def text() -> common.Split:
    """The pages and the source of this repository: eight characters, and the next one."""
    root = Path(__file__).parents[2]
    files = [*sorted(root.glob("docs/*.md")), *sorted(root.glob("stratagem/**/*.py"))]
    known = {chr(i): i for i in range(128)}
    codes = torch.tensor([known.get(c, 0) for f in files for c in f.read_text()])
    x = codes.unfold(0, CONTEXT + 1, 1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:44000]
    x = x[order]
    cuts = (slice(0, 40000), slice(40000, 42000), slice(42000, 44000))
    return common.Split(*(t for cut in cuts for t in (x[cut, :-1], x[cut, -1])))


class Flat(nn.Module):
    """The characters before, one after another."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


def character_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(128, 16),
        Flat(),
        nn.Linear(16 * CONTEXT, 128),
        nn.Tanh(),
        nn.Linear(128, 128),
    )


TASKS = {"clothes": (clothes, common.cnn), "text": (text, character_model)}
_splits: dict[str, common.Split] = {}


def one(job: dict[str, Any]) -> dict[str, Any]:
    """One training."""
    task, steps = job["task"], job["steps"]
    load, make = TASKS[task]
    if task not in _splits:
        _splits[task] = load()
    split = _splits[task]
    kind, wire, sync = ROWS[job["row"]]
    modules = [make(job["seed"]) for _ in range(WORKERS)]
    dice = torch.Generator().manual_seed(job["seed"])
    size = EACH[task] * WORKERS
    batches = torch.randint(len(split.x), (steps, size), generator=dice)

    momentum = 0.0 if getattr(wire, "momentum", 0.0) else 0.9  # the compression has its own

    def train(collective: ThreadCollective) -> tuple[float, float]:
        module = modules[collective.rank]
        optimizer: Any = (
            torch.optim.SGD(module.parameters(), job["rate"], momentum=momentum)
            if kind == "sgd"
            else torch.optim.AdamW(module.parameters(), job["rate"])
        )
        worker = SimulatedReplica(collective, module, optimizer, wire, sync)
        for step, batch in enumerate(batches):
            rate = job["rate"] * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.param_groups[0]["lr"] = rate
            worker.step(lambda rows: F.cross_entropy(module(split.x[rows]), split.y[rows]), batch)
        worker.committer.meet()
        return collective.bytes, collective.seconds

    sent, seconds = all_at_once(WORKERS, LINK, train)[0]
    with torch.no_grad():
        check, test = (
            [float(F.cross_entropy(out, y)), float((out.argmax(1) == y).float().mean())]
            for out, y in (
                (modules[0](split.x_check), split.y_check),
                (modules[0](split.x_test), split.y_test),
            )
        )
    found = {"check": check, "test": test, "bytes": sent, "seconds": steps * COMPUTE + seconds}
    return {**job, **found}


def quality(task: str, pair: list[float]) -> float:
    """What counts: accuracy in percent, or nats a character with a minus; more is better."""
    return 100 * pair[1] if task == "clothes" else -pair[0]


def study(small: bool) -> list[dict[str, Any]]:
    """The rate by the validation split of the first seed; then five seeds at that rate."""
    tasks = ["text"] if small else list(TASKS)
    names = ["every step", "int8", "DiLoCo 20, AdamW"] if small else list(ROWS)
    base = [
        {"task": t, "row": r, "steps": 40 if small else STEPS[t]}
        for t in tasks
        for r in names
        if t == "clothes" or r not in CLOTHES_ONLY
    ]
    grid = [
        {**each, "rate": rate, "seed": 0}
        for each in base
        for rate in (RATES[ROWS[each["row"]][0]][2:3] if small else RATES[ROWS[each["row"]][0]])
    ]
    found = common.on_all_cores(one, grid)
    rest = []
    for each in base:
        mine = [r for r in found if (r["task"], r["row"]) == (each["task"], each["row"])]
        sound = [r for r in mine if math.isfinite(r["check"][0])] or mine
        best = max(sound, key=lambda r: quality(r["task"], r["check"]))
        rest += [{**each, "rate": best["rate"], "seed": s} for s in range(1, 1 if small else SEEDS)]
    return found + (common.on_all_cores(one, rest) if rest else [])


def chosen(data: list[dict[str, Any]], task: str, row: str) -> list[dict[str, Any]]:
    """The runs at the rate that was chosen, one a seed."""
    mine = [r for r in data if (r["task"], r["row"]) == (task, row)]
    later = {r["rate"] for r in mine if r["seed"]}
    if not mine:
        return []
    sound = [r for r in mine if math.isfinite(r["check"][0])] or mine
    best = max(sound, key=lambda r: quality(task, r["check"]))["rate"]
    rate = later.pop() if later else best
    return [r for r in mine if r["rate"] == rate]


def report(data: list[dict[str, Any]]) -> str:
    parts = []
    for task in dict.fromkeys(r["task"] for r in data):
        dense = chosen(data, task, "every step")[0]
        lines = []
        for row in dict.fromkeys(r["row"] for r in data if r["task"] == task):
            runs = chosen(data, task, row)
            values = [abs(quality(task, r["test"])) for r in runs]
            lines.append(
                [
                    row,
                    f"{runs[0]['rate']:g}",
                    f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})",
                    f"{dense['bytes'] / runs[0]['bytes']:.1f}",
                    f"{dense['seconds'] / runs[0]['seconds']:.2f}",
                ]
            )
        what = "accuracy, %" if task == "clothes" else "nats a character"
        heads = [task, "rate", what, "times fewer bytes", "times faster at 1 Gbit/s"]
        parts.append(common.table(heads, lines))
    return "\n\n".join([*parts, *sentences(data)])


def sentences(data: list[dict[str, Any]]) -> list[str]:
    """The goals, and whether they were reached, by the median of the clothes' test split."""
    found = []
    for row, beside, limit in GOALS:
        both = [chosen(data, "clothes", each) for each in (row, beside)]
        if all(both):
            mine, theirs = (
                statistics.median(quality("clothes", r["test"]) for r in b) for b in both
            )
            behind = theirs - mine
            word = "reached" if behind <= limit else "missed"
            found.append(
                f"{row}: {mine:.2f}%, {behind:.2f} points behind {beside} ({theirs:.2f}%); "
                f"the goal of {limit} is {word}."
            )
    return found


def draw(data: list[dict[str, Any]], out: Path) -> None:
    plt = common.pyplot()
    if plt is None:
        return
    tasks = list(dict.fromkeys(r["task"] for r in data))
    figure, axes = plt.subplots(len(tasks), 2, figsize=(11, 4 * len(tasks)), squeeze=False)
    for line, task in zip(axes, tasks, strict=True):
        for axis, what in zip(line, ("bytes", "seconds"), strict=True):
            for number, row in enumerate(ROWS):
                runs = chosen(data, task, row)
                if not runs:
                    continue
                values = [abs(quality(task, r["test"])) for r in runs]
                at = runs[0][what] / (1e6 if what == "bytes" else 1)
                low, high = min(values), max(values)
                axis.plot([at, at], [low, high], color=f"C{number % 10}")
                axis.plot(
                    at,
                    statistics.median(values),
                    marker="os"[number // 10],
                    color=f"C{number % 10}",
                    label=row,
                )
            axis.set(
                xscale="log",
                xlabel="MB that a worker sends" if what == "bytes" else "simulated seconds",
                ylabel="accuracy, %" if task == "clothes" else "nats a character",
                title=task,
            )
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out / "figure.png", dpi=75)


if __name__ == "__main__":
    common.main(__file__, __doc__ or "", study, report, draw)
