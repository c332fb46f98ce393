"""End a submitted job, and wait until it has ended.

examples:
  stratagem cancel slurm:123
"""

from __future__ import annotations

import argparse
import time

from stratagem.errors import UsageError
from stratagem.launch.engines.engine import engine
from stratagem.launch.job_folder import JobFolder
from stratagem.launch.verdict import TOLD_TO_END

_PATIENCE = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem cancel`."""
    parser.add_argument("job", help="the job's handle: slurm:123")


def main(args: argparse.Namespace) -> int:
    """Ask the engine to end it."""
    job = JobFolder.find(args.job)
    runs = engine(job.engine)
    state = runs.state(job)
    if state.phase == "ended":
        print(f"{job.handle} has {state}")
        return 0
    runs.cancel(job)
    until = time.monotonic() + _PATIENCE
    while (state := runs.state(job)).phase != "ended":
        if time.monotonic() > until:
            raise UsageError(f"{job.handle} was told to end, and is still {state}")
        time.sleep(0.2)
    if job.end() is None:  # it had not begun
        job.ended(TOLD_TO_END, "cancelled")
    print(f"{job.handle} is cancelled")
    return 0
