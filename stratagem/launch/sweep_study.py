"""The trials of a sweep in Optuna's journal: asked and told by one process, in order.

For random search and grids a trial's values follow from the seed and its number alone, so neither
the number of slots nor a restart changes them. TPE also looks at what is known when it is asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratagem.errors import UsageError
from stratagem.launch.sweep_folder import Axis, Choices, SweepSettings, grid, name_of

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
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

_NAME = "sweep"
#: pruning begins once so many trials are complete, and with this epoch of a trial
_STARTUP_TRIALS, _FIRST_EPOCH = 5, 3
#: of 100 complete trials, those that one must not be behind; the median ends slow starters
_AHEAD = 75.0
_ENDED = {
    TrialState.COMPLETE: "done",
    TrialState.FAIL: "failed",
    TrialState.PRUNED: "pruned",
}


def pruner() -> PercentilePruner:
    """Ends a trial that is behind three quarters of the complete ones at the same epoch."""
    return PercentilePruner(_AHEAD, n_startup_trials=_STARTUP_TRIALS, n_warmup_steps=_FIRST_EPOCH)


@dataclass(frozen=True)
class EndedTrial:
    """A trial that was told: `state` is done, failed or pruned."""

    number: int
    params: Mapping[str, Any]
    state: str
    value: float | None


class SweepStudy:
    """Numbers of trials, their values, and how they ended."""

    def __init__(self, settings: SweepSettings, journal: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._settings = settings
        axes, _ = settings.space
        self._space = {name_of(axis.flag): _distribution(axis) for axis in axes}
        self._points = grid(axes) if settings.sampler == "grid" else []
        self._study = optuna.create_study(
            study_name=_NAME,
            storage=JournalStorage(JournalFileBackend(str(journal))),
            direction="maximize" if settings.larger else "minimize",
            load_if_exists=True,
            pruner=pruner(),
        )
        self._flags = {name_of(axis.flag): axis.flag for axis in axes}

    def unfinished(self) -> list[int]:
        """Trials that were begun, and of which nobody has told how they ended."""
        return [each.number for each in self._trials() if not each.state.is_finished()]

    def count(self) -> int:
        """How many trials were ever asked for."""
        return len(self._trials())

    def ended(self) -> list[EndedTrial]:
        found = [each for each in self._trials() if each.state.is_finished()]
        return [EndedTrial(t.number, t.params, _ENDED[t.state], _value(t)) for t in found]

    def ask(self) -> int:
        """The number of the next trial."""
        number = self.count()
        self._study.sampler = self._sampler(number)
        return self._study.ask(self._space).number

    def flags(self, number: int) -> dict[str, str]:
        """The flags of a trial, as the script gets them."""
        frozen = self._trials()[number]
        if missing := [name for name in self._space if name not in frozen.params]:
            # the process that asked was killed in the midst of it
            self._study.sampler = self._sampler(number)
            trial = optuna.trial.Trial(self._study, frozen._trial_id)
            for name in missing:
                _suggest(trial, name, self._space[name])
            frozen = self._trials()[number]
        return {self._flags[name]: _text(frozen.params[name]) for name in self._space}

    def tell(self, number: int, value: float) -> None:
        """A trial is complete."""
        self._study.tell(number, value)

    def tell_failed(self, number: int) -> None:
        self._study.tell(number, state=TrialState.FAIL)

    def tell_pruned(self, number: int) -> None:
        self._study.tell(number, state=TrialState.PRUNED)

    def report(self, number: int, curve: Sequence[float | None]) -> bool:
        """A trial has come so far; returns whether it may be ended here."""
        frozen = self._trials()[number]
        trial = optuna.trial.Trial(self._study, frozen._trial_id)
        known = set(frozen.intermediate_values)
        for epoch, value in enumerate(curve, 1):
            if epoch not in known and value is not None:
                trial.report(value, epoch)
        return trial.should_prune()

    def ranked(self) -> list[EndedTrial]:
        """The complete trials, the best first; of equals the first."""
        sign = -1.0 if self._settings.larger else 1.0
        done = [each for each in self.ended() if each.value is not None]
        return sorted(done, key=lambda each: (sign * (each.value or 0.0), each.number))

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _sampler(self, number: int) -> BaseSampler:
        seed = self._settings.seed
        if self._settings.sampler == "tpe":
            return TPESampler(seed=mixed(seed, number), constant_liar=True)
        if self._points:
            return _ByNumber(lambda number, name, _: self._points[number][name])
        return _ByNumber(
            lambda number, name, distribution: RandomSampler(
                seed=mixed(seed, number, name)
            ).sample_independent(self._study, self._trials()[number], name, distribution)
        )


class _ByNumber(BaseSampler):
    """A value from the trial's number and the parameter's name, and nothing else."""

    def __init__(self, draw: Callable[[int, str, BaseDistribution], Any]) -> None:
        self._draw = draw

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        return self._draw(trial.number, param_name, param_distribution)


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


def _suggest(trial: optuna.trial.Trial, name: str, by: BaseDistribution) -> None:
    if isinstance(by, CategoricalDistribution):
        trial.suggest_categorical(name, by.choices)
    elif isinstance(by, IntDistribution):
        trial.suggest_int(name, by.low, by.high, log=by.log)
    elif isinstance(by, FloatDistribution):
        trial.suggest_float(name, by.low, by.high, log=by.log)


def _value(trial: FrozenTrial) -> float | None:
    return trial.value if trial.state is TrialState.COMPLETE else None


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)
