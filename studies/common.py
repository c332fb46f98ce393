"""What the studies have in common: data, models, work on all cores, and where results go."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stratagem.plan.simulate import SimulatedRing, simulate
from stratagem.plan.simulation.scenario import Scenario
from stratagem.plan.simulation.spread import Draws
from stratagem.rules.updates import Synchronous

_DEBIAN = "/usr/share/datasets/fashion-mnist"


class Split(NamedTuple):
    """Examples to train on, to choose settings by, and to report on."""

    x: Tensor
    y: Tensor
    x_check: Tensor
    y_check: Tensor
    x_test: Tensor
    y_test: Tensor


def digits() -> Split:
    """scikit-learn's digits: 1797 pictures of 8 x 8."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.data / 16.0, dtype=torch.float32)
    return _split(x, torch.tensor(found.target), 1100, 300)


def fashion_folder() -> Path:
    """Where Fashion-MNIST lies; ends the program with a sentence if it does not."""
    folder = Path(os.environ.get("FASHION_MNIST", _DEBIAN))
    if not folder.is_dir():
        sys.exit(
            f"Fashion-MNIST is not in {folder}: install Debian's dataset-fashion-mnist, or set "
            "FASHION_MNIST to the folder of its four .gz files."
        )
    return folder


def fashion(examples: int, check: int = 1000, test: int = 2000) -> Split:
    """Fashion-MNIST: pictures of clothes, 28 x 28; some of its training and of its test set."""
    folder = fashion_folder()
    x, y = _idx(folder / "train-images-idx3-ubyte.gz"), _idx(folder / "train-labels-idx1-ubyte.gz")
    tests = _idx(folder / "t10k-images-idx3-ubyte.gz")[:test]
    targets = _idx(folder / "t10k-labels-idx1-ubyte.gz")[:test]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, choose = order[: examples + check].split([examples, check])
    pairs = ((x[train], y[train]), (x[choose], y[choose]), (tests, targets))
    return Split(
        *(part for x, y in pairs for part in (x.float().unsqueeze(1) / 255 - 0.286, y.long()))
    )


def _idx(file: Path) -> Tensor:
    """Numbers of a file in the format that MNIST came in: two zeros, type, dimensions, sizes."""
    raw = gzip.decompress(file.read_bytes())
    sizes = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    return torch.frombuffer(bytearray(raw[4 + 4 * raw[3] :]), dtype=torch.uint8).view(sizes)


def _split(x: Tensor, y: Tensor, train: int, check: int) -> Split:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    a, b, c = order[:train], order[train : train + check], order[train + check :]
    return Split(x[a], y[a], x[b], y[b], x[c], y[c])


def mlp(seed: int) -> nn.Module:
    """For digits."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn(seed: int) -> nn.Module:
    """For Fashion-MNIST: two convolutions, 9 thousand parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, 10),
    )


def accuracy(x: Tensor, y: Tensor) -> Callable[[nn.Module], float]:
    """The part of examples that a model gets right."""
    return lambda module: float((module(x).argmax(1) == y).float().mean())


def speedup(given: Scenario) -> float:
    """To one worker that computes the same gradients and talks to nobody, in mid-run.

    Seconds of computing in a second: never more than there are workers. (Of spares it is not known
    whose gradients counted: the average stands for them.)
    """
    if not isinstance(given.updates, Synchronous):
        return _free(given)
    run = simulate(given)
    first, last = len(run.updates) // 6, len(run.updates) * 5 // 6
    seconds = run.updates[last] - run.updates[first]
    if given.updates.spares:
        each = run.stats.applied / len(run.updates)
        return (last - first) * each * given.work.compute.mean / seconds
    return sum(sum(one[first + 1 : last + 1]) for one in _drawn(given, given.steps)) / seconds


def _drawn(given: Scenario, steps: int) -> list[list[float]]:
    """Seconds of computing of every worker, step by step."""
    if not given.servers:
        seconds: list[list[float]] = SimulatedRing(given).computing().T.tolist()
        return seconds
    draws = [Draws(given.work.compute, given.seed, w) for w in range(given.workers)]
    return [[one.next() for _ in range(steps)] for one in draws]


def _free(given: Scenario) -> float:
    """Asynchronous: each worker between two of its own gradients, the same ones for all."""
    pushes: list[list[float]] = [[] for _ in range(given.workers)]
    for at, what, worker, _ in simulate(given, trace=True).trace:
        if what == "push":
            pushes[worker].append(at)
    rounds = given.steps // given.workers
    first, last = rounds // 6, rounds * 5 // 6
    computing = span = 0.0
    for times, drawn in zip(pushes, _drawn(given, last + 1), strict=True):
        end = min(last, len(times) - 1)  # a late one may have made fewer
        computing += sum(drawn[first + 1 : end + 1])
        span += times[end] - times[first]
    return given.workers * computing / span


def _alone() -> None:
    torch.set_num_threads(1)


def all_cores() -> ProcessPoolExecutor:
    """A process a core, with one thread each."""
    cores = len(os.sched_getaffinity(0))
    return ProcessPoolExecutor(cores, mp_context=get_context("spawn"), initializer=_alone)


def on_all_cores(task: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
    """The task on every job, one process a core, in order; says how far it is."""
    if len(jobs) < 8:  # starting processes would take longer
        _alone()
        return [task(job) for job in jobs]
    done: list[Any] = []
    with all_cores() as pool:
        for result in pool.map(task, jobs):
            done.append(result)
            if sys.stderr.isatty() or len(done) in (1, len(jobs)) or len(done) % 50 == 0:
                print(f"\r{len(done)} of {len(jobs)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return done


class Options(NamedTuple):
    """How a study was called."""

    small: bool
    plot: bool
    out: Path


def options(file: str, description: str) -> Options:
    """Read the command line of a study."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--small", action="store_true", help="a short form, for tests")
    parser.add_argument("--plot", action="store_true", help="draw data.json again, run nothing")
    parser.add_argument(
        "--out", type=Path, help="where results go; else here, or for --small a new folder"
    )
    args = parser.parse_args()
    apart = args.small and not args.plot  # never over the figures of the whole study
    out = args.out or (Path(tempfile.mkdtemp(prefix="study-")) if apart else Path(file).parent)
    out.mkdir(parents=True, exist_ok=True)
    return Options(args.small, args.plot, out)


def write(out: Path, data: Any) -> None:
    """Keep what was found."""
    (out / "data.json").write_text(json.dumps(data, indent=1) + "\n")


def read(out: Path) -> Any:
    """What was found before."""
    return json.loads((out / "data.json").read_text())


def main(
    file: str,
    description: str,
    study: Callable[[bool], Any],
    report: Callable[[Any], str],
    draw: Callable[[Any, Path], None],
) -> None:
    """Run a study, or take what it found before; keep it, print it, draw it."""
    chosen = options(file, description)
    found = read(chosen.out) if chosen.plot else study(chosen.small)
    if not chosen.plot:
        write(chosen.out, found)
    print(report(found))
    if not chosen.small:
        draw(found, chosen.out)


def pyplot() -> Any:
    """matplotlib, drawing into files; None, with a word, where it is missing."""
    try:
        import matplotlib
    except ImportError:
        print("no figure: matplotlib is missing; install it, then --plot", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def middle(values: Sequence[float | None]) -> str:
    """The median and the extremes; a run that never got there took longer than all that did."""
    got = [v for v in values if v is not None]
    if not got:
        return "never"
    median = statistics.median([inf if v is None else v for v in values])
    missed = f", {len(values) - len(got)} of {len(values)} never" if len(got) < len(values) else ""
    half = "never" if median == inf else f"{median:.3g}"
    return f"{half} ({min(got):.3g} to {max(got):.3g}{missed})"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """In Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
