"""Threads that carry tensors: gone, and holding nothing, when the interpreter may end."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

from stratagem.strategies.parameters.courier import Courier

pytestmark = pytest.mark.timeout(60)


def test_errands_are_forgotten_and_it_leaves() -> None:
    """Whoever frees tensors in a daemon thread while Python ends is aborted, and all with it."""
    courier = Courier("test")
    tensor = torch.zeros(3)
    held = weakref.ref(tensor)
    courier.send(partial(tensor.add_, 1))
    del tensor
    courier.wait()
    assert held() is None
    courier.end()
    assert not courier._thread.is_alive()


def test_what_went_wrong_comes_back_once() -> None:
    def fail() -> None:
        raise ValueError("lost on the way")

    courier = Courier("test")
    courier.send(fail)
    with pytest.raises(ValueError, match="lost on the way"):
        courier.wait()
    courier.wait()
    courier.end()
