"""The process of a task, with the processes that it starts, and the guard of the launcher."""

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

from stratagem.cluster.exit_cause import VARIABLE, part_of
from stratagem.cluster.spec import Task
from stratagem.errors import UsageError

# Isolated and without site-packages: a few milliseconds instead of many.
_TETHER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("tether.py"))]


class Process:
    """A task's process, which leads a session of its own, so that signals reach its children.

    `code` is None until `reap`, then as in `subprocess`. `because_of` is then the task that this
    one blames for its end, which it wrote into the file `blame`.
    """

    def __init__(
        self,
        task: Task,
        command: Sequence[str],
        environ: Mapping[str, str],
        blame: Path,
        stdin: int = subprocess.DEVNULL,
        output: int = subprocess.PIPE,
        place: Path | None = None,
    ) -> None:
        """`output`: a file descriptor for stdout and stderr; by default two pipes. `place`: where
        it runs; by default here."""
        self.task = task
        self.code: int | None = None
        self.because_of = self.part = ""
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
                cwd=place,
            )
        except OSError as problem:
            raise UsageError(f"{task} cannot be started: {problem}") from problem
        self.pid = self._popen.pid
        pipes = self._popen.stdout, self._popen.stderr
        self.stdout, self.stderr = (-1 if pipe is None else pipe.fileno() for pipe in pipes)

    def watch(self, ended: SimpleQueue[Process]) -> None:
        """Put this process into the queue when it ends; a thread for each keeps the true order."""
        watcher = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        watcher.start()

    def _watch(self, ended: SimpleQueue[Process]) -> None:
        if hasattr(os, "waitid"):
            # Not reaped here: the process id stays taken until the supervisor has seen the end.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._popen.wait()
        self.ended = time.monotonic()
        ended.put(self)

    def reap(self) -> int:
        """Read the exit code, and whom the task blames."""
        self.code = self._popen.wait()
        with contextlib.suppress(FileNotFoundError):  # the task made no strategy
            self.part = part_of(self._blame).read_text()
        with contextlib.suppress(FileNotFoundError):  # the task blames no other
            self.because_of = self._blame.read_text()
        return self.code

    def signal(self, number: signal.Signals) -> None:
        """Signal the task and the processes that it started."""
        if not self._gone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def gone(self) -> bool:
        """Whether the task and all processes that it started have ended."""
        if self.code is not None and not self._gone:
            _adopt(self.pid)
            try:
                os.killpg(self.pid, 0)
            except (ProcessLookupError, PermissionError):
                self._gone = True  # remembered: the id may be reused from now on
        return self._gone

    def kill(self) -> None:
        """Kill the process group at once, for a launcher that can no longer supervise."""
        if self.gone():
            return
        self.signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self._popen.wait(timeout=5)


def _adopt(group: int) -> None:
    """Reap orphans of a group, whose parent is the launcher if that is process 1."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


class Guard:
    """A process that kills the tasks' process groups when the launcher dies, however it dies.

    It also removes `folder`, the launcher's temporary files.
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
        """End the guard, which kills the groups that were not removed."""
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
        # Without the guard, PR_SET_PDEATHSIG still ties the tasks to the launcher.
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(line.encode())
