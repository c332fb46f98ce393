"""Trials as jobs of an engine: what trial_slots.py does with processes of this machine.

A trial's folder names the folder of its job (`job`) before the job is sent. So a sweep that was
killed finds its jobs again, which went on meanwhile, and submits none of them twice.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stratagem.cluster.environment import cores
from stratagem.errors import UsageError
from stratagem.figures.trial_record import VARIABLE
from stratagem.launch.engines.engine import engine
from stratagem.launch.job_folder import JobFolder, LogReader
from stratagem.launch.job_request import JobRequest, JobState
from stratagem.launch.run import visible
from stratagem.launch.submit import make_request
from stratagem.launch.sweep_settings import SweepSettings
from stratagem.launch.trial_slots import Slot, slots

JOB = "job"
_ENGINES = ("slurm", "ssh", "ray")
_ASK = 2.0  # seconds between two questions to the engine
_UNANSWERED = 600.0
_KILLED = -int(signal.SIGKILL)


@dataclass
class _Sent:
    """A trial's job."""

    number: int
    slot: Slot
    job: JobFolder
    folder: Path
    stopped: bool = False


class TrialJobs:
    """Submits a job for each trial, so many at once, and cancels them."""

    def __init__(self, submit: Mapping[str, Any], slots: int | None, out: Path) -> None:
        """`submit`: options of `stratagem submit`; `out`: the sweep's folder, which engines that
        send the project leave out."""
        name = str(submit["on"])
        self._engine, self._submit, self._out = engine(name), dict(submit), out.absolute()
        if name not in _ENGINES:
            raise UsageError(
                f"a sweep's trials write to a folder that all machines share, which {name} has "
                f"none of: --on {', '.join(_ENGINES)}"
            )
        if slots is None:
            raise UsageError(f"how many jobs at once on {name}? As in: --slots 4, or slots=4")
        self.places = [Slot(number) for number in range(slots)]
        self._free = list(self.places)
        self._sent: dict[int, _Sent] = {}
        self._asked, self._answered = 0.0, time.monotonic()

    def check(self, command: Sequence[str]) -> None:
        """Refuse what cannot be submitted, before anything is."""
        request = self._engine.prepare(self._request(0, command, Path()))
        hosts = request.settings.get("hosts", ())
        if request.gpus and hosts and len(self.places) * request.workers > len(hosts):
            raise UsageError(
                "over ssh nobody keeps GPUs apart between jobs, so no two have a host in common: "
                f"--slots {len(hosts) // request.workers} at most on {len(hosts)} hosts"
            )

    @property
    def free(self) -> bool:
        return bool(self._free)

    @property
    def running(self) -> list[int]:
        return list(self._sent)

    def find(self, number: int, folder: Path) -> Slot | None:
        """Take up the job of a trial that a sweep before this one has sent, if it has."""
        if not (folder / JOB).exists():
            return None
        job = JobFolder(Path((folder / JOB).read_text()))
        if not job.told:  # it was killed before
            return None
        return self._add(number, job, folder)

    def start(
        self, number: int, command: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> Slot:
        request = self._engine.prepare(self._request(number, command, log.parent))
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
        self._sent[number] = _Sent(number, slot, job, folder)
        return slot

    def _request(self, number: int, command: Sequence[str], folder: Path) -> JobRequest:
        made = make_request(tuple(command[1:]), self._submit)
        given = {} if made.gpus else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        own = {**given, **made.environ, VARIABLE: str(folder.absolute())}
        more = dict(made.settings)
        if hosts := more["hosts"]:  # a job's tasks are dealt to them from the first
            first = self._free[0].number * made.workers % len(hosts) if self._free else 0
            more["hosts"] = [*hosts[first:], *hosts[:first]]
        if self._out.is_relative_to(made.folder):
            more["excludes"] = [f"/{self._out.relative_to(made.folder)}"]
        name = f"{made.name[:40].rstrip('-')}-{number:03d}"
        return replace(made, name=name, environ=own, settings=more)

    def stop(self, number: int, reason: signal.Signals, grace: float) -> None:
        """Cancel a trial's job; the engine gives it time to save."""
        sent = self._sent[number]
        if not sent.stopped:
            sent.stopped = True
            self._engine.cancel(sent.job)

    def collect(self, seconds: float) -> list[tuple[int, int]]:
        """Wait so long; numbers and exit codes of trials whose jobs have ended."""
        time.sleep(seconds)
        now = time.monotonic()
        if now - self._asked < _ASK:
            return []
        self._asked, over = now, []
        for sent in list(self._sent.values()):
            state = self._state(sent.job)
            if state.phase != "ended":
                continue
            _bring_log(sent)
            if sent.stopped:  # it is no result, and another sweep is not to find it
                (sent.folder / JOB).unlink(missing_ok=True)
            over.append((sent.number, _exit_code(state)))
            del self._sent[sent.number]
            self._free.append(sent.slot)
        self._free.sort(key=lambda slot: slot.number)
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

    def close(self) -> None:
        """Cancel what is left."""
        for sent in self._sent.values():
            self._engine.cancel(sent.job)


def trial_places(
    settings: SweepSettings, asked: int | None, out: Path
) -> tuple[list[Slot], TrialJobs | None]:
    """Where trials run: slots of this machine, or jobs of an engine, so many at once."""
    if not settings.submit:
        return slots(asked, settings.replicas, visible(os.environ), cores()), None
    jobs = TrialJobs(settings.submit, asked, out)
    jobs.check(settings.command)
    return jobs.places, jobs


def _exit_code(state: JobState) -> int:
    """As a process of this machine would have it: negative for a signal, and if nobody knows."""
    if state.code is None:
        return _KILLED
    return 128 - state.code if state.code - 128 in signal.valid_signals() else state.code


def _bring_log(sent: _Sent) -> None:
    """What its tasks printed, into the trial's folder."""
    many = len(sent.job.request.tasks()) > 1
    with (sent.folder / "log").open("w") as log:
        for task, _, line in LogReader(sent.job).lines():
            log.write(f"[{task}] {line}\n" if many else f"{line}\n")
