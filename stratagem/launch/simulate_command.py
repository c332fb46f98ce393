"""Run a training in virtual time: how fast at sizes that nobody here owns, and on bad days?

The rules that decide are the real ones; computing, links and faults take the time that you say.
The same seed gives the same run again, event by event.

examples:
  stratagem simulate --workers 100 --servers 4 --compute 200ms --bytes 100MB --link 10Gbit
  stratagem simulate --workers 100 --servers 4 --spares 4 --spread lognormal:0.3
  stratagem simulate --workers 500 --servers 16 --asynchronous --stragglers 0.02:10
  stratagem simulate --workers 64 --servers 0 --bytes 100MB          all-reduce, no servers
  stratagem simulate --servers 0 --link 1Gbit --wire Int8 --sync "DiLoCo(20, fragments=4)"
  stratagem simulate --workers 64 --servers 0 --elastic --faults 5   some are killed, and join
  stratagem simulate --workers 8 --faults 5 --seed 41 --trace day.json
  stratagem simulate --stages 4 --microbatches 8 --crossing 4MB --slow-link 1:100Mbit   a pipeline
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.errors import UsageError
from stratagem.launch import simulate_options
from stratagem.launch.cli import Option, below, check_outputs, declare, whole

if TYPE_CHECKING:
    from stratagem.plan.simulation.scenario import Fault, Overhead, Scenario, SimulatedRun
    from stratagem.plan.simulation.spread import Spread
    from stratagem.rules.updates import Updates

_SPREADS = "constant, exponential:LEAST, lognormal:SIGMA, pareto:SHAPE or trace:FILE"


#: options of a training by workers, with servers or without
_WORKERS: tuple[Option, ...] = (
    # who computes, what, and how fast
    ("--workers N", "how many compute (8)", whole(1), 8),
    ("--servers K", "parameter servers; 0: the workers all-reduce (1)", whole(0), 1),
    (
        "--steps T",
        "global batches; asynchronous: gradients of each worker, on average (200)",
        whole(1),
        200,
    ),
    (
        "--compute TIME",
        "of one gradient, on average, stragglers apart; a trace has times of its own (100ms)",
        str,
        "100ms",
    ),
    ("--spread KIND", f"{_SPREADS} (constant)", str, "constant"),
    ("--stragglers PART:TIMES", "0.02:10: every 50th step ten times as slow"),
    ("--slow WORKER:TIMES", "always that slow", list, []),
    ("--bytes SIZE", "of a gradient, and of the values (100MB)", str, "100MB"),
    ("--update TIME", "of one optimizer step, on one server (0)", str, "0ms"),
    (
        "--overlap PART",
        "of the computation beside which gradients travel: 0.6 (0)",
        below(1.0, "a part, from 0 to less than 1"),
        0.0,
    ),
    # what messages cost
    ("--link RATE", "of each host, each way (10Gbit)", str, "10Gbit"),
    ("--latency TIME", "one way (50us)", str, "50us"),
    ("--per-host G", "workers behind one link (1)", whole(1), 1),
    (
        "--overhead TIMES",
        "of processors for each message, WORKER:SERVER, as 0.2ms:0.3ms (none)",
        str,
        "none",
    ),
    # who waits for whom, and what goes wrong
    ("--asynchronous", "nobody waits for the others"),
    ("--spares B", "late ones not waited for (0)", whole(0), 0),
    ("--bound S", "asynchronous, but at most S steps ahead", whole(0)),
    ("--buffer K", "asynchronous: K gradients make an update (1)", whole(1), 1),
    (
        "--faults F",
        "kills, stalls and cuts, by chance, in the time that the work takes without them (0)",
        whole(0),
        0,
    ),
    (
        "--elastic",
        "without servers: the others go on when a worker is killed, and with one that joins",
    ),
    (
        "--regroup TIME",
        "--elastic: until those who are here have come together again (400ms)",
        str,
        "400ms",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem simulate`."""
    declare(parser, *_WORKERS)
    simulate_options.add_arguments(parser)
    declare(
        parser,
        ("--patience TIME", "with a silent worker (60s)", str, "60s"),
        ("--seed S", "of everything that is chance (0)", whole(0), 0),
        ("--json FILE", "what came of it, for programs"),
        ("--trace FILE", "everything that happened, for programs"),
    )


def main(args: argparse.Namespace) -> int:
    """Simulate and print; 1 if the training could not go on."""
    check_outputs({"json": args.json, "trace": args.trace})
    if args.stages is not None:
        return _stages(args)
    from stratagem.plan.simulate import simulate

    scenario = read(args)
    if args.faults:
        scenario = _bad_day(scenario, args.faults)
    run = simulate(scenario, trace=args.trace is not None)
    _print(scenario, run)
    _write(args.json, {"seed": args.seed, **summary(scenario, run)})
    _write(args.trace, {"seed": args.seed, "digest": run.digest, "events": run.trace})
    return 1 if run.failure else 0


def _stages(args: argparse.Namespace) -> int:
    """Simulate a pipeline; its trace is the time line of the first batch."""
    from stratagem.plan.hardware import seconds

    compute = _spread(args.spread, seconds(args.compute, "--compute"), args.stragglers)
    scenario = simulate_options.read_stages(args, compute, dict(_slow(text) for text in args.slow))
    told = simulate_options.run_stages(scenario)
    _write(args.json, {"seed": args.seed, **told})
    _write(args.trace, {"seed": args.seed, "events": told["first_batch"]})
    return 0


def read(args: argparse.Namespace) -> Scenario:
    """The scenario that the options describe, without random faults."""
    from stratagem.plan.hardware import rate, seconds, size
    from stratagem.plan.simulation.scenario import Regrouping, Scenario, Work
    from stratagem.rules.updates import Synchronous
    from stratagem.wire.simulated import Topology

    compute = seconds(args.compute, "--compute")
    begins = 1.0 - args.overlap
    work = Work(
        _spread(args.spread, compute, args.stragglers),
        push=size(args.bytes, "--bytes"),
        update=seconds(args.update, "--update"),
        # in ten pieces, evenly over the time beside which they travel
        buckets=tuple((0.1, begins + args.overlap * (i + 1) / 10) for i in range(10))
        if args.overlap
        else ((1.0, 1.0),),
    )
    updates = _updates(args)
    each = 1 if isinstance(updates, Synchronous) else args.workers
    elastic = Regrouping(seconds(args.regroup, "--regroup"))
    return Scenario(
        args.workers,
        args.steps * each,
        work,
        Topology(rate(args.link, "--link"), seconds(args.latency, "--latency"), args.per_host),
        updates,
        args.servers,
        slow=dict(_slow(text) for text in args.slow),
        patience=seconds(args.patience, "--patience"),
        seed=args.seed,
        overhead=_overhead(args.overhead),
        elastic=elastic if args.elastic else None,
        wire=simulate_options.read_wire(args.wire),
        sync=simulate_options.read_sync(args.sync),
    )


def _bad_day(scenario: Scenario, count: int) -> Scenario:
    """Add random faults, within the time that the scenario takes without them."""
    from stratagem.plan.simulate import simulate
    from stratagem.plan.simulation.scenario import schedule

    until = simulate(scenario).seconds
    chief = scenario.elastic is not None
    faults = schedule(scenario.seed, scenario.workers, until, count, chief=chief)
    return replace(scenario, faults=faults)


def _updates(args: argparse.Namespace) -> Updates:
    from stratagem.rules.updates import Asynchronous, Synchronous

    free = args.asynchronous or args.bound is not None or args.buffer > 1
    if free and args.spares:
        raise UsageError("--spares is for synchronous updates; leave it or --asynchronous out.")
    if args.servers == 0 and (free or args.spares):
        raise UsageError("without servers all workers step together; give --servers 1 or more.")
    if args.spares >= args.workers:
        raise UsageError(f"--spares {args.spares} leaves nobody of {args.workers} to wait for.")
    if free:
        return Asynchronous(bound=args.bound, buffer=args.buffer)
    return Synchronous(spares=args.spares)


def _overhead(text: str) -> Overhead:
    from stratagem.plan.hardware import seconds
    from stratagem.plan.simulation.scenario import Overhead

    if text == "none":
        return Overhead()
    worker, _, server = text.partition(":")
    if not worker or not server:
        raise UsageError(f"--overhead {text!r} is not WORKER:SERVER, as 0.2ms:0.3ms.")
    return Overhead(seconds(worker, "--overhead"), seconds(server, "--overhead"))


def _spread(text: str, average: float, stragglers: str | None) -> Spread:
    from stratagem.plan.simulation import spread

    kind, _, rest = text.partition(":")
    found: Spread
    if kind == "constant" and not rest:
        found = spread.Constant(average)
    elif kind == "trace" and rest:
        found = spread.Recorded(_recorded(rest))
    elif kind in ("exponential", "lognormal", "pareto"):
        found = _tailed(text, kind, average, _numbers(rest, 1))
    else:
        raise UsageError(f"--spread {text!r} is none of {_SPREADS}.")
    if stragglers is None:
        return found
    numbers = _numbers(stragglers, 2)
    if numbers is None:
        raise UsageError(f"--stragglers {stragglers!r} is not PART:TIMES, as 0.02:10.")
    return spread.Stragglers(found, *numbers)


def _tailed(text: str, kind: str, average: float, numbers: list[float] | None) -> Spread:
    """A spread with a tail, with this average."""
    from stratagem.plan.simulation import spread

    if numbers is None:
        raise UsageError(f"--spread {text!r} is none of {_SPREADS}.")
    (number,) = numbers
    if kind == "exponential":
        return spread.ShiftedExponential(number * average, average)
    if kind == "lognormal":
        return spread.Lognormal(average * math.exp(-number * number / 2), number)
    if number <= 1:
        raise UsageError(f"--spread {text!r} has no average; give a SHAPE above 1.")
    return spread.Pareto(average * (number - 1) / number, number)


def _recorded(file: str) -> tuple[float, ...]:
    """Seconds of measured steps: a list in a JSON file, or the `samples` of an object there."""
    try:
        told = json.loads(Path(file).read_text())
    except (OSError, ValueError) as problem:
        raise UsageError(f"--spread trace:{file}: it cannot be read ({problem}).") from None
    samples = told.get("samples") if isinstance(told, dict) else told
    if not isinstance(samples, list) or not all(isinstance(s, int | float) for s in samples):
        raise UsageError(f"--spread trace:{file}: it holds no list of seconds.")
    return tuple(float(s) for s in samples)


def _slow(text: str) -> tuple[int, float]:
    worker, _, times = text.partition(":")
    numbers = _numbers(times, 1)
    if not worker.isdecimal() or numbers is None:
        raise UsageError(f"--slow {text!r} is not WORKER:TIMES, as 3:2 for worker 3 taking twice.")
    return int(worker), numbers[0]


def _numbers(text: str, count: int) -> list[float] | None:
    """Read `count` numbers with colons between them; None if the text is something else."""
    try:
        found = [float(part) for part in text.split(":")]
    except ValueError:
        return None
    return found if len(found) == count and all(map(math.isfinite, found)) else None


def summary(scenario: Scenario, run: SimulatedRun) -> dict[str, Any]:
    """The results of a run, for programs."""
    ages = run.stats.staleness
    received = max(1, run.stats.received)
    return {
        "seconds": run.seconds,
        "updates": len(run.updates),
        "updates_per_s": run.rate,
        "gradients_per_s": run.stats.applied / run.seconds if run.seconds else 0.0,
        "busy": _busy(scenario, run),
        "staleness": sum(t * n for t, n in ages.items()) / received,
        "oldest": max(ages, default=0),
        "stats": run.stats.to_json(),
        "failure": run.failure,
    }


def _busy(scenario: Scenario, run: SimulatedRun) -> float:
    """The part of the workers' time spent on gradients that were applied."""
    slow = [scenario.slow.get(w, 1.0) for w in range(scenario.workers)]
    mean = scenario.work.compute.mean * len(slow) / sum(1 / s for s in slow)
    whole_time = run.seconds * scenario.workers
    return run.stats.applied * mean / whole_time if whole_time else 0.0


def _print(scenario: Scenario, run: SimulatedRun) -> None:
    # rich takes a while to import, which `--help` should not.
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    told, books = summary(scenario, run), run.stats
    table = Table(box=SIMPLE, show_header=False)
    rows = [
        ("time", f"{told['seconds']:.4g} s for {told['updates']} updates"),
        ("updates a second", f"{told['updates_per_s']:.4g}"),
        ("gradients a second", f"{told['gradients_per_s']:.4g}"),
        ("workers busy with what counts", f"{told['busy']:.0%}"),
        (
            "gradients",
            f"{books.received} received, {books.applied} applied, {books.dropped} "
            f"dropped, {books.abandoned} given up half-way, {books.requeued} put back",
        ),
        ("age of the weights", f"{told['staleness']:.2f} updates, {told['oldest']} at most"),
    ]
    if scenario.faults:
        rows.append(("faults", ", ".join(map(_fault, scenario.faults))))
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    if run.failure:
        console.print(f"[red]{run.failure}[/] (seed {scenario.seed})")


def _fault(fault: Fault) -> str:
    """Describe a fault, as in "kill of worker 3 at 1.2 s"."""
    who = "server" if hasattr(fault, "server") else "worker"
    kind = "death" if who == "server" else type(fault).__name__.lower()
    return f"{kind} of {who} {getattr(fault, who)} at {fault.at:.3g} s"


def _write(file: str | None, told: dict[str, Any]) -> None:
    if file is None:
        return
    try:
        Path(file).write_text(json.dumps(told) + "\n")
    except OSError as problem:
        raise UsageError(f"{file}: it cannot be written ({problem.strerror}).") from None
