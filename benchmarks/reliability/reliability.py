"""What faults cost, and that they change nothing: the table of docs/reliability.md.

    python benchmarks/reliability/reliability.py [--seeds 200] [--kills 100] [--jobs 4] [--write]
    python benchmarks/reliability/reliability.py --only seeds --seeds 200 --jobs 4

Replicas are killed at random moments in real trainings, in float64, and what comes of it is
compared with one device that nobody disturbs. Each figure is a function with a short form, which
tests/test_reliability.py runs. Times depend on the machine; differences do not.

Each part runs in a process of its own. One that raises, gives other weights or has not ended after
ten minutes is told in its row; the rest still runs, and the exit code is 1 at the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from between_hosts import between_hosts
from malformed import malformed
from parts_apart import report, say, table, write_between
from torch import nn

import stratagem as sg

# everything here is about CPU processes, workers of servers included
os.environ["CUDA_VISIBLE_DEVICES"] = ""

ROWS, BATCH, EPOCHS = 512, 64, 5
#: of a training in which one is killed; how far weights may be from those of one device
FEW, EXACT = 3, 1e-13
#: until somebody was killed
TRIES = 5
#: seconds for a part, several times what it takes on two quiet cores
LIMIT = 600.0
PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
SERVERS = "servers, in step"
KINDS = (None, "ring", SERVERS)
PARTS = ("seeds", "kills", "hosts", "malformed", "cost")
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


class Pace(sg.callbacks.Callback):
    """When each batch ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())

    def after(self, when: float) -> float | None:
        """Seconds from then to the next finished batch."""
        return next((end - when for end in self.ends if end > when), None)


class Slow:
    """A loss that takes a while, as a model of some size does."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return nn.functional.cross_entropy(output, target)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 32, generator=dice)
    return x, torch.randint(0, 10, (ROWS,), generator=dice)


def train(strategy: Any, seconds: float, epochs: int = EPOCHS) -> tuple[list[torch.Tensor], Pace]:
    torch.manual_seed(0)
    with strategy.scope(check=False):
        module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))
        model = sg.Model(module)
        model.compile(lambda p: torch.optim.Adam(p, lr=1e-2), Slow(seconds))
    x, y = data()
    pace = Pace()
    model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[pace])
    return [p.detach().clone() for p in module.parameters()], pace


def kill_one(strategy: Any, dice: random.Random) -> float | None:
    """Kill one that the strategy has started; when, or None if there is nobody just now."""
    group = strategy.replica_group
    try:
        if strategy.served:
            pids = [each.one.pid for each in group._children.members]
        else:
            pids = group._pool.pids
        os.kill(dice.choice(pids), signal.SIGKILL)
    except (AttributeError, IndexError, ProcessLookupError):
        return None
    return time.perf_counter()


@contextmanager
def killing(strategy: Any, dice: random.Random, pauses: Iterator[float]) -> Iterator[list[float]]:
    """Kill after each of the pauses."""
    over, kills = threading.Event(), []

    def run() -> None:
        for pause in pauses:
            if over.wait(pause):
                return
            when = kill_one(strategy, dice)
            if when is not None:
                kills.append(when)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield kills
    finally:
        over.set()
        thread.join()


def distance(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference of a weight: to rounding, or it is an error."""
    worst = max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))
    if not worst <= EXACT:
        raise AssertionError(f"a weight differs by {worst:.1e} from that of one device")
    return worst


def make(kind: str | None, replicas: int) -> Any:
    """A strategy whose replicas may die."""
    if kind == SERVERS:
        return sg.ParameterServerStrategy(
            sg.LocalCluster(workers=replicas, ps=2), updates=sg.Synchronous()
        )
    return sg.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], kind, elastic=True)


def some_seeds(kind: str | None, replicas: int, seeds: range) -> tuple[float, list[float], int]:
    """A kill at a random moment, once for each seed: the largest difference of a weight, the times
    to the next finished step, and how many were killed."""
    seconds, begun = 0.005, time.monotonic()
    with closing(sg.MirroredStrategy(["cpu:0"])) as one:
        expected, _ = train(one, 0.0, FEW)
    worst, waits, hit = 0.0, [], 0
    with closing(make(kind, replicas)) as strategy:
        train(strategy, seconds, FEW)  # starts everybody
        _, pace = train(strategy, seconds, FEW)
        whole = pace.ends[-1] - pace.ends[0]
        for done, seed in enumerate(seeds):
            if done and not done % 50:
                say(f"   {done} of {len(seeds)} seeds, {time.monotonic() - begun:.0f} s")
            dice, kills = random.Random(seed), list[float]()
            for _ in range(TRIES):  # a training may end before its moment has come
                if kills:
                    break
                with killing(strategy, dice, iter([dice.uniform(0, whole)])) as kills:
                    found, pace = train(strategy, seconds, FEW)
                worst = max(worst, distance(found, expected))
            hit += len(kills)
            waits += [wait for when in kills if (wait := pace.after(when)) is not None]
    return worst, waits, hit


def in_parallel(kind: str | None, replicas: int, seeds: int, jobs: int) -> Iterator[Any]:
    """The same in several processes, each on cores of its own; what each has found."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // jobs)
    running = []
    for job in range(jobs):
        mine = cores[job * each % len(cores) :][:each]
        part = [kind, replicas, job * seeds // jobs, (job + 1) * seeds // jobs, mine]
        command = [sys.executable, __file__, "--part", json.dumps(part)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    for process in running:
        said, _ = process.communicate()
        if process.returncode:
            raise AssertionError(f"some seeds failed with exit code {process.returncode}")
        yield json.loads(said.splitlines()[-1])


def one_part(part: str) -> None:
    """Some seeds, on some cores, for the process that has started this one."""
    kind, replicas, first, last, cores = json.loads(part)
    os.sched_setaffinity(0, cores)
    print(json.dumps(some_seeds(kind, replicas, range(first, last))))


def at_random(kind: str | None, replicas: int, seeds: int, jobs: int = 1) -> list[str]:
    """A kill at a random moment, once for each seed."""
    if jobs > 1:
        found = list(in_parallel(kind, replicas, seeds, jobs))
    else:
        found = [some_seeds(kind, replicas, range(seeds))]
    worst, hit = max(each[0] for each in found), sum(each[2] for each in found)
    waits = [wait for each in found for wait in each[1]]
    name = f"SIGKILL at a random moment, {kind or 'shared memory'}, {replicas} replicas"
    return [
        f"| {name}: {seeds} seeds, {hit} killed | largest difference of a weight {worst:.1e} |",
        f"| from the kill to the next finished step, {kind or 'shared memory'} | "
        f"{_spread(waits)} |",
    ]


def many_kills(replicas: int, kills: int, seconds: float) -> list[str]:
    """One kill every twenty steps of one long run, beside one of the same length without kills."""
    epochs = -(-kills * 20 * BATCH // ROWS)
    with closing(sg.MirroredStrategy(["cpu:0"])) as one:
        expected, _ = train(one, 0.0, epochs)
    devices = [f"cpu:{i}" for i in range(replicas)]
    with closing(sg.MirroredStrategy(devices, elastic=True)) as strategy:
        train(strategy, seconds, 1)
        _, pace = train(strategy, seconds, -(-epochs // 4))
        step = (pace.ends[-1] - pace.ends[0]) / (len(pace.ends) - 1)
        pauses = (20 * step for _ in range(kills))
        with killing(strategy, random.Random(0), pauses) as done:
            found, pace = train(strategy, seconds, epochs)
    took = pace.ends[-1] - pace.ends[0]
    rate = step * (len(pace.ends) - 1) / took
    return [
        f"| {len(done)} kills and joins in one run, a kill every 20 steps of {step * 1e3:.0f} ms | "
        f"ends; {distance(found, expected):.1e}; {rate:.0%} of the undisturbed rate |"
    ]


def cost(replicas: int, rounds: int) -> list[str]:
    """A step where nothing fails, elastic and not, in turns."""
    devices = [f"cpu:{i}" for i in range(replicas)]
    lines = []
    for kind, name in ((None, "shared memory"), ("ring", "ring")):
        with (
            closing(sg.MirroredStrategy(devices, kind)) as plain,
            closing(sg.MirroredStrategy(devices, kind, elastic=True)) as elastic,
        ):
            took: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(rounds + 1):
                for which, strategy in ((False, plain), (True, elastic)):
                    _, pace = train(strategy, 0.008)
                    gaps = [b - a for a, b in zip(pace.ends, pace.ends[1:], strict=False)]
                    took[which].append(statistics.median(gaps))
            ratios = [b / a for a, b in zip(took[False][1:], took[True][1:], strict=True)]
        lines.append(
            f"| the cost when nothing fails, {name}, {replicas} replicas, "
            f"steps of {statistics.median(took[False]) * 1e3:.1f} ms | "
            f"{statistics.median(ratios) - 1:+.1%} ({min(ratios) - 1:+.1%} to "
            f"{max(ratios) - 1:+.1%}, {rounds} rounds) |"
        )
    return lines


def hosts(epochs: int, cut: float = 10.0) -> list[str]:
    """A cable that is pulled for a while, and a worker that is killed and joins."""
    with closing(sg.MirroredStrategy(["cpu:0"])) as one:
        expected, _ = train(one, 0.0, epochs)
    return between_hosts(lambda found: distance(found, expected), epochs, cut)


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return "nobody was killed in time"
    ordered = sorted(seconds)
    ninety = ordered[int(0.9 * (len(ordered) - 1))]
    return (
        f"median {statistics.median(ordered):.2f} s, nine of ten within {ninety:.2f} s, "
        f"all within {ordered[-1]:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--write", action="store_true", help="put the table into docs/reliability.md"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="so many seeds at once, each on cores of its own"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these figures")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.getLogger("stratagem").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if args.part:
        one_part(args.part)
        return
    figures = titled(args)
    if args.row:
        report(figures[args.row])
        return
    wanted = [title for title in figures if title.partition(":")[0] in args.only]
    command = [sys.executable, __file__, *sys.argv[1:], "--row"]
    lines, well = table([(title, [*command, title]) for title in wanted], LIMIT)
    if args.write:
        write_between(PAGE, BEGIN, END, lines)
    if not well:
        raise SystemExit(1)


def titled(args: argparse.Namespace) -> dict[str, Callable[[], list[str]]]:
    """What makes the rows of each part."""
    found: dict[str, Callable[[], list[str]]] = {}
    for kind in KINDS:
        title = f"seeds: SIGKILL at a random moment, {kind or 'shared memory'}"
        found[title] = partial(at_random, kind, args.replicas, args.seeds, args.jobs)
    found[f"kills: {args.kills} kills and joins in one run"] = partial(
        many_kills, args.replicas, args.kills, 0.05
    )
    found["hosts: a cut link, and joining"] = partial(hosts, 60)
    found["malformed: 10,000 malformed things"] = partial(malformed, 10_000)
    found["cost: when nothing fails"] = partial(cost, args.replicas, args.rounds)
    return found


if __name__ == "__main__":
    main()
