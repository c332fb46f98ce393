"""Where trials run: in slots of this machine, or as jobs of an engine.

A slot is free again once nothing is left of its trial, neither the process nor what it started. A
trial's folder names the folder of its job (`job`) before the job is sent. So a sweep that was
killed finds its jobs again, which went on meanwhile, and submits none of them twice.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

from stratagem.cluster.environment import cores
from stratagem.cluster.spec import Task
from stratagem.errors import UsageError
from stratagem.figures.trial_record import VARIABLE
from stratagem.launch.engines.engine import engine
from stratagem.launch.job_folder import JobFolder, JobRequest, JobState, LogReader
from stratagem.launch.processes import Guard, Process
from stratagem.launch.run import visible
from stratagem.launch.submit import make_request
from stratagem.launch.supervise import Escalation, steps_after
from stratagem.launch.sweep_folder import SweepSettings

_LINGER = 1.0  # for processes that a trial started, once the trial itself has ended
_HELD = 5.0  # after SIGKILL, until a process that is still there counts as stuck in the kernel


@dataclass(frozen=True)
class Slot:
    """One place for a trial: the GPUs that it alone sees, none on a CPU."""

    number: int
    gpus: tuple[str, ...] = ()
    threads: int = 1

    def environ(self) -> dict[str, str]:
        """Variables of a trial; threads must not depend on the number of slots: rounding would."""
        own = {"OMP_NUM_THREADS": str(self.threads)} if "OMP_NUM_THREADS" not in os.environ else {}
        return own | ({"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {})


def slots(asked: int | None, replicas: int, gpus: Sequence[str], cores: int) -> list[Slot]:
    """Divide the GPUs, or else the processors, into slots; `asked` None: as many as possible."""
    have, kind = (len(gpus), "GPU") if gpus else (cores, "processor")
    if replicas > have and (gpus or asked is None):
        raise UsageError(
            f"a trial needs {replicas} devices, and here {_are(have, kind)}; lower "
            f"--replicas-per-trial{'' if gpus else ', or give --slots 1 to let them share'}"
        )
    count = asked or have // replicas
    if not gpus:
        return [Slot(number) for number in range(count)]
    if count * replicas > have:
        raise UsageError(
            f"{count} slots of {replicas} need {count * replicas} GPUs, and here {_are(have, kind)}"
            f"; no GPU is shared: give --slots {have // replicas} at most"
        )
    threads = max(1, cores // have)
    dealt = [tuple(gpus[n * replicas : (n + 1) * replicas]) for n in range(count)]
    return [Slot(number, each, threads) for number, each in enumerate(dealt)]


def _are(count: int, kind: str) -> str:
    return f"is 1 {kind}" if count == 1 else f"are {count} {kind}s"


@dataclass
class _Running:
    """A trial in its slot."""

    slot: Slot
    process: Process
    escalation: Escalation = field(default_factory=lambda: Escalation((), 0.0))


def own_place(trial: Path, source: Path) -> Path:
    """Make the folder where a trial runs: what it writes beside its script is its own, and what
    lies there is linked."""
    place = trial.absolute() / "files"
    place.mkdir()
    for each in source.absolute().iterdir():
        (place / each.name).symlink_to(each)
    return place


class TrialSlots:
    """Runs trials on this machine; a trial ends with the processes that it started, and those that
    still run at the end of the context are killed."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.count = len(slots)
        self._free = list(slots)
        #: by number: the slot of a trial, and what runs there
        self._running: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._ended: SimpleQueue[Process] = SimpleQueue()
        self._guard = Guard()
        return self

    @property
    def free(self) -> bool:
        return bool(self._free)

    @property
    def running(self) -> list[int]:
        return list(self._running)

    def _release(self, number: int) -> None:
        """Note that a trial has ended."""
        self._free.append(self._running.pop(number).slot)
        self._free.sort(key=lambda slot: slot.number)

    def find(self, number: int, folder: Path) -> Slot | None:
        """Find a trial that still runs: none, since trials die with their sweep."""
        return None

    def start(
        self, number: int, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> Slot:
        """Start a trial in the first free slot."""
        slot = self._free[0]
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            task = Task("worker", number)
            own = {**environ, "PYTHONUNBUFFERED": "1", **slot.environ()}
            blame, place = self._guard.folder / str(number), own_place(log.parent, Path.cwd())
            process = Process(task, command, own, blame, output=output, place=place)
        finally:
            os.close(output)
        self._guard.add(process)
        process.watch(self._ended)
        self._free.remove(slot)
        self._running[number] = _Running(slot, process)
        return slot

    def stop(self, number: int, reason: signal.Signals, grace: float) -> None:
        """Signal a trial, later kill it; a second call hurries."""
        running, now = self._running[number], time.monotonic()
        if running.escalation.begun:
            running.escalation.hurry(now)
        else:
            running.escalation = Escalation(steps_after(reason, grace), now)

    def collect(self, seconds: float) -> list[tuple[int, int]]:
        """Wait so long; return numbers and exit codes of ended trials, whose slots are free."""
        with suppress(Empty):
            self._ended.get(timeout=seconds).reap()
            while True:
                self._ended.get_nowait().reap()
        now, over = time.monotonic(), []
        for number, running in list(self._running.items()):
            process = running.process
            for each in running.escalation.due(now):
                process.signal(each)
            if process.code is None:
                continue
            if process.gone() or now - process.ended > _LINGER + _HELD:
                over.append((number, process.code))
                self._guard.remove(process)
                self._release(number)
            elif now - process.ended > _LINGER:
                process.signal(signal.SIGKILL)
        return over

    def __exit__(self, *error: object) -> None:
        for running in self._running.values():
            running.process.kill()
        self._guard.close()


JOB = "job"
_ENGINES = ("slurm", "ssh", "ray")
_ASK = 2.0  # seconds between two questions to the engine
_UNANSWERED = 600.0
_KILLED = -int(signal.SIGKILL)


@dataclass
class _Sent:
    """A trial's job."""

    slot: Slot
    job: JobFolder
    folder: Path
    stopped: bool = False


class TrialJobs(TrialSlots):
    """Submits a job for each trial, as many at once as there are slots, and cancels jobs."""

    def __init__(self, submit: Mapping[str, Any], slots: int | None, out: Path) -> None:
        """`submit`: options of `stratagem submit`; `out`: the sweep's folder, which is not copied
        to the cluster with the project."""
        name = str(submit["on"])
        self._engine, self._submit, self._out = engine(name), dict(submit), out.absolute()
        if name not in _ENGINES:
            raise UsageError(
                f"a sweep's trials write to a folder that all machines share, which {name} has "
                f"none of: --on {', '.join(_ENGINES)}"
            )
        if slots is None:
            raise UsageError(f"how many jobs at once on {name}? As in: --slots 4, or slots=4")
        super().__init__([Slot(number) for number in range(slots)])
        self._asked, self._answered = 0.0, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def check(self, command: Sequence[str]) -> None:
        """Refuse a job that cannot be submitted, before the sweep begins."""
        request = self._prepared(0, command, Path())
        hosts = request.settings.get("hosts", ())
        if request.gpus and hosts and self.count * request.workers > len(hosts):
            raise UsageError(
                "over ssh nobody keeps GPUs apart between jobs, so no two have a host in common: "
                f"--slots {len(hosts) // request.workers} at most on {len(hosts)} hosts"
            )

    def _prepared(self, number: int, command: Sequence[str], folder: Path) -> JobRequest:
        return self._engine.check(self._engine.prepare(self._request(number, command, folder)))

    def find(self, number: int, folder: Path) -> Slot | None:
        if not (folder / JOB).exists():
            return None
        job = JobFolder(Path((folder / JOB).read_text()))
        if not job.record:  # the sweep was killed before it had sent the job
            return None
        return self._add(number, job, folder)

    def start(
        self, number: int, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> Slot:
        request = self._prepared(number, command, log.parent)
        if self._submit["on"] != "ray":  # which gives each job a copy of the folder
            place = own_place(log.parent, Path(request.folder))
            request = replace(request, folder=str(place))
        job = JobFolder.create(request.name)
        (log.parent / JOB).write_text(str(job.path))
        try:
            self._engine.send(request, job)
        except UsageError:
            shutil.rmtree(job.path)
            raise
        return self._add(number, job, log.parent)

    def _add(self, number: int, job: JobFolder, folder: Path) -> Slot:
        slot = self._free.pop(0)
        self._running[number] = _Sent(slot, job, folder)
        return slot

    def _request(self, number: int, command: Sequence[str], folder: Path) -> JobRequest:
        made = make_request(tuple(command[1:]), self._submit)
        given = {} if made.gpus else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        own = {**given, **made.environ, VARIABLE: str(folder.absolute())}
        more = dict(made.settings)
        if hosts := more["hosts"]:  # a job's tasks get hosts from the first on
            first = self._free[0].number * made.workers % len(hosts) if self._free else 0
            more["hosts"] = [*hosts[first:], *hosts[:first]]
        if self._out.is_relative_to(made.folder):
            more["excludes"] = [f"/{self._out.relative_to(made.folder)}"]
        name = f"{made.name[:40].rstrip('-')}-{number:03d}"
        return replace(made, name=name, environ=own, settings=more)

    def stop(self, number: int, reason: signal.Signals, grace: float) -> None:
        """Cancel a trial's job; the engine gives it time to save."""
        sent = self._running[number]
        if not sent.stopped:
            sent.stopped = True
            self._engine.cancel(sent.job)

    def collect(self, seconds: float) -> list[tuple[int, int]]:
        time.sleep(seconds)
        now = time.monotonic()
        if now - self._asked < _ASK:
            return []
        self._asked, over = now, []
        for number, sent in list(self._running.items()):
            state = self._state(sent.job)
            if state.phase != "ended":
                continue
            _bring_log(sent)
            if sent.stopped:  # no result, so a resumed sweep must not find it
                (sent.folder / JOB).unlink(missing_ok=True)
            over.append((number, _exit_code(state)))
            self._release(number)
        return over

    def _state(self, job: JobFolder) -> JobState:
        try:
            state = self._engine.state(job)
        except UsageError:
            if time.monotonic() - self._answered > _UNANSWERED:
                raise
            return JobState("running")
        self._answered = time.monotonic()
        return state

    def __exit__(self, *error: object) -> None:
        """Cancel the jobs that still run."""
        for sent in self._running.values():
            self._engine.cancel(sent.job)


def trial_runner(settings: SweepSettings, asked: int | None, out: Path) -> TrialSlots:
    """What runs trials: slots of this machine, or jobs of an engine."""
    if not settings.submit:
        return TrialSlots(slots(asked, settings.replicas, visible(os.environ), cores()))
    jobs = TrialJobs(settings.submit, asked, out)
    jobs.check(settings.command)
    return jobs


def _exit_code(state: JobState) -> int:
    """The exit code as `subprocess` has it: negative for a signal; unknown counts as killed."""
    if state.code is None:
        return _KILLED
    return 128 - state.code if state.code - 128 in signal.valid_signals() else state.code


def _bring_log(sent: _Sent) -> None:
    """Copy the output of a job's tasks into the trial's folder."""
    many = len(sent.job.request.tasks()) > 1
    with (sent.folder / "log").open("w") as log:
        for task, _, line in LogReader(sent.job).lines():
            log.write(f"[{task}] {line}\n" if many else f"{line}\n")
