"""A cluster on this machine: one process per task, each running the same script.

Every process finds its place in TF_CONFIG; worker 0 is the chief. What they print appears line by
line behind the name of the task. When one fails, the others have --grace seconds to end, then
they are ended; the exit code is that of the first task that failed. Ctrl-C ends them all.

examples:
  stratagem run --replicas 2 train.py --epochs 10       two workers, one device each
  stratagem run --workers 2 train.py                    two workers sharing out all the GPUs
  stratagem run --workers 4 -m mypackage.train --lr 0.1
  stratagem run --workers 4 --ps 2 --evaluator train.py
  stratagem run --replicas 2 --gpu-memory 50% train.py  two workers on one GPU
  CUDA_VISIBLE_DEVICES=2,3 stratagem run --replicas 2 train.py
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import UsageError
from stratagem.launch import gpus
from stratagem.launch.escalation import Inbox
from stratagem.launch.job import Job, addresses, command
from stratagem.launch.options import below, whole
from stratagem.launch.output import Relay, Sink, wants_colour
from stratagem.launch.processes import Guard, Process
from stratagem.launch.supervise import Supervisor, ending


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem run`."""
    add = parser.add_argument
    parser.usage = (
        "%(prog)s [options] train.py [args...]\n       %(prog)s [options] -m module [args...]"
    )
    add("--replicas", type=whole(1), metavar="N", help="N workers of one GPU each (or the CPU); "
        "where there are fewer GPUs, several share one")  # fmt: skip
    add("--workers", type=whole(1), metavar="W", help="W workers, which divide the GPUs among "
        "them (1 if neither this nor --replicas is given)")  # fmt: skip
    add("--ps", type=whole(0), default=0, metavar="P", help="P parameter servers besides")
    add("--evaluator", action="store_true", help="an evaluator besides")
    add("--port", type=whole(1), metavar="BASE", help="the tasks listen at BASE, BASE + 1, ... "
        "(else at ports that are free)")  # fmt: skip
    add("--gpu-memory", type=_limit, metavar="LIMIT", help="what each task may take of a GPU: "
        "8GiB, 50%% or 0.5 (handed on as STRATAGEM_GPU_MEMORY)")  # fmt: skip
    add("--grace", type=below(1e6, "a number of seconds"), default=5.0, metavar="SECONDS",
        help="for the other tasks to end after one has failed, or after Ctrl-C (5)")  # fmt: skip
    add("--no-color", action="store_true", help="no colours on a terminal (or set NO_COLOR)")
    # Both take all that follows: options after the script are the script's own.
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="module", help="run a module")
    add("script", nargs=argparse.REMAINDER, help="a Python script and its arguments")


def main(args: argparse.Namespace) -> int:
    """Run the job to its end; the exit code of the first task that failed."""
    job = plan(args, os.environ)
    if args.gpu_memory and not any(job.gpus.values()):
        print("stratagem run: no GPU here: --gpu-memory has no effect", file=sys.stderr)
    return launch(job, grace=args.grace, colour=not args.no_color)


def plan(args: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """What to start, with everything checked that can be."""
    if args.replicas and args.workers:
        raise UsageError(
            "give --replicas (workers of one device each) or --workers (they divide the devices), "
            "not both"
        )
    words = command(args.script, args.module)
    workers = args.replicas or args.workers or 1
    roles = {"worker": workers, "ps": args.ps, "evaluator": int(args.evaluator)}
    spec = ClusterSpec(addresses(roles, args.port))
    dealt = gpus.assign(spec.tasks(), gpus.visible(environ), one_each=bool(args.replicas))
    return Job(spec, words, dealt, args.gpu_memory)


def launch(job: Job, *, grace: float, colour: bool) -> int:
    """Start the tasks, see them to their end, and say which failed first."""
    out, err = (Sink(s, colour=colour and wants_colour(s, os.environ))
                for s in (sys.stdout, sys.stderr))  # fmt: skip
    relay = Relay(out, err)
    with Inbox() as inbox, ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix=f"stratagem-{os.getpid()}-")))
        guard = Guard(folder)
        stack.callback(guard.close)
        processes = _start(job, guard, relay, stack, folder)
        supervisor = Supervisor(processes, guard, relay, inbox, grace)
        supervisor.run()
        _finish(relay, inbox, hurry=supervisor.stopped is not None)
    if supervisor.first is not None:
        err.write(_verdict(supervisor.first, relay.tail(supervisor.first)).encode())
    return supervisor.code


def _start(
    job: Job, guard: Guard, relay: Relay, stack: ExitStack, folder: Path
) -> list[Process]:
    processes: list[Process] = []
    for number, (task, environ) in enumerate(job.environments(os.environ).items()):
        process = Process(task, job.command, environ, folder / str(number))
        stack.callback(process.kill)
        guard.add(process)
        relay.add(process, number)
        processes.append(process)
    relay.start()
    return processes


def _finish(relay: Relay, inbox: Inbox, *, hurry: bool) -> None:
    """Let everything out that was printed; whoever is interrupted waits a second at most."""
    relay.close()
    waited = 0.0
    while not relay.join(0.1):
        hurry = hurry or bool(inbox.arrived)
        waited += 0.1
        if hurry and waited > 1:
            return


def _verdict(first: Process, tail: Sequence[str]) -> str:
    """The last word: who failed first, how and when, and what it said."""
    assert first.code is not None
    lived = first.ended - first.started
    what = f"{first.task} failed first: {ending(first.code)} (pid {first.pid}) after {lived:.1f} s"
    if not tail:
        return f"{what}; it wrote nothing to stderr.\n"
    return "\n".join([f"{what}; its last lines:", *(f"    {line}" for line in tail), ""])


def _limit(text: str) -> str:
    try:
        return gpus.memory_limit(text)
    except ValueError as flaw:
        raise argparse.ArgumentTypeError(str(flaw)) from None
