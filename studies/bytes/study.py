"""Fewer bytes, fewer meetings: accuracy against bytes and simulated time at 1 Gbit/s."""

from __future__ import annotations

import copy
import itertools
import json
import math
import statistics
import sys
import time
from concurrent.futures import FIRST_COMPLETED, wait
from functools import cache
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

WORKERS, COMPUTE = 8, 5e-3  # seconds that a gradient takes: an assumption
TRAININGS = 5  # of each row, with seeds one after another
LINK = Topology(rate=1e9 / 8, latency=50e-6)  # 1 Gbit/s
SHORT, LONG = "clothes, short", "clothes, long"
#: as many steps as the goals take: top-k and DiLoCo need most
STEPS = {"clothes": 2000, SHORT: 300, LONG: 3500, "text": 150}
EACH = {"clothes": 16, SHORT: 16, LONG: 16, "text": 32}  # rows a worker
#: of each task, the seed by which the rate is chosen; none was tried before its settings were fixed
FIRST_SEED = {"clothes": 100, SHORT: 100, LONG: 200, "text": 100}
CONTEXT = 8
SIDE = 7  # of the first convolution, with stride 3


def tried(steps: int) -> dict[str, tuple[str, Any, Any]]:
    """The optimizer, `wire=`, `sync=`; a tenth of the steps is dense for two of them."""
    tenth = steps // 10
    return {
        "every step": ("sgd", None, None),
        "int8": ("sgd", sg.Int8(), None),
        "top-k 1%": ("sgd", sg.TopK(0.01, momentum=0.9, dense_steps=tenth), None),
        "PowerSGD 4": ("sgd", sg.PowerSGD(4, dense_steps=tenth), None),
        "every step, AdamW": ("adamw", None, None),
        "DiLoCo 20, AdamW": ("adamw", None, sg.DiLoCo(20, outer=sg.Outer(1.0, 0.5))),
        "sign": ("sgd", sg.Sign(), None),
        "local 20": ("sgd", None, sg.LocalSteps(20)),
        "ring": ("sgd", None, sg.Gossip("ring")),
    }


ROWS = tuple(tried(0))
#: of each task, what is tried; what takes longest first, so that no core is idle at the end
OF_TASK = {
    LONG: ("DiLoCo 20, AdamW", "every step, AdamW"),
    "clothes": ("top-k 1%", "every step"),
    SHORT: ("PowerSGD 4", "int8", "sign", "ring", "local 20", "every step"),
    "text": ("int8", "top-k 1%", "PowerSGD 4", *ROWS[4:6], "every step"),
}
#: a row, what it is held against, and how far it may be behind: points
GOALS = [
    ("int8", "every step", 0.3),
    ("top-k 1%", "every step", 1.0),
    ("PowerSGD 4", "every step", 1.0),
    ("DiLoCo 20, AdamW", "every step, AdamW", 0.5),
]
RATES = {
    "sgd": [0.05, 0.1, 0.2, 0.4],
    "sign": [0.003, 0.01, 0.03, 0.1],
    "adamw": [2.5e-3, 5e-3, 1e-2, 2e-2],
}


@cache
def clothes() -> common.Split:
    """As many to choose by that tenths of a point can be told apart; the whole test set."""
    split = common.fashion(20000, check=20000, test=10000)
    x, x_check, x_test = (patches(x) for x in split[::2])
    return split._replace(x=x, x_check=x_check, x_test=x_test)


def patches(x: Tensor) -> Tensor:
    """What the first convolution looks at, cut out once for all trainings."""
    return x.unfold(2, SIDE, 3).unfold(3, SIDE, 3).flatten(4)[:, 0].contiguous()


@cache
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


class Patches(nn.Conv2d):
    """A convolution of pictures, channels last, whose patches do not overlap, as one product of
    matrices: of a stack of small ones, in half the time."""

    def forward(self, x: Tensor) -> Tensor:
        side = self.kernel_size[0]
        cut = x.unflatten(1, (-1, side)).unflatten(3, (-1, side)).transpose(2, 3)
        out = cut.flatten(3).flatten(0, 2) @ self.weight.permute(2, 3, 1, 0).flatten(0, 2)
        return (out + self.bias).unflatten(0, cut.shape[:3])


def picture_model(seed: int) -> nn.Module:
    """Two convolutions, 8 thousand parameters; the data are the patches of the first."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(SIDE * SIDE, 16),
        nn.ReLU(),
        Patches(16, 32, 2, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
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
    SHORT: (clothes, picture_model),
    LONG: (clothes, picture_model),
    "text": (text, character_model),
}


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
    began = time.process_time()
    task, steps = job["task"], job["steps"]
    load, make = TASKS[task]
    split = load()
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
    trained = workers.copies[0]
    found: dict[str, Any] = {"bytes": sent, "seconds": steps * COMPUTE + seconds}
    with torch.no_grad():
        if job["seed"] == FIRST_SEED[task]:  # the rate is chosen by it
            found["check"] = measured(trained(split.x_check), split.y_check)
        found["test"] = measured(trained(split.x_test), split.y_test)
    return {**job, **found, "processor": time.process_time() - began}


def measured(out: Tensor, y: Tensor) -> list[float]:
    """The loss, and the part that is right."""
    return [float(F.cross_entropy(out, y)), float((out.argmax(1) == y).float().mean())]


def quality(task: str, pair: list[float]) -> float:
    """What counts: accuracy in percent, or nats a character with a minus; more is better."""
    return -pair[0] if task == "text" else 100 * pair[1]


def rates(row: str) -> list[float]:
    return RATES.get(row) or RATES[tried(0)[row][0]]


def study(small: bool) -> list[dict[str, Any]]:
    """The rate by the validation split of the first seed; then five seeds at that rate."""
    if small:
        names = ("every step", "int8", "DiLoCo 20, AdamW")
        base = {"task": "text", "steps": 40, "seed": FIRST_SEED["text"]}
        return [one({**base, "row": row, "rate": rates(row)[2]}) for row in names]
    grid = [
        {"task": task, "row": row, "steps": STEPS[task], "rate": rate, "seed": FIRST_SEED[task]}
        for task, rows in OF_TASK.items()
        for row in rows
        for rate in rates(row)
    ]
    found: list[dict[str, Any]] = []
    with common.all_cores() as pool:
        under_way = {pool.submit(one, job) for job in grid}
        while under_way:
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for each in done:
                result = each.result()
                found.append(result)
                print(json.dumps(result), file=sys.stderr, flush=True)
                under_way |= {pool.submit(one, job) for job in more(found, result)}
    return sorted(found, key=lambda r: (list(TASKS).index(r["task"]), ROWS.index(r["row"])))


def more(found: list[dict[str, Any]], last: dict[str, Any]) -> list[dict[str, Any]]:
    """The other seeds, when a row's last rate was tried."""
    task, row = last["task"], last["row"]
    mine = [r for r in found if (r["task"], r["row"]) == (task, row)]
    if len(mine) != len(rates(row)):
        return []
    job = {"task": task, "row": row, "steps": last["steps"], "rate": best(mine)}
    return [{**job, "seed": FIRST_SEED[task] + later} for later in range(1, TRAININGS)]


def best(runs: list[dict[str, Any]]) -> float:
    """The rate with which the first seed has the least loss on the validation split."""
    first = [r for r in runs if r["seed"] == FIRST_SEED[r["task"]]]
    sound = [r for r in first if math.isfinite(r["check"][0])] or first
    rate: float = min(sound, key=lambda r: r["check"][0])["rate"]
    return rate


def chosen(data: list[dict[str, Any]], task: str, row: str) -> list[dict[str, Any]]:
    """The runs at the rate that was chosen, one a seed."""
    mine = [r for r in data if (r["task"], r["row"]) == (task, row)]
    return [r for r in mine if r["rate"] == best(mine)] if mine else []


def report(data: list[dict[str, Any]]) -> str:
    parts = []
    for task in dict.fromkeys(r["task"] for r in data):
        lines = []
        for row in dict.fromkeys(r["row"] for r in data if r["task"] == task):
            runs = chosen(data, task, row)
            values = [abs(quality(task, r["test"])) for r in runs]
            dense = (chosen(data, task, ROWS[0]) or chosen(data, task, "every step, AdamW"))[0]
            first = runs[0]
            lines.append(
                [
                    row,
                    f"{first['rate']:g}",
                    f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})",
                    f"{dense['bytes'] / first['bytes']:.1f}",
                    f"{dense['seconds'] / first['seconds']:.2f}",
                ]
            )
        what = "nats a character" if task == "text" else "accuracy, %"
        heads = [f"{task}, {first['steps']} steps", "rate", what, "times fewer bytes"]
        parts.append(common.table([*heads, "times faster at 1 Gbit/s"], lines))
    minutes = sum(r.get("processor", 0.0) for r in data) / 60
    parts.append(f"{len(data)} trainings, {minutes:.1f} minutes of processor time.")
    return "\n\n".join([*parts, *sentences(data)])


def sentences(data: list[dict[str, Any]]) -> list[str]:
    """The goals, and whether they were reached, by the medians of what was tested on."""
    found = []
    for task, (row, beside, limit) in itertools.product(("clothes", SHORT, LONG), GOALS):
        both = [chosen(data, task, each) for each in (row, beside)]
        if all(both):
            mine, theirs = (
                statistics.median(quality(task, run["test"]) for run in runs) for runs in both
            )
            word = "reached" if theirs - mine <= limit else "missed"
            found.append(
                f"{row}, {both[0][0]['steps']} steps: {mine:.2f}%, {theirs - mine:.2f} points "
                f"behind {beside} ({theirs:.2f}%), by {len(both[0])} seeds; the goal of {limit} is "
                f"{word}."
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
                at = runs[0][what] / runs[0]["steps"] * (1e-3 if what == "bytes" else 1e3)
                low, high = min(values), max(values)
                axis.plot([at, at], [low, high], color=f"C{number}")
                axis.plot(at, statistics.median(values), "o", color=f"C{number}", label=row)
            axis.set(
                xlabel="kB a worker and step" if what == "bytes" else "simulated ms a step",
                ylabel="nats a character" if task == "text" else "accuracy, %",
                title=f"{task}, {STEPS[task]} steps",
            )
            if what == "bytes":
                axis.set_xscale("log")
                axis.xaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
                axis.xaxis.set_major_formatter(plt.FuncFormatter(lambda kb, _: f"{kb:g}"))
                axis.xaxis.set_minor_formatter(plt.NullFormatter())
                axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out / "figure.png", dpi=75)


if __name__ == "__main__":
    common.main(__file__, __doc__ or "", study, report, draw)
