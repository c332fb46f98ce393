"""`sg.sweep`: a sweep of a function, from a notebook or a script.

python -m stratagem.launch.notebook_sweep FILE --lr 0.1 --units 64 runs one trial. FILE has the
sys.path of the process that began the sweep, as a line of JSON, and the pickled function.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

from stratagem.cluster.environment import detect
from stratagem.errors import UsageError
from stratagem.figures.trial_record import record_epoch
from stratagem.launch.submit import as_name, settings_of
from stratagem.launch.sweep_folder import (
    SAMPLERS,
    SweepFolder,
    SweepSettings,
    SweepTrial,
    best_first,
    count_trials,
    read_axis,
    read_metric,
    value_of,
)
from stratagem.launch.trial_places import TrialSlots, trial_runner


def arguments(words: Sequence[str]) -> dict[str, Any]:
    """The flags as keyword arguments."""
    pairs: list[tuple[str, str]] = []
    left = list(words)
    while left:
        flag, equals, value = left.pop(0).partition("=")
        pairs.append((flag, value if equals else left.pop(0)))
    return {flag.removeprefix("--"): value_of(value) for flag, value in pairs}


def main(argv: Sequence[str]) -> None:
    """Call the function; a dict of numbers that the chief returns counts as a last epoch."""
    import cloudpickle

    folders, _, function = Path(argv[0]).read_bytes().partition(b"\n")
    sys.path += [each for each in json.loads(folders) if each not in sys.path]
    train = cloudpickle.loads(function)
    result = train(**arguments(argv[1:]))
    place = detect(os.environ)
    if isinstance(result, dict) and (place is None or place.is_chief):
        record_epoch(0, result)


Space = Mapping[str, str | Sequence[Any]]


@dataclass(frozen=True)
class SweepResult:
    """The trials by number, and the complete ones, the best first."""

    metric: str
    trials: list[SweepTrial]
    ranked: list[SweepTrial]
    folder: Path

    @property
    def best(self) -> SweepTrial:
        if not self.ranked:
            raise UsageError(f"no trial came to a result; what they printed is in {self.folder}")
        return self.ranked[0]

    def plot(self) -> Any:
        """The metric over each parameter, a point for each complete trial (matplotlib)."""
        from matplotlib import pyplot as plt

        names = list(self.best.params)
        figure, axes = plt.subplots(1, len(names), squeeze=False, figsize=(4 * len(names), 3))
        for axis, name in zip(axes[0], names, strict=True):
            values = [each.params[name] for each in self.ranked]
            axis.plot(values, [each.value for each in self.ranked], "o")
            if _spans_decades(values):
                axis.set_xscale("log")
            axis.set(xlabel=name, ylabel=self.metric)
        figure.tight_layout()
        return figure


def sweep(
    train: Callable[..., Any],
    space: Space,
    *,
    metric: str,
    out: str | os.PathLike[str],
    trials: int | None = None,
    keep: int = 3,
    sampler: str = "random",
    seed: int = 0,
    slots: int | None = None,
    replicas_per_trial: int = 1,
    prune: bool = False,
    resume: bool = False,
    on: str | None = None,
) -> SweepResult:
    """Call `train` with other arguments, each time in a process of its own.

    >>> result = sg.sweep(train, {"lr": "1e-4..1e-1:log", "units": [64, 128]},
    ...                   metric="val_accuracy:max", trials=20, out="runs/units")
    >>> result.best.params, result.plot()

    Args:
        train: takes the parameters by name; its `fit` writes the metrics, or it returns a dict of
            them.
        space: a range as in `stratagem sweep`, or a list of numbers or words.
        metric: what is best: "val_accuracy:max".
        out: the sweep's folder; `resume=True` goes on with what is there.
        on: "slurm", "ray" or "ssh": each trial is a job there, `slots` of them at once, with what
            stratagem.toml says of jobs; all machines must share `out`.
    """
    if sampler not in SAMPLERS:
        raise UsageError(f"sampler={sampler!r}; choose one of {', '.join(SAMPLERS)}.")
    folder = SweepFolder(Path(out))
    begun = folder.begun
    if begun is not None and not resume:
        raise UsageError(f"{out} has a sweep already; go on with resume=True, or choose another.")
    name, larger = read_metric(metric)
    function = folder.path.absolute() / f"{getattr(train, '__name__', 'train')}.function"
    settings = SweepSettings(
        command=(sys.executable, "-m", "stratagem.launch.notebook_sweep", str(function)),
        words=_words(train, space),
        metric=name,
        larger=larger,
        trials=1,
        keep=keep,
        replicas=replicas_per_trial,
        sampler=sampler,
        seed=seed,
        prune=prune,
        where=os.getcwd(),
        submit=_submit(on, replicas_per_trial, train),
    )
    asked = trials or (None if begun is None else begun.trials)
    settings = replace(settings, trials=count_trials(settings.space[0], sampler, asked))
    if begun is not None:
        settings.check_same(begun)
    runner = trial_runner(settings, slots, folder.path)
    return _run(settings, folder, runner, function, train)


def _submit(on: str | None, replicas: int, train: Any) -> dict[str, Any]:
    """Options of `stratagem submit` for the trials' jobs; none if they run on this machine."""
    if on is None:
        return {}
    if replicas != 1:
        raise UsageError(
            f"a job on {on} has workers: write workers and gpus_per_worker into stratagem.toml "
            "instead of replicas_per_trial"
        )
    return {
        "name": as_name(getattr(train, "__name__", "train")),
        **settings_of(Path.cwd()),
        "on": on,
    }


def _run(
    settings: SweepSettings, folder: SweepFolder, runner: TrialSlots, function: Path, train: Any
) -> SweepResult:
    import cloudpickle

    from stratagem.launch.sweep_loop import SweepLoop

    with folder.locked():
        folders = json.dumps([os.path.abspath(each) for each in sys.path])
        function.write_bytes(folders.encode() + b"\n" + cloudpickle.dumps(train))
        folder.begin(settings)
        loop = SweepLoop(settings, folder, runner)
        loop.run()
    if loop.stopped is not None:
        raise KeyboardInterrupt(f"the sweep goes on with resume=True: {folder.path}")
    trials = loop.study.ended()
    ranked = best_first(trials, settings.larger)
    return SweepResult(settings.metric, trials, ranked, folder.path)


def _words(train: Callable[..., Any], space: Space) -> tuple[str, ...]:
    """The space as it would be written on the command line; every name must be a parameter."""
    known = inspect.signature(train).parameters.values()
    if not space:
        raise UsageError('there is nothing to try: sg.sweep(train, {"lr": "1e-4..1e-1:log"}, ...).')
    words: list[str] = []
    for name, values in space.items():
        if not any(p.name == name or p.kind is p.VAR_KEYWORD for p in known):
            raise UsageError(f"{getattr(train, '__name__', 'train')} has no parameter {name!r}.")
        text = values if isinstance(values, str) else ",".join(_word(name, v) for v in values)
        if read_axis(f"--{name}", text) is None:
            raise UsageError(
                f"{name} has one value, {text}; give it a range, or a list of several."
            )
        words += [f"--{name}", text]
    return tuple(words)


def _word(name: str, value: Any) -> str:
    """A value of a list, as one word that a trial reads as the same value."""
    word = json.dumps(value) if isinstance(value, bool) else str(value)
    is_word = isinstance(value, str)
    read_alike = isinstance(value_of(word), str) == is_word and word == word.strip()
    cut = is_word and ("," in word or word.startswith("-"))
    if not isinstance(value, str | Real) or cut or not read_alike:
        raise UsageError(
            f"{name} has the value {value!r}, and a trial is given finite numbers, True, False, "
            'and words without "," that do not begin with "-" and are no numbers; give names '
            "instead, and look them up in the function."
        )
    return word


def _spans_decades(values: Sequence[Any]) -> bool:
    numbers = [value for value in values if isinstance(value, float) and value > 0]
    return len(numbers) == len(values) and max(numbers) > 100 * min(numbers)


if __name__ == "__main__":
    main(sys.argv[1:])
