"""What every engine does with a job: describe it, send it, tell its state, end it.

An engine is one file of this folder. What it needs to know of a job is a `JobRequest`; what there
is to know of one that was sent lies in its folder (job_folder.py), whichever engine runs it.
"""

from __future__ import annotations

import importlib
from typing import Protocol

from stratagem.errors import UsageError
from stratagem.launch.job_folder import JobFolder, JobRequest, JobState

ENGINES = ("slurm", "ssh", "kubernetes", "ray", "vertex")


class Engine(Protocol):
    """One file of this folder."""

    def prepare(self, request: JobRequest) -> JobRequest:
        """Look at everything that can be wrong before anything starts; raises `UsageError`."""

    def describe(self, request: JobRequest, job: JobFolder) -> str:
        """What will be sent, to the byte but for the secret and values of --env."""

    def send(self, request: JobRequest, job: JobFolder) -> str:
        """Start it; the engine's own name for it."""

    def state(self, job: JobFolder) -> JobState:
        """How far it is; what lies elsewhere of its logs is brought into the folder."""

    def cancel(self, job: JobFolder) -> None:
        """End it; nothing happens to one that has ended."""


def engine(name: str) -> Engine:
    """The engine of that name."""
    if name not in ENGINES:
        raise UsageError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
    found: Engine = importlib.import_module(f"stratagem.launch.engines.{name}").ENGINE
    return found
