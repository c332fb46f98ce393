"""Predicted against measured: trains every configuration that fits on this machine.

All configurations are run in turns, for several rounds, and the median of a configuration's rounds
counts: a bad moment of the machine then spoils one round of one row only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from stratagem.cluster.environment import cores
from stratagem.errors import UsageError
from stratagem.plan.advice import constructor
from stratagem.plan.choose import Plan
from stratagem.plan.configuration import CENTRAL, MIRRORED, SERVERS, SHARDED, Configuration
from stratagem.plan.cost import predict
from stratagem.plan.measure import batch_of
from stratagem.rules.updates import Asynchronous, LowerRate, Synchronous
from stratagem.servers.local_cluster import LocalCluster
from stratagem.strategies.central_storage import CentralStorageStrategy
from stratagem.strategies.mesh import Mesh
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.strategies.parameter_server import ParameterServerStrategy
from stratagem.strategies.pipeline import PipelineStrategy
from stratagem.strategies.sharded import ShardedStrategy
from stratagem.strategies.strategy import Strategy
from stratagem.training.dry_run import DryRun
from stratagem.wire.device_kinds import KINDS

#: of the steps that are timed, and as long before them; how many steps at least and at most
_SECONDS, _LEAST, _MOST = 0.75, 2, 100
ROUNDS = 3
_RESTLESS = 0.15  # by how much a row may differ from itself on a quiet machine
Say = Callable[[str], None]
Train = Callable[[Strategy, Any, int], float]


@dataclass(frozen=True)
class ValidationRow:
    """Predicted and measured seconds of a step."""

    configuration: Configuration
    predicted: float
    #: what each round has measured
    rounds: tuple[float, ...]

    @property
    def measured(self) -> float:
        return statistics.median(self.rounds)

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def spread(self) -> float:
        """The difference of slowest and fastest round, as a part of the median."""
        return (max(self.rounds) - min(self.rounds)) / self.measured


def validate(
    plan: Plan,
    trial: DryRun,
    chosen: Sequence[Configuration] | None = None,
    *,
    rounds: int = ROUNDS,
    say: Say = lambda text: None,
) -> list[ValidationRow]:
    """Run these configurations, or all that fit on this machine, in turns."""
    train = trainer(trial)
    chosen = fitting(plan) if chosen is None else chosen
    said = [predict(plan.profile, plan.hardware, each, plan.calibration).step for each in chosen]
    taken: list[list[float]] = [[] for _ in chosen]
    for round_ in range(1, rounds + 1):
        began = time.perf_counter()
        for number, (each, step) in enumerate(zip(chosen, said, strict=True), 1):
            say(f"round {round_} of {rounds}, {number} of {len(chosen)}: {each}")
            seconds = _measured(plan, trial, train, each, step)
            taken[number - 1].append(seconds)
            say(f"predicted {step * 1e3:.2f} ms, measured {seconds * 1e3:.2f}")
        if round_ < rounds:
            left = (time.perf_counter() - began) * (rounds - round_)
            say(f"round {round_} of {rounds} is done; about {left:.0f} s are left")
    return [ValidationRow(*row) for row in zip(chosen, said, map(tuple, taken), strict=True)]


def _measured(
    plan: Plan, trial: DryRun, train: Train, each: Configuration, predicted: float
) -> float:
    """Measure seconds of a step, with a strategy made for it."""
    steps = int(min(max(_LEAST, _SECONDS / predicted), _MOST))
    rows = plan.profile.batch * (1 if each.asynchronous else each.counted)
    steps *= each.replicas if each.asynchronous else 1
    batch = batch_of(trial, rows, torch.device("cpu"))
    made = _strategy(each, plan.profile.device)
    with closing(made) as strategy, _threads(plan, each):
        rate = train(strategy, batch, steps)
    return each.counted * plan.profile.batch / rate


def trainer(trial: DryRun) -> Train:
    """Return the function that trains a copy of the model, if the training can be repeated."""
    if trial.train is None:
        raise UsageError(
            "a loop of one's own cannot be run with other strategies from outside, so there is "
            "nothing to compare with; --validate works with fit of sg.Model or Keras."
        )
    return trial.train


def fitting(plan: Plan) -> list[Configuration]:
    """Configurations that share no device here, and those measured although they do."""
    gpus = KINDS["cuda"].count() if plan.profile.device == "cuda" else 0
    most = gpus or max(cores(), *(n for n, _ in plan.profile.crowd), 1)
    counts = [n for n in (2, 4, 8, 16) if n <= min(most, plan.hardware.size)]
    found = [Configuration()] if not plan.profile.sparse else []
    for n in counts:
        if not plan.profile.sparse:
            found += [Configuration(MIRRORED, per_host=n)]
            found += [each for each in plan.tried if _divides(each, n)]
    if not plan.profile.unserved:
        found += [Configuration(SERVERS, per_host=n, servers=1) for n in counts]
    for n in counts[:1]:
        if not plan.profile.unserved:
            found += [Configuration(SERVERS, per_host=n, servers=1, asynchronous=True)]
        if not plan.profile.sparse:
            found += [Configuration(CENTRAL, per_host=n)]
    return found


def _divides(cfg: Configuration, n: int) -> bool:
    """Whether this is one of the strategies that divide a model over `n` devices; of pipelines and
    meshes, every schedule with two microbatches a stage."""
    if cfg.hosts > 1 or cfg.replicas != n:
        return False
    return cfg.strategy == SHARDED or (cfg.staged and cfg.microbatches == 2 * cfg.depth)


#: names in the code that the plan prints
_NAMES = SimpleNamespace(
    **{
        each.__name__: each
        for each in (
            *(CentralStorageStrategy, Mesh, MirroredStrategy, ParameterServerStrategy),
            *(PipelineStrategy, ShardedStrategy),
            *(Asynchronous, LocalCluster, LowerRate, Synchronous),
        )
    }
)


def _strategy(cfg: Configuration, device: str) -> Strategy:
    """Make the strategy by the code that the plan prints, which names the devices here."""
    made: Strategy = eval(constructor(cfg, device, per_host=0), {"sg": _NAMES})
    return made


@contextmanager
def _threads(plan: Plan, cfg: Configuration) -> Iterator[None]:
    """Give one device the threads that it was planned with; replicas divide the cores."""
    before = torch.get_num_threads()
    if cfg.replicas == 1 and plan.profile.device == "cpu":
        torch.set_num_threads(plan.profile.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def restless(rows: Sequence[ValidationRow]) -> str:
    """A note if one device or the rounds of a row differ in speed: the machine causes errors, too.

    The prediction for one device is the time that it took when it was profiled.
    """
    notes = []
    for row in rows:
        if row.configuration.replicas == 1 and abs(row.error) > _RESTLESS:
            notes.append(
                f"one device took {row.measured * 1e3:.2f} ms now, {row.predicted * 1e3:.2f} ms "
                "when it was profiled"
            )
    unsteady = [row for row in rows if row.spread > _RESTLESS]
    if unsteady:
        notes.append(
            f"in {len(unsteady)} of {len(rows)} rows the rounds differ by more than "
            f"{_RESTLESS:.0%} (their spread)"
        )
    if not notes:
        return ""
    return (
        f"note: {'; '.join(notes)}: other work on this machine? Then these errors are not the "
        "plan's alone; compare again on a quiet machine, or with more --rounds."
    )


def compare(plan: Plan, trial: DryRun, rounds: int, say: Say) -> int:
    """Run `validate` and print its table; return the exit code."""
    console = Console()
    title = f"predicted against measured, ms a step, the median of {rounds}"
    table = Table("configuration", box=SIMPLE, title=title)
    for head in ("predicted", "measured", "error", "spread"):
        table.add_column(head, justify="right")
    found = validate(plan, trial, rounds=rounds, say=say)
    for row in found:
        times = (f"{row.predicted * 1e3:.2f}", f"{row.measured * 1e3:.2f}")
        table.add_row(str(row.configuration), *times, f"{row.error:+.0%}", f"{row.spread:.0%}")
    console.print(table)
    errors = [abs(row.error) for row in found]
    if errors:
        console.print(f"median error {statistics.median(errors):.0%}, worst {max(errors):.0%}")
    if note := restless(found):
        console.print(note, soft_wrap=True)
    return 0
