"""One pass over data: what its order was drawn from, and how many batches of it were seen.

Whoever goes on with a pass draws its order once more, from where the generators stood when it
began, and leaves out the batches that were seen: samplers are asked for indices only, so that no
row is read in vain. Streams of batches are read, and thrown away.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from stratagem.data.streams import generator_states, set_beside_torch
from stratagem.errors import UsageError


def _nothing() -> None:
    return None


class PassJournal:
    """Notes where the present pass of one source of data began; or has a pass go on."""

    def __init__(self, *, once: bool = False) -> None:
        """`once`: all passes are one, over a generator."""
        #: on the chief: where the generators stood when this pass began
        self.begun: dict[str, Any] | None = None
        self.once = once
        #: of the epoch that the next pass goes on with: how many batches were seen
        self.seen = 0
        self._skip, self._seeded = 0, False
        self._states: dict[str, Any] | None = None
        self._then: Callable[[], None] = _nothing
        #: while a pass is gone on with, and nothing of it was drawn
        self._dice: Sequence[torch.Generator] | None = None
        #: of the last batches of row numbers: how many there were, and a digest of all of them
        self._digests: deque[tuple[int, int]] = deque(maxlen=1024)

    def __reduce__(self) -> Any:
        return PassJournal, ()  # another process has passes of its own

    def go_on(
        self,
        seen: int = 0,
        states: dict[str, Any] | None = None,
        then: Callable[[], None] = _nothing,
        *,
        earlier: int = 0,
        seeded: bool = False,
    ) -> None:
        """Have the next pass begin where these states were noted, and leave out `seen` batches.

        Args:
            then: called before the first row is read.
            earlier: where all passes are one, the batches of the epochs before.
            seeded: a pass that is not begun yet would draw no seed for workers, which persist.
        """
        self.seen, self._skip = seen, seen + (earlier if self.once else 0)
        self._states, self._then, self._seeded = states, then, seeded

    def begin(self, dice: Sequence[torch.Generator]) -> None:
        """On the chief, inside of what orders the data: a sampler is about to be iterated, which
        may draw at once, or with its first batch. A loader does this twice before the latter, and
        draws a seed for its workers between."""
        self._dice = dice
        if self._states is not None:
            # a digest is of the batches seen by then, and this pass will have seen more
            self.begun = {name: self._states[name] for name in self._states if name != "digest"}
            set_states(self._states["iter"], dice)
        elif not self.once or self.begun is None:  # else the first pass goes on
            self.begun = {"iter": states_now(dice)}

    def before_first(self) -> None:
        """On the chief, inside of what orders the data: a sampler's first batch is asked for."""
        if self._dice is None or self.begun is None:
            return
        if self._states is not None and "first" in self._states:
            set_states(self._states["first"], self._dice)
        elif self._seeded:  # a seed was drawn for workers that would have had theirs
            set_states(self.begun["iter"], self._dice)
        self.begun = {**self.begun, "first": states_now(self._dice)}
        self._states, self._seeded, self._dice = None, False, None

    def skip(self) -> int:
        """Return how many batches to leave out; the pass after this one has them all again."""
        skip, self._skip, self.seen = self._skip, 0, 0
        return skip

    def then(self) -> None:
        """The batches that were seen are left out."""
        then, self._then = self._then, _nothing
        then()

    def leave(self) -> None:
        """Nothing of the pass is read: all batches of its epoch were seen."""
        self.skip()
        self._states = None
        self.then()

    def noted(self, seen: int) -> dict[str, Any] | None:
        """On the chief: where the pass began, and a digest of the batches that were seen."""
        digest = next((known for count, known in reversed(self._digests) if count == seen), None)
        return None if self.begun is None else {**self.begun, "digest": digest}

    def rest(self, batches: Iterator[Any], *, numbers: bool = False) -> Iterator[Any]:
        """Return the batches that were not seen yet; `numbers`: batches of row numbers."""
        digest = (self._states or {}).get("digest")
        if numbers:
            batches = self._digested(batches)
        skip = self.skip()
        for _ in range(skip):
            next(batches, None)
        self._states = None
        if numbers and skip and digest is not None and (skip, digest) not in self._digests:
            raise UsageError(
                "the batches that were seen before this training broke off are not drawn again "
                "alike, so rows would come twice in this epoch, or not at all: the data is "
                "another, or its sampler draws as it goes from random numbers that others draw "
                "from, too; give the sampler a torch.Generator of its own, as `generator`, or go "
                "on from a checkpoint of an epoch's end."
            )
        self.then()
        yield from batches

    def _digested(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._digests.clear()
        total = 0
        for count, batch in enumerate(batches, 1):
            total = _digest(batch, total)
            self._digests.append((count, total))
            yield batch


def _digest(batch: Any, before: int) -> int:
    """Of a batch's row numbers and all before; other keys of rows do not count."""
    if not isinstance(batch, list) or {*map(type, batch)} != {int}:
        return before
    return zlib.crc32(array("q", batch).tobytes(), before)


def states_now(dice: Sequence[torch.Generator]) -> dict[str, Any]:
    """Return where everything stands that may order data."""
    return {**generator_states(), "dice": [each.get_state() for each in dice]}


def set_states(states: dict[str, Any], dice: Sequence[torch.Generator]) -> None:
    """Have everything of `states_now` stand there again."""
    torch.set_rng_state(states["torch"])
    set_beside_torch(states)
    for mine, state in zip(dice, states["dice"], strict=True):
        mine.set_state(state)


def dice_of(loader: DataLoader[Any]) -> list[torch.Generator]:
    """Return the generators that order a loader's data besides torch's own."""
    batches: Any = loader.batch_sampler
    samplers = (loader.sampler, getattr(batches, "sampler", None), batches)
    found = [loader.generator, *(getattr(sampler, "generator", None) for sampler in samplers)]
    given = [each for each in found if isinstance(each, torch.Generator)]
    return list(dict.fromkeys(given))


def batch_size_of(data: Any) -> int | None:
    """The rows of a batch of a loader, or of a source of batches; None where that is not known."""
    loader = getattr(data, "loader", getattr(data, "batches", data))
    for each in (loader, getattr(loader, "batch_sampler", None)):
        if type(size := getattr(each, "batch_size", None)) is int:
            return size
    return None
