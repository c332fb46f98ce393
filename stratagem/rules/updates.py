"""When the parameters are updated: what users write and tasks tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from stratagem.errors import UsageError
from stratagem.rules.ramp import Ramp
from stratagem.rules.record import Record, flag, settings, whole
from stratagem.rules.staleness import Policy


@dataclass(frozen=True)
class Synchronous(Record):
    """Everybody works on the same version; an update is made of all, or of the first, of them.

        Synchronous()           the answer of one device on the same global batches
        Synchronous(spares=2)   the last two of every step are not waited for

    requeue: work that came too late goes back into the epoch; False: its examples are lost.
    """

    spares: int = 0
    requeue: bool = True

    def __post_init__(self) -> None:
        whole("spares of Synchronous", self.spares, 0)
        flag("requeue of Synchronous", self.requeue)


@dataclass(frozen=True)
class Asynchronous(Record):
    """Nobody waits: every gradient is applied when it comes, however old its weights.

        Asynchronous(staleness=[ScaleDown(), Drop(older_than=16)], warmup=Ramp(steps=500))
        Asynchronous(bound=3)    a worker waits when it is more than 3 steps ahead of the last
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

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {
            "staleness": [policy.to_json() for policy in self.staleness],
            "warmup": self.warmup and self.warmup.to_json(),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        given = settings(plain, cls.__name__, set(cls.__dataclass_fields__))
        if "staleness" in given:
            given["staleness"] = [Policy.from_json(each) for each in given["staleness"]]
        if given.get("warmup") is not None:
            given["warmup"] = Ramp.from_json(given["warmup"])
        return cls(**given)


Updates = Synchronous | Asynchronous


def from_json(plain: Mapping[str, Any]) -> Updates:
    """Either kind of updates from what `to_json` wrote."""
    if plain.get("kind") == "Synchronous":
        return Synchronous.from_json(plain)
    return Asynchronous.from_json(plain)
