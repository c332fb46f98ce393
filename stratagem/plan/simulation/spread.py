"""Distributions of the seconds of a step.

Constant(0.1)                               always the same
ShiftedExponential(least=0.08, average=0.1)   never less than 0.08, a tail of exponential kind
Lognormal(median=0.1, sigma=0.3)            a factor of exp(0.3) either way
Pareto(least=0.08, shape=3.0)               a heavy tail
Recorded(samples)                           drawn from what was measured
Stragglers(Constant(0.1), 0.02, 10.0)       2% of the steps take ten times as long
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import exp, inf

import numpy as np
import numpy.typing as npt

from stratagem.errors import UsageError

_WIDEST, _HEAVIEST = 20.0, 0.1  # beyond that a step may take more seconds than a float can count
Seconds = npt.NDArray[np.float64]


class Spread(ABC):
    """A distribution of seconds."""

    @abstractmethod
    def draw(self, random: np.random.Generator, count: int) -> Seconds:
        """Draw the seconds of so many independent steps."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """The mean seconds of a step."""


@dataclass(frozen=True)
class Constant(Spread):
    """Every step takes the same time."""

    seconds: float

    def __post_init__(self) -> None:
        _check(0 <= self.seconds < inf, "Constant", "seconds of 0 or more, not without end")

    def draw(self, random: np.random.Generator, count: int) -> Seconds:
        return np.full(count, self.seconds)

    @property
    def mean(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class ShiftedExponential(Spread):
    """At least `least`, and `average` on average: least + an exponential rest."""

    least: float
    average: float

    def __post_init__(self) -> None:
        good = 0 <= self.least <= self.average < inf
        _check(good, "ShiftedExponential", "0 <= least <= average, not without end")

    def draw(self, random: np.random.Generator, count: int) -> Seconds:
        return self.least + random.exponential(self.average - self.least, count)

    @property
    def mean(self) -> float:
        return self.average


@dataclass(frozen=True)
class Lognormal(Spread):
    """The logarithm is normal: half of the steps are below `median`."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        good = 0 < self.median < inf and 0 <= self.sigma <= _WIDEST
        _check(good, "Lognormal", f"0 < median, not without end, and 0 <= sigma <= {_WIDEST:g}")

    def draw(self, random: np.random.Generator, count: int) -> Seconds:
        return self.median * np.exp(random.normal(0.0, self.sigma, count))

    @property
    def mean(self) -> float:
        return self.median * exp(self.sigma**2 / 2)


@dataclass(frozen=True)
class Pareto(Spread):
    """At least `least`; the part of steps beyond x falls as x ** -shape."""

    least: float
    shape: float

    def __post_init__(self) -> None:
        good = 0 < self.least < inf and _HEAVIEST <= self.shape < inf
        _check(good, "Pareto", f"least above 0, not without end, and a shape from {_HEAVIEST:g} on")

    def draw(self, random: np.random.Generator, count: int) -> Seconds:
        return self.least * (1.0 + random.pareto(self.shape, count))

    @property
    def mean(self) -> float:
        return self.least * self.shape / (self.shape - 1) if self.shape > 1 else inf


@dataclass(frozen=True)
class Recorded(Spread):
    """Steps that were measured, drawn again in any order."""

    samples: tuple[float, ...]

    def __post_init__(self) -> None:
        good = bool(self.samples) and all(0 <= s < inf for s in self.samples)
        _check(good, "Recorded", "at least one measured time, each 0 or more")

    def draw(self, random: np.random.Generator, count: int) -> Seconds:
        return random.choice(np.asarray(self.samples), count)

    @property
    def mean(self) -> float:
        return sum(self.samples) / len(self.samples)


@dataclass(frozen=True)
class Stragglers(Spread):
    """Another spread, but a `part` of the steps takes `times` as long."""

    usual: Spread
    part: float
    times: float

    def __post_init__(self) -> None:
        good = 0 <= self.part <= 1 and 0 <= self.times < inf
        _check(good, "Stragglers", "0 <= part <= 1, and times of 0 or more, not without end")

    def draw(self, random: np.random.Generator, count: int) -> Seconds:
        seconds = self.usual.draw(random, count)
        return np.where(random.random(count) < self.part, seconds * self.times, seconds)

    @property
    def mean(self) -> float:
        return self.usual.mean * (1 + self.part * (self.times - 1))


class Draws:
    """Draws one worker's steps one after another, from a seed of its own."""

    _BLOCK = 64

    def __init__(self, spread: Spread, seed: int, worker: int, times: float = 1.0) -> None:
        self._spread, self._times = spread, times
        self._random = np.random.default_rng([seed, worker])
        self._block: list[float] = []

    def next(self) -> float:
        """The seconds of the next step."""
        if not self._block:
            block = self._spread.draw(self._random, self._BLOCK) * self._times
            self._block = block[::-1].tolist()
        return self._block.pop()


def _check(good: bool, name: str, what: str) -> None:
    if not good:
        raise UsageError(f"{name} needs {what}.")
