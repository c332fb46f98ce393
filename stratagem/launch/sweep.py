"""Many trainings with other hyper-parameters, side by side; the best of them are kept.

Ranges and lists stand where the script's own flags have values, and each trial gets one value of
each. `fit` of an sg.Model, or of a Keras model in a scope, writes metrics and the trained model
into the trial's folder; the script needs no other change. Options of the sweep may stand before or
after the script; what follows -- is the script's, whatever it looks like.
A sweep that was ended, by Ctrl-C or anyhow, goes on with --resume (docs/sweep.md).

examples:
  stratagem sweep train.py --lr 1e-4..1e-1:log --units 64,128 --trials 20 --metric val_accuracy:max
  stratagem sweep train.py --depth 2..6 --units 64,128 --sampler grid --metric val_loss:min
  stratagem sweep train.py --lr 1e-4..1e-1:log --metric val_loss --out runs/lr -- --seed 3
  stratagem sweep --on slurm --slots 8 train.py --lr 1e-4..1e-1:log --metric val_loss
  stratagem sweep --resume --out runs/lr                   go on where it was
  stratagem sweep --resume --out runs/lr --trials 40       and with 20 more trials
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from stratagem.errors import UsageError
from stratagem.launch.cli import declare, whole
from stratagem.launch.run import command
from stratagem.launch.submit import settings_of
from stratagem.launch.sweep_folder import (
    SAMPLERS,
    SweepFolder,
    SweepSettings,
    check_flags,
    count_trials,
    read_metric,
)
from stratagem.launch.trial_places import trial_runner


def _slots(text: str) -> int | None:
    return None if text == "auto" else whole(1)(text)


def _add_options(parser: argparse.ArgumentParser) -> None:
    declare(
        parser,
        ("--metric NAME:max", "what is best: val_accuracy:max, val_loss:min"),
        ("--trials N", "how many (10; of a grid all)", whole(1)),
        ("--keep K", "how many models stay on disk (3)", whole(0)),
    )
    parser.add_argument("--sampler", choices=SAMPLERS, help="random, grid or tpe (random)")
    declare(
        parser,
        ("--seed S", "of the sampler (0)", whole(0)),
        ("--replicas-per-trial R", "devices of one trial (1)", whole(1)),
        ("--slots N", "trials at a time; auto: as many as there are devices for (auto)", _slots),
        ("--prune", "end trials that are far behind", bool, None),
        ("--on ENGINE", "each trial is a job: slurm, ssh or ray (this machine)"),
        ("--workers W", "of each such job (1)", whole(1)),
        ("--gpus-per-worker G", "of each such job (0)", whole(0)),
        ("--hosts LIST", "as for stratagem submit (ssh)"),
        ("--out DIR", "the sweep's folder (runs/sweep-SCRIPT)"),
        ("--resume", "go on with the sweep of that folder"),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stratagem sweep`."""
    parser.usage = (
        "%(prog)s [options] train.py --flag RANGE ... [options] [-- args...]\n"
        "       %(prog)s --resume --out DIR"
    )
    _add_options(parser)
    # The script's flags and the sweep's options may be mixed after it; main separates them.
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="module")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="train.py ...")


class _OwnOptions(argparse.ArgumentParser):
    """Parses the sweep's options among the arguments of a script."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        _add_options(self)
        self.takes = {
            option: action.nargs != 0
            for action in self._actions
            for option in action.option_strings
        }

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see stratagem sweep --help)")

    def split(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split into the sweep's options and the script's arguments."""
        own: list[str] = []
        script: list[str] = []
        left = list(words)
        while left:
            word = left.pop(0)
            if word == "--":
                return own, [*script, word, *left]
            option, equals, _ = word.partition("=")
            if option not in self.takes:
                script.append(word)
                continue
            own.append(word)
            if self.takes[option] and not equals and left:
                own.append(left.pop(0))
        return own, script


def main(args: argparse.Namespace) -> int:
    """Run the sweep; 1 if no trial is complete."""
    options = _OwnOptions()
    own, words = options.split(args.module or args.words)
    args = options.parse_args(own, args)
    folder = SweepFolder(_out(args, words))
    begun = folder.begun
    if args.resume and begun is None:
        raise UsageError(f"there is no sweep in {folder.path} to go on with; leave --resume out")
    if not args.resume and begun is not None:
        raise UsageError(
            f"{folder.path} has a sweep already; go on with it by --resume, or choose another --out"
        )
    asked = _settings(args, words, begun)
    runner = trial_runner(asked, args.slots, folder.path)
    with folder.locked():
        folder.begin(asked)
        from stratagem.launch.sweep_loop import SweepLoop  # imports Optuna

        loop = SweepLoop(asked, folder, runner, list(options.takes))
        loop.run()
        print("\n".join(loop.summary()), flush=True)
    if loop.stopped is not None:
        again = f"stratagem sweep --resume --out {folder.path}"
        print(
            f"stratagem sweep: ended by {loop.stopped.name}; go on with: {again}", file=sys.stderr
        )
        return 128 + loop.stopped
    return 0 if loop.complete else 1


def _out(args: argparse.Namespace, words: Sequence[str]) -> Path:
    if args.out:
        return Path(args.out)
    if not words:
        raise UsageError(
            "which script? As in: stratagem sweep train.py --lr 1e-4..1e-1:log --metric val_loss"
        )
    name = words[0] if args.module else Path(words[0]).stem
    return Path("runs", f"sweep-{name}")


def _settings(
    args: argparse.Namespace, words: Sequence[str], begun: SweepSettings | None
) -> SweepSettings:
    """The settings that the options give; a resumed sweep keeps those that are not given."""
    if begun is not None and not words:
        _check_place(begun)
        said = {name: vars(args)[name] for name in ("keep", "sampler", "seed", "prune")}
        said["replicas"] = args.replicas_per_trial
        said["submit"] = _submit(args) or None
        if args.metric:
            said["metric"], said["larger"] = read_metric(args.metric)
        given = {name: value for name, value in said.items() if value is not None}
        axes, _ = begun.space
        trials = count_trials(axes, begun.sampler, args.trials or begun.trials)
        replace(begun, **given).check_same(begun)
        return _no_fewer(replace(begun, trials=trials), begun)
    made = _new(args, words)
    if begun is not None:
        made.check_same(begun)
        if args.trials is None:
            made = replace(made, trials=begun.trials)
        _no_fewer(made, begun)
    return made


def _submit(args: argparse.Namespace) -> dict[str, Any]:
    """Options of `stratagem submit` for the trials' jobs; none if they run on this machine."""
    names = ("on", "workers", "gpus_per_worker", "hosts")
    given = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    if given and "on" not in given:
        raise UsageError("where to? As in: --on slurm, with --workers, --gpus-per-worker, --hosts")
    if given and args.replicas_per_trial:
        raise UsageError(
            f"a job on {given['on']} has workers: say --workers and --gpus-per-worker instead of "
            "--replicas-per-trial"
        )
    return {**settings_of(Path.cwd()), **given} if given else {}


def _check_place(begun: SweepSettings) -> None:
    if begun.where != os.getcwd():
        raise UsageError(f"the sweep was begun in {begun.where}; go on with it there")


def _no_fewer(asked: SweepSettings, begun: SweepSettings) -> SweepSettings:
    if asked.trials < begun.trials:
        raise UsageError(
            f"the sweep was begun with {begun.trials} trials; --trials {asked.trials} are fewer"
        )
    return asked


def _new(args: argparse.Namespace, words: Sequence[str]) -> SweepSettings:
    if not words:
        _out(argparse.Namespace(out=None), ())
    head = command(["-m", words[0]] if args.module else words[:1])
    metric, larger = read_metric(args.metric)
    made = SweepSettings(
        command=head,
        words=tuple(words[1:]),
        metric=metric,
        larger=larger,
        trials=1,
        keep=3 if args.keep is None else args.keep,
        replicas=args.replicas_per_trial or 1,
        sampler=args.sampler or "random",
        seed=args.seed or 0,
        prune=bool(args.prune),
        where=os.getcwd(),
        submit=_submit(args),
    )
    axes, _ = made.space
    if not axes:
        raise UsageError(
            f"there is nothing to try: give a flag of {made.script} a range, as in --lr "
            "1e-4..1e-1:log, or a list, as in --units 64,128"
        )
    if not args.module:
        check_flags(Path(words[0]), axes)
    return replace(made, trials=count_trials(axes, made.sampler, args.trials))
