"""Fewer bytes, fewer meetings: accuracy against bytes and simulated time at 1 Gbit/s."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import sys
from collections.abc import Sequence
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
LONGER = "clothes, longer"
STEPS = {"clothes": 200, "text": 200, LONGER: 2000}
EACH = {"clothes": 16, "text": 32, LONGER: 16}  # rows a worker
CONTEXT = 8


def tried(steps: int) -> dict[str, tuple[str, Any, Any]]:
    """The optimizer, `wire=`, `sync=`; a tenth of the steps is dense for two of them."""
    tenth = steps // 10
    return {
        "every step": ("sgd", None, None),
        "int8": ("sgd", sg.Int8(), None),
        "top-k 1%": ("sgd", sg.TopK(0.01, momentum=0.9, dense_steps=tenth), None),
        "PowerSGD 4": ("sgd", sg.PowerSGD(4, dense_steps=tenth), None),
        "sign": ("sgd", sg.Sign(), None),
        "local 20": ("sgd", None, sg.LocalSteps(20)),
        "ring": ("sgd", None, sg.Gossip("ring")),
        "every step, AdamW": ("adamw", None, None),
        "DiLoCo 20, AdamW": ("adamw", None, sg.DiLoCo(20)),
        "DiLoCo 20 (1, 0.5), AdamW": ("adamw", None, sg.DiLoCo(20, outer=sg.Outer(1.0, 0.5))),
    }


ROWS = tuple(tried(0))
SHORT = ROWS[:-1]
#: of each task, what is tried
OF_TASK = {
    "clothes": SHORT,
    "text": tuple(row for row in SHORT if row not in ("sign", "local 20", "ring")),
    LONGER: ("every step", "top-k 1%", "every step, AdamW", "DiLoCo 20 (1, 0.5), AdamW"),
}
#: a row, what it is held against, and how far it may be behind: points
GOALS = [
    ("int8", "every step", 0.3),
    ("top-k 1%", "every step", 1.0),
    ("PowerSGD 4", "every step", 1.0),
    ("DiLoCo 20, AdamW", "every step, AdamW", 0.5),
    ("DiLoCo 20 (1, 0.5), AdamW", "every step, AdamW", 0.5),
]
RATES = {"sgd": [0.01, 0.03, 0.1, 0.3], "adamw": [5e-4, 1.5e-3, 5e-3, 1.5e-2]}


def clothes() -> common.Split:
    return common.fashion(20000)


def more_clothes() -> common.Split:
    """With as many to choose and to report by that tenths of a point can be told apart."""
    return common.fashion(20000, check=5000, test=10000)


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


class Unfolded(nn.Conv2d):
    """A convolution as one product of matrices: of a stack of small ones, in half the time."""

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, self.kernel_size, padding=self.padding, stride=self.stride)
        rows, _, places = patches.shape
        out = self.weight.flatten(1) @ patches.transpose(0, 1).flatten(1)
        out = (out + self.bias.unsqueeze(1)).view(-1, rows, places).transpose(0, 1)
        side = round(places**0.5)
        return out.unflatten(2, (side, side))


def picture_model(seed: int) -> nn.Module:
    """The one of the other studies (common.cnn), with the same numbers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        Unfolded(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        Unfolded(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, 10),
    )


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


TASKS = {
    "clothes": (clothes, picture_model),
    "text": (text, character_model),
    LONGER: (more_clothes, picture_model),
}
_splits: dict[str, common.Split] = {}


class Workers:
    """Copies of a model that lie in one tensor a parameter: one call finds the gradients of all."""

    def __init__(self, module: nn.Module, split: common.Split) -> None:
        self.copies = [copy.deepcopy(module) for _ in range(WORKERS)]
        self._module, self._split, self._done = module, split, -1
        named = dict(module.named_parameters())
        self._stacks = {name: torch.stack([p.detach()] * WORKERS) for name, p in named.items()}
        for rank, each in enumerate(self.copies):
            for name, p in each.named_parameters():
                p.data = self._stacks[name][rank]
        for stack in self._stacks.values():
            stack.requires_grad_()

    def gradients(self, step: int, rows: Tensor) -> None:
        """Give each copy the gradient of its part of the rows; who asks first has all found."""
        if step == self._done:
            return
        self._done = step
        rows = rows.view(WORKERS, -1)
        losses = torch.func.vmap(self._loss)(self._stacks, self._split.x[rows], self._split.y[rows])
        found = torch.autograd.grad(losses.mean(), list(self._stacks.values()))
        for rank, each in enumerate(self.copies):
            for p, gradient in zip(each.parameters(), found, strict=True):
                p.grad = gradient[rank]

    def _loss(self, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(self._module, weights, (x,)), y)


def one(job: dict[str, Any]) -> dict[str, Any]:
    """One training."""
    task, steps = job["task"], job["steps"]
    load, make = TASKS[task]
    if task not in _splits:
        _splits[task] = load()
    split = _splits[task]
    kind, wire, sync = tried(steps)[job["row"]]
    workers = Workers(make(job["seed"]), split)
    dice = torch.Generator().manual_seed(job["seed"])
    size = EACH[task] * WORKERS
    batches = torch.randint(len(split.x), (steps, size), generator=dice)

    momentum = 0.0 if getattr(wire, "momentum", 0.0) else 0.9  # the compression has its own

    def train(collective: ThreadCollective) -> tuple[float, float]:
        module = workers.copies[collective.rank]
        optimizer: Any = (
            torch.optim.SGD(module.parameters(), job["rate"], momentum=momentum, fused=True)
            if kind == "sgd"
            else torch.optim.AdamW(module.parameters(), job["rate"], fused=True)
        )
        worker = SimulatedReplica(collective, module, optimizer, wire, sync)
        worker.begin(size)
        for step, rows in enumerate(batches):
            rate = job["rate"] * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.param_groups[0]["lr"] = rate
            collective.barrier()  # everybody has made the last update
            workers.gradients(step, rows)
            worker.update()
        worker.committer.meet()
        return collective.bytes, collective.seconds

    sent, seconds = all_at_once(WORKERS, LINK, train)[0]
    with torch.no_grad():
        check, test = (
            [float(F.cross_entropy(out, y)), float((out.argmax(1) == y).float().mean())]
            for out, y in (
                (workers.copies[0](split.x_check), split.y_check),
                (workers.copies[0](split.x_test), split.y_test),
            )
        )
    found = {"check": check, "test": test, "bytes": sent, "seconds": steps * COMPUTE + seconds}
    return {**job, **found}


def quality(task: str, pair: list[float]) -> float:
    """What counts: accuracy in percent, or nats a character with a minus; more is better."""
    return -pair[0] if task == "text" else 100 * pair[1]


def rates(row: str) -> list[float]:
    return RATES[tried(0)[row][0]]


def study(small: bool, tasks: Sequence[str] = ("clothes", "text")) -> list[dict[str, Any]]:
    """The rate by the validation split of the first seed; then five seeds at that rate."""
    tasks = ["text"] if small else tasks
    names = ["every step", "int8", "DiLoCo 20, AdamW"] if small else ROWS
    base = [
        {"task": t, "row": r, "steps": 40 if small else STEPS[t]}
        for t in tasks
        for r in names
        if r in OF_TASK[t]
    ]
    grid = [
        {**each, "rate": rate, "seed": 0}
        for each in base
        for rate in rates(each["row"])[2 if small else 0 : 3 if small else 4]
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
        what = "nats a character" if task == "text" else "accuracy, %"
        heads = [task, "rate", what, "times fewer bytes", "times faster at 1 Gbit/s"]
        parts.append(common.table(heads, lines))
    return "\n\n".join([*parts, *sentences(data)])


def sentences(data: list[dict[str, Any]]) -> list[str]:
    """The goals, and whether they were reached, by the median of the clothes' test split."""
    found = []
    for task, (row, beside, limit) in itertools.product(("clothes", LONGER), GOALS):
        both = [chosen(data, task, each) for each in (row, beside)]
        if all(both):
            mine, theirs = (statistics.median(quality(task, r["test"]) for r in b) for b in both)
            behind = theirs - mine
            word = "reached" if behind <= limit else "missed"
            found.append(
                f"{row}, {STEPS[task]} steps: {mine:.2f}%, {behind:.2f} points behind {beside} "
                f"({theirs:.2f}%); the goal of {limit} is {word}."
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
                ylabel="nats a character" if task == "text" else "accuracy, %",
                title=task,
            )
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out / "figure.png", dpi=75)


if __name__ == "__main__":
    common.main(__file__, __doc__ or "", study, report, draw)
