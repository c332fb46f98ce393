"""Constants that no formula gives, and how they are fitted to measured steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Calibration:
    """Seconds and bytes a second of this library, on the machines it was measured on."""

    #: starting one reduction, or one hop of it, besides the link's latency
    message: float = 120e-6
    #: the same between GPUs; an estimate, for want of several to measure
    kernel: float = 20e-6
    #: a step of mirrored replicas: meeting twice, the notes, the loop around
    step: float = 250e-6
    #: a worker's ticket, its push and the answers, besides latency
    exchange: float = 1.2e-3
    #: the part of a link's speed that is left for gradients: 1448 bytes of a frame of 1514
    goodput: float = 0.956
    #: what one replica slows down for each other one on its host
    contention: float = 0.02
    #: a ring through sockets of one host
    sockets: float = 1.2e9
    #: what encryption adds to a transfer: as if it went through this besides
    cipher: float = 2e9
    #: servers send values to one group of workers after the other: how far the first have pushed
    #: when the last come to it
    turns: float = 0.9
    #: rounding gradients to 16 bits and back
    cast: float = 2e9
    #: how much longer than a ring 16-bit sums take between many hosts, where several send to one;
    #: between two there is nobody else
    half: float = 0.35

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


#: constants that are a part of something, and between what they lie
_PARTS = {"goodput": (0.3, 1.0), "turns": (0.1, 1.0)}
#: a constant is sought within this factor of where it starts
_REACH = 30.0


def fit(
    measured: Sequence[tuple[float, Callable[[Calibration], float]]],
    start: Calibration | None = None,
    names: Sequence[str] = ("message", "step", "exchange", "goodput", "turns", "half"),
) -> Calibration:
    """The constants with the least squares of relative error.

    measured: seconds that a step took, and what predicts it from a calibration.

    One constant after the other is moved by a factor that shrinks: nothing is smooth here, since a
    step is the longest of several ways.
    """
    best = first = start or Calibration()
    error = _squares(measured, best)
    factor = 3.0
    while factor > 1.005:
        before = error
        for name in names:
            for by in (factor, 1 / factor):
                value = _kept(name, getattr(best, name) * by, getattr(first, name))
                tried = replace(best, **{name: value})
                now = _squares(measured, tried)
                if now < error:
                    best, error = tried, now
        if error > before * 0.999:
            factor = math.sqrt(factor)
    return best


def errors(
    measured: Sequence[tuple[float, Callable[[Calibration], float]]], with_: Calibration
) -> list[float]:
    """Relative errors, signed: more than 0 is predicted too slow."""
    return [predict(with_) / seconds - 1 for seconds, predict in measured]


def _squares(
    measured: Sequence[tuple[float, Callable[[Calibration], float]]], with_: Calibration
) -> float:
    return statistics.fmean(e * e for e in errors(measured, with_)) if measured else 0.0


def _kept(name: str, value: float, first: float) -> float:
    if name in _PARTS:
        return min(max(value, _PARTS[name][0]), _PARTS[name][1])
    return min(max(value, first / _REACH), first * _REACH)
