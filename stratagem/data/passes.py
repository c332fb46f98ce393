"""One pass over data: the generators' states at its beginning, and how many batches were seen.

A training that resumes in mid-pass draws the order once more, from these states, and skips the
batches that were seen: samplers are asked for indices only, so that no row is read in vain. Streams
of batches are read and thrown away.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from stratagem.data.streams import generator_states, set_beside_torch
from stratagem.errors import UsageError


class PassJournal:
    """Records the generators' states when a pass over one source begins, and resumes a pass."""

    def __init__(self, *, once: bool = False) -> None:
        """`once`: all passes together read one generator once."""
        #: on the chief: the generators' states when this pass began
        self.begun: dict[str, Any] | None = None
        self.once = once
        #: how many batches were seen of the epoch that the next pass resumes
        self.seen = 0
        self._skip, self._seeded = 0, False
        self._states: dict[str, Any] | None = None
        self._then: Callable[[], None] = lambda: None
        #: while a pass has begun and drawn nothing
        self._dice: Sequence[torch.Generator] | None = None
        #: of the last batches of row numbers: their count so far, and a digest of all until then
        self._digests: deque[tuple[int, int]] = deque(maxlen=1024)

    def __reduce__(self) -> Any:
        return PassJournal, ()  # another process has passes of its own

    def go_on(
        self,
        saved: Mapping[str, Any],
        dice: Sequence[torch.Generator] | None,
        then: Callable[[], None],
        *,
        begun: bool,
        persistent: bool,
    ) -> None:
        """Have the next pass be the rest of the one in a checkpoint, in the same order.

        Args:
            saved: has the `batch` and `step`, the `pass` and the states of the `dice`.
            dice: on the chief, the generators that order the data.
            then: restores the random numbers for the rows.
            begun: whether the pass had begun.
            persistent: whether workers outlast a pass.
        """
        for each, state in zip(dice, saved["dice"], strict=True) if dice is not None else ():
            each.set_state(state)
        batch, step = int(saved["batch"]), int(saved["step"])
        self.seen, self._skip = batch, step if self.once else batch
        self._states, self._then = saved["pass"] if begun else None, then
        self._seeded = persistent and not begun and step > 0
        if not begun:
            self.then()  # the user's code may draw before the first batch

    def begin(self, dice: Sequence[torch.Generator]) -> None:
        """On the chief, with the generators that order data: a sampler is about to be iterated.

        It may draw at once, or with its first batch. A loader iterates it twice before that, and
        draws a seed for its workers in between.
        """
        self._dice = dice
        if self._states is not None:
            # the digest is of the batches seen by then, and this pass will have seen more
            self.begun = {name: self._states[name] for name in self._states if name != "digest"}
            set_states(self._states["iter"], dice)
        elif not self.once or self.begun is None:  # else the first pass goes on
            self.begun = {"iter": states_now(dice)}

    def before_first(self) -> None:
        """On the chief, with the generators that order data: a sampler is asked for a batch."""
        if self._dice is None or self.begun is None:
            return
        if self._states is not None and "first" in self._states:
            set_states(self._states["first"], self._dice)
        elif self._seeded:  # the loader has drawn a seed, which persistent workers had before
            set_states(self.begun["iter"], self._dice)
        self.begun = {**self.begun, "first": states_now(self._dice)}
        self._states, self._seeded, self._dice = None, False, None

    def skip(self) -> int:
        """Return how many batches to skip in this pass; the next pass skips none."""
        skip, self._skip, self.seen = self._skip, 0, 0
        return skip

    def then(self) -> None:
        """Run `then` of `go_on`, now that the batches that were seen are skipped."""
        then, self._then = self._then, lambda: None
        then()

    def leave(self) -> None:
        """End a pass of which nothing is read, since all batches of its epoch were seen."""
        self.skip()
        self._states = None
        self.then()

    def noted(self, seen: int) -> dict[str, Any] | None:
        """On the chief: return `begun`, and a digest of the batches that were seen."""
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
    """The digest of a batch's row numbers and all before; keys of another kind do not count."""
    if not isinstance(batch, list) or {*map(type, batch)} != {int}:
        return before
    return zlib.crc32(array("q", batch).tobytes(), before)


def states_now(dice: Sequence[torch.Generator]) -> dict[str, Any]:
    """Return the states of all generators that may order data."""
    return {**generator_states(), "dice": [each.get_state() for each in dice]}


def set_states(states: dict[str, Any], dice: Sequence[torch.Generator]) -> None:
    """Restore what `states_now` returned."""
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
