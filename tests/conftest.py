"""Every test leaves the machine as it found it: no process and no shared memory behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ["KERAS_BACKEND"] = "torch"  # Keras reads it when it is imported
torch.set_num_threads(1)  # replicas on few cores fight each other otherwise


def _shared_files() -> set[str]:
    """Named shared memory, but for what torch's own data loaders hold for a moment."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith(("torch_", "sem."))}


@pytest.fixture(scope="session", autouse=True)
def nothing_in_shared_memory() -> Iterator[None]:
    before = _shared_files()
    yield
    left = _shared_files() - before
    assert not left, f"left in shared memory: {left}"
