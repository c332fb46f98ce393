"""Scripts as real processes: each with its own output, environment, signals and end.

Importing torch takes seconds, and some tests need three processes. A nursery imports it once; a
script is a fork of it, in a session of its own, that runs as `__main__` and ends as any
interpreter ends: tracebacks, exit hooks and signals are Python's own.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.clock import PATIENCE
from tests.clock import wait_for as wait_for

ROOT = Path(__file__).parents[2]

NURSERY = Path(__file__).with_name("nursery.py")


def _stat(pid: int) -> list[str] | None:
    """State and parent of a process, None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def runs(pid: int) -> bool:
    """Whether a process runs; one that is dead but not yet reaped does not."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def family(pid: int) -> list[int]:
    """The processes that descend from this one: its zygote, their followers."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    parents = {each: int(stat[1]) for each in pids if (stat := _stat(each))}
    found, fresh = [], [pid]
    while fresh:
        fresh = [child for child, parent in parents.items() if parent in fresh]
        found += fresh
    return found


class Script:
    """A process that runs one script; its output lies in files beside it."""

    def __init__(self, pid: int, stem: Path) -> None:
        self.pid = pid
        self._stem = stem

    @property
    def out(self) -> str:
        return self._text(".out")

    @property
    def err(self) -> str:
        return self._text(".err")

    def _text(self, ending: str) -> str:
        path = self._stem.with_suffix(ending)
        return path.read_text(errors="replace") if path.exists() else ""

    def says(self, words: str, seconds: float = 30.0) -> float:
        """Wait for these words on either stream; the seconds it took."""

        def said() -> bool:
            done = self.status is not None  # before reading: what it said last counts
            if words in self.out or words in self.err:
                return True
            assert not done, f"it ended without a word of {words!r}: {self}"
            return False

        return wait_for(said, seconds, f"for {words!r} from {self}")

    @property
    def status(self) -> int | None:
        """The exit code (negative: a signal's number), None while it runs."""
        text = self._text(".status")
        return int(text) if text else None

    def ends(self, seconds: float = 30.0) -> int:
        """Wait for its end; the exit code."""
        wait_for(lambda: self.status is not None, seconds, f"for the end of {self}")
        assert self.status is not None
        return self.status

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def keyboard(self) -> None:
        """Ctrl-C, as a terminal sends it: to the whole process group in the foreground."""
        os.killpg(self.pid, signal.SIGINT)

    def noted(self, name: str) -> object:
        """The last value that the script printed as `name = json`."""
        lines = [line for line in self.out.splitlines() if line.startswith(f"{name} = ")]
        assert lines, f"no {name!r} from {self}"
        return json.loads(lines[-1].partition(" = ")[2])

    def __repr__(self) -> str:
        return f"{self._stem.name} (status {self.status})\n--- out\n{self.out}\n--- err\n{self.err}"


class Nursery:
    """Starts scripts in milliseconds; ends what is left of them."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        clean = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "RANK")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(NURSERY), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            env={
                **clean,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": str(ROOT),
            },
        )
        theirs.close()
        self._socket = ours
        self._file = ours.makefile("rw")
        self._started: list[Script] = []
        assert self._file.readline() == "ready\n"

    def start(self, where: Path, source: str, name: str = "train", **environ: str) -> Script:
        """Run a script in this directory, with these variables in its environment."""
        stem = where / name
        stem.with_suffix(".py").write_text(source)
        order = {
            "path": str(stem.with_suffix(".py")),
            "where": str(where),
            "environ": environ,
            **{key: str(stem.with_suffix(f".{key}")) for key in ("out", "err", "status")},
        }
        print(json.dumps(order), file=self._file, flush=True)
        script = Script(int(self._file.readline()), stem)
        self._started.append(script)
        return script

    def clear(self) -> None:
        """Kill the scripts that still run; their zygotes and followers follow them."""
        for script in self._started:
            if script.status is None and runs(script.pid):
                script.signal(signal.SIGKILL)
                script.ends()
        self._started.clear()

    def close(self) -> None:
        self.clear()
        self._file.close()
        self._socket.close()
        self._process.wait(PATIENCE)


@functools.cache
def nursery() -> Nursery:
    """The one nursery of this test run."""
    made = Nursery()
    atexit.register(made.close)
    return made
