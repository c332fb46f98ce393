"""What the tasks of a submitted job print: every line once, from the start.

examples:
  stratagem logs slurm:123
  stratagem logs slurm:123 --follow      to its end; Ctrl-C leaves the job alone
  stratagem logs ssh:ab12cd --task "worker 1" --times
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from stratagem.errors import StratagemError, UsageError
from stratagem.launch.engines.engine import engine
from stratagem.launch.job_folder import JobFolder, LogReader
from stratagem.launch.job_request import JobState
from stratagem.launch.output import Sink, wants_colour

_TICK = 0.2
_ASK = 2.0  # seconds between two questions to the engine
_UNANSWERED = 600.0  # seconds after which nobody asks again


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem logs`."""
    add = parser.add_argument
    add("job", help="the job's handle: slurm:123")
    add("--follow", action="store_true", help="go on until the job has ended, and exit as it did")
    add("--task", metavar="TASK", help="one task alone: 'worker 1'")
    add("--times", action="store_true", help="with the time of each line")
    add("--no-color", action="store_true", help="no colours on a terminal (or set NO_COLOR)")


def main(args: argparse.Namespace) -> int:
    """Print the lines."""
    job = JobFolder.find(args.job)
    names = [str(task) for task in job.request.tasks()]
    if args.task and args.task not in names:
        raise UsageError(f"{job.handle} has no task {args.task!r}; it has {', '.join(names)}")
    printer = _Printer(job, args.task, times=args.times, colour=not args.no_color)
    if args.follow:
        return follow(job, printer)
    try:
        engine(job.engine).state(job)  # brings what lies elsewhere
    except StratagemError as problem:
        print(f"stratagem logs: what is here already: {problem}", file=sys.stderr)
    printer.print_new()
    return 0


def follow(job: JobFolder, printer: _Printer | None = None) -> int:
    """Print lines as they come, until the job has ended; its exit code."""
    printer = printer or _Printer(job)
    try:
        state = _to_the_end(job, printer)
    except KeyboardInterrupt:
        print(
            f"\n{job.handle} goes on. To come back: stratagem logs {job.handle} --follow; to end "
            f"it: stratagem cancel {job.handle}",
            file=sys.stderr,
        )
        return 130
    print(f"{job.handle} {state}", file=sys.stderr)
    return 1 if state.code is None else state.code


def _to_the_end(job: JobFolder, printer: _Printer) -> JobState:
    runs, said, answered = engine(job.engine), "", time.monotonic()
    while True:
        try:
            state, answered = runs.state(job), time.monotonic()
        except StratagemError as problem:
            if time.monotonic() - answered > _UNANSWERED:
                raise
            state = JobState("waiting", text=f"{problem}; the job goes on, and is asked again")
        if state.phase == "waiting" and said != str(state):
            said = str(state)
            print(f"{job.handle} is {said}", file=sys.stderr, flush=True)
        printer.print_new()
        if state.phase == "ended":
            return state
        asked = time.monotonic()
        while time.monotonic() - asked < _ASK:
            time.sleep(_TICK)
            printer.print_new()
            if job.end() is not None:  # ask the engine whether that is all
                break


class _Printer:
    """Prints lines behind the names of their tasks."""

    def __init__(
        self, job: JobFolder, only: str | None = None, *, times: bool = False, colour: bool = True
    ) -> None:
        self._reader, self._only, self._times = LogReader(job), only, times
        self._sink = Sink(sys.stdout, colour=colour and wants_colour(sys.stdout, os.environ))
        tasks = job.request.tasks()
        self._prefixes = {task: self._sink.prefix(str(task), i) for i, task in enumerate(tasks)}

    def print_new(self) -> None:
        for task, when, line in self._reader.lines():
            if self._only in (None, str(task)):
                time_of = f"{when} ".encode() if self._times else b""
                self._sink.write(time_of + self._prefixes[task] + line.encode() + b"\n")
