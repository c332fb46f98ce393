"""Jobs over ssh: hosts from a list, where only the package has to be installed.

A supervisor on this machine holds one connection for each task; it goes on when the submitting
process has ended. A task ends with its connection, so a killed supervisor leaves no tasks behind.
Secrets go through stdin, never onto a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from stratagem import __version__
from stratagem.cluster.spec import Task
from stratagem.errors import UsageError
from stratagem.launch.far_task import ALIVE, BECAUSE, GRACE
from stratagem.launch.job_folder import (
    JobFolder,
    JobRequest,
    JobState,
    LogFile,
    TaskEnd,
    last_line,
    now,
)
from stratagem.launch.output import Relay
from stratagem.launch.processes import Guard, Process
from stratagem.launch.supervise import LaunchPolicy, SignalQueue, Supervisor, write_end

_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"),
    *("-o", "ControlMaster=no", "-o", "ControlPath=none"),  # one connection per task
)
_ALIVE = 5.0  # seconds between two lines of ALIVE to each task
_GRACE = 3.0  # seconds for the other tasks to end after a failure
_NOT_REACHED = 255  # ssh's own exit code


class Ssh:
    """Runs jobs with ssh of this machine, with the user's configuration."""

    def prepare(self, request: JobRequest) -> JobRequest:
        hosts = [str(host) for host in request.settings.get("hosts", ())]
        if not hosts:
            raise UsageError("which hosts? As in: --hosts node1,node2 (or hosts in stratagem.toml)")
        tasks = request.tasks()
        places = [hosts[i % len(hosts)] for i in range(len(tasks))]
        own = [[t for t, at in zip(tasks, places, strict=True) if at == host] for host in hosts]
        settings = {
            **request.settings,
            "gpus": _dealt(request, own),
            "places": [_login(host) for host in places],
            "addresses": [f"{_address(host)}:(a free port)" for host in places],
        }
        return replace(request, settings=settings)

    def check(self, request: JobRequest) -> JobRequest:
        """Ask every host whether its tasks could run there, and for free ports."""
        if shutil.which(_ssh(request)[0]) is None:
            raise UsageError(
                f"there is no {_ssh(request)[0]} on this machine: install OpenSSH's client, or say "
                "another with --ssh"
            )
        hosts, tasks = [str(host) for host in request.settings["hosts"]], request.tasks()
        places = {task: hosts[i % len(hosts)] for i, task in enumerate(tasks)}
        wanted = {host: [t for t in tasks if places[t] == host] for host in places.values()}
        with ThreadPoolExecutor(min(16, len(wanted))) as pool:
            asked = {h: pool.submit(_probe, request, h, ts) for h, ts in wanted.items()}
            found = {host: answer.result() for host, answer in asked.items()}
        ports = {
            task: port
            for host, own in wanted.items()
            for task, port in zip(own, found[host]["ports"], strict=True)
        }
        for host, own in wanted.items():
            _check_gpus(request, _login(host), own, found[host]["gpus"])
        addresses = [f"{_address(places[task])}:{ports[task]}" for task in tasks]
        return replace(request, settings={**request.settings, "addresses": addresses})

    def describe(self, request: JobRequest, job: JobFolder) -> str:
        """The commands, each followed by its stdin without the secret and the values of --env."""
        request, lines = request.hidden(), []
        for task, host in zip(request.tasks(), request.settings["places"], strict=True):
            text = _task_json(request, task, "(a secret)")
            lines += [f"# {task}", shlex.join(_command(request, host)), f"# stdin: {text}"]
        return "\n".join([*lines, ""])

    def send(self, request: JobRequest, job: JobFolder) -> str:
        (job.path / "script").write_text(self.describe(request, job))
        name = job.suffix
        job.sent("ssh", name, request)
        with (job.path / "supervisor.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "stratagem.launch.engines.ssh", str(job.path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + 30
        while job.read("supervisor.json") is None and process.poll() is None:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        return name

    def state(self, job: JobFolder) -> JobState:
        alive = self._alive(job)
        if (end := job.end()) is not None:
            return end
        if alive:
            return JobState("running")
        return JobState("ended", text=f"its supervisor was killed: {job.path / 'supervisor.log'}")

    def cancel(self, job: JobFolder) -> None:
        pid = self._alive(job)
        if pid:
            os.kill(pid, signal.SIGTERM)

    def _alive(self, job: JobFolder) -> int:
        """The process id of the supervisor, 0 if it has ended."""
        found = job.read("supervisor.json")
        if found is None:
            return 0
        if found.get("host") != socket.gethostname():
            raise UsageError(f"{job.handle} is supervised by {found.get('host')}: ask there")
        pid = int(found["pid"])
        return pid if _born(pid) == found["born"] else 0


ENGINE = Ssh()


def _born(pid: int) -> str:
    """The start of a process in the kernel's ticks; empty if it has ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if words[0] == "Z" else words[19]


def _ssh(request: JobRequest) -> list[str]:
    return shlex.split(str(request.settings.get("ssh", "ssh")))


def _login(host: str) -> str:
    """The login for ssh, from LOGIN or LOGIN=ADDRESS."""
    return host.partition("=")[0]


def _address(host: str) -> str:
    """The address at which other tasks reach a host."""
    login, _, address = host.partition("=")
    return address or login.rpartition("@")[2]


def _far(request: JobRequest, mode: str) -> str:
    return f"{shlex.quote(request.python)} -m stratagem.launch.far_task {mode}"


def _command(request: JobRequest, login: str) -> list[str]:
    return [*_ssh(request), *_OPTIONS, "--", login, _far(request, "ssh")]


def _task_json(request: JobRequest, task: Task, secret: str) -> str:
    sent: dict[str, Any] = {
        "task": [task.type, task.index],
        "cluster": request.by_role(list(request.settings["addresses"])),
        "folder": request.folder,
        "words": request.words,
        "environ": request.environ,
        "gpus": request.settings["gpus"].get(str(task)),
        "secret": secret,
    }
    return json.dumps(sent)


def _probe(request: JobRequest, host: str, tasks: Sequence[Task]) -> Mapping[str, Any]:
    """Run `far_task probe` on a host; raise if the tasks cannot run there."""
    login, script = _login(host), request.words[0]
    asked = {
        "folder": request.folder,
        "script": None if script == "-m" else script,
        "gpus": request.gpus,
        "ports": len(tasks),
    }
    words = [*_ssh(request), *_OPTIONS, "--", login, _far(request, "probe")]
    try:
        done = subprocess.run(
            words, input=json.dumps(asked) + "\n", capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{login} has not answered in 120 s: `ssh {login} true` must end without a question"
        ) from None
    if done.returncode == _NOT_REACHED:
        raise UsageError(
            f"{login} cannot be reached: {last_line(done.stderr)} (`ssh {login} true` must end "
            "without a question)"
        )
    if done.returncode:
        raise UsageError(
            f"{login} cannot run stratagem with {request.python!r} ({last_line(done.stderr)}): "
            "install the package there, or say --python"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    _check(request, login, found)
    return found


def _check(request: JobRequest, login: str, found: Mapping[str, Any]) -> None:
    if found["version"] != __version__:
        raise UsageError(
            f"{login} has stratagem {found['version']}, this machine {__version__}: tasks of one "
            "job need the same"
        )
    if not found["folder"]:
        raise UsageError(f"there is no folder {request.folder} on {login}; --folder says where")
    if not found["script"]:
        raise UsageError(
            f"there is no script {request.words[0]!r} in {request.folder} on {login}: copy it "
            "there, or say --folder"
        )


def _check_gpus(request: JobRequest, login: str, own: Sequence[Task], there: int) -> None:
    needed = request.gpus * sum(task.type == "worker" for task in own)
    if there < needed:
        raise UsageError(
            f"{login} has {there} GPUs, and its workers need {needed}: fewer --gpus-per-worker, "
            "or more hosts"
        )


def _dealt(request: JobRequest, by_host: Sequence[Sequence[Task]]) -> dict[str, list[int]]:
    """The GPUs of each task, by their numbers on its host; None if the job uses none."""
    if not request.gpus:
        return {}
    dealt: dict[str, list[int]] = {}
    for own in by_host:
        first = 0
        for task in own:
            count = request.gpus if task.type == "worker" else 0
            dealt[str(task)] = list(range(first, first + count))
            first += count
    return dealt


class Remote(Process):
    """A task at the other end of an ssh connection, which also carries names of signals."""

    def __init__(
        self, task: Task, command: Sequence[str], text: str, environ: Mapping[str, str], blame: Path
    ) -> None:
        ours, self._way = os.pipe()
        with os.fdopen(ours) as end:
            super().__init__(task, command, environ, blame, stdin=end.fileno())
        self.say(text)

    def signal(self, number: signal.Signals) -> None:
        if self.code is not None:
            super().signal(number)
            return
        self.say(number.name)
        if number is signal.SIGKILL and self._way >= 0:
            os.close(self._way)
            self._way = -1

    def say(self, line: str) -> None:
        """Write a line to the task's stdin."""
        if self._way >= 0:
            with contextlib.suppress(BrokenPipeError):  # the task has ended, as its watcher reports
                os.write(self._way, f"{line}\n".encode())


def supervise(job: JobFolder) -> int:
    """Run the tasks of a job, and write how each of them ended."""
    request, secret = job.request, secrets.token_hex(32)
    here = {"host": socket.gethostname(), "pid": os.getpid(), "born": _born(os.getpid())}
    job.write("supervisor.json", here)
    with SignalQueue() as inbox, Guard() as guard, ExitStack() as stack:
        notes = stack.enter_context(LogFile(job.path / "supervisor.notes"))
        relay = Relay(notes, notes)
        processes: list[Remote] = []
        for i, (task, host) in enumerate(
            zip(request.tasks(), request.settings["places"], strict=True)
        ):
            text = _task_json(request, task, secret)
            process = Remote(task, _found(request, host), text, os.environ, guard.folder / str(i))
            stack.callback(process.kill)
            guard.add(process)
            relay.add(process, i, stack.enter_context(LogFile(job.log(task))))
            job.task_runs(task, host)
            processes.append(process)
        relay.start()
        over = threading.Event()
        stack.callback(over.set)
        threading.Thread(target=_keep_alive, args=(processes, over), daemon=True).start()
        policy = _WriteEnds(job, relay)
        supervisor = Supervisor(processes, guard, relay, inbox, _GRACE, policy=policy)
        supervisor.run()
        relay.close()
        while not relay.join(1.0):
            pass
        for process in processes:
            _write_end(job, process, relay.tail(process), supervisor.stopped is not None)
    stopped = supervisor.stopped
    return write_end(job, supervisor.code if stopped is None else 128 + stopped)


def _found(request: JobRequest, host: str) -> list[str]:
    """The command with the full path of its program, as exec needs it."""
    first, *rest = _command(request, host)
    return [shutil.which(first) or first, *rest]


class _WriteEnds(LaunchPolicy):
    """Writes the end of a task at once, before its last lines are all read."""

    def __init__(self, job: JobFolder, relay: Relay) -> None:
        self._job, self._relay = job, relay

    def record(self, kind: str, process: Process | None, text: str) -> None:
        if kind == "end" and process is not None:
            _write_end(self._job, process, self._relay.tail(process))

    def grace_after_signal(self) -> float:
        return GRACE + _ALIVE


def _keep_alive(processes: Sequence[Remote], over: threading.Event) -> None:
    while not over.wait(_ALIVE):
        for process in processes:
            if process.code is None:
                process.say(ALIVE)


def _write_end(job: JobFolder, process: Process, tail: list[str], stopped: bool = False) -> None:
    known = job.task(process.task)
    because = next((line.removeprefix(BECAUSE) for line in tail if line.startswith(BECAUSE)), "")
    code = -signal.SIGKILL if process.code is None else process.code  # given up by the supervisor
    if code == _NOT_REACHED:
        tail = [*tail, f"the connection to {known.get('host')} was lost, or never made"]
    lines = tuple(line for line in tail if not line.startswith(BECAUSE))
    when = known.get("when") or now()
    job.task_ended(
        TaskEnd(process.task, code if code >= 0 else 128 - code, because, when, lines, stopped)
    )


if __name__ == "__main__":
    sys.exit(supervise(JobFolder(Path(sys.argv[1]))))
