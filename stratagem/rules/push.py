"""What passes between workers and the ledger: work, its result, the decision, the update."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from stratagem.errors import UsageError


class Ticket(NamedTuple):
    """A piece of work: batch `batch` of the epoch, or part `part` of the `parts` it is cut into.

    `serial` is unique over the whole job; the parts of one batch have consecutive ones.
    """

    serial: int
    batch: int
    part: int = 0
    parts: int = 1

    @property
    def first(self) -> int:
        """The serial of part 0 of the same batch: what all parts of a batch have in common."""
        return self.serial - self.part


@dataclass(slots=True)
class Push:
    """A gradient that arrived: of weights of `version`, with `weight` examples behind it.

    Nobody changes it; to freeze it would take longer than to judge it.
    """

    worker: int
    serial: int
    version: int
    weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.weight < inf:
            raise UsageError(
                f"worker {self.worker} pushed a gradient of weight {self.weight}; the weight is "
                "the number of examples behind it (or their sum of weights): finite, not negative."
            )


class Verdict(NamedTuple):
    """The one decision about a push, for all shards alike.

    kept: it goes into the sum as factor * weight * gradient; `rate` is what it asks of the
    learning rate of its update. Otherwise `why` says in words what it was dropped for.
    """

    kept: bool
    tau: int
    factor: float
    rate: float
    why: str


class Update(NamedTuple):
    """The gate opened: the step that takes the parameters to `version`.

    The mean gradient is the sum of factor * weight * gradient over `pushes`, by `divisor`, the sum
    of the weights (0 if there was no example behind any of them). The optimizer's learning rate is
    times `rate`, the smallest that a push asked for.
    """

    version: int
    pushes: tuple[Push, ...]
    divisor: float
    rate: float
