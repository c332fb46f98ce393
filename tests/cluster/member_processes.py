"""Real processes for tests, which take commands as lines and whose output is recorded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.clock import PATIENCE, unless_late

ROOT = Path(__file__).parents[2]

MEMBER = """
import json, logging, os, socket, sys, threading, time, traceback
from stratagem.cluster.membership import Failure, Member, Membership
from stratagem.cluster.rendezvous import form
from stratagem.cluster.spec import ClusterSpec, Task

logging.basicConfig(level=logging.INFO, format="%(message)s")
how = json.loads(sys.argv[1])

lock = threading.Lock()

def say(**words):
    with lock:
        print(json.dumps(words), flush=True)

def explain(problem):
    who = getattr(problem, "who", "")
    return {"error": type(problem).__name__, "text": str(problem), "who": who}

try:
    if "cluster" in how:
        spec = ClusterSpec(how["cluster"])
        members = form(spec, Task(*how["task"]), secret=how.get("secret", "s").encode(),
                       limit=how.get("limit", 30), give_up=how.get("give_up", 60))
    else:
        everyone = [Member(*each) for each in how["members"]]
        sockets = {int(r): socket.socket(fileno=fd) for r, fd in how["sockets"].items()}
        if how["rank"] == 0:
            members = Membership.hub(everyone, sockets, give_up=how.get("give_up", 60))
        else:
            members = Membership.spoke(everyone, how["rank"], sockets[0],
                                       give_up=how.get("give_up", 60))
except BaseException as problem:
    say(**explain(problem))
    sys.exit(3)

members.on_trouble(lambda t: say(event="trouble", rank=t.rank, name=t.member.name, kind=t.kind,
                                 detail=t.detail, thread=threading.current_thread().name,
                                 **explain(t.error())))
say(event="ready", rank=members.rank)
for line in sys.stdin:
    verb, _, rest = line.strip().partition(" ")
    try:
        if verb == "exchange":
            asked = json.loads(rest)
            say(event="notes", notes=members.exchange(asked["note"], asked.get("limit", 20)))
        elif verb == "fail":
            try:
                raise ZeroDivisionError("by " + rest)
            except ZeroDivisionError:
                members.report_failure(traceback.format_exc())
        elif verb == "announce":
            t = json.loads(rest)
            shot = Member(t["name"], t["where"])
            members.announce(Failure(t["rank"], shot, "died", "it was shot"))
        elif verb == "fork":
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            say(event="forked", pid=child)
        elif verb == "leave":
            members.leave()
            say(event="left", threads=[t.name for t in threading.enumerate()])
        elif verb == "exit":
            break
    except BaseException as problem:
        say(**explain(problem))
"""


class Process:
    """A child whose stdout (JSON lines) and stderr are recorded, each line with its time."""

    def __init__(self, source: str, *args: str, fds: Sequence[int] = (), **env: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-u", "-c", source, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=fds,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        )
        self.out: list[tuple[float, str]] = []
        self.err: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self._readers = [
            threading.Thread(target=self._read, args=each, daemon=True)
            for each in ((self.child.stdout, self.out), (self.child.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Iterator[str], kept: list[tuple[float, str]]) -> None:
        for line in stream:
            with self._changed:
                kept.append((time.monotonic(), line.rstrip("\n")))
                self._changed.notify_all()

    def say(self, line: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()

    def expect(
        self, word: str, seconds: float, since: float = 0.0
    ) -> tuple[float, dict[str, object]]:
        """Return the first JSON line with this word, and its time."""
        when, line = self._wait(self.out, word, seconds, since)
        return when, json.loads(line)

    def logged(self, word: str, seconds: float, since: float = 0.0) -> tuple[float, str]:
        """Return the first log line with this word, and its time."""
        return self._wait(self.err, word, seconds, since)

    def has_logged(self, word: str) -> bool:
        with self._changed:
            return any(word in line for _, line in self.err)

    def _wait(
        self, kept: list[tuple[float, str]], word: str, seconds: float, since: float
    ) -> tuple[float, str]:
        def found() -> tuple[float, str] | None:
            return next((each for each in kept if word in each[1] and each[0] >= since), None)

        with self._changed:
            self._changed.wait_for(found, seconds)
            hit = found()
        unless_late(hit, f"no {word!r} in {seconds} s; out={self.out} err={self.err}")
        assert hit is not None
        return hit

    def signal(self, number: signal.Signals) -> float:
        """Send a signal to this child; returns the time."""
        now = time.monotonic()
        self.child.send_signal(number)
        return now

    def ends(self) -> int:
        """Wait for its end and for all its output; returns the exit code."""
        code = self.child.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        return code

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.child.send_signal(signal.SIGCONT)
        self.child.kill()
        self.child.wait(PATIENCE)
        for stream in (self.child.stdin, self.child.stdout, self.child.stderr):
            with contextlib.suppress(OSError):
                stream.close()
