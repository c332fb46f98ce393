"""List the jobs that were submitted, the newest last, with their states."""

from __future__ import annotations

import argparse
import shlex

from stratagem.errors import UsageError
from stratagem.launch.engines.engine import engine
from stratagem.launch.job_folder import JobFolder, jobs_home


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem jobs`."""


def main(args: argparse.Namespace) -> int:
    """Print a line for each."""
    jobs = JobFolder.all()
    if not jobs:
        print(f"no job in {jobs_home()}")
    for job in jobs:
        request = job.request
        try:
            state = str(engine(job.engine).state(job)).splitlines()[0]
        except UsageError as problem:
            state = f"unknown: {problem}"
        print(f"{job.handle:<16} {request.name:<20} {shlex.join(request.words):<30} {state}")
    return 0
