"""How far a submitted job is, task by task; the exit code says whether it is known to have failed.

examples:
  stratagem status slurm:123
"""

from __future__ import annotations

import argparse

from stratagem.launch.engines.engine import engine
from stratagem.launch.job_folder import JobFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem status`."""
    parser.add_argument("job", help="the job's handle: slurm:123")


def main(args: argparse.Namespace) -> int:
    """Print the state of the job, and of its tasks."""
    job = JobFolder.find(args.job)
    state = engine(job.engine).state(job)
    print(f"{job.handle} ({job.request.name}): {state}")
    for task in job.request.tasks():
        told = job.task(task)
        how = f"ended, exit code {told['code']}" if "code" in told else "running"
        if state.phase == "ended" and "code" not in told:
            how = "gone without a word" if told else "never began"
            how = "ended with the job" if state.code == 0 else how
        elif not told:
            how = "not begun"
        print(f"  {task!s:<12} {told.get('host', '-'):<20} {how}")
    return int(state.phase == "ended" and bool(state.code is None or state.code))
