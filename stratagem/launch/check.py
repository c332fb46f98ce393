"""`stratagem check`: can every task reach every other, and how fast?

Run it on each machine in place of the training. It listens where this task will listen, calls
at the address of every other task, and says of each one it does not reach what to do.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from stratagem.cluster import tf_config
from stratagem.cluster.dial import is_loopback
from stratagem.cluster.environment import detect
from stratagem.cluster.handshake import SECRET_VARIABLE, job_secret
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.errors import ClusterError, StratagemError
from stratagem.launch.diagnosis import Row
from stratagem.launch.probe import Speed
from stratagem.launch.round_call import RoundCall

WIDE = 130  # columns from which the remedies have room inside the table

__all__ = ["Row", "add_arguments", "check", "main"]


def check(
    spec: ClusterSpec, task: Task | None, *, secret: bytes, wait: float, size_bytes: int
) -> list[Row]:
    """Try every task of the cluster, answering the checks of the others; one row a task."""
    return RoundCall(spec, task, secret, size_bytes).run(wait)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem check`."""
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="JSON: the cluster, or all that TF_CONFIG holds; else the environment is read",
    )
    parser.add_argument("--task", metavar="ROLE:N", help="this machine's task, as worker:1")
    parser.add_argument("--wait", type=float, default=30.0, metavar="S", help="seconds to try for")
    parser.add_argument(
        "--megabytes", type=float, default=16.0, metavar="M", help="sent each way to measure"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="the table for programs; stratagem plan --network reads it"
    )


def main(args: argparse.Namespace) -> int:
    """Run a check and print its table; 0 if every task was reached."""
    try:
        spec, task = _cluster(args.cluster)
        task = _task(args.task, spec) if args.task else task
    except (StratagemError, OSError) as problem:
        print(f"stratagem check: {problem}", file=sys.stderr)
        return 2
    _warn_of_open_door(spec)
    secret = job_secret(os.environ, spec.to_json())
    size = max(1, int(args.megabytes * 1e6))
    try:
        rows = check(spec, task, secret=secret, wait=args.wait, size_bytes=size)
    except KeyboardInterrupt:
        return 130
    _print(rows)
    if args.json is not None:
        try:
            Path(args.json).write_text(json.dumps({"tasks": [asdict(row) for row in rows]}) + "\n")
        except OSError as problem:
            print(f"stratagem check: {args.json}: {problem.strerror}", file=sys.stderr)
            return 2
    return 0 if all(row.ok for row in rows) else 1


def _cluster(file: str | None) -> tuple[ClusterSpec, Task | None]:
    """Read the cluster and, where it is given, this machine's task."""
    if file is None:
        place = detect(os.environ)
        if place is None:
            raise ClusterError(
                "no cluster in the environment: give one with --cluster FILE, or set TF_CONFIG"
            )
        return place.spec, place.task if place.task in place.spec else None
    text = Path(file).read_text()
    spec = _bare_cluster(text, file)
    if spec is not None:
        return spec, None
    written = tf_config.read(text, tf_config.NAMES, file, tf_config.EXAMPLE)
    if written is None:
        raise ClusterError(f"{file}: its cluster is empty; correct: {tf_config.EXAMPLE}")
    return written.spec, written.task if written.task in written.spec else None


def _bare_cluster(text: str, file: str) -> ClusterSpec | None:
    """Return the cluster of a file that names no task; None if it is written like TF_CONFIG."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None  # the spec's own reader words the error
    if isinstance(document, dict) and "cluster" in document:
        if "task" in document:
            return None
        return ClusterSpec.from_json(json.dumps(document["cluster"]), where=file)
    return ClusterSpec.from_json(text, where=file)


def _task(text: str, spec: ClusterSpec) -> Task:
    """Read ROLE:N and see that the cluster has it."""
    role, _, index = text.partition(":")
    if index and not index.isdecimal():
        raise ClusterError(f"--task: {text!r} is not a task; correct: --task worker:1")
    task = Task(role, int(index or 0))
    spec.address(task)
    return task


def _warn_of_open_door(spec: ClusterSpec) -> None:
    if not os.environ.get(SECRET_VARIABLE) and not all(
        is_loopback(spec.address(task)) for task in spec.tasks()
    ):
        print(
            f"{SECRET_VARIABLE} is not set: whoever knows this cluster can join the job. Set it to "
            "the same long random text on every task.",
            file=sys.stderr,
        )


def _print(rows: Sequence[Row]) -> None:
    # rich takes a while to import, which `--help` should not.
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    console = Console()
    wide = console.width >= WIDE
    heads = ["task", "address", "state", "latency", "there / back"]
    table = Table(*(Column(head, overflow="fold") for head in heads), box=SIMPLE)
    if wide:
        table.add_column("what to do")
    for row in rows:
        state = f"[{'green' if row.ok else 'red'}]{row.state}[/]"
        cells = [row.task, escape(row.address), state, *_speed(row.speed)]
        table.add_row(*cells, *([escape(row.remedy)] if wide else []))
    console.print(table)
    for row in rows:
        if row.remedy and not wide:
            console.print(f"[bold]{row.task}[/]: {escape(row.remedy)}", soft_wrap=True)


def _speed(speed: Speed | None) -> tuple[str, str]:
    if speed is None:
        return "", ""
    return f"{speed.latency * 1e3:.2f} ms", f"{speed.up / 1e6:.0f} / {speed.down / 1e6:.0f} MB/s"
