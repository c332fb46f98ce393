"""Write a plan as a table with one recommendation, or as JSON."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from stratagem.errors import UsageError
from stratagem.plan.advice import code, like, say_number, sentence, why_not
from stratagem.plan.choose import Plan, Saturation, sizes
from stratagem.plan.cost import Prediction
from stratagem.plan.hardware import Hardware, say_bytes, say_seconds
from stratagem.plan.lossy_advice import compared, lossy_table
from stratagem.plan.profile import Profile

#: what has no row
_LEFT_OUT = " (TensorParallelStrategy and columns= are not predicted)"
#: widths to try for names and reasons, in characters
_TEXT = (60, 30, 24, 20, 10)


def to_json(plan: Plan) -> dict[str, Any]:
    """Return everything that was measured and predicted."""
    best, rows = plan.recommendation, compared(plan) if plan.lossy else []
    return {
        "profile": plan.profile.to_json(),
        "hardware": plan.hardware.to_json(),
        "calibration": plan.calibration.to_json(),
        "predictions": [each.to_json() for each in plan.predictions],
        "saturation": [asdict(each) for each in plan.saturations.values()],
        "recommendation": {
            **best.to_json(),
            "sentence": sentence(plan),
            "code": code(plan),
        },
        "lossy": [
            {**row.prediction.to_json(), "bytes": row.part, "encoding_s": row.encoding}
            | {"times_as_fast": row.gain}
            for row in rows
        ],
    }


def from_json(text: str) -> tuple[Profile, Hardware]:
    """Read the profile and the hardware of an earlier plan from the text of `dumps`."""
    try:
        plain = json.loads(text)
        return Profile.from_json(plain["profile"]), Hardware.from_json(plain["hardware"])
    except (KeyError, TypeError, ValueError) as flaw:
        raise UsageError(f"this is no plan as --json writes it ({flaw}); make it again.") from None


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically, by a temporary file; write to a pipe or a device directly."""
    target, part = Path(path), _part(path)
    content = text.encode()
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    try:
        part.write_bytes(content)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _part(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    return target.with_name(f".{target.name}.{os.getpid()}.part")


def dumps(plan: Plan) -> str:
    return json.dumps(to_json(plan), indent=1) + "\n"


def heading(profile: Profile) -> str:
    """Return one line about the measurement."""
    parts = [
        f"{profile.name}: {profile.batch} examples a replica{_in_parts(profile)}",
        f"forward {say_seconds(profile.forward, 3)}, backward {say_seconds(profile.backward, 3)}, "
        f"optimizer {say_seconds(profile.optimizer, 3)} on {profile.device}",
        f"gradients {say_bytes(profile.dense_bytes)}",
    ]
    if profile.sparse:
        rows = sum(table.touched for table in profile.sparse)
        parts.append(f"and {rows:.0f} sparse rows, {say_bytes(profile.sparse_bytes)}")
    return "; ".join(parts)


def _in_parts(profile: Profile) -> str:
    return f" in {profile.accumulated} micro-batches" if profile.accumulated > 1 else ""


def warnings(profile: Profile) -> list[str]:
    """Return the reasons to doubt the predictions, and what they leave out."""
    left_out = [*profile.notes]
    if profile.unserved:
        left_out.append(f"without servers: {profile.unserved}")
    if not profile.restless:
        return left_out
    return [
        *left_out,
        f"{_unrest(profile)} Stragglers are predicted from that, so neither spares nor "
        "asynchronous updates are recommended on its account; measure again on a quiet machine, "
        "or with a smaller --batch.",
    ]


def _unrest(profile: Profile) -> str:
    steps = len(profile.samples)
    if steps < 10:
        return f"only {steps} steps were measured, each takes so long."
    if profile.unrest > 1.3:
        seen = f"one step in ten took {profile.unrest:.1f}x the usual time"
    else:
        longest = profile.spread[-1] / profile.spread[steps // 2]
        seen = f"{profile.late} of {steps} steps took up to {longest:.1f}x the usual time"
    return f"{seen} here: other work on this machine?"


def shown(plan: Plan) -> list[tuple[str, list[Prediction], Saturation]]:
    """Return the best family of each kind, the recommended one first; JSON has all families."""
    best = plan.recommendation.configuration.family
    rows = sorted(
        plan.families.items(), key=lambda item: (item[0] != best, -max(p.rate for p in item[1]))
    )
    first = {row[0].configuration.kind: name for name, row in reversed(rows)}
    return [
        (name, row, plan.saturations[name])
        for name, row in rows
        if first[row[0].configuration.kind] == name
    ]


def render(plan: Plan, console: Console, *, rows: bool = False) -> None:
    """Print the table, or a row for each of its cells, and the recommendation."""
    soft = not console.is_terminal  # in a terminal rich wraps lines, at words
    console.print(escape(heading(plan.profile)), soft_wrap=soft)
    end = ":" if rows else "; times faster than one device:"
    console.print(f"on {plan.hardware}{end}", soft_wrap=soft)
    console.print(_listing(plan) if rows else _fitting(plan, console))
    if not rows and plan.profile.footprint is not None:
        console.print(
            f"what a device holds, and what speaks against it{_LEFT_OUT}:", soft_wrap=soft
        )
        console.print(_needs(plan, console.width))
    if plan.lossy:
        console.print("with less than the gradients on the wire:", soft_wrap=soft)
        console.print(lossy_table(plan))
    for each in warnings(plan.profile):
        console.print(f"[yellow]note:[/] {escape(each)}", soft_wrap=soft)
    console.print(f"[bold]{escape(sentence(plan))}[/]", soft_wrap=soft)
    console.print()
    for line in code(plan).splitlines():
        console.print(f"    {line}", soft_wrap=True, markup=False, highlight=False)


def _fitting(plan: Plan, console: Console) -> Table:
    """Return the widest table that fits: first wrap text, then leave out numbers of replicas."""
    best = plan.recommendation.configuration.replicas
    ends = {at.replicas for _, _, at in shown(plan)}
    counts = sorted({*sizes(plan.most), best, *ends})
    wide = console.options.update(max_width=10_000)
    while True:
        for width in _TEXT:
            table = _table(plan, counts, width)
            if Measurement.get(console, wide, table).maximum <= console.width:
                return table
        spared = [n for n in counts if n != best]
        if len(spared) < 2:
            return table
        counts.remove(spared[len(spared) // 2])


def _table(plan: Plan, counts: Sequence[int], width: int) -> Table:
    """Speedups at these numbers of replicas; names and reasons in lines of about `width`."""
    best = plan.recommendation.configuration
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    for n in counts:
        table.add_column(str(n), justify="right", no_wrap=True)
    table.add_column(_lines("worth it to", width), no_wrap=True)
    table.add_column("then binds", no_wrap=True)
    for name, row, at in shown(plan):
        chosen, called = name == best.family, _lines(name, width)
        table.add_row(
            f"[bold]{called}[/]" if chosen else called,
            *_cells(row, counts, best.replicas if chosen else 0),
            f"{at.replicas}" if at.reached or at.replicas == 1 else f"all {at.replicas}",
            _lines(at.reason, width),
        )
    return table


def _needs(plan: Plan, width: int) -> Table:
    """Return a table of the same strategies with step, memory, bubble and the reason against it."""
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    for head in ("devices", "step", "memory", "bubble"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("why not", no_wrap=True)
    text = next((n for n in _TEXT if 2 * n + 36 <= width), _TEXT[-1])
    for name, row, _ in shown(plan):
        each = like(plan, row)
        table.add_row(
            _lines(_detailed(each, name), text),
            str(each.configuration.replicas),
            say_seconds(each.step, 3),
            "" if each.memory is None else say_bytes(each.memory),
            f"{each.bubble:.0%}" if each.bubble else "",
            _lines(why_not(plan, each), text),
        )
    for name, reason in refused(plan.profile):
        table.add_row(name, "", "", "", "", _lines(reason, text))
    return table


def _detailed(each: Prediction, name: str) -> str:
    return name + each.configuration.pieces


def refused(profile: Profile) -> list[tuple[str, str]]:
    """Return the strategies that do not support this model, and why."""
    given = (
        ("Pipeline", profile.unpiped),
        ("Sharded", profile.unsharded),
    )
    return [(name, reason) for name, reason in given if reason]


def _lines(words: str, width: int) -> str:
    return fill(words, width, break_long_words=False, break_on_hyphens=False)


def _listing(plan: Plan) -> Table:
    """Return a table of the same strategies with throughput and efficiency at every size."""
    table = Table("strategy", box=SIMPLE, pad_edge=False)
    for head in ("replicas", "examples/s", "speedup", "efficiency"):
        table.add_column(head, justify="right")
    for name, row, _ in shown(plan):
        for each in row:
            style = "reverse" if each is plan.recommendation else None
            table.add_row(
                name if each is row[0] else "",
                str(each.configuration.replicas),
                say_number(each.rate),
                f"{each.speedup:.2f}",
                f"{each.efficiency:.0%}",
                style=style,
            )
        table.add_section()
    return table


def _cells(row: Sequence[Prediction], counts: Sequence[int], marked: int) -> list[str]:
    by = {each.configuration.replicas: each.speedup for each in row}
    cells = [f"{by[n]:.1f}" if n in by else "" for n in counts]
    return [
        f"[reverse]{cell}[/]" if n == marked else cell
        for cell, n in zip(cells, counts, strict=True)
    ]


def text(plan: Plan, width: int = 120) -> str:
    """Return the output of `render` as plain text."""
    out = io.StringIO()
    render(plan, Console(file=out, width=width, no_color=True, force_terminal=False))
    return out.getvalue()
