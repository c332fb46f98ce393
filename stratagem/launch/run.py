"""A cluster on this machine: one process per task, each running the same script.

Every process finds its place in TF_CONFIG; worker 0 is the chief. What they print appears line by
line behind the name of the task. When one fails, the others have --grace seconds to end, then
they are ended; the exit code is that of the first task that failed. Ctrl-C ends them all.
With --restarts the whole job is started again after a failure, and trainings with checkpoints go
on (docs/resume.md). SIGTERM reaches all tasks: those that save end with 75, and so does this.

examples:
  stratagem run --replicas 2 train.py --epochs 10       two workers, one device each
  stratagem run --workers 2 train.py                    two workers sharing out all the GPUs
  stratagem run --workers 4 -m mypackage.train --lr 0.1
  stratagem run --workers 4 --ps 2 --evaluator train.py
  stratagem run --replicas 2 --gpu-memory 50% train.py  two workers on one GPU
  CUDA_VISIBLE_DEVICES=2,3 stratagem run --replicas 2 train.py
  stratagem run --record runs/first --replicas 2 train.py   then: stratagem top, stratagem report
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from stratagem.cluster.parsing import MAX_PORT
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.errors import ClusterError, UsageError
from stratagem.launch.cli import below, declare, declare_script, script_words, whole
from stratagem.launch.local_job import Job, launch
from stratagem.tracebacks import VARIABLE as TRACEBACK_VARIABLE
from stratagem.training.termination import EXIT_CODE

_PROC = Path("/proc/driver/nvidia/gpus")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]i?b)", re.IGNORECASE | re.ASCII)
_SHARE = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?(%?)", re.ASCII)


def visible(environ: Mapping[str, str]) -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(number) for number in range(count_gpus())]
    names = [name.strip() for name in chosen.split(",")]
    # As in CUDA: an entry that names no device hides those after it.
    bad = (i for i, name in enumerate(names) if not name or name.startswith("-"))
    return names[: next(bad, len(names))]


def count_gpus() -> int:
    """How many NVIDIA GPUs this machine has."""
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        try:
            found = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            found = None
        if found is not None and found.returncode == 0:
            return sum(line.startswith("GPU ") for line in found.stdout.splitlines())
    return len(list(_PROC.iterdir())) if _PROC.is_dir() else 0


def assign(
    tasks: Sequence[Task], gpus: Sequence[str], *, one_each: bool
) -> dict[Task, tuple[str, ...]]:
    """Assign the GPUs: one to each worker, or all of them in contiguous blocks.

    With fewer GPUs than workers, several workers share one. The evaluator takes the next GPU in
    turn; a parameter server takes none.
    """
    workers = [task for task in tasks if task.type in ("chief", "worker")]
    size = len(workers)
    dealt: dict[Task, tuple[str, ...]] = dict.fromkeys(tasks, ())
    for rank, task in enumerate([*workers, *(t for t in tasks if t.type == "evaluator")]):
        if gpus and (one_each or len(gpus) < size or rank == size):
            dealt[task] = (gpus[rank % len(gpus)],)
        elif gpus:
            dealt[task] = tuple(gpus[rank * len(gpus) // size : (rank + 1) * len(gpus) // size])
    return dealt


def memory_limit(text: str) -> str:
    """Normalise a limit as "8GiB", "50%" or "0.5"; ValueError for anything else."""
    text = text.strip()
    if (size := _SIZE.fullmatch(text)) and float(size[1]) > 0:
        unit = size[2].upper().replace("I", "i")
        return f"{size[1]}{unit}"
    share = _SHARE.fullmatch(text)
    if share and 0 < float(share[1]) <= (100 if share[2] else 1):
        return f"{share[1]}{share[2]}"
    raise ValueError(f"{text!r} is not an amount of GPU memory; write 8GiB, 50% or 0.5")


_HOST = "127.0.0.1"


def command(words: Sequence[str]) -> tuple[str, ...]:
    """The command line of a script, or of -m and a module, which must be there."""
    if words[0] == "-m" and not _importable(words[1].partition(".")[0]):
        raise UsageError(f"there is no module {words[1]!r}, neither in {os.getcwd()} nor installed")
    if words[0] != "-m" and not Path(words[0]).exists():
        raise UsageError(f"there is no script {words[0]!r} in {os.getcwd()}")
    return sys.executable, *words


def _importable(package: str) -> bool:
    """Whether python -m would find a package; a dotted name would import its parents."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)


def addresses(roles: Mapping[str, int], base: int | None) -> dict[str, list[str]]:
    """Addresses on this machine for so many tasks of each role."""
    tasks = [Task(role, index) for role, count in roles.items() for index in range(count)]
    if base is not None and base + len(tasks) - 1 > MAX_PORT:
        raise ClusterError(
            f"--port {base}: {len(tasks)} tasks need the ports up to {base + len(tasks) - 1}, and "
            f"{MAX_PORT} is the last"
        )
    found: dict[str, list[str]] = {role: [] for role in roles}
    with ExitStack() as held:  # all are bound at once, so that no port is found twice
        for number, task in enumerate(tasks):
            sock = held.enter_context(socket.socket())
            port = _bind(sock, task, None if base is None else base + number)
            found[task.type].append(f"{_HOST}:{port}")
    return found


def _bind(sock: socket.socket, task: Task, port: int | None) -> int:
    """Bind a free port, or the one that was asked for."""
    if port is None:
        sock.bind((_HOST, 0))
        return int(sock.getsockname()[1])
    # Old connections of an earlier job, in TIME_WAIT, do no harm.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((_HOST, port))
    except OSError as problem:
        raise ClusterError(
            f"{task} cannot listen at port {port} ({problem.strerror}): choose another --port, or "
            "leave it out and free ports are found"
        ) from None
    return port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem run`."""
    parser.usage = (
        "%(prog)s [options] train.py [args...]\n       %(prog)s [options] -m module [args...]"
    )
    declare(
        parser,
        (
            "--replicas N",
            "N workers of one GPU each (or the CPU); where there are fewer GPUs, several share one",
            whole(1),
        ),
        (
            "--workers W",
            "W workers, which divide the GPUs among them (1 if neither this nor --replicas is "
            "given)",
            whole(1),
        ),
        ("--ps P", "P parameter servers besides", whole(0), 0),
        ("--evaluator", "an evaluator besides"),
        (
            "--port BASE",
            "the tasks listen at BASE, BASE + 1, ... (else at ports that are free)",
            whole(1),
        ),
        (
            "--gpu-memory LIMIT",
            "what each task may take of a GPU: 8GiB, 50%% or 0.5 (handed on as "
            "STRATAGEM_GPU_MEMORY)",
            _limit,
        ),
        (
            "--grace SECONDS",
            "for the other tasks to end after one has failed, or after Ctrl-C (5)",
            below(1e6, "a number of seconds"),
            5.0,
        ),
        ("--restarts N", "start the job again up to N times after a failure (0)", whole(0), 0),
        (
            "--task-restarts N",
            "start tasks that were killed again, up to N times in all, while the others go on: "
            "for strategies with elastic=True, backups=1 or servers and fit(..., checkpoint=) (0)",
            whole(0),
            0,
        ),
        (
            "--record DIR",
            "have every task write its figures into DIR, a line a second, for `stratagem top` "
            "and `stratagem report` (handed on as STRATAGEM_RECORD)",
        ),
        ("--traceback", "whole tracebacks, with the lines of stratagem"),
        ("--no-color", "no colours on a terminal (or set NO_COLOR)"),
    )
    declare_script(parser)


def main(args: argparse.Namespace) -> int:
    """Run the job, again if restarts are left; return the exit code of the first failed task."""
    for left in range(args.restarts, -1, -1):
        code, stopped = _once(args)
        if not code or stopped or not left:
            break
        what = "was asked to end, and saved" if code == EXIT_CODE else f"failed ({code})"
        print(
            f"stratagem run: the job {what}; starting it again, {left - 1} more times at most",
            file=sys.stderr,
        )
    return code


def _once(args: argparse.Namespace) -> tuple[int, bool]:
    """Run the job, with new ports; return its exit code, and whether a signal has ended it."""
    job = plan(args, os.environ)
    if args.gpu_memory and not any(job.gpus.values()):
        print("stratagem run: no GPU here: --gpu-memory has no effect", file=sys.stderr)
    whole = args.traceback or bool(os.environ.get(TRACEBACK_VARIABLE))
    return launch(
        job,
        grace=args.grace,
        colour=not args.no_color,
        tracebacks=whole,
        record=args.record and Path(args.record).absolute(),
        task_restarts=args.task_restarts,
    )


def plan(args: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """The job to start, after its options are checked."""
    if args.replicas and args.workers:
        raise UsageError(
            "give --replicas (workers of one device each) or --workers (they divide the devices), "
            "not both"
        )
    words = command(script_words(args, "run --replicas 2"))
    workers = args.replicas or args.workers or 1
    roles = {"worker": workers, "ps": args.ps, "evaluator": int(args.evaluator)}
    spec = ClusterSpec(addresses(roles, args.port))
    dealt = assign(spec.tasks(), visible(environ), one_each=bool(args.replicas))
    return Job(spec, words, dealt, args.gpu_memory)


def _limit(text: str) -> str:
    try:
        return memory_limit(text)
    except ValueError as flaw:
        raise argparse.ArgumentTypeError(str(flaw)) from None
