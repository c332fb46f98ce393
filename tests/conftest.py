"""Every test leaves the machine as it found it: no process and no shared memory behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)  # replicas on few cores fight each other otherwise


def _ours() -> set[int]:
    """Zygotes and followers on this machine."""
    listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    return {
        int(line.split(None, 1)[0])
        for line in listing.stdout.splitlines()
        if "stratagem.replicas.zygote" in line
    }


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


@pytest.fixture
def processes() -> Iterator[set[int]]:
    """Zygotes that ran before the test; use `_ours` through this to look for new ones."""
    yield _ours()
