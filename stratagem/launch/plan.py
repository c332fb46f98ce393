"""How many machines, which strategy, is the network enough? Answered without training.

Runs the script (torch or Keras, distributed or not) up to its first fit, or the first step of its
own loop, measures a few steps there on a batch of the real data, and predicts every strategy at
every number of replicas. Nothing is trained.

examples:
  stratagem plan train.py                                  this machine, and 10Gbit between hosts
  stratagem plan --link 1Gbit --hosts 8 train.py --lr 0.1
  stratagem plan --network check.json --hosts 8 train.py   what stratagem check --json saw
  stratagem plan --link 100Gbit --latency 5us --hosts 4 --gpus-per-host 8 train.py
  stratagem plan --html plan.html --json plan.json train.py
  stratagem plan --lossy --link 1Gbit train.py             does sending less pay?
  stratagem plan --validate train.py                       also runs what fits on this machine
  stratagem plan --from plan.json --link 25Gbit            measured before, on other links
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stratagem.errors import UsageError
from stratagem.launch.cli import check_outputs, declare, script_words, whole

if TYPE_CHECKING:
    from stratagem.plan.choose import Plan
    from stratagem.plan.hardware import Hardware
    from stratagem.plan.profile import Profile
    from stratagem.training.dry_run import DryRun

#: the command runs the user's script, which may be killed for the memory that it takes
APART = True
_LINK, _LATENCY, _HOSTS = "10Gbit", "50us", 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem plan`."""
    parser.usage = "%(prog)s [options] train.py [args...]"
    declare(
        parser,
        ("--link RATE", f"between hosts, each way: 10Gbit, 1.5GB/s ({_LINK})"),
        ("--latency TIME", f"between hosts, one way: 50us, 2ms ({_LATENCY})"),
        ("--network FILE", "what stratagem check --json saw, instead of both"),
        ("--hosts H", f"how many there could be ({_HOSTS})", whole(1)),
        (
            "--gpus-per-host G",
            "devices of each host, CPU replicas where there is no GPU (as many as this machine "
            "has)",
            whole(1),
        ),
        ("--local RATE", "between devices of a host: 300GB/s (measured)"),
        ("--memory SIZE", "of each device: 16GB (what is here)"),
        ("--max N", "the most replicas to plan for (all)", whole(1)),
        (
            "--batch B",
            "examples that a replica computes at once (what the script gives to each)",
            whole(1),
        ),
        ("--quick", "do not measure replicas of this machine at once"),
    )
    earlier = "what an earlier --json has measured, instead of running a script"
    parser.add_argument("--from", dest="earlier", metavar="FILE", help=earlier)
    declare(
        parser,
        (
            "--rows",
            "throughput, speedup and efficiency, one row each, instead of the table of speedups",
        ),
        ("--json FILE", "everything, for programs"),
        ("--html FILE", "a page with the figures under the pointer"),
        ("--lossy", "also compressions: what they gain, or that none pays"),
        ("--validate", "run what fits on this machine, and compare"),
        ("--rounds N", "of --validate, in turns; the median counts (3)", whole(1)),
    )
    script = "a Python script and its arguments"
    parser.add_argument("script", nargs=argparse.REMAINDER, help=script)


def main(args: argparse.Namespace) -> int:
    """Print a plan; return the exit code."""
    if args.earlier and (args.script or args.validate or args.batch):
        raise UsageError("--from takes what was measured before: no script, --batch or --validate.")
    if args.rounds and not args.validate:
        raise UsageError("--rounds says how often --validate runs each configuration; add it.")
    words = () if args.earlier else script_words(args, "plan --link 10Gbit")
    if words and not Path(words[0]).is_file():
        raise UsageError(f"there is no script {words[0]!r} in {os.getcwd()}")
    _check_network(args)
    outputs = {"json": args.json, "html": args.html}
    check_outputs(outputs)
    if args.earlier:
        return _plan(args, outputs, None)
    from stratagem.launch.script import beside

    with beside(words[0]):
        return _plan(args, outputs, _dry_run(words, args.validate))


def _plan(args: argparse.Namespace, outputs: Mapping[str, str | None], trial: DryRun | None) -> int:
    from stratagem.plan.choose import choose

    profile, here = _earlier(args.earlier) if trial is None else _measured(args, trial)
    if args.lossy and not profile.codecs:
        raise UsageError(
            f"{args.earlier} was made without --lossy, so no encoding was measured; plan the "
            "script again."
        )
    plan = choose(profile, _hardware(args, here), most=args.max, lossy=args.lossy)
    _print(plan, args)
    _write(plan, outputs)
    if not args.validate or trial is None:
        return 0
    from stratagem.launch.validate import ROUNDS, compare

    return compare(plan, trial, args.rounds or ROUNDS, _say)


def _measured(args: argparse.Namespace, trial: DryRun) -> tuple[Profile, Hardware]:
    """Measure the model and this machine."""
    from stratagem.plan.machine import measure_hardware
    from stratagem.plan.measure import rehearse

    crowded = not args.quick and args.gpus_per_host != 1
    profile = rehearse(
        trial,
        batch=args.batch,
        crowded=crowded,
        lossy=args.lossy,
        per_host=args.gpus_per_host,
        say=_say,
    )
    return profile, measure_hardware(profile.device)


def _earlier(file: str) -> tuple[Profile, Hardware]:
    from stratagem.plan.report import from_json

    return from_json(_text(file, "--from"))


def _text(file: str, option: str) -> str:
    try:
        return Path(file).read_text()
    except OSError as problem:
        raise UsageError(f"{option} {file}: it cannot be read ({problem.strerror}).") from None
    except UnicodeDecodeError:
        raise UsageError(f"{option} {file}: it is not text.") from None


def _check_network(args: argparse.Namespace) -> None:
    """Refuse wrong options of the network before the script runs."""
    from stratagem.plan.hardware import rate, seconds, size

    size(args.memory or "1GB", "--memory")
    if args.network is not None:
        if args.link is not None or args.latency is not None:
            raise UsageError("--network says how fast links are; leave --link and --latency out.")
        _seen(args.network)
    rate(args.link or _LINK, "--link")
    rate(args.local or _LINK, "--local")
    seconds(args.latency or _LATENCY, "--latency")


def _dry_run(words: Sequence[str], validate: bool) -> DryRun:
    """Run `python script args` up to its first fit or step."""
    from stratagem.launch.script import run_to_fit

    _say(f"running {words[0]} up to its first fit, or step")
    trial = run_to_fit(words)
    if validate:  # refuse before anything is measured
        from stratagem.launch.validate import trainer

        trainer(trial)
    return trial


def _hardware(args: argparse.Namespace, here: Hardware) -> Hardware:
    """Hosts like this machine, with the links that the options name."""
    from stratagem.plan.hardware import Hardware, size

    counts = {"hosts": args.hosts or _HOSTS}
    if args.gpus_per_host:
        counts["per_host"] = args.gpus_per_host
    planned = Hardware.of(
        link=args.link or _LINK,
        latency=args.latency or _LATENCY,
        local=args.local,
        base=here,
        **counts,
    )
    if args.memory is not None:
        planned = replace(planned, memory=size(args.memory, "--memory"))
    return planned if args.network is None else planned.from_check(*_seen(args.network))


def _seen(file: str) -> tuple[float, float, float]:
    """The slowest latency, up and down rate of all tasks that `stratagem check` has measured."""
    try:
        rows = json.loads(_text(file, "--network"))["tasks"]
        speeds = [row["speed"] for row in rows if row["speed"] is not None]
        numbers = [[float(speed[name]) for speed in speeds] for name in ("latency", "up", "down")]
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"--network {file}: it is not what stratagem check --json writes; make it anew."
        ) from None
    if not speeds or min(numbers[1] + numbers[2]) <= 0:
        raise UsageError(f"--network {file}: no task was measured; run stratagem check again.")
    return max(numbers[0]), min(numbers[1]), min(numbers[2])


def _print(plan: Plan, args: argparse.Namespace) -> None:
    from rich.console import Console

    from stratagem.plan.report import render

    # in a pipe nobody sees an edge: no figure is cut
    render(plan, Console(width=None if sys.stdout.isatty() else 300), rows=args.rows)
    if not args.rows:
        _say("--rows has examples/s and efficiency of every number, --json every configuration")
    each, hosts = plan.hardware.per_host, plan.hardware.hosts
    if args.gpus_per_host is None and (args.earlier or (each > 1 and hosts > 1)):
        _say(
            f"hosts of {each}, as {f'in {args.earlier}' if args.earlier else 'this machine'}, so "
            f"{hosts * each} replicas at most; --gpus-per-host sets another number"
        )
    assumed = {} if args.hosts or args.max else {"--hosts": str(_HOSTS)}
    if args.network is None and plan.hardware.hosts > 1:
        given = {"--link": (args.link, _LINK), "--latency": (args.latency, _LATENCY)}
        assumed |= {name: usual for name, (value, usual) in given.items() if value is None}
    if assumed:
        words = " ".join(f"{name} {value}" for name, value in assumed.items())
        _say(f"assumed {words}; say what you have")


def _write(plan: Plan, outputs: Mapping[str, str | None]) -> None:
    """Write the files that were asked for, after all of them were made."""
    from stratagem.plan.page import page
    from stratagem.plan.report import dumps, write

    make = {"json": dumps, "html": page}
    made = {file: make[option](plan) for option, file in outputs.items() if file is not None}
    for file, data in made.items():
        try:
            write(file, data)
        except OSError as problem:
            raise UsageError(f"{file}: it cannot be written ({problem.strerror}).") from None
        _say(f"wrote {file}")


def _say(text: str) -> None:
    print(f"stratagem plan: {text}", file=sys.stderr, flush=True)
