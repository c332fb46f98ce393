"""Commands about jobs that were submitted: jobs, logs, status, cancel."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time

from stratagem.errors import StratagemError, UsageError
from stratagem.launch.cli import declare
from stratagem.launch.engines.engine import engine
from stratagem.launch.job_folder import JobFolder, JobState, LogReader, jobs_home
from stratagem.launch.output import Sink, wants_colour
from stratagem.launch.supervise import TOLD_TO_END

_TICK = 0.2
_ASK = 2.0  # seconds between two questions to the engine
_UNANSWERED = 600.0  # seconds without an answer after which an error is raised
_CANCELLED_WITHIN = 60.0


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", help="the job's handle: slurm:123")


class JobsCommand:
    """List the jobs that were submitted, the newest last, with their states."""

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declare the options of `stratagem jobs`."""

    @staticmethod
    def main(args: argparse.Namespace) -> int:
        """Print a line for each."""
        lines = [_line(job) for job in JobFolder.begun()]
        print("\n".join(filter(None, lines)) or f"no job in {jobs_home()}")
        return 0


def _line(job: JobFolder) -> str:
    """The line of a job; empty if no engine has named it, which Slurm may do when asked."""
    request = job.request
    if not job.record["name"] and job.engine != "slurm":
        return ""
    try:
        state = str(engine(job.engine).state(job)).splitlines()[0]
    except StratagemError as problem:
        state = f"unknown: {problem}"
    if not job.record["name"]:
        return ""
    return f"{job.handle:<16} {request.name:<20} {shlex.join(request.words):<30} {state}"


class StatusCommand:
    """How far a submitted job is, task by task; the exit code is 1 if it is known to have failed.

    examples:
      stratagem status slurm:123
    """

    add_arguments = staticmethod(_add_job)

    @staticmethod
    def main(args: argparse.Namespace) -> int:
        """Print the state of the job, and of its tasks."""
        job = JobFolder.find(args.job)
        state = engine(job.engine).state(job)
        print(f"{job.handle} ({job.request.name}): {state}")
        for task in job.request.tasks():
            known = job.task(task)
            how = f"ended, exit code {known['code']}" if "code" in known else "running"
            if state.phase == "ended" and "code" not in known:
                how = "gone without a word" if known else "never began"
                how = "ended with the job" if state.code == 0 else how
            elif not known:
                how = "not begun"
            print(f"  {task!s:<12} {known.get('host', '-'):<20} {how}")
        return int(state.phase == "ended" and bool(state.code is None or state.code))


class CancelCommand:
    """End a submitted job, and wait until it has ended.

    examples:
      stratagem cancel slurm:123
    """

    add_arguments = staticmethod(_add_job)

    @staticmethod
    def main(args: argparse.Namespace) -> int:
        """Ask the engine to end it."""
        job = JobFolder.find(args.job)
        runs = engine(job.engine)
        state = runs.state(job)
        if state.phase == "ended":
            print(f"{job.handle} has {state}")
            return 0
        runs.cancel(job)
        until = time.monotonic() + _CANCELLED_WITHIN
        while (state := runs.state(job)).phase != "ended":
            if time.monotonic() > until:
                raise UsageError(f"{job.handle} was told to end, and is still {state}")
            time.sleep(0.2)
        if job.end() is None:  # the job had not begun
            job.ended(TOLD_TO_END, "cancelled")
        print(f"{job.handle} is cancelled")
        return 0


class LogsCommand:
    """What the tasks of a submitted job print: every line once, from the start.

    examples:
      stratagem logs slurm:123
      stratagem logs slurm:123 --follow      to its end; Ctrl-C leaves the job alone
      stratagem logs ssh:ab12cd --task "worker 1" --times
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Declare the options of `stratagem logs`."""
        _add_job(parser)
        declare(
            parser,
            ("--follow", "go on until the job has ended, and exit as it did"),
            ("--task TASK", "one task alone: 'worker 1'"),
            ("--times", "with the time of each line"),
            ("--no-color", "no colours on a terminal (or set NO_COLOR)"),
        )

    @staticmethod
    def main(args: argparse.Namespace) -> int:
        """Print the lines, until the job has ended with --follow."""
        job = JobFolder.find(args.job)
        names = [str(task) for task in job.request.tasks()]
        if args.task and args.task not in names:
            raise UsageError(f"{job.handle} has no task {args.task!r}; it has {', '.join(names)}")
        printer = _Printer(job, args.task, times=args.times, colour=not args.no_color)
        if args.follow:
            return follow(job, printer)
        try:
            engine(job.engine).state(job)  # copies logs that lie elsewhere
        except StratagemError as problem:
            print(f"stratagem logs: what is here already: {problem}", file=sys.stderr)
        printer.print_new()
        return 0


def follow(job: JobFolder, printer: _Printer | None = None) -> int:
    """Print lines as they come, until the job has ended; return its exit code."""
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
            if job.end() is not None:  # ask the engine whether the job has ended
                break


class _Printer:
    """Prints the lines of a job, each after the name of its task."""

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
