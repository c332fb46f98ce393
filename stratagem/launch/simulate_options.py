"""Options of `stratagem simulate` for pipelines (`--stages`), and records written as in Python.

--wire bfloat16   --wire Int8   --wire "TopK(0.01)"
--sync "LocalSteps(20)"   --sync "DiLoCo(20, fragments=4, overlap=2, wire=Int8())"
"""

from __future__ import annotations

import argparse
import ast
from typing import TYPE_CHECKING, Any

from stratagem.errors import UsageError
from stratagem.launch.cli import declare, whole

if TYPE_CHECKING:
    from stratagem.plan.simulation.spread import Spread
    from stratagem.plan.simulation.stages import StageRun, StageScenario

#: options of workers that hold the whole model, which a pipeline does not take
_OF_WORKERS = ("asynchronous", "spares", "bound", "faults", "elastic", "overlap", "wire", "sync")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what workers all-reduce, and when; and the options of pipelines."""
    declare(
        parser,
        (
            "--wire RECORD",
            "--servers 0: what gradients travel as: bfloat16, Int8, 'TopK(0.01)', Sign (they are "
            "sent whole)",
        ),
        (
            "--sync RECORD",
            "--servers 0: when workers meet: 'LocalSteps(20)', 'DiLoCo(20, fragments=4)', Gossip "
            "(every step)",
        ),
        ("--stages S", "a pipeline of so many, instead of workers", whole(1)),
        ("--microbatches M", "--stages: of a batch (8)", whole(1), 8),
        (
            "--schedule NAME",
            "--stages: gpipe, 1f1b, eager, interleaved",
            str,
            "1f1b",
        ),
        (
            "--crossing SIZE",
            "--stages: of a batch at each cut, and as much backward (1MB)",
            str,
            "1MB",
        ),
        ("--slow-link STAGE:RATE", "--stages: of the link behind a stage, as 1:100Mbit", list, []),
    )


def read_stages(args: argparse.Namespace, compute: Spread, slow: dict[int, float]) -> StageScenario:
    """The scenario of a pipeline that the options describe."""
    from stratagem.plan.hardware import rate, seconds, size
    from stratagem.plan.simulation.stages import StageScenario
    from stratagem.wire.simulated import Topology

    given = [name for name in _OF_WORKERS if getattr(args, name)]
    if given:
        raise UsageError(
            f"--{given[0]} is of workers that have the whole model, and --stages of a pipeline, "
            "which waits for all of them; leave one of the two out."
        )
    links = dict(_link(text, rate) for text in args.slow_link)
    return StageScenario(
        args.stages,
        args.microbatches,
        args.steps,
        compute,
        size(args.crossing, "--crossing"),
        Topology(rate(args.link, "--link"), seconds(args.latency, "--latency"), args.per_host),
        args.schedule,
        seconds(args.update, "--update"),
        links=links,
        slow=slow,
        seed=args.seed,
    )


def _link(text: str, rate: Any) -> tuple[int, float]:
    stage, _, speed = text.partition(":")
    if not stage.isdecimal() or not speed:
        raise UsageError(f"--slow-link {text!r} is not STAGE:RATE, as 1:100Mbit.")
    return int(stage), rate(speed, "--slow-link")


def run_stages(scenario: StageScenario) -> dict[str, Any]:
    """Simulate a pipeline, print the result, and return it as JSON."""
    from stratagem.plan.simulation.stages import simulate_stages

    run, free = simulate_stages(scenario), simulate_stages(scenario.without_links)
    _print(run, free)
    spans = [
        [span.device, *span.op, span.begin, span.end] for span in run.lines[0].spans
    ]  # of the first batch
    return {
        "seconds": run.seconds,
        "step_s": run.step,
        "steps_per_s": 1 / run.step if run.step else 0.0,
        "bubble": run.bubble,
        "least_bubble": run.least_bubble,
        "busy": list(run.busy),
        "step_without_links_s": free.step,
        "first_batch": spans,
    }


def _print(run: StageRun, free: StageRun) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from stratagem.plan.hardware import say_seconds
    from stratagem.rules.timeline import draw

    scenario, console = run.scenario, Console()
    one = scenario.compute.mean + scenario.update
    table = Table(box=SIMPLE, show_header=False)
    rows = [
        ("a batch", f"{say_seconds(run.step)}, {run.step and one / run.step:.2f}x one device"),
        (
            "stages wait",
            f"{run.bubble:.0%} of the time; equal stages and free links: {run.least_bubble:.0%}",
        ),
        ("stages busy", ", ".join(f"{part:.0%}" for part in run.busy)),
        ("links", _links(run, free)),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    print(draw(run.lines[0], max(20, min(console.width - 12, 110))))


def _links(run: StageRun, free: StageRun) -> str:
    """Describe what the links between stages cost."""
    from stratagem.plan.hardware import say_seconds

    if run.step < free.step * 1.005:
        return "hidden behind the computation"
    more = run.step / free.step - 1 if free.step else 0.0
    return f"{more:.0%} longer than without them ({say_seconds(free.step)})"


if TYPE_CHECKING:
    from stratagem.codecs.wire_choice import Wire
    from stratagem.rules.cadence import Sync


def read_wire(text: str | None) -> Wire:
    """Read the wire that `--wire` describes."""
    from stratagem.codecs.wire_choice import RECORDS, check_wire

    if text is None:
        return None
    plain = text.isidentifier() and text not in RECORDS
    found: Wire = text if plain else _record(text, "--wire", "Int8, 'TopK(0.01)' or bfloat16")
    check_wire(found)
    return found


def read_sync(text: str | None) -> Sync | None:
    """Read the cadence that `--sync` describes."""
    from stratagem.rules.cadence import Sync

    if text is None:
        return None
    known = "'LocalSteps(20)', 'DiLoCo(20)', Gossip or EveryStep"
    found = _record(text, "--sync", known)
    if not isinstance(found, Sync):
        raise UsageError(f"--sync {text!r} is none of {known}.")
    return found


def _record(text: str, option: str, known: str) -> Any:
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as problem:
        raise UsageError(f"{option} {text!r} is no record such as {known} ({problem}).") from None


def _value(written: ast.expr) -> Any:
    """Evaluate a call of a record, or a literal."""
    from stratagem.codecs.wire_choice import RECORDS
    from stratagem.rules import cadence

    call = written if isinstance(written, ast.Call) else None
    name = written if call is None else call.func
    word = name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")
    kinds = (cadence.EveryStep, cadence.LocalSteps, cadence.DiLoCo, cadence.Gossip, cadence.Outer)
    made: Any = {**RECORDS, **{kind.__name__: kind for kind in kinds}}.get(word)
    if made is None:
        return ast.literal_eval(written)
    if call is None:
        return made()
    return made(*map(_value, call.args), **{str(k.arg): _value(k.value) for k in call.keywords})
