"""The process of one task, with all that it starts, and the guard that outlives the launcher."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkdtemp
from typing import Self

from stratagem.cluster.exit_cause import VARIABLE
from stratagem.cluster.spec import Task
from stratagem.errors import UsageError

# Isolated and without site-packages: a few milliseconds instead of many.
_TETHER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("tether.py"))]


class Process:
    """One running task: the leader of a session of its own, so that a signal reaches its children.

    `code` is None until the supervisor has taken note of the end; then as in `subprocess`.
    `because_of` is whom it then blames for its end, by the file `blame`.
    """

    def __init__(
        self,
        task: Task,
        command: Sequence[str],
        environ: Mapping[str, str],
        blame: Path,
        stdin: int = subprocess.DEVNULL,
        output: int = subprocess.PIPE,
    ) -> None:
        """`output` is a file's descriptor where both streams go into one; else they are pipes."""
        self.task = task
        self.code: int | None = None
        self.because_of = ""
        self._blame = blame
        self.started = time.monotonic()
        self.ended = self.started
        self._gone = False
        hold = [*_TETHER, "hold", str(os.getpid()), *command]
        try:
            self._popen = subprocess.Popen(
                hold,
                env={**environ, VARIABLE: str(blame)},
                bufsize=0,
                start_new_session=True,
                stdin=stdin,
                stdout=output,
                stderr=output,
            )
        except OSError as problem:
            raise UsageError(f"{task} cannot be started: {problem}") from problem
        self.pid = self._popen.pid
        pipes = self._popen.stdout, self._popen.stderr
        self.stdout, self.stderr = (-1 if pipe is None else pipe.fileno() for pipe in pipes)

    def watch(self, ended: SimpleQueue[Process]) -> None:
        """Put this process into the queue when it ends; a thread each keeps their true order."""
        watcher = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        watcher.start()

    def _watch(self, ended: SimpleQueue[Process]) -> None:
        if hasattr(os, "waitid"):
            # Not reaped here: until the supervisor knows, nobody else may get the process id.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._popen.wait()
        self.ended = time.monotonic()
        ended.put(self)

    def reap(self) -> int:
        """Take note of the end."""
        self.code = self._popen.wait()
        with contextlib.suppress(FileNotFoundError):  # it blames nobody
            self.because_of = self._blame.read_text()
        return self.code

    def signal(self, number: signal.Signals) -> None:
        """Signal the task and all that it started."""
        if not self._gone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def gone(self) -> bool:
        """Whether nothing is left, neither of the task nor of what it started."""
        if self.code is not None and not self._gone:
            _adopt(self.pid)
            try:
                os.killpg(self.pid, 0)
            except (ProcessLookupError, PermissionError):
                self._gone = True  # remembered: from now on the number may be another process's
        return self._gone

    def kill(self) -> None:
        """End at once what is left; only for a launcher that can no longer supervise."""
        if self.gone():
            return
        self.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self._popen.wait(timeout=5)


def _adopt(group: int) -> None:
    """Reap the orphans of a group, which come to the launcher where it is process 1."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


class Guard:
    """A process that sees the launcher die, however it dies, and then kills the tasks' groups.

    The launcher's folder, for whatever it needs while tasks run, goes with them.
    """

    def __init__(self) -> None:
        self.folder = Path(mkdtemp(prefix=f"stratagem-{os.getpid()}-"))
        self._popen = subprocess.Popen(
            [*_TETHER, "guard", str(self.folder)],
            bufsize=0,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def add(self, process: Process) -> None:
        self._tell(f"+{process.pid}\n")

    def remove(self, process: Process) -> None:
        self._tell(f"-{process.pid}\n")

    def close(self) -> None:
        """Let it go; groups that were not removed are killed."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # unless the guard has done so

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _tell(self, line: str) -> None:
        assert self._popen.stdin is not None
        # Somebody killed the guard: the tasks themselves are still tied to the launcher.
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(line.encode())
