"""Runs the tasks of a job on this machine, and starts killed tasks again if that is allowed."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from stratagem.cluster import exit_cause
from stratagem.cluster.environment import cores
from stratagem.cluster.generation_hub import GenerationHub
from stratagem.cluster.handshake import SECRET_VARIABLE, job_secret
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.errors import UsageError
from stratagem.figures.recorder import VARIABLE as RECORD_VARIABLE
from stratagem.figures.recorder import Recorder
from stratagem.figures.run_folder import LAUNCHER
from stratagem.launch.output import Relay, Sink, wants_colour
from stratagem.launch.processes import Guard, Process
from stratagem.launch.supervise import LaunchPolicy, SignalQueue, Supervisor, ending, last_word
from stratagem.tracebacks import VARIABLE as TRACEBACK_VARIABLE


@dataclass(frozen=True)
class Job:
    """One command for every task of a cluster, and the GPUs of each."""

    spec: ClusterSpec
    command: tuple[str, ...]
    gpus: Mapping[Task, tuple[str, ...]]
    gpu_memory: str | None = None

    def environments(self, base: Mapping[str, str]) -> dict[Task, dict[str, str]]:
        """The environment of every task, with a fresh secret for the job."""
        tasks = self.spec.tasks()
        shared = {
            "OMP_NUM_THREADS": str(max(1, cores() // len(tasks))),
            **base,
            "PYTHONUNBUFFERED": "1",
            SECRET_VARIABLE: secrets.token_hex(32),
        }
        if self.gpu_memory:
            shared["STRATAGEM_GPU_MEMORY"] = self.gpu_memory
        return {task: {**shared, **self._own(task)} for task in tasks}

    def _own(self, task: Task) -> dict[str, str]:
        own = {"TF_CONFIG": self.spec.tf_config(task)}
        if any(self.gpus.values()):
            own["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[task])
        return own


def launch(
    job: Job,
    *,
    grace: float,
    colour: bool,
    tracebacks: bool = False,
    record: Path | None = None,
    task_restarts: int = 0,
) -> tuple[int, bool]:
    """Run the tasks and print which failed first; return the exit code, and whether a signal to
    the launcher has ended them."""
    out, err = (
        Sink(s, colour=colour and wants_colour(s, os.environ)) for s in (sys.stdout, sys.stderr)
    )
    relay = Relay(out, err)
    with SignalQueue() as inbox, Guard() as guard, ExitStack() as stack:
        environ = os.environ | ({TRACEBACK_VARIABLE: "1"} if tracebacks else {})
        environ |= {RECORD_VARIABLE: str(record)} if record else {}
        events = _Events(environ.get(RECORD_VARIABLE))
        starter = _TaskStarter(job, environ, guard, relay, stack, task_restarts, events)
        processes = [starter.start(task) for task in starter.environments]
        relay.start()
        supervisor = Supervisor(processes, guard, relay, inbox, grace, tracebacks, starter)
        supervisor.run()
        _finish(relay, inbox, hurry=supervisor.stopped is not None)
        said = alone(processes) if not supervisor.code else ""
    if (first := supervisor.first) is not None:
        assert first.code is not None
        lived = first.ended - first.started
        how = f"{ending(first.code)} (pid {first.pid}) after {lived:.1f} s"
        err.write(f"{last_word(first.task, how, relay.tail(first))}\n".encode())
    err.write(said.encode())
    return supervisor.code, supervisor.stopped is not None


def alone(processes: Sequence[Process]) -> str:
    """Say which of several tasks have ended well and never took part in the job."""
    trained = [each for each in processes if each.task.type in ("chief", "worker")]
    part = {each: each.part for each in trained if each.code == 0}
    idle = [each for each in part if part[each] != exit_cause.COMPUTES]
    if len(trained) < 2 or not idle:
        return ""
    made = any(part[each] == exit_cause.JOINED for each in idle)
    who = " and ".join(str(each.task) for each in idle)
    return (
        f"stratagem run: {'give your model to the strategy' if made else 'make a strategy'} in the "
        "script: call fit on a model of its scope, or\n"
        f"strategy.prepare(model, optimizer, loader). {who} ran the whole script without the\n"
        "others: all of them did the same work, and wrote the same files.\n"
    )


class _Events:
    """Writes events of the launcher into the run's folder of figures, if there is one."""

    def __init__(self, folder: str | None) -> None:
        try:
            self._file = Recorder(Path(folder), LAUNCHER, announced=False) if folder else None
        except OSError as problem:
            raise UsageError(f"nothing can be recorded in {folder}: {problem.strerror}") from None

    def launched(self, process: Process) -> None:
        """Record that a task was started."""
        if self._file is not None:
            host, pid = socket.gethostname(), process.pid
            self._file.write(event="launched", about=str(process.task), host=host, pid=pid)

    def add(self, kind: str, process: Process | None, text: str) -> None:
        """Record an end of a task, or an action of the launcher."""
        if self._file is not None:
            about = {"about": str(process.task), "error": text} if process is not None else {}
            self._file.write(event=kind, text=text, **about)


class _TaskStarter(LaunchPolicy):
    """Starts the tasks of a job, and tasks that were killed again, `restarts` times in all."""

    def __init__(
        self,
        job: Job,
        base: Mapping[str, str],
        guard: Guard,
        relay: Relay,
        stack: ExitStack,
        restarts: int,
        events: _Events,
    ) -> None:
        self._job, self._guard, self._relay, self._stack = job, guard, relay, stack
        self._restarts, self._events = restarts, events
        self.environments = dict(job.environments(base))
        self._started: list[Process] = []
        self._hub = self._open_hub()

    def _open_hub(self) -> GenerationHub | None:
        """Open the hub at which the tasks of an elastic job meet; it outlives every task."""
        tasks = self._job.spec.training_tasks()
        if len(tasks) == 1:
            return None
        secret = job_secret(self.environments[tasks[0]], self._job.spec.to_json())
        hub = GenerationHub(self._job.spec, secret)
        self._stack.callback(hub.close)
        for task in tasks:
            self.environments[task]["TF_CONFIG"] = self._job.spec.tf_config(task, hub.address)
        return hub

    def start(self, task: Task) -> Process:
        number = list(self.environments).index(task)
        blame = self._guard.folder / str(number)
        process = Process(task, self._job.command, self.environments[task], blame)
        self._stack.callback(process.kill)
        self._guard.add(process)
        self._relay.add(process, number)
        self._events.launched(process)
        self._started.append(process)
        return process

    def record(self, kind: str, process: Process | None, text: str) -> None:
        self._events.add(kind, process, text)

    def restart(self, process: Process) -> Process | None:
        """Start a server or worker again, but not the chief of a job that cannot do without it."""
        task = process.task
        needed = str(task) == "worker 0" and not self.goes_on(process)
        if not self._restarts or task.type not in ("ps", "worker") or needed:
            return None
        self._restarts -= 1
        return self.start(task)

    def goes_on(self, process: Process) -> bool:
        return self._hub is not None and self._hub.does_without(str(process.task))

    def comes_too_late(self, process: Process) -> bool | None:
        """Whether a restarted task had not joined when the job was over: known in an elastic job;
        with servers (None) it may have joined, and be about to end."""
        name, hub = str(process.task), self._hub
        again = process is not next(each for each in self._started if each.task == process.task)
        if hub is not None and hub.took_part(name):
            return not hub.has(name) or (again and hub.has_lost(name))
        # servers end without an error when the job is over
        over = any(each.task.type == "ps" and each.code == 0 for each in self._started)
        return None if over and again else False


def _finish(relay: Relay, inbox: SignalQueue, *, hurry: bool) -> None:
    """Print the remaining output; after an interrupt, for a second at most."""
    relay.close()
    waited = 0.0
    while not relay.join(0.1):
        hurry = hurry or bool(inbox.arrived)
        waited += 0.1
        if hurry and waited > 1:
            return
