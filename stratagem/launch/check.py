"""`stratagem check`: can every task reach every other, and how fast?

Run it on each machine in place of the training. It listens where this task will listen, calls
at the address of every other task, and says of each one it does not reach what to do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from stratagem.cluster.acceptor import Acceptor
from stratagem.cluster.environment import TF_CONFIG_EXAMPLE, TF_ROLES, detect, read_tf_config
from stratagem.cluster.failure import Member
from stratagem.cluster.handshake import peer_name, secret_for
from stratagem.cluster.sockets import connect, listen
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.cluster.waiting import FIRST, Wait, say_missing
from stratagem.errors import ClusterError, StratagemError
from stratagem.launch.cli import declare
from stratagem.launch.probe import (
    CheckRow,
    Speed,
    answer,
    answered,
    broke_off,
    diagnose,
    introduce,
    measure,
    measured,
    own,
)

log = logging.getLogger("stratagem")

CONNECT = 3.0  # seconds for one try to connect
RETRY = 0.3  # seconds between two tries
REFUSALS = 5  # failures in a row, from the first certain one on, that make it final


class CheckRound:
    """One run of a check: a thread that calls each other task, and one for each caller."""

    def __init__(self, spec: ClusterSpec, task: Task | None, secret: bytes, size: int) -> None:
        self._me = "" if task is None else str(task)
        self._places = {str(each): spec.address(each) for each in spec.tasks()}
        self._others = [name for name in self._places if name != self._me]
        self._secret = secret
        self._size = size
        self._rows: dict[str, CheckRow] = {}
        self._visited_by: set[str] = set()
        self._changed = threading.Condition()
        self._measuring = threading.Lock()
        self._over = threading.Event()

    def run(self, wait: float) -> list[CheckRow]:
        """Call until each task is reached and has reached this one, or `wait` seconds are over."""
        door = self._listen() if self._me in self._places else None
        try:
            for name in self._others:
                caller = partial(self._call_on, name)
                threading.Thread(target=caller, name="stratagem-check", daemon=True).start()
            self._wait(Wait(wait, first=FIRST), listening=door is not None)
        finally:
            self._over.set()
            if door is not None:
                door.close()
        with self._changed:
            return [self._final(name, door is not None) for name in self._places]

    def _wait(self, patience: Wait, listening: bool) -> None:
        while True:
            with self._changed:
                missing = self._unfinished(listening)
                if not missing or patience.over:
                    return
                self._changed.wait(patience.pause)
            say_missing([Member(name, self._places[name]) for name in missing], patience)

    def _unfinished(self, listening: bool) -> list[str]:
        """Tasks without a certain result, and tasks that were reached but did not call here."""
        rows = self._rows
        return [
            name
            for name in self._others
            if name not in rows
            or not rows[name].certain
            or (listening and rows[name].speed is not None and name not in self._visited_by)
        ]

    def _final(self, name: str, listening: bool) -> CheckRow:
        row = self._rows.get(name)
        if row is None:
            problem = TimeoutError("timed out")
            return diagnose(name, self._places[name], problem)
        if listening and row.speed is not None and name not in self._visited_by:
            _, _, port = self._places[self._me].rpartition(":")
            remedy = (
                f"but it has not reached this task: is TCP port {port} open from there to here?"
            )
            return dataclasses.replace(row, remedy=remedy)
        return row

    def _record(self, row: CheckRow) -> None:
        with self._changed:
            self._rows[row.task] = row
            self._changed.notify_all()

    def _call_on(self, name: str) -> None:
        """Try one task until it is measured, or certainly cannot be, or the check is over."""
        refusal, refusals = None, 0
        while not self._over.is_set():
            row = self._try(name)
            if row.certain and not row.ok:
                refusal = row
            if refusal is not None and not row.ok:
                # A peer that has refused and is gone counts as one that still refuses.
                row, refusals = refusal, refusals + 1
            certain = row.certain and (row.ok or refusals >= REFUSALS)
            if not self._over.is_set():
                self._record(dataclasses.replace(row, certain=certain))
            if certain:
                return
            self._over.wait(RETRY)

    def _try(self, name: str) -> CheckRow:
        address = self._places[name]
        try:
            with connect(address, CONNECT) as sock:
                row = answered(name, address, introduce(sock, self._secret, self._me))
                if not row.ok or row.certain:
                    return row
                self._record(row)
                return self._measure(name, sock)
        except OSError as problem:
            return diagnose(name, address, problem)

    def _measure(self, name: str, sock: socket.socket) -> CheckRow:
        try:
            with self._measuring:  # two measurements would halve each other's bandwidth
                speed = measure(sock, self._size)
        except OSError as problem:
            return broke_off(name, self._places[name], problem)
        return measured(name, self._places[name], speed)

    def _listen(self) -> Acceptor | None:
        """Listen at this task's port; a port that cannot be opened is a row of the table."""
        address = self._places[self._me]
        try:
            listener = listen(address, self._me)
        except ClusterError as problem:
            self._record(own(self._me, address, problem))
            return None
        self._record(own(self._me, address, None))
        door = Acceptor(listener, self._secret, self._answer, f"{self._me} at {address}")
        door.open()
        return door

    def _answer(self, conn: socket.socket) -> None:
        with conn:
            try:
                visitor = answer(conn, self._me)
            except OSError as problem:
                log.warning("refused a connection from %s: %s", peer_name(conn), problem)
                return
        with self._changed:
            self._visited_by.add(visitor)
            self._changed.notify_all()


WIDE = 130  # columns from which the remedies have room inside the table


def check(
    spec: ClusterSpec, task: Task | None, *, secret: bytes, wait: float, size_bytes: int
) -> list[CheckRow]:
    """Call every task and answer the checks of other tasks; return a row for each task."""
    return CheckRound(spec, task, secret, size_bytes).run(wait)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem check`."""
    declare(
        parser,
        (
            "--cluster FILE",
            "JSON: the cluster, or all that TF_CONFIG holds; else the environment is read",
        ),
        ("--task ROLE:N", "this machine's task, as worker:1"),
        ("--wait S", "seconds to try for", float, 30.0),
        ("--megabytes M", "sent each way to measure", float, 16.0),
        ("--insecure", "listen on a network without STRATAGEM_SECRET"),
        ("--json FILE", "the table for programs; stratagem plan --network reads it"),
    )


def main(args: argparse.Namespace) -> int:
    """Run a check and print its table; 0 if every task was reached."""
    try:
        spec, task = _cluster(args.cluster)
        task = _task(args.task, spec) if args.task else task
        ports = [spec.address(each) for each in spec.tasks()]
        secret = secret_for(spec, ports, insecure=args.insecure, option="--insecure")
    except (StratagemError, OSError) as problem:
        print(f"stratagem check: {problem}", file=sys.stderr)
        return 2
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
    written = read_tf_config(text, TF_ROLES, file, TF_CONFIG_EXAMPLE)
    if written is None:
        raise ClusterError(f"{file}: its cluster is empty; correct: {TF_CONFIG_EXAMPLE}")
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


def _print(rows: Sequence[CheckRow]) -> None:
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
