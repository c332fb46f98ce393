"""The settings `updates=`: when parameters are updated, and how stale gradients count.

    Synchronous()                                    the result of one device
    Synchronous(spares=1)                            every step goes on without its last worker
    Asynchronous(staleness=[ScaleDown(), Drop()])    each gradient is applied when it arrives
    Asynchronous(warmup=Ramp(steps=500))             workers begin one by one

A gradient's staleness tau is the number of updates made since its worker pulled the weights. With
W workers at the same pace it is W - 1. A policy may scale or drop the gradient, lower the learning
rate of its update, or correct it by how far the weights have moved. Factors and rates are
multiplied; one policy that drops is enough. With tau = 0 every policy leaves the gradient as it is;
with a single worker every policy is plain SGD.

All settings are frozen dataclasses that travel as plain dictionaries.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import sqrt
from typing import TYPE_CHECKING, Any, ClassVar

from stratagem.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Record:
    """Base class of all settings. `kind` in the JSON is the name of the class."""

    def to_json(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return {"kind": type(self).__name__} | {
            field.name: _plain(getattr(self, field.name)) for field in fields(self)
        }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.to_json() if isinstance(value, Record) else value


def whole(what: str, value: object, least: int) -> None:
    """Refuse anything but a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what} is a whole number of at least {least}, not {value!r}.")


def flag(what: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise UsageError(f"{what} is True or False, not {value!r}.")


def positive(what: str, value: object) -> None:
    """Refuse anything but a number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UsageError(f"{what} is a number above 0, not {value!r}.")


@dataclass(frozen=True)
class Ramp(Record):
    """From one worker to all of them over `steps` updates.

    Asynchronous(warmup=Ramp(steps=500))
    """

    steps: int

    def __post_init__(self) -> None:
        whole("steps of Ramp", self.steps, 0)

    def allowed(self, version: int, workers: int) -> int:
        """How many of `workers` may work after `version` updates."""
        if version >= self.steps or workers <= 1:
            return workers
        return 1 + (workers - 1) * version // self.steps


@dataclass(frozen=True)
class Policy(Record):
    """Interface of staleness policies; this one changes nothing."""

    #: the engine must keep the weights that the worker pulled
    needs_then: ClassVar[bool] = False
    #: the engine must measure norm(w_now - w_then) over all shards
    needs_gap: ClassVar[bool] = False

    def factor(self, tau: int, workers: int) -> float | None:
        """Return the factor of the gradient; None drops it."""
        return 1.0

    def rate(self, tau: int, workers: int) -> float:
        """Return the factor of the learning rate of the gradient's update."""
        return 1.0

    def compensate(
        self, grad: Tensor, now: Tensor, then: Tensor, memory: dict[str, Tensor]
    ) -> None:
        """Correct `grad` in place, element by element; the engine keeps `memory` for each shard."""

    def gap_factor(self, gap: float, step_norm: float) -> float:
        """Return the factor of a gradient whose weights have moved by `gap` since the pull."""
        return 1.0

    def step_norm(self) -> StepNorm:
        """Return the running mean of update lengths that `gap_factor` asks for."""
        return StepNorm()


@dataclass(frozen=True, init=False)
class LowerRate(Policy):
    """Multiply the learning rate by `factor`; left out, by 1 / sqrt(workers).

    A single worker has no staleness, so its rate stays as it is.
    """

    times: float | None

    def __init__(self, factor: float | None = None) -> None:
        # Policy.factor is a method: the setting that users call `factor` needs another attribute
        if factor is not None:
            positive("factor of LowerRate", factor)
        object.__setattr__(self, "times", factor)

    def rate(self, tau: int, workers: int) -> float:
        if workers <= 1:
            return 1.0
        return 1 / sqrt(workers) if self.times is None else self.times

    def to_json(self) -> dict[str, Any]:
        return {"kind": "LowerRate", "factor": self.times}


@dataclass(frozen=True)
class Drop(Policy):
    """Drop gradients with tau > `older_than`; left out, twice the number of workers."""

    older_than: float | None = None

    def __post_init__(self) -> None:
        if self.older_than is not None and self.older_than != 0:
            positive("older_than of Drop", self.older_than)

    def factor(self, tau: int, workers: int) -> float | None:
        limit = 2 * workers if self.older_than is None else self.older_than
        return None if tau > limit else 1.0


@dataclass(frozen=True)
class ScaleDown(Policy):
    """Scale by age: g / (1 + tau)**power, or g / max(1, tau) with `linear`.

    References: Zhang et al. 2015, arXiv 1511.05950 (linear); Nguyen et al. 2021, arXiv 2106.06639
    (the square root).
    """

    power: float = 0.5
    linear: bool = False

    def __post_init__(self) -> None:
        positive("power of ScaleDown", self.power)
        flag("linear of ScaleDown", self.linear)

    def factor(self, tau: int, workers: int) -> float | None:
        return 1 / max(1, tau) if self.linear else (1 + tau) ** -self.power


@dataclass(frozen=True)
class DelayCompensated(Policy):
    """Correct for the movement of the weights: g + lam * g * g * (w_now - w_then).

    Adaptive: lam = strength / sqrt(MS + 1e-7), MS a running mean (.95) of g * g; strength 2.
    Constant: lam = strength, .04.

    Reference: Zheng et al. 2017, arXiv 1609.08326.
    """

    strength: float | None = None
    adaptive: bool = True
    needs_then: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.strength is not None and self.strength != 0:
            positive("strength of DelayCompensated", self.strength)
        flag("adaptive of DelayCompensated", self.adaptive)

    def compensate(
        self, grad: Tensor, now: Tensor, then: Tensor, memory: dict[str, Tensor]
    ) -> None:
        strength = self.strength
        if strength is None:
            strength = 2.0 if self.adaptive else 0.04
        # in this order: where the weights have not moved, a huge g * g cannot make inf * 0
        change = (now - then).mul_(grad)
        if not self.adaptive:
            grad.addcmul_(change, grad, value=strength)
            return
        if "mean_square" not in memory:
            memory["mean_square"] = grad.new_zeros(grad.shape)
        mean_square = memory["mean_square"].mul_(0.95).addcmul_(grad, grad, value=0.05)
        grad.addcdiv_(change.mul_(grad), (mean_square + 1e-7).sqrt_(), value=strength)


@dataclass(frozen=True)
class GapAware(Policy):
    """Scale by how far the weights have moved: g / (1 + norm(w_now - w_then) / C).

    C is the usual length of a step, a running mean that forgets with `memory` (see StepNorm).

    Reference: Barkai et al. 2019, arXiv 1909.10802.
    """

    memory: float = 0.9
    needs_then: ClassVar[bool] = True
    needs_gap: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.memory != 0:
            positive("memory of GapAware", self.memory)
        if self.memory >= 1:
            raise UsageError(f"memory of GapAware is below 1, not {self.memory!r}.")

    def gap_factor(self, gap: float, step_norm: float) -> float:
        return 1 / (1 + gap / step_norm) if gap > 0 and step_norm > 0 else 1.0

    def step_norm(self) -> StepNorm:
        return StepNorm(self.memory)


class StepNorm:
    """The usual length of an update: a running mean of norms, 0.0 before the first."""

    def __init__(self, memory: float = 0.9) -> None:
        self.value = 0.0
        self._memory = memory
        self._empty = True

    def add(self, norm: float) -> None:
        """Add the norm of one more update."""
        keep = 0.0 if self._empty else self._memory
        self.value = keep * self.value + (1 - keep) * norm
        self._empty = False


@dataclass(frozen=True)
class Synchronous(Record):
    """All workers use the same version; an update takes all their gradients, or the first ones.

        Synchronous()           the result of one device on the same global batches
        Synchronous(spares=2)   every step goes on without its last two workers

    requeue: late work goes back into the epoch; False: its examples are lost.
    """

    spares: int = 0
    requeue: bool = True

    def __post_init__(self) -> None:
        whole("spares of Synchronous", self.spares, 0)
        flag("requeue of Synchronous", self.requeue)


@dataclass(frozen=True)
class Asynchronous(Record):
    """No worker waits: every gradient is applied when it arrives, however old its weights.

        Asynchronous(staleness=[ScaleDown(), Drop(older_than=16)], warmup=Ramp(steps=500))
        Asynchronous(bound=3)    a worker waits when it is more than 3 steps ahead of the slowest
        Asynchronous(buffer=10)  an update is the mean of 10 gradients

    requeue: dropped work goes back into the epoch; False: its examples are lost.
    """

    staleness: tuple[Policy, ...] = ()
    warmup: Ramp | None = None
    bound: int | None = None
    buffer: int = 1
    requeue: bool = True

    def __post_init__(self) -> None:
        given: Any = self.staleness
        if not isinstance(given, list | tuple) or not all(isinstance(p, Policy) for p in given):
            raise UsageError(
                f"staleness of Asynchronous is a list of policies, not {given!r}; "
                "write staleness=[ScaleDown(), Drop(older_than=16)], for example."
            )
        object.__setattr__(self, "staleness", tuple(given))
        if self.warmup is not None and not isinstance(self.warmup, Ramp):
            raise UsageError(f"warmup of Asynchronous is a Ramp(steps), not {self.warmup!r}.")
        if self.bound is not None:
            whole("bound of Asynchronous", self.bound, 0)
        whole("buffer of Asynchronous", self.buffer, 1)
        flag("requeue of Asynchronous", self.requeue)


Updates = Synchronous | Asynchronous

_KINDS = {
    kind.__name__: kind
    for kind in (
        *(Synchronous, Asynchronous, Ramp),
        *(LowerRate, Drop, ScaleDown, DelayCompensated, GapAware),
    )
}


def from_json(plain: Any) -> Any:
    """Return what `to_json` wrote, records inside of records, too."""
    if isinstance(plain, list):
        return [from_json(each) for each in plain]
    if not isinstance(plain, dict):
        return plain
    settings = {name: from_json(value) for name, value in plain.items()}
    kind = _KINDS.get(str(settings.pop("kind", None)))
    if kind is None:
        raise UsageError(
            f"there is no kind of updates or policy {plain.get('kind')!r}; "
            f"there are {', '.join(_KINDS)}."
        )
    try:
        return kind(**settings)
    except TypeError as problem:
        raise UsageError(f"{plain!r}: {problem}. Do all tasks run one version?") from problem
