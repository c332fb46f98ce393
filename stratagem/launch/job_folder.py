"""What is known of a submitted job: one folder for each, which its tasks write into.

    job.json            what was asked for, by which engine, and the job's handle
    script              what was sent
    logs/worker-0.log   what a task printed: a time, then the line
    tasks/worker-0.json whether it runs, or how it ended and because of whom
    end.json            how the job ended

They lie in $STRATAGEM_JOBS or ~/.stratagem/jobs, which machines of a cluster share as they share
the homes of their users.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from stratagem.cluster.spec import Task
from stratagem.errors import UsageError
from stratagem.launch.output import Sink

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")


@dataclass(frozen=True)
class JobRequest:
    """A job to submit: a script, the number of tasks of each role, and what each task needs."""

    name: str
    #: the command after the interpreter: a script, or -m and a module, and arguments
    words: tuple[str, ...]
    #: where the tasks run, and with which interpreter
    folder: str
    python: str
    workers: int = 1
    ps: int = 0
    evaluator: bool = False
    gpus: int = 0
    minutes: int | None = None
    #: variables that the tasks get
    environ: Mapping[str, str] = field(default_factory=dict)
    #: options of one engine: hosts, partition
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} is no name for a job: up to 52 small letters, digits and -, as "
                "in --name digits-2"
            )

    def check_script(self) -> None:
        """Refuse a script that is not in the folder, if the tasks share this machine's folder."""
        script = self.words[0]
        if script != "-m" and not (Path(self.folder) / script).is_file():
            raise UsageError(
                f"there is no script {script!r} in {self.folder}; --folder says where it is"
            )

    def roles(self) -> dict[str, int]:
        """How many tasks each role has, workers first."""
        return {"worker": self.workers, "ps": self.ps, "evaluator": int(self.evaluator)}

    def tasks(self) -> list[Task]:
        """All tasks, in the order in which engines number them."""
        return [Task(role, i) for role, count in self.roles().items() for i in range(count)]

    def by_role(self, addresses: list[str]) -> dict[str, list[str]]:
        """The addresses of the tasks, in their order, as a cluster."""
        found: dict[str, list[str]] = {}
        for task, address in zip(self.tasks(), addresses, strict=True):
            found.setdefault(task.type, []).append(address)
        return found

    def hidden(self) -> JobRequest:
        """A copy without the values of variables, which may be printed."""
        return replace(self, environ=dict.fromkeys(self.environ, "(as it is here)"))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> JobRequest:
        return JobRequest(**{**found, "words": tuple(found["words"])})


@dataclass(frozen=True)
class JobState:
    """The phase of a job: "waiting", "running", or "ended", with its exit code if it is known."""

    phase: str
    code: int | None = None
    text: str = ""

    def __str__(self) -> str:
        how = "" if self.code is None else f", exit code {self.code}"
        return f"{self.phase}{how}{f': {self.text}' if self.text else ''}"


VARIABLE = "STRATAGEM_JOBS"


def jobs_home() -> Path:
    """The folder of all jobs' folders."""
    return Path(os.environ.get(VARIABLE) or Path.home() / ".stratagem" / "jobs").absolute()


def now() -> str:
    """The time as in logs, of a fixed length, so that lines sort by it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass(frozen=True)
class TaskEnd:
    """How a task ended; `because_of`: the task that it blames; `stopped`: it was told to end."""

    task: Task
    code: int
    because_of: str
    when: str
    tail: tuple[str, ...]
    stopped: bool = False


class JobFolder:
    """The folder of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, name: str) -> Self:
        """Make a folder that only its owner may read, since logs may hold anything."""
        home = jobs_home()
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        path = home / f"{name}-{stamp}-{secrets.token_hex(3)}"
        try:
            for each in (path, path / "logs", path / "tasks"):
                each.mkdir(parents=True, mode=0o700)
        except OSError as problem:
            raise UsageError(
                f"the job's folder {path} cannot be made ({problem.strerror}); {VARIABLE} says "
                "where jobs are written down"
            ) from None
        return cls(path)

    @classmethod
    def begun(cls) -> list[Self]:
        """Every job, the newest last, with those whose sender was killed before the engine had
        named them."""
        found = [cls(file.parent) for file in jobs_home().glob("*/job.json")]
        return sorted(found, key=lambda job: job.path.name[-22:])

    @classmethod
    def find(cls, handle: str) -> Self:
        """Find the job with this handle."""
        jobs = {job.handle: job for job in cls.begun() if job.record["name"]}
        if handle not in jobs:
            near = get_close_matches(handle, jobs, 1)
            hint = f"; {near[0]}?" if near else ""
            raise UsageError(
                f"there is no job {handle} in {jobs_home()}{hint} (`stratagem jobs` lists them)"
            )
        return jobs[handle]

    # what was asked for

    def sent(self, engine: str, own_name: str, request: JobRequest) -> None:
        """Write that the job was sent."""
        self.write("job.json", {"engine": engine, "name": own_name, "request": request.to_json()})

    @property
    def record(self) -> dict[str, Any]:
        """What was asked for, by which engine, and the name of the job there."""
        return dict(self.read("job.json") or {})

    @property
    def request(self) -> JobRequest:
        return JobRequest.from_json(self.record["request"])

    @property
    def engine(self) -> str:
        return str(self.record["engine"])

    @property
    def suffix(self) -> str:
        """A suffix that tells jobs of the same name apart."""
        return self.path.name.rpartition("-")[2]

    @property
    def handle(self) -> str:
        return f"{self.engine}:{self.record['name']}"

    # what has come of it

    def log(self, task: Task) -> Path:
        return self.path / "logs" / f"{stem_of(task)}.log"

    def task_runs(self, task: Task, host: str) -> None:
        self.write(f"tasks/{stem_of(task)}.json", {"host": host, "since": now()})

    def task_ended(self, end: TaskEnd) -> None:
        before = self.read(f"tasks/{stem_of(end.task)}.json") or {}
        facts = {"code": end.code, "because_of": end.because_of, "when": end.when}
        facts |= {"tail": end.tail, "stopped": end.stopped}
        self.write(f"tasks/{stem_of(end.task)}.json", {**before, **facts})

    def task(self, task: Task) -> dict[str, Any]:
        """What a task has written of itself; empty before it has begun."""
        return dict(self.read(f"tasks/{stem_of(task)}.json") or {})

    def ends(self) -> list[TaskEnd]:
        """The ends of tasks, in their order."""
        found = [
            TaskEnd(task, **{key: facts[key] for key in _END}, tail=tuple(facts["tail"]))
            for task in self.request.tasks()
            if "code" in (facts := self.task(task))
        ]
        return sorted(found, key=lambda end: end.when)

    def ended(self, code: int, text: str) -> None:
        """Write how the job ended."""
        self.write("end.json", {"code": code, "text": text, "when": now()})

    def end(self) -> JobState | None:
        found = self.read("end.json")
        return None if found is None else JobState("ended", found["code"], found["text"])

    def begin_again(self) -> None:
        """Forget how an earlier run of the job ended."""
        (self.path / "end.json").unlink(missing_ok=True)
        for file in (self.path / "tasks").glob("*.json"):
            file.unlink()

    # files

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file by one rename, since other machines may be reading it."""
        path = self.path / name
        part = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}.part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(part, path)

    def read(self, name: str) -> dict[str, Any] | None:
        try:
            return dict(json.loads((self.path / name).read_text()))
        except FileNotFoundError:
            return None


_END = ("code", "because_of", "when", "stopped")


def append_missing(log: Path, lines: list[bytes], *, after: int = 0) -> None:
    """Append the lines that the file does not have yet; its first `after` lines are of an earlier
    run.

    `lines` are all lines of this run so far, each a time and a text. Another process may be doing
    the same.
    """
    with log.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        there = file.read().count(b"\n") - after
        for line in lines[there:]:
            when, _, text = line.partition(b" ")
            file.write(when + b" " + last_state(text) + b"\n")


def last_line(text: str) -> str:
    """The last line of a program's output, for a sentence about its failure."""
    return (text.strip().splitlines() or ["without a word"])[-1]


def last_state(line: bytes) -> bytes:
    """What a terminal shows of a line, which may be a progress bar: its last state."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def stem_of(task: Task) -> str:
    """The name of a task in names of files, and in lines: worker-0."""
    return f"{task.type}-{task.index}"


class LogFile(Sink):
    """A task's log: a time before each line, written at once for readers on other machines."""

    def __init__(self, path: Path) -> None:
        self.colour = False
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def prefix(self, name: str, number: int) -> bytes:
        """Empty, since the file has the name of the task."""
        return b""

    def write(self, data: bytes) -> None:
        stamp = f"{now()} ".encode()
        data = b"".join(stamp + line + b"\n" for line in data.split(b"\n")[:-1])
        while data:
            data = data[os.write(self._file, data) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)


class LogReader:
    """Reads the lines of all tasks, each once: the present lines by time, then new lines."""

    def __init__(self, job: JobFolder) -> None:
        self._job, self._tasks = job, job.request.tasks()
        self._read: dict[Task, int] = dict.fromkeys(self._tasks, 0)

    def lines(self) -> Iterator[tuple[Task, str, str]]:
        """The lines since the last call: task, time, text."""
        found = []
        for task in self._tasks:
            found += [(when, task, line) for when, line in self._new(task)]
        for when, task, line in sorted(found, key=lambda each: each[0]):
            yield task, when, line

    def _new(self, task: Task) -> list[tuple[str, str]]:
        try:
            with self._job.log(task).open("rb") as file:
                file.seek(self._read[task])
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read[task] += len(whole)
        lines = whole.split(b"\n")[:-1]
        pairs = (raw.decode(errors="replace").partition(" ") for raw in lines)
        return [(when, line) for when, _, line in pairs]
