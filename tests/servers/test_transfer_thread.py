"""Transfer threads end, and free everything, before the interpreter ends."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

from stratagem.servers.transfers import TransferThread

pytestmark = pytest.mark.timeout(60)


def test_errands_are_forgotten_and_it_leaves() -> None:
    """A daemon thread that frees tensors while Python ends aborts the process."""
    transfer_thread = TransferThread("test")
    tensor = torch.zeros(3)
    held = weakref.ref(tensor)
    transfer_thread.send(partial(tensor.add_, 1))
    del tensor
    transfer_thread.wait()
    assert held() is None
    transfer_thread.end()
    assert not transfer_thread._thread.is_alive()


def test_what_went_wrong_comes_back_once() -> None:
    def fail() -> None:
        raise ValueError("lost on the way")

    transfer_thread = TransferThread("test")
    transfer_thread.send(fail)
    with pytest.raises(ValueError, match="lost on the way"):
        transfer_thread.wait()
    transfer_thread.wait()
    transfer_thread.end()
