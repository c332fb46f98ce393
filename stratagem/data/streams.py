"""Streams of random numbers: what orders data, what the model draws, and what each replica draws.

    torch's generator   seed 0 -> 1 -> 2 -> ...      shuffling goes on here, as without a model
    the model's                 dropout, noise       as many as this replica's share needs

A replica's dropout draws for its share of the batch, and so does a dataset that makes noise of its
own. Were there one stream, what is drawn next would depend on the number of replicas, and with it
the order of the next epoch.

Replicas that are forked from one process would draw alike. What each draws follows from where the
caller's generators stand when it calls (`RngStates`); the caller's own sequences are not touched.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratagem.wire.device_kinds import kind_of

_MIX = 0x9E3779B97F4A7C15


def mixed(seed: int, index: int, generation: int = 0) -> int:
    """A seed of its own for a replica, and for each fit."""
    return ((seed & (2**62 - 1)) + _MIX * (index + (generation << 20))) % 2**63


def seed_torch(seed: int) -> None:
    """As `torch.manual_seed`, which notes the stack for accelerators even if torch knows none."""
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


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
        self._model = torch.get_rng_state()
        torch.set_rng_state(self._data)
        self._ordering = True
        try:
            yield
        finally:
            self._ordering = False
            self._data = torch.get_rng_state()
            torch.set_rng_state(self._model)

    @property
    def data(self) -> Tensor:
        """Where the stream stands that orders the data."""
        return torch.get_rng_state() if self._ordering else self._data

    def go_on(self, *, model: Tensor | None = None, data: Tensor | None = None) -> None:
        """Have a stream go on from where it stood elsewhere; inside of `for_data`, too."""
        if model is not None and self._ordering:
            self._model = model
        elif model is not None:
            torch.set_rng_state(model)
        if data is not None and self._ordering:
            torch.set_rng_state(data)
        elif data is not None:
            self._data = data

    def end(self, *, renew: bool = False) -> None:
        """Go on where the data's stream is; with `renew` somewhere new if the model drew anything,
        so that it does not draw the same again the next time."""
        drew = renew and not torch.equal(torch.get_rng_state(), self._begun)
        torch.set_rng_state(self._data)
        if drew:
            number = int(torch.empty((), dtype=torch.int64).random_().item())
            torch.default_generator.manual_seed(mixed(number, -2))


def generator_states(device: torch.device | None = None) -> dict[str, Any]:
    """Where this process's generators stand: torch's, numpy's and Python's; and a GPU's."""
    _, keys, position, has_gauss, cached = np.random.get_state()
    _, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            cached,
        ],
        "python": [torch.tensor(words, dtype=torch.int64), gauss],
    }
    if device is not None and (own := kind_of(device).rng_state(device)) is not None:
        found[device.type] = own
    return found


def set_beside_torch(states: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Have all generators of `generator_states` but torch's on the CPU stand there again."""
    keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state(
        ("MT19937", keys.numpy().astype(np.uint32), int(position), int(has_gauss), float(cached))
    )
    words, gauss = states["python"]
    random.setstate((3, tuple(words.tolist()), gauss))
    if device is not None and device.type in states:
        kind_of(device).set_rng_state(device, states[device.type])


@dataclass(frozen=True)
class RngStates:
    """Where the caller's generators stood, in short; sent along with a call."""

    torch: bytes
    numpy: bytes
    python: bytes

    @classmethod
    def of_caller(cls) -> RngStates:
        """Look at this process's generators; nothing is drawn from them."""
        return cls(
            _short(torch.get_rng_state().numpy().tobytes()),
            _short(pickle.dumps(np.random.get_state())),
            _short(pickle.dumps(random.getstate())),
        )

    def throw(self, index: int) -> None:
        """In a follower: begin the sequences that the replica with this index has."""
        seed_torch(_seed(self.torch, index) >> 1)
        throw_beside_torch(self.beside_torch(), index)

    def beside_torch(self) -> list[str]:
        """Where the generators of numpy and of Python stood."""
        return [self.numpy.hex(), self.python.hex()]


def throw_beside_torch(told: Sequence[str], index: int) -> None:
    """Begin the sequences of numpy and Python that the replica with this index has."""
    numpy, python = map(bytes.fromhex, told)
    np.random.seed(_seed(numpy, index) >> 32)
    random.seed(_seed(python, index))


def _short(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _seed(state: bytes, index: int) -> int:
    """64 bits, other ones for every replica."""
    return int.from_bytes(_short(state + index.to_bytes(8, "big"))[:8], "big")
