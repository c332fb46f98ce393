"""Two streams of random numbers where torch has one: what orders data, and what the model draws.

    torch's generator   seed 0 -> 1 -> 2 -> ...      shuffling goes on here, as without a model
    the model's                 dropout, noise       as many as this replica's share needs

A replica's dropout draws for its share of the batch, and so does a dataset that makes noise of its
own; what comes after in one stream would depend on the number of replicas, and with it the order of
the next epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MIX = 0x9E3779B97F4A7C15


def mixed(seed: int, index: int, generation: int = 0) -> int:
    """A seed of its own for a replica, and for each fit."""
    return ((seed & (2**62 - 1)) + _MIX * (index + (generation << 20))) % 2**63


class RandomStreams:
    """While it is in hand, torch's CPU generator is the model's; `end` gives it back."""

    def __init__(self, seed: int | None = None) -> None:
        """`seed` is for the model; without one it draws what it would draw by itself."""
        self._data = torch.get_rng_state()
        self._ordering = False
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        self._begun = torch.get_rng_state()

    @contextmanager
    def for_data(self) -> Iterator[None]:
        """What is drawn inside orders the data."""
        if self._ordering:
            yield
            return
        model = torch.get_rng_state()
        torch.set_rng_state(self._data)
        self._ordering = True
        try:
            yield
        finally:
            self._ordering = False
            self._data = torch.get_rng_state()
            torch.set_rng_state(model)

    def end(self, *, renew: bool = False) -> None:
        """Go on where the data's stream is; with `renew` somewhere new if the model drew anything,
        so that it does not draw the same again the next time."""
        drew = renew and not torch.equal(torch.get_rng_state(), self._begun)
        torch.set_rng_state(self._data)
        if drew:
            number = int(torch.empty((), dtype=torch.int64).random_().item())
            torch.default_generator.manual_seed(mixed(number, -2))
