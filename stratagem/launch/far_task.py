"""Runs one task of a submitted job, on the machine of the task.

python -m stratagem.launch.far_task slurm FOLDER   under srun, which names the task
python -m stratagem.launch.far_task kubernetes SCRIPT ...   in a pod, which has an index
python -m stratagem.launch.far_task vertex SCRIPT ...   on a machine of Vertex AI
python -m stratagem.launch.far_task ssh            reads the task from stdin, and ends with it
python -m stratagem.launch.far_task probe          reports whether a task could run here

The task on stdin is one line of JSON, so that no secret is ever on a command line.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stratagem import __version__
from stratagem.cluster.environment import cores, from_slurm, from_vertex
from stratagem.cluster.handshake import SECRET_VARIABLE
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.errors import StratagemError, UsageError
from stratagem.launch.job_folder import JobFolder, LogFile, TaskEnd, now
from stratagem.launch.output import Relay, Sink
from stratagem.launch.processes import Guard, Process
from stratagem.launch.run import count_gpus
from stratagem.launch.supervise import LaunchPolicy, SignalQueue, Supervisor

#: seconds from SIGTERM to SIGKILL: a training may have something to save, unless a task has failed
GRACE = 20.0
_AFTER_A_FAILURE = 3.0
#: seconds for the names of all pods to be known
_NAMES = 600.0


class _TimeToSave(LaunchPolicy):
    """Time to save for a task that is told to end, unless another task has failed."""

    def __init__(self, failed: Callable[[], bool]) -> None:
        self._failed = failed

    def grace_after_signal(self) -> float:
        return 0.0 if self._failed() else GRACE


def run(
    task: Task,
    words: list[str],
    environ: Mapping[str, str],
    relay: Relay,
    attend: Callable[[SignalQueue], None] = lambda inbox: None,
    failed: Callable[[], bool] = lambda: False,
) -> TaskEnd:
    """Run the task to its end; `attend` may put signals into the queue; `failed`: whether another
    task has failed, which shortens the time to end after a signal."""
    with SignalQueue() as inbox, Guard() as guard, ExitStack() as stack:
        process = Process(task, words, environ, guard.folder / "because")
        stack.callback(process.kill)
        guard.add(process)
        relay.add(process, 0)
        relay.start()
        attend(inbox)
        policy = _TimeToSave(failed)
        supervisor = Supervisor([process], guard, relay, inbox, _AFTER_A_FAILURE, policy=policy)
        supervisor.run()
        relay.close()
        while not relay.join(1.0) and not relay.broken.is_set():
            pass
        tail = tuple(relay.tail(process))
    code = supervisor.code
    stopped = supervisor.stopped is not None
    if stopped and process.code and process.code > 0:
        code = process.code
    if process.code == -signal.SIGTERM and signal.SIGTERM in inbox.arrived:
        stopped = True  # Slurm signals all processes, and the task ended first
    return TaskEnd(task, code, process.because_of, now(), tail, stopped)


def environment(spec: ClusterSpec, task: Task, secret: str, more: Mapping[str, str]) -> Any:
    """The environment of the task."""
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(cores())}
    return {
        **os.environ,
        **threads,
        **more,
        "PYTHONUNBUFFERED": "1",
        "TF_CONFIG": spec.tf_config(task),
        SECRET_VARIABLE: secret,
    }


def under_slurm(folder: str) -> int:
    """Run a task of a Slurm step, with the cluster that srun describes."""
    job = JobFolder(Path(folder))
    request = job.request
    place = from_slurm(os.environ)
    if place is None:
        raise UsageError("this is no task of a Slurm step: srun starts it")
    addresses = [place.spec.address(each) for each in place.spec.tasks()]
    task = request.tasks()[place.task.index]
    secret = (job.path / "secret").read_text().strip()
    environ = environment(ClusterSpec(request.by_role(addresses)), task, secret, request.environ)
    job.task_runs(task, socket.gethostname())
    with LogFile(job.log(task)) as log:
        words, relay = [request.python, *request.words], Relay(log, log)
        end = run(task, words, environ, relay, failed=lambda: _has_failed(job))
    job.task_ended(end)
    return 0 if end.stopped else end.code  # else srun would kill tasks that still save


def _has_failed(job: JobFolder) -> bool:
    return any(end.code and not end.stopped for end in job.ends())


def in_a_pod(words: list[str]) -> int:
    """Become the script of a task of an Indexed Job, once all names of pods resolve."""
    index = os.environ.get("JOB_COMPLETION_INDEX", "")
    if not index.isdecimal() or "STRATAGEM_CLUSTER" not in os.environ:
        raise UsageError("this is no pod of an Indexed Job that `stratagem submit` has made")
    jobs = json.loads(os.environ["STRATAGEM_CLUSTER"])
    tasks = [Task(role, i) for role, listed in jobs.items() for i in range(len(listed))]
    role = os.environ.get("STRATAGEM_ROLE")  # in a JobSet each role has a Job of its own
    task = Task(role, int(index)) if role else tasks[int(index)]
    for address in (each for listed in jobs.values() for each in listed):
        _await_name(address.rpartition(":")[0])
    os.environ["TF_CONFIG"] = ClusterSpec(jobs).tf_config(task)
    os.environ["PYTHONUNBUFFERED"] = "1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *words])


def on_vertex(words: list[str]) -> int:
    """Become the script of a task of a CustomJob, once the secret is known."""
    if folder := os.environ.get("STRATAGEM_FOLDER"):
        place = from_vertex(os.environ)
        chief = place is None or place.spec.is_chief(place.task)
        os.environ[SECRET_VARIABLE] = shared_secret(Path(folder) / "secret", make=chief)
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.execv(sys.executable, [sys.executable, *words])


def shared_secret(file: Path, *, make: bool, within: float = _NAMES) -> str:
    """Read the secret of a job whose tasks share a folder; the chief makes the secret."""
    if make and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(32))
    until = time.monotonic() + within
    while not file.exists() or len(secret := file.read_text()) != 64:
        if time.monotonic() > until:
            raise UsageError(
                f"the chief has written no secret to {file} in {within:g} s: does it run, and may "
                "the job's service account write to the bucket?"
            )
        time.sleep(1.0)
    return secret


def _await_name(host: str) -> None:
    """Wait until a pod's name resolves, which is some time after the pod starts."""
    until = time.monotonic() + _NAMES
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror:
            if time.monotonic() > until:
                raise UsageError(
                    f"{host} does not resolve after {_NAMES:g} s: is its pod waiting for a node?"
                ) from None
            time.sleep(0.5)


def over_ssh() -> int:
    """Run a task whose output goes back over ssh, and which ends with the connection."""
    request = json.loads(sys.stdin.readline())
    task = Task(*request["task"])
    spec = ClusterSpec(request["cluster"])
    environ = environment(spec, task, request["secret"], request["environ"])
    if request["gpus"] is not None:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, request["gpus"]))
    os.chdir(request["folder"])
    relay = Relay(PlainSink(sys.stdout), PlainSink(sys.stderr))
    end = run(task, [sys.executable, *request["words"]], environ, relay, _attend)
    if end.because_of:
        print(f"{BECAUSE}{end.because_of}", file=sys.stderr, flush=True)
    return end.code


#: a line that a task gets now and then, and seconds without one after which the task ends
ALIVE = "alive"
_SILENCE = 40.0
#: begins the last line of a task over ssh that ended because of another task
BECAUSE = "[stratagem] ended because of "


class PlainSink(Sink):
    """Stdout or stderr without names of tasks, since its reader knows the task."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream, colour=False)

    def prefix(self, name: str, number: int) -> bytes:
        return b""


def _attend(inbox: SignalQueue) -> None:
    """Take names of signals from stdin; SIGTERM when stdin ends, or nothing has come for long, as
    when a cable is cut."""
    heard = [time.monotonic()]

    def listen() -> None:
        for line in sys.stdin:
            heard[0] = time.monotonic()
            if line.strip() != ALIVE:
                inbox.arrived.append(signal.Signals[line.strip()])
        inbox.arrived.append(signal.SIGTERM)

    def watch() -> None:
        while time.monotonic() - heard[0] < _SILENCE:
            time.sleep(1.0)
        inbox.arrived.append(signal.SIGTERM)

    for work in (listen, watch):
        threading.Thread(target=work, daemon=True).start()


def probe() -> int:
    """Print what `stratagem submit` must know of this machine before it starts tasks here."""
    request = json.loads(sys.stdin.readline())
    found: dict[str, Any] = {"version": __version__, "host": socket.gethostname()}
    folder = Path(request["folder"])
    found["folder"] = folder.is_dir()
    found["script"] = request["script"] is None or (folder / request["script"]).is_file()
    found["gpus"] = count_gpus() if request["gpus"] else 0
    with ExitStack() as held:  # all at once, so that no port is found twice
        socks = [held.enter_context(socket.socket()) for _ in range(request["ports"])]
        for sock in socks:
            sock.bind(("", 0))
        found["ports"] = [sock.getsockname()[1] for sock in socks]
    print(json.dumps(found))
    return 0


def main(words: list[str]) -> int:
    mode, *rest = words
    try:
        if mode == "kubernetes":
            return in_a_pod(rest)
        if mode == "vertex":
            return on_vertex(rest)
        return under_slurm(*rest) if mode == "slurm" else {"ssh": over_ssh, "probe": probe}[mode]()
    except StratagemError as problem:
        print(f"stratagem: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
