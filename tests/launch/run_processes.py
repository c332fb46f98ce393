"""`stratagem run` as a real process, with a script of the test, and its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.clock import PATIENCE
from tests.clock import wait_for as wait_for

HEAD = """
import json, os, pathlib, signal, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
index = task["index"]
def note(name, value):
    pathlib.Path(f"{name}.part").write_text(str(value))
    os.replace(f"{name}.part", name)
"""

# A task with a child of its own, neither of which ends by itself; {0} is run in both.
FAMILY = """
stubborn = {0!r}
child = subprocess.Popen([sys.executable, "-c", "import signal, time, sys\\n" + stubborn +
                          "\\nprint('child', flush=True)\\ntime.sleep(60)"], stdout=subprocess.PIPE)
exec(stubborn)
child.stdout.readline()
note(f"child{{index}}", child.pid)
note(f"task{{index}}", os.getpid())
time.sleep(60)
"""
DEAF = "for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)"


class Launcher:
    """`stratagem run` in a directory, with a script of its own."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, script: str, *options: str, **environ: str) -> subprocess.Popen[str]:
        (self.where / "train.py").write_text(HEAD + script)
        base = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "TF_CONFIG")}
        command = [sys.executable, "-m", "stratagem", "run", *options]
        child = subprocess.Popen(
            command if "-m" in options or "train.py" in options else [*command, "train.py"],
            cwd=self.where,
            env={**base, "CUDA_VISIBLE_DEVICES": "", **environ},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            errors="surrogateescape",
        )
        self.started.append(child)
        return child

    def finish(self, script: str, *options: str, **environ: str) -> tuple[int, str, str]:
        child = self(script, *options, **environ)
        out, err = child.communicate(timeout=PATIENCE)
        return child.returncode, out, err

    def end(self) -> None:
        """Kill the processes that the test has left."""
        for child in self.started:
            if child.poll() is None:
                child.kill()
            child.communicate()
        for noted in [*self.where.glob("task*"), *self.where.glob("child*")]:
            pid = int(noted.read_text())
            if alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def pid(self, name: str) -> int:
        """The process id that a script has noted in a file."""
        wait_for(lambda: (self.where / name).exists())
        return int((self.where / name).read_text())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def said(text: str, name: str) -> list[str]:
    """The output of a task."""
    label = f"[{name}] "
    return [line.removeprefix(label) for line in text.splitlines() if line.startswith(label)]
