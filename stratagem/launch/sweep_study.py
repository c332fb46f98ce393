"""The trials of a sweep in Optuna's journal, which one process writes.

In random search and grids a trial's values follow from the seed and its number alone, so neither
the number of slots nor a restart changes them. TPE also uses the results so far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from stratagem.errors import UsageError
from stratagem.launch.sweep_folder import (
    Axis,
    Choices,
    SweepFolder,
    SweepSettings,
    SweepTrial,
    best_first,
    grid,
    name_of,
)

try:
    import optuna
except ImportError as missing:
    raise UsageError(
        "a sweep needs Optuna, which is not installed: pip install 'stratagem[sweep]'"
    ) from missing

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.pruners import PercentilePruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

_NAME = "sweep"
#: pruning begins once so many trials are complete, and with this epoch of a trial
_STARTUP_TRIALS, _FIRST_EPOCH = 5, 3
#: the percentile of complete trials that a trial must reach; the median would end slow starters
_AHEAD = 75.0
_ENDED = {
    TrialState.COMPLETE: "done",
    TrialState.FAIL: "failed",
    TrialState.PRUNED: "pruned",
}


def pruner() -> PercentilePruner:
    """Prunes a trial that is behind three quarters of the complete trials at the same epoch."""
    return PercentilePruner(_AHEAD, n_startup_trials=_STARTUP_TRIALS, n_warmup_steps=_FIRST_EPOCH)


class SweepStudy:
    """Numbers of trials, their values, and how they ended."""

    def __init__(self, settings: SweepSettings, folder: SweepFolder) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._settings, self._folder = settings, folder
        axes, _ = settings.space
        self._space = {name_of(axis.flag): _distribution(axis) for axis in axes}
        self._points = grid(axes) if settings.sampler == "grid" else []
        self._direction = StudyDirection.MAXIMIZE if settings.larger else StudyDirection.MINIMIZE
        self._study = optuna.create_study(
            study_name=_NAME,
            storage=JournalStorage(JournalFileBackend(str(folder.journal))),
            direction=self._direction,
            load_if_exists=True,
            pruner=pruner(),
        )
        self._flags = {name_of(axis.flag): axis.flag for axis in axes}

    def unfinished(self) -> list[int]:
        """Trials that were begun, and have not ended."""
        return [each.number for each in self._trials() if not each.state.is_finished()]

    def count(self) -> int:
        """How many trials were ever begun."""
        return len(self._trials())

    def ended(self) -> list[SweepTrial]:
        """The trials that have ended, by number."""
        found = [each for each in self._trials() if each.state.is_finished()]
        return [
            SweepTrial(
                each.number,
                self.flags(each.number),
                self._folder.trial(each.number),
                _ENDED[each.state],
                each.value if each.state is TrialState.COMPLETE else None,
            )
            for each in found
        ]

    def ask(self) -> int:
        """Write a new trial and its values to the journal, in one line; return its number."""
        number = self.count()
        drawn = self._drawn(number)
        self._study.add_trial(
            create_trial(state=TrialState.RUNNING, params=drawn, distributions=self._space)
        )
        return number

    def flags(self, number: int) -> dict[str, str]:
        """The flags of a trial, as the script gets them."""
        params = self._trials()[number].params
        return {self._flags[name]: str(params[name]) for name in self._space}

    def tell(self, number: int, value: float) -> None:
        """A trial is complete."""
        self._study.tell(number, value)

    def tell_failed(self, number: int) -> None:
        self._study.tell(number, state=TrialState.FAIL)

    def tell_pruned(self, number: int) -> None:
        self._study.tell(number, state=TrialState.PRUNED)

    def report(self, number: int, curve: Sequence[float | None]) -> bool:
        """Report the metric after each epoch so far; whether the trial is to be pruned."""
        frozen = self._trials()[number]
        trial = optuna.trial.Trial(self._study, frozen._trial_id)
        known = set(frozen.intermediate_values)
        for epoch, value in enumerate(curve, 1):
            if epoch not in known and value is not None:
                trial.report(value, epoch)
        return trial.should_prune()

    def ranked(self) -> list[SweepTrial]:
        """The complete trials, the best first; of equals the first."""
        return best_first(self.ended(), self._settings.larger)

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _drawn(self, number: int) -> dict[str, Any]:
        """The values of a new trial."""
        seed = self._settings.seed
        if self._points:
            return self._points[number]
        if self._settings.sampler == "tpe":
            sampler = TPESampler(seed=mixed(seed, number), constant_liar=True)
            study = optuna.create_study(direction=self._direction, sampler=sampler)
            study.add_trials(self._trials())
            return study.ask(self._space).params
        trial = create_trial(state=TrialState.RUNNING)
        return {
            name: RandomSampler(seed=mixed(seed, number, name)).sample_independent(
                self._study, trial, name, distribution
            )
            for name, distribution in self._space.items()
        }


def mixed(seed: int, *parts: int | str) -> int:
    """A seed of 32 bits that depends on all of these."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])


def _distribution(axis: Axis) -> BaseDistribution:
    if isinstance(axis, Choices):
        return CategoricalDistribution(axis.values)
    if axis.whole:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)
