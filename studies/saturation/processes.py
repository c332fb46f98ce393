"""Processes on the hosts of a study: one a host, one a server, all forked from this one.

Forking, because torch takes seconds to import and a study starts more than a hundred processes.
This process must have no threads then, and have computed nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hosts import Hosts

PORT = 2222
LIMIT = 120.0  # seconds for one leg, the start included
_FAREWELL = 10.0  # seconds in which a process should have ended by itself
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Cast:
    """Which processes take part, and how their gradients travel."""

    strategy: str
    hosts: int
    servers: int
    wire: str


@dataclass
class Process:
    """A forked process: lines to it, lines from it."""

    name: str
    pid: int
    to: int
    out: int
    rest: bytes = b""
    ended: bool = False
    said: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """What it has printed since; empty at its end, too."""
        data = os.read(self.out, 1 << 16)
        self.ended = not data
        *whole, self.rest = (self.rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def wait(self, deadline: float) -> None:
        """Until it ends; killed at the deadline."""
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                break
            time.sleep(0.01)
        for end in (self.to, self.out):
            if end >= 0:
                os.close(end)
        self.to = self.out = -1


def start(name: str, space: str, environ: dict[str, str], run: Callable[[], object]) -> Process:
    """Run a function in a process of its own on a host."""
    theirs_in, to = os.pipe()
    out, theirs_out = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(theirs_in)
        os.close(theirs_out)
        return Process(name, pid, to, out)
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it decides
        for mine, standard in ((theirs_in, 0), (theirs_out, 1), (theirs_out, 2)):
            os.dup2(mine, standard)
        os.closerange(3, 256)  # the other processes' ends are not for this one
        sys.stdin = os.fdopen(0, "r", closefd=False)
        _enter(space)
        os.environ.update(environ)
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter(space: str) -> None:
    """Into a network namespace; the process ends with the one that forked it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with open(f"/var/run/netns/{space}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {space}")


class Troupe:
    """The processes of one cast, until `end`."""

    def __init__(self, cast: Cast, hosts: Hosts) -> None:
        import task

        from stratagem import ps

        task.preload()
        self.cast, self.hosts = cast, hosts
        self.workers: list[Process] = []
        self.servers: list[Process] = []
        try:
            for i in range(cast.servers):
                self.servers.append(self._start("ps", i, lambda: ps.main([])))
            for i in range(cast.hosts):
                self.workers.append(
                    self._start("worker", i, lambda: task.main(cast.strategy, cast.wire))
                )
        except BaseException:
            self.end()
            raise

    def _start(self, role: str, index: int, run: Callable[[], object]) -> Process:
        cast, hosts = self.cast, self.hosts
        jobs = {"worker": range(cast.hosts), "ps": range(cast.hosts, cast.hosts + cast.servers)}
        cluster = {
            job: [f"{hosts.address(i)}:{PORT}" for i in where]
            for job, where in jobs.items()
            if where
        }
        environ = {
            "STRATAGEM_SECRET": "of a study",
            "STRATAGEM_SHARED_MEMORY": "0",  # hosts of their own: tensors travel
        }
        if cast.strategy != "one":
            place = {"type": role, "index": index}
            environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": place})
        return start(f"{role} {index}", hosts.names[jobs[role][index]], environ, run)

    def run(self, leg: dict[str, Any]) -> list[list[float]]:
        """Train; when each worker's forward passes began."""
        for process in self.workers:
            os.write(process.to, json.dumps(leg).encode() + b"\n")
        found: dict[str, list[float]] = {}
        deadline = time.monotonic() + LIMIT
        with selectors.DefaultSelector() as selector:
            for process in (*self.workers, *self.servers):
                selector.register(process.out, selectors.EVENT_READ, process)
            while len(found) < len(self.workers):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RuntimeError(self._last_words(f"nothing within {LIMIT:.0f} s"))
                for key, _ in ready:
                    self._hear(key.data, found)
        return [found[process.name] for process in self.workers]

    def _hear(self, process: Process, found: dict[str, list[float]]) -> None:
        for line in process.lines():
            if line.startswith("LEG "):
                found[process.name] = json.loads(line[4:])
            else:
                process.said.append(line)
        if process.ended:
            raise RuntimeError(self._last_words(f"{process.name} has ended"))

    def _last_words(self, what: str) -> str:
        said = [
            f"{p.name}: {line}" for p in (*self.servers, *self.workers) for line in p.said[-15:]
        ]
        return "\n".join([f"{self.cast}: {what}", *said])

    def end(self) -> None:
        """Let everybody end by itself, then make sure."""
        for process in self.workers:
            if process.to >= 0:
                os.close(process.to)
                process.to = -1
        deadline = time.monotonic() + _FAREWELL
        for process in (*self.workers, *self.servers):
            process.wait(deadline)
        self.workers, self.servers = [], []
