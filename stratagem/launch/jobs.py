"""List the jobs that were submitted, the newest last, with their states."""

from __future__ import annotations

import argparse
import shlex

from stratagem.errors import StratagemError
from stratagem.launch.engines.engine import engine
from stratagem.launch.job_folder import JobFolder, jobs_home


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem jobs`."""


def main(args: argparse.Namespace) -> int:
    """Print a line for each."""
    lines = [_line(job) for job in JobFolder.begun()]
    print("\n".join(filter(None, lines)) or f"no job in {jobs_home()}")
    return 0


def _line(job: JobFolder) -> str:
    """Nothing for one without a name, which Slurm may find now."""
    request = job.request
    if not job.told["name"] and job.engine != "slurm":
        return ""
    try:
        state = str(engine(job.engine).state(job)).splitlines()[0]
    except StratagemError as problem:
        state = f"unknown: {problem}"
    if not job.told["name"]:
        return ""
    return f"{job.handle:<16} {request.name:<20} {shlex.join(request.words):<30} {state}"
