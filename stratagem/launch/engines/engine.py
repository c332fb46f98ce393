"""The interface of engines: describe a job, send it, report its state, end it.

Each engine is one file of this folder. It gets a job as a `JobRequest`; the folder of a job that
was sent (job_folder.py) has the same files whichever engine runs it.
"""

from __future__ import annotations

import importlib
from typing import Protocol

from stratagem.errors import UsageError
from stratagem.launch.job_folder import JobFolder, JobRequest, JobState

ENGINES = ("slurm", "ssh", "kubernetes", "ray", "vertex")


class Engine(Protocol):
    """A way to run jobs elsewhere."""

    def prepare(self, request: JobRequest) -> JobRequest:
        """Complete the request without asking any machine; raise `UsageError` for what is wrong."""

    def check(self, request: JobRequest) -> JobRequest:
        """Ask this machine and those of the job whether it could run; raise `UsageError` if not."""

    def describe(self, request: JobRequest, job: JobFolder) -> str:
        """Return what will be sent, to the byte but for the secret and values of --env."""

    def send(self, request: JobRequest, job: JobFolder) -> str:
        """Start the job; return the engine's name for it."""

    def state(self, job: JobFolder) -> JobState:
        """Return the job's state, after logs that lie elsewhere were copied into its folder."""

    def cancel(self, job: JobFolder) -> None:
        """End the job, if it has not ended."""


def engine(name: str) -> Engine:
    """Import the engine of this name."""
    if name not in ENGINES:
        raise UsageError(f"there is no engine {name!r}; there are {', '.join(ENGINES)}")
    found: Engine = importlib.import_module(f"stratagem.launch.engines.{name}").ENGINE
    return found
