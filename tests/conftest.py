"""Every test leaves the machine as it found it: no process and no shared memory behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

os.environ["KERAS_BACKEND"] = "torch"  # Keras reads it when it is imported

import stratagem as sg
from tests.support import strategy

torch.set_num_threads(1)  # replicas on few cores fight each other otherwise
# whatever started the tests in the background may have chosen to ignore them, and children inherit
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

#: files whose tests take long: they begin first, so that no process is left alone with them
_LONG = ("test_served", "parameters", "test_faults", "membership", "multi_worker", "keras")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not any(name in str(item.path) for name in _LONG))


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


@pytest.fixture(scope="module")
def two() -> Iterator[sg.MirroredStrategy]:
    """Replicas for all tests of a file that need nothing else."""
    with closing(strategy(2)) as made:
        yield made


@pytest.fixture(scope="module")
def three() -> Iterator[sg.MirroredStrategy]:
    with closing(strategy(3)) as made:
        yield made
