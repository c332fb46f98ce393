"""What every engine does with a job: describe it, send it, tell its state, end it.

An engine is one file of this folder. What it needs to know of a job is a `Request`; what there is
to know of one that was sent lies in its folder (job_folder.py), whichever engine runs it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from stratagem.cluster.spec import Task
from stratagem.errors import UsageError

if TYPE_CHECKING:
    from stratagem.launch.job_folder import JobFolder

ENGINES = ("slurm", "ssh")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")


@dataclass(frozen=True)
class Request:
    """A script, how many tasks of which role run it, and what each of them needs."""

    name: str
    #: what follows the interpreter: a script, or -m and a module, and its arguments
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
    #: what one engine alone knows: its hosts, its partition
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} is no name for a job: up to 52 small letters, digits and -, as "
                "in --name digits-2"
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> Request:
        return Request(**{**told, "words": tuple(told["words"])})


@dataclass(frozen=True)
class State:
    """How far a job is: "waiting", "running", or "ended", with its exit code if anybody knows."""

    phase: str
    code: int | None = None
    text: str = ""

    def __str__(self) -> str:
        how = "" if self.code is None else f", exit code {self.code}"
        return f"{self.phase}{how}{f': {self.text}' if self.text else ''}"


class Engine(Protocol):
    """One file of this folder."""

    def prepare(self, request: Request) -> Request:
        """Look at everything that can be wrong before anything starts; raises `UsageError`."""

    def describe(self, request: Request, job: JobFolder) -> str:
        """What will be sent, to the byte."""

    def send(self, request: Request, job: JobFolder) -> str:
        """Start it; the engine's own name for it."""

    def state(self, job: JobFolder) -> State:
        """How far it is."""

    def cancel(self, job: JobFolder) -> None:
        """End it; nothing happens to one that has ended."""


def engine(name: str) -> Engine:
    """The engine of that name."""
    if name not in ENGINES:
        raise UsageError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
    found: Engine = importlib.import_module(f"stratagem.launch.engines.{name}").ENGINE
    return found
