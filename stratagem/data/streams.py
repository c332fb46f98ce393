"""Streams of random numbers: what orders data, what the model draws, and what each replica draws.

    torch's generator   seed 0 -> 1 -> 2 -> ...      shuffling goes on here, as without a model
    the model's                 dropout, noise       as many as this replica's share needs

A replica's dropout draws for its share of the batch, and so does a dataset that makes noise. With
one stream, the next draw, and the order of the next epoch, would depend on the number of replicas.

Replicas that are forked from one process would draw the same. Each is seeded from the states of the
caller's generators at the call (`RngStates`); the caller's own sequences are not touched.
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
    """Return a seed that differs for each replica, and for each fit."""
    return ((seed & (2**62 - 1)) + _MIX * (index + (generation << 20))) % 2**63


def seed_torch(seed: int) -> None:
    """Seed as `torch.manual_seed`, which records a stack trace even without an accelerator."""
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


class RandomStreams:
    """Two streams on torch's CPU generator, which is the model's until `end`."""

    def __init__(self, seed: int | None = None) -> None:
        """`seed` is for the model; without one it goes on from the generator's state."""
        self._data = torch.get_rng_state()
        self._ordering = False
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        self._begun = torch.get_rng_state()

    @contextmanager
    def for_data(self) -> Iterator[None]:
        """Draw from the data's stream in this block."""
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
        """The state of the stream that orders the data."""
        return torch.get_rng_state() if self._ordering else self._data

    def go_on(self, *, model: Tensor | None = None, data: Tensor | None = None) -> None:
        """Restore the state of a stream; inside of `for_data`, too."""
        if model is not None and self._ordering:
            self._model = model
        elif model is not None:
            torch.set_rng_state(model)
        if data is not None and self._ordering:
            torch.set_rng_state(data)
        elif data is not None:
            self._data = data

    def end(self, *, renew: bool = False) -> None:
        """Give the generator the data's state; with `renew` a new one if the model drew anything,
        so that it does not draw the same again the next time."""
        drew = renew and not torch.equal(torch.get_rng_state(), self._begun)
        torch.set_rng_state(self._data)
        if drew:
            number = int(torch.empty((), dtype=torch.int64).random_().item())
            torch.default_generator.manual_seed(mixed(number, -2))


def generator_states(device: torch.device | None = None) -> dict[str, Any]:
    """Return the states of this process's generators: torch's, numpy's, Python's; and a GPU's."""
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
    """Restore all generators of `generator_states` except torch's on the CPU."""
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
    """Digests of the states of the caller's generators; sent along with a call."""

    torch: bytes
    numpy: bytes
    python: bytes

    @classmethod
    def of_caller(cls) -> RngStates:
        """Digest this process's generators; nothing is drawn from them."""
        return cls(
            _short(torch.get_rng_state().numpy().tobytes()),
            _short(pickle.dumps(np.random.get_state())),
            _short(pickle.dumps(random.getstate())),
        )

    def seed(self, index: int) -> None:
        """In a follower: seed all generators for the replica with this index."""
        seed_torch(_seed(self.torch, index) >> 1)
        seed_beside_torch(self.beside_torch(), index)

    def beside_torch(self) -> list[str]:
        """The digests of numpy's and Python's generators."""
        return [self.numpy.hex(), self.python.hex()]


def seed_beside_torch(digests: Sequence[str], index: int) -> None:
    """Seed numpy's and Python's generators for the replica with this index."""
    numpy, python = map(bytes.fromhex, digests)
    np.random.seed(_seed(numpy, index) >> 32)
    random.seed(_seed(python, index))


def _short(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _seed(state: bytes, index: int) -> int:
    """Return 64 bits that differ for every replica."""
    return int.from_bytes(_short(state + index.to_bytes(8, "big"))[:8], "big")
