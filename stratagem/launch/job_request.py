"""A job to be submitted: its script, its tasks, what they need; and how far it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from stratagem.cluster.spec import Task
from stratagem.errors import UsageError

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")


@dataclass(frozen=True)
class JobRequest:
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

    def check_script(self) -> None:
        """Refuse a script that is not in the folder, where tasks find the same folder as we do."""
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
        """The same without the values of its variables, for everybody to see."""
        return replace(self, environ=dict.fromkeys(self.environ, "(as it is here)"))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> JobRequest:
        return JobRequest(**{**told, "words": tuple(told["words"])})


@dataclass(frozen=True)
class JobState:
    """How far a job is: "waiting", "running", or "ended", with its exit code if anybody knows."""

    phase: str
    code: int | None = None
    text: str = ""

    def __str__(self) -> str:
        how = "" if self.code is None else f", exit code {self.code}"
        return f"{self.phase}{how}{f': {self.text}' if self.text else ''}"
