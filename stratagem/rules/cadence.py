"""When replicas synchronise: the settings `sync=`, and the count that says when it is due.

EveryStep()               gradients are all-reduced in every step: the result of one device
LocalSteps(20)            each replica trains by itself; weights are averaged every 20 updates
LocalSteps(20, after=500) the same after 500 exact steps
DiLoCo(20)                the mean change of 20 updates is the gradient of an outer momentum SGD
DiLoCo(20, fragments=2)   the same for half of the model at a time, sent while training goes on
Gossip("ring")            after each update weights are mixed with those of two neighbours
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from stratagem.errors import UsageError


@dataclass(frozen=True, repr=False)
class Sync:
    """Base class of the settings `sync=`."""

    def __repr__(self) -> str:
        """Write only the settings that differ from their defaults."""
        chosen = [(f.name, getattr(self, f.name)) for f in fields(self) if not self._usual(f)]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in chosen)})"

    def _usual(self, each: Field[Any]) -> bool:
        return bool(getattr(self, each.name) == each.default)


@dataclass(frozen=True, repr=False)
class EveryStep(Sync):
    """Gradients are all-reduced in every step: the result of one device. The default."""


@dataclass(frozen=True, repr=False)
class LocalSteps(Sync):
    """Each replica makes `every` updates by itself; then the weights are averaged.

    Args:
        every: updates between two meetings. 1 with SGD is what one device does.
        after: how many first steps all-reduce gradients, as `EveryStep` does (post-local SGD).
        wire: what travels at meetings, as `wire=` of a strategy.

    Stich 2019 (1805.09767), Lin et al. 2020 (1808.07217).
    """

    every: int
    after: int = 0
    wire: Any = None

    def __post_init__(self) -> None:
        _least(self, "every", 1)
        _least(self, "after", 0)


@dataclass(frozen=True)
class Outer:
    """SGD with Nesterov momentum over D, the mean change of the replicas between two meetings:

    b = momentum * b + D;  x = x - lr * (D + momentum * b)
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise UsageError(f"{self!r}: lr is greater than 0.")
        if not 0 <= self.momentum < 1:
            raise UsageError(f"{self!r}: momentum is at least 0 and less than 1.")


@dataclass(frozen=True, repr=False)
class DiLoCo(Sync):
    """Each replica makes `every` updates by itself; the mean change is an outer SGD's gradient.

    Args:
        every: updates between two meetings of a parameter.
        outer: the outer optimizer; `sg.Outer(lr=1, momentum=0)` is `LocalSteps`.
        fragments: number of parts of the model; one meets every `every / fragments` updates.
        wire: what travels at meetings, as `wire=` of a strategy.
        overlap: how many updates are made while a part is sent, before its outer step. 0: replicas
            wait. None: with several fragments half of the updates between two meetings, at most
            5; with one, 0.
        mix: how much of its own weights a replica keeps of a part that was sent during updates:
            mix * own + (1 - mix) * outer, where the next change is counted from. 0 discards the
            updates made meanwhile.

    Douillard et al. 2023 (2311.08105), 2025 (2501.18512).
    """

    every: int
    outer: Outer = field(default=Outer())
    fragments: int = 1
    wire: Any = None
    overlap: int | None = None
    mix: float = 0.5

    def __post_init__(self) -> None:
        _least(self, "every", 1)
        _least(self, "fragments", 1)
        if self.every % self.fragments:
            raise UsageError(f"{self!r}: every is a multiple of fragments.")
        pace = self.every // self.fragments
        if self.overlap is not None:
            _least(self, "overlap", 0)
            if self.overlap >= pace:
                raise UsageError(
                    f"{self!r}: overlap is less than the {pace} updates from one part's meeting to "
                    "the next part's; one part travels at a time."
                )
        if not 0 <= self.mix < 1:
            raise UsageError(f"{self!r}: mix is at least 0 and less than 1.")

    @property
    def delay(self) -> int:
        """Updates from a part's sending to its outer step."""
        if self.overlap is not None:
            return self.overlap
        return min(5, self.every // self.fragments // 2) if self.fragments > 1 else 0


@dataclass(frozen=True, repr=False)
class Gossip(Sync):
    """After each update a replica averages its weights with those of its neighbours.

    Args:
        graph: "ring": a third each from the replicas before and after, every step; "exponential":
            half from one replica that is 1, 2, 4, ... places away in turn.

    Lian et al. 2017 (1705.09056), Assran et al. 2019 (1811.10792); step first, then mix.
    """

    graph: str = "ring"

    def __post_init__(self) -> None:
        if self.graph not in ("ring", "exponential"):
            raise UsageError(f'{self!r}: graph is "ring" or "exponential".')

    def weights(self, rank: int, size: int, turn: int) -> Mapping[int, float]:
        """Return the share of each replica's weights in this one's average, its own included."""
        if size == 1:
            return {rank: 1.0}
        if self.graph == "ring":
            near = {rank, (rank - 1) % size, (rank + 1) % size}
            return dict.fromkeys(sorted(near), 1 / len(near))
        return {rank: 0.5, (rank - self._hop(size, turn)) % size: 0.5}

    def receivers(self, rank: int, size: int, turn: int) -> list[int]:
        """Return the replicas that take this one's weights in this turn."""
        return [
            other
            for other in range(size)
            if other != rank and rank in self.weights(other, size, turn)
        ]

    @staticmethod
    def _hop(size: int, turn: int) -> int:
        return int(1 << turn % (size - 1).bit_length())


def _least(record: Sync, name: str, least: int) -> None:
    value = getattr(record, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{record!r}: {name} is a whole number, {least} or more.")


class Cadence:
    """Counts the updates of a replica; all replicas have the same count."""

    def __init__(self, sync: Sync) -> None:
        #: how many parts of the model meet in turn
        self.fragments = sync.fragments if isinstance(sync, DiLoCo) else 1
        #: updates from the sending of a part to the end of its meeting
        self.delay = sync.delay if isinstance(sync, DiLoCo) else 0
        #: updates from one part's meeting to the next part's; None: only when a meeting is forced
        self._pace: int | None = None
        if isinstance(sync, LocalSteps | DiLoCo):
            self._pace = sync.every // self.fragments
        self._after = sync.after if isinstance(sync, LocalSteps) else 0
        #: all updates, and those since the whole model has met
        self.updates = self.since = 0
        #: by part of the model: updates since it has met, or was sent
        self.unmet = [0] * self.fragments
        #: the part whose meeting has begun and not ended
        self.under_way: int | None = None

    @property
    def together(self) -> bool:
        """Whether the next update takes the gradients of all replicas."""
        return self.updates < self._after

    @property
    def apart(self) -> bool:
        """Whether replicas differ, or a meeting is under way."""
        return any(self.unmet) or self.under_way is not None

    def updated(self) -> int | None:
        """Count an update; return the part of the model whose meeting begins now, if any."""
        alike = self.together
        self.updates += 1
        if alike:
            return None
        self.since += 1
        self.unmet = [count + 1 for count in self.unmet]
        if self._pace is None or self.since % self._pace:
            return None
        part = self.under_way = (self.since // self._pace - 1) % self.fragments
        self.unmet[part] = 0
        return part

    @property
    def ends(self) -> bool:
        """Whether the meeting under way ends with the last update."""
        return self.under_way is not None and self.since % (self._pace or 1) == self.delay

    def ended(self, *, alike: bool) -> None:
        """Note that the meeting under way has ended; `alike`: all replicas have the same part."""
        if self.under_way is not None and alike:
            self.unmet[self.under_way] = 0
        self.under_way = None

    def met(self) -> None:
        """Note that the whole model has met."""
        self.since, self.unmet, self.under_way = 0, [0] * self.fragments, None
