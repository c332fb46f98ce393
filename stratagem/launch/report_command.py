"""A run on one page: curves, what every task did when, faults and what was done about them.

RUN is the folder that was given to `stratagem run --record`, or that STRATAGEM_RECORD names;
without it, the newest one in runs/. The page is one file that needs nothing else, no network
either; it can be written while the run goes on.

examples:
  stratagem run --record runs/first --replicas 2 train.py
  stratagem report runs/first                         writes runs/first/report.html
  stratagem report --html first.html runs/first
"""

from __future__ import annotations

import argparse
import html
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stratagem.errors import UsageError
from stratagem.figures.run_folder import Line, RunFolder, RunTask, find


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem report`."""
    add = parser.add_argument
    add("run", nargs="?", metavar="RUN", help="the run's folder (the newest in runs/)")
    add("--html", metavar="FILE", help="where to write the page (RUN/report.html)")


def main(args: argparse.Namespace) -> int:
    """Write the page."""
    run = find(args.run)
    run.read()
    if not run.tasks:
        raise UsageError(f"nothing was recorded in {run.path} yet; is this the run's folder?")
    path = Path(args.html) if args.html else run.path / "report.html"
    try:
        path.write_text(page(run), encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"{path} cannot be written: {problem.strerror}") from None
    print(path)
    return 0


_WIDTH, _LEFT, _RIGHT, _HEIGHT, _STRIP = 1000, 130, 26, 220, 34
_MOST = 500  # points of a curve, and seconds of a strip, at most
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5cb8", "#c77d0a", "#00798c", "#7a7a7a", "#b03a86")
#: what a step's time goes to, in the words of the page
_PARTS = {
    "compute": ("computes", "#2e8b57"),
    "load": ("loads data", "#c77d0a"),
    "link": ("link", "#8a5cb8"),
    "wait": ("waits", "#9bb7d4"),
}
_MARKS = {"fault": "#d1495b", "slow": "#e0b400", "save": "#1b6ca8", "join": "#00a6a6"}
_QUIET = ("launched", "epoch")

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:66em;margin:2em auto;padding:0 1em;
color:#222;background:#fff}svg{max-width:100%;height:auto}text{fill:currentColor;font-size:12px}
table{border-collapse:collapse;font-size:14px;margin:1em 0}th,td{padding:.25em .7em;
border-bottom:1px solid #8884;text-align:right;vertical-align:top}
th.l,td.l{text-align:left;white-space:nowrap}td.text{text-align:left}
tr.dead td,tr.fault td{color:#d1495b}tr.slow td{color:#b06a00}
.key{display:inline-block;width:.9em;height:.9em;margin:0 .3em 0 1em;vertical-align:-.1em}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}}"""

Point = tuple[float, float]


def page(run: RunFolder) -> str:
    """The report as an HTML document."""
    tasks = sorted(run.tasks.values(), key=lambda task: task.name)
    times = [line["time"] for task in tasks for line in task.lines]
    times += [event["time"] for event in run.events]
    begin, end = min(times), max(times)
    title = f"{run.path.resolve().name}: {len(tasks)} tasks, {_clock(end - begin)}"
    parts = [_tasks(run, tasks), _rates(tasks, begin, end)]
    parts += [_losses(run), _loop_losses(tasks, begin, end)]
    parts += [_timeline(run, tasks, begin, end), _events(run, begin)]
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin))
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width">'
        f"<title>{_say(title)}</title><style>{_STYLE}</style>"
        f"<h1>{_say(title)}</h1><p>It began at {began}.</p>{''.join(parts)}</html>\n"
    )


def _say(text: object) -> str:
    return html.escape(str(text))


def _clock(seconds: float) -> str:
    whole = int(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _mean(task: RunTask, kind: str) -> float:
    """The mean of a figure over all steps."""
    lines = [line for line in task.lines if line.get("steps") and kind in line]
    steps = sum(line["steps"] for line in lines)
    return sum(line[kind] * line["steps"] for line in lines) / steps if steps else 0.0


def _tasks(run: RunFolder, tasks: Sequence[RunTask]) -> str:
    names = ["task", "host", "state", "steps", "examples/s", "ms a step"]
    names += [word for word, _ in _PARTS.values()] + ["generation", "restarts"]
    head = "".join(f"<th{' class=l' if i < 3 else ''}>{each}</th>" for i, each in enumerate(names))
    rows = []
    for task in tasks:
        state = run.state(task)
        seconds = {kind: _mean(task, kind) for kind in _PARTS}
        whole = sum(seconds.values())
        why = (task.end or "").partition(":")[0]  # what happened, below, has the whole text
        how = f"{state}: {why}" if why not in ("", "fault") else state
        cells = [task.step, f"{_mean(task, 'rate'):,.0f}" if whole else ""]
        cells += [f"{whole * 1e3:.2f}" if whole else ""]
        cells += [f"{each / whole:.0%}" if whole else "" for each in seconds.values()]
        numbers = "".join(
            f"<td>{_say(cell)}</td>"
            for cell in [*cells, task.last.get("generation", ""), task.restarts]
        )
        words = "".join(f"<td class=l>{_say(each)}</td>" for each in (task.name, task.host, how))
        rows.append(f"<tr class={state}>{words}{numbers}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


# --- curves ---------------------------------------------------------------------------------


def _rates(tasks: Sequence[RunTask], begin: float, end: float) -> str:
    curves = {
        task.name: [(line["time"] - begin, line["rate"]) for line in task.lines if "rate" in line]
        for task in tasks
    }
    return _chart("Examples a second, by task", curves, end - begin, _clock)


def _losses(run: RunFolder) -> str:
    """A chart of the losses that `fit` logged for each epoch; other metrics have other scales."""
    curves: dict[str, list[Point]] = {}
    for event in run.events:
        for name, value in event.get("logs", {}).items():
            if name.endswith("loss"):
                curves.setdefault(name, []).append((float(event["epoch"]), float(value)))
    last = max((points[-1][0] for points in curves.values()), default=0.0)
    return _chart("Loss, by epoch", curves, last, lambda x: f"{x:g}" if x == int(x) else "")


def _loop_losses(tasks: Sequence[RunTask], begin: float, end: float) -> str:
    """A chart of the losses that a custom loop asked for; every task knows the same ones."""
    curves = (
        [(line["time"] - begin, line["loss"]) for line in task.lines if "loss" in line]
        for task in tasks
    )
    found = next((points for points in curves if points), [])
    return _chart("Loss, by time", {"loss": found}, end - begin, _clock)


def _chart(
    title: str, curves: dict[str, list[Point]], most: float, label: Callable[[float], str]
) -> str:
    """A chart of lines from 0 on both axes; empty if there is nothing to draw."""
    curves = {name: _thinned(points) for name, points in curves.items() if points}
    if not curves:
        return ""
    top = max(y for points in curves.values() for _, y in points) or 1.0
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - 30

    def at(x: float, y: float) -> str:
        return f"{_LEFT + x / (most or 1.0) * width:.1f},{10 + height * (1 - y / top):.1f}"

    drawn = []
    for i in range(5):
        y, value = 10 + height * (1 - i / 4), top * i / 4
        drawn.append(
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#8884"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>'
            f'<text x="{_LEFT + width * i / 4:.1f}" y="{_HEIGHT - 4}" text-anchor="middle">'
            f"{_say(label(most * i / 4))}</text>"
        )
    keys = []
    for i, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        way = " ".join(at(x, y) for x, y in points)
        drawn.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        keys.append(f'<span class=key style="background:{colour}"></span>{_say(name)}')
    return (
        f"<h2>{_say(title)}</h2><p>{''.join(keys)}</p>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role=img aria-label="{_say(title)}">'
        f"{''.join(drawn)}</svg>"
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Average neighbouring points, if there are more than can be seen."""
    size = math.ceil(len(points) / _MOST)
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]


# --- when -----------------------------------------------------------------------------------


def _timeline(run: RunFolder, tasks: Sequence[RunTask], begin: float, end: float) -> str:
    """A strip for every task: the parts of its steps, second by second, and marks for events."""
    width, span = _WIDTH - _LEFT - _RIGHT, max(end - begin, 1.0)
    drawn = []
    for row, task in enumerate(tasks):
        y = 10 + row * (_STRIP + 12)
        drawn.append(
            f'<text x="{_LEFT - 6}" y="{y + 20}" text-anchor="end">{_say(task.name)}</text>'
        )
        for line in task.lines[:: math.ceil(len(task.lines) / _MOST) or 1]:
            x = _LEFT + (line["time"] - begin) / span * width
            drawn.append(_second(line, x, y, max(1.5, width / min(span, _MOST))))
        for event in run.events:
            if event["task"] == task.name and event["event"] in (*_MARKS, "start", "end"):
                x = _LEFT + (event["time"] - begin) / span * width
                drawn.append(_mark(event, x, y))
    height = 24 + len(tasks) * (_STRIP + 12)
    for i in range(5):
        x, label = _LEFT + width * i / 4, _clock(span * i / 4)
        drawn.append(f'<text x="{x:.1f}" y="{height - 2}" text-anchor="middle">{label}</text>')
    named = [*_PARTS.values(), ("no step", "#8885"), *((n, c) for n, c in _MARKS.items())]
    keys = (f'<span class=key style="background:{colour}"></span>{name}' for name, colour in named)
    return (
        f"<h2>What every task did, second by second</h2><p>{''.join(keys)}</p>"
        f'<svg viewBox="0 0 {_WIDTH} {height}" role=img aria-label="timeline by task">'
        f"{''.join(drawn)}</svg>"
    )


def _second(line: Line, x: float, y: float, width: float) -> str:
    """One line of figures as a bar ending at x: the parts of a step, one above the other."""
    parts = [(name, float(line.get(name) or 0.0)) for name in _PARTS]
    whole = sum(seconds for _, seconds in parts)
    left = x - width
    if not whole:
        if "updates" in line:
            return ""
        say = _say(f"{line.get('doing', 'no step')} for {line.get('seconds', 0)} s")
        return (
            f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_STRIP}" fill="#8885">'
            f"<title>{say}</title></rect>"
        )
    found, low = [], float(y + _STRIP)
    for name, seconds in parts:
        high = seconds / whole * _STRIP
        low -= high
        if high >= 0.3:
            found.append(
                f'<rect x="{left:.1f}" y="{low:.1f}" width="{width:.1f}" height="{high:.1f}" '
                f'fill="{_PARTS[name][1]}"/>'
            )
    parts_said = ", ".join(f"{_PARTS[name][0]} {seconds * 1e3:.2f} ms" for name, seconds in parts)
    say = _say(f"step {line['step']}: {parts_said}")
    return f"<g><title>{say}</title>{''.join(found)}</g>"


def _mark(event: Line, x: float, y: float) -> str:
    colour = _MARKS.get(event["event"], "currentColor")
    say = _say(f"{event['event']}: {event.get('text', '')}")
    return (
        f'<path d="M{x:.1f} {y - 4}v{_STRIP + 8}" stroke="{colour}" stroke-width="2">'
        f"<title>{say}</title></path>"
    )


def _events(run: RunFolder, begin: float) -> str:
    """A table of faults, slow tasks, savings and actions; the same text of several tasks once."""
    rows: list[str] = []
    said: dict[Any, float] = {}
    for event in run.events:
        kind, text = event["event"], str(event.get("text", ""))
        key = (kind, text)
        if kind in _QUIET or (text and event["time"] - said.get(key, -math.inf) < 10):
            continue
        said[key] = event["time"]
        if kind == "start":
            text = f"on {event['host']}, process {event['pid']}"
        failed = kind == "fault" or (kind == "end" and event.get("error"))
        rows.append(
            f"<tr class={'fault' if failed else _say(kind)}><td>{_clock(event['time'] - begin)}"
            f"</td><td class=l>{_say(event['task'])}</td><td class=l>{_say(kind)}</td>"
            f"<td class=text>{_say(text)}</td></tr>"
        )
    head = "<tr><th>time</th><th class=l>task</th><th class=l>what</th><th class=l></th></tr>"
    return f"<h2>What happened, and what was done about it</h2><table>{head}{''.join(rows)}</table>"
