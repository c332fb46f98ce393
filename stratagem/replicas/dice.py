"""Random numbers on followers: each draws its own, and all follow from those of the caller.

Followers are forked from one process, so they would draw alike. What they draw follows from where
the caller's generators stand when it calls; the caller's own sequences are not touched.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Dice:
    """Where the caller's generators stood, in short; sent along with a call."""

    torch: bytes
    numpy: bytes
    python: bytes

    @classmethod
    def of_caller(cls) -> Dice:
        """Look at this process's generators; nothing is drawn from them."""
        return cls(
            _short(torch.get_rng_state().numpy().tobytes()),
            _short(pickle.dumps(np.random.get_state())),
            _short(pickle.dumps(random.getstate())),
        )

    def throw(self, index: int) -> None:
        """In a follower: begin the sequences that the replica with this index has."""
        torch.manual_seed(_seed(self.torch, index) >> 1)
        np.random.seed(_seed(self.numpy, index) >> 32)
        random.seed(_seed(self.python, index))


def _short(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _seed(state: bytes, index: int) -> int:
    """64 bits, other ones for every replica."""
    return int.from_bytes(_short(state + index.to_bytes(8, "big"))[:8], "big")
