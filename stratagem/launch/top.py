"""A run as it goes: what every task does, step by step.

RUN is the folder that was given to `stratagem run --record`, or that STRATAGEM_RECORD names;
without it, the newest one in runs/. On a terminal the table is drawn anew every second; in a pipe
each task gets a plain line. A task that has died turns red and stays. It ends with the run, or
with Ctrl-C; the exit code is 1 if a task has died.

examples:
  stratagem run --record runs/first --replicas 2 train.py &
  stratagem top runs/first
  ssh host stratagem top --once runs/first            one look, over ssh
  stratagem top runs/first | tee top.log              plain lines
  stratagem top --prometheus 9464 runs/first          also at http://127.0.0.1:9464/metrics
  stratagem top --tensorboard logs runs/first         also for TensorBoard
"""

from __future__ import annotations

import argparse
import http.server
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from stratagem.errors import UsageError
from stratagem.figures.run_folder import Line, RunFolder, RunTask, State, find
from stratagem.launch.cli import declare

#: figures of a line: their names for Prometheus, and their meanings
_GAUGES = {
    "step": ("step", "the newest step"),
    "rate": ("examples_per_second", "examples of this task a second"),
    "compute": ("compute_seconds", "seconds a step that it computes"),
    "load": ("load_seconds", "seconds a step that it loads data"),
    "wait": ("wait_seconds", "seconds a step that it waits for others"),
    "link": ("link_seconds", "seconds a step that its link takes"),
    "bytes": ("bytes_per_second", "bytes a second that it hands over to be sent or added up"),
    "staleness": ("staleness", "updates that a pushed gradient is behind"),
    "updates": ("updates_per_second", "updates that a server makes"),
    "loss": ("loss", "of a batch, where a custom loop asks for it by strategy.mean"),
    "generation": ("generation", "how often the membership has changed"),
}


class PrometheusPage:
    """Serves the newest figures over HTTP until it is closed."""

    def __init__(self, where: str, run: RunFolder) -> None:
        host, _, port = where.rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"--prometheus {where}: it takes a port, or host:port")
        page = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = page.text().encode()
                self.send_response(200 if self.path in ("/", "/metrics") else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: the terminal shows a table."""

        self._run = run
        try:
            address = (host.strip("[]") or "127.0.0.1", int(port))
            self._server = http.server.ThreadingHTTPServer(address, Handler)
        except OSError as problem:
            raise UsageError(f"--prometheus {where}: {problem.strerror or problem}") from None

    @property
    def port(self) -> int:
        """The port, which the system has chosen if 0 was asked for."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, task: str, line: Line) -> None:
        """Do nothing: the page reads the run when it is requested."""

    def text(self) -> str:
        """The page, in Prometheus' text format."""
        tasks = list(self._run.tasks.values())
        found = []
        for name, (called, meaning) in _GAUGES.items():
            rows = [
                f"stratagem_{called}{{{_labels(task.name, task.host)}}} {value}"
                for task in tasks
                if (value := task.last.get(name)) is not None
            ]
            if rows:
                found += [f"# HELP stratagem_{called} {meaning}"]
                found += [f"# TYPE stratagem_{called} gauge", *rows]
        found += ["# HELP stratagem_up whether the task lives", "# TYPE stratagem_up gauge"]
        alive = ("runs", "silent")
        for task in tasks:
            up = int(self._run.state(task) in alive)
            found.append(f"stratagem_up{{{_labels(task.name, task.host)}}} {up}")
        found += ["# HELP stratagem_restarts_total how often the task was started again"]
        found += ["# TYPE stratagem_restarts_total counter"]
        for task in tasks:
            labels = _labels(task.name, task.host)
            found.append(f"stratagem_restarts_total{{{labels}}} {task.restarts}")
        return "\n".join(found) + "\n"


def _labels(task: str, host: str) -> str:
    named = {"task": task, "host": host}
    quoted = {k: v.replace("\\", r"\\").replace('"', r"\"") for k, v in named.items()}
    return ",".join(f'{name}="{value}"' for name, value in quoted.items())


class TensorBoardWriter:
    """Writes a folder for TensorBoard, with one run for each task; the axis is the step."""

    def __init__(self, folder: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "TensorBoard is not installed; pip install 'stratagem[tensorboard]'."
            ) from None
        self._folder, self._make = folder, SummaryWriter
        self._writers: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self._writers.values():
            writer.close()

    def take(self, task: str, line: Line) -> None:
        """Write one line's figures."""
        if not line.get("steps"):
            return
        if task not in self._writers:
            self._writers[task] = self._make(f"{self._folder}/{task.replace(' ', '-')}")
        for name, (called, _) in _GAUGES.items():
            if name != "step" and line.get(name) is not None:
                self._writers[task].add_scalar(
                    f"figures/{called}", line[name], line["step"], walltime=line["time"]
                )


if TYPE_CHECKING:
    from rich.table import Table

_STYLES: dict[State, str] = {"runs": "", "silent": "yellow", "done": "dim", "dead": "bold red"}
_COLUMNS = (
    "task",
    "host",
    "state",
    "step",
    "examples/s",
    "step ms",
    "computes",
    "loads",
    "waits",
    "link",
    "MB/s",
    "stale",
    "gen",
    "restarts",
)
_PAUSE = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem top`."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="the run's folder (the newest in runs/)"
    )
    declare(
        parser,
        ("--once", "one table, and no more"),
        (
            "--prometheus [HOST:]PORT",
            "serve the figures for Prometheus; on 127.0.0.1 unless a host is named",
        ),
        ("--tensorboard DIR", "write the figures into DIR for TensorBoard"),
        ("--no-color", "no colours on a terminal (or set NO_COLOR)"),
    )


def main(args: argparse.Namespace) -> int:
    """Show the run until it is over."""
    run = find(args.run)
    with ExitStack() as stack:
        sinks: list[PrometheusPage | TensorBoardWriter] = []
        if args.tensorboard:
            sinks.append(stack.enter_context(TensorBoardWriter(args.tensorboard)))
        if args.prometheus:
            sinks.append(stack.enter_context(PrometheusPage(args.prometheus, run)))
        show = _live if sys.stdout.isatty() and not args.once else _plain
        try:
            show(run, sinks, args)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(any(run.state(task) == "dead" for task in run.tasks.values()))


def _follow(run: RunFolder, sinks: Sequence[PrometheusPage | TensorBoardWriter]) -> bool:
    """Read new lines; return whether the run is over."""
    for task, line in run.read():
        for sink in sinks:
            sink.take(task, line)
    return run.is_over


def _live(
    run: RunFolder, sinks: Sequence[PrometheusPage | TensorBoardWriter], args: argparse.Namespace
) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(no_color=True if args.no_color else None)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            over = _follow(run, sinks)
            live.update(_table(run), refresh=True)
            if over:
                return
            time.sleep(_PAUSE)


def _plain(
    run: RunFolder, sinks: Sequence[PrometheusPage | TensorBoardWriter], args: argparse.Namespace
) -> None:
    """Print columns as wide as their heads, for files and other programs."""
    over = _follow(run, sinks)
    print(_columns(_COLUMNS, run), flush=True)
    while True:
        for task in _sorted(run):
            print(_columns(cells(run, task), run), flush=True)
        if over or args.once:
            return
        time.sleep(_PAUSE)
        over = _follow(run, sinks)


def _columns(words: Sequence[str], run: RunFolder) -> str:
    first = max([10, *map(len, run.tasks)])
    host = max([6, *(len(task.host) for task in run.tasks.values())])
    widths = [first, host, 8, *(max(7, len(name)) for name in _COLUMNS[3:])]
    left = [word.ljust(width) for word, width in zip(words[:3], widths, strict=False)]
    right = [word.rjust(width) for word, width in zip(words[3:], widths[3:], strict=False)]
    return " ".join([*left, *right]).rstrip()


def _table(run: RunFolder) -> Table:
    from rich.table import Table

    table = Table(title=f"{run.path}, {time.strftime('%H:%M:%S')}", expand=False)
    for i, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if i < 3 else "right", no_wrap=True)
    for task in _sorted(run):
        table.add_row(*cells(run, task), style=_STYLES[run.state(task)])
    slow = [event for event in run.events if event["event"] in ("slow", "fault", "join")][-3:]
    if slow:
        table.caption = "\n".join(str(event["text"]) for event in slow)
        table.caption_justify = "left"
    return table


def _sorted(run: RunFolder) -> list[RunTask]:
    """Sort tasks by role and number: worker 2 before worker 10."""

    def key(task: RunTask) -> list[tuple[int, str]]:
        words = task.name.split()
        return [(int(word), "") if word.isdecimal() else (-1, word) for word in words]

    return sorted(run.tasks.values(), key=key)


def cells(run: RunFolder, task: RunTask) -> list[str]:
    """The row of a task."""
    line, state = task.last, run.state(task)
    busy = task.doing if state == "runs" else ""
    figures = [str(task.step), *_figures(line)] if task.lines else [""] * 10
    return [task.name, task.host, busy or state, *figures, str(task.restarts)]


def _figures(line: Line) -> list[str]:
    """Rate, step time and its parts, bytes, staleness and generation of a line."""
    parts = [float(line.get(kind, 0.0)) for kind in ("compute", "load", "wait", "link")]
    whole = sum(parts)
    shares = [f"{part / whole:.0%}" if whole else "" for part in parts]
    stale = line.get("staleness")
    return [
        f"{line['rate']:,.0f}" if "rate" in line else "",
        f"{whole * 1e3:.1f}" if whole else "",
        *shares,
        f"{line['bytes'] / 1e6:.1f}" if "bytes" in line else "",
        "" if stale is None else f"{stale:.1f}",
        str(line.get("generation", "")),
    ]
