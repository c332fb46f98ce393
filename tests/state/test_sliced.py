"""Slicing optimizers, and their state in shared memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stratagem.state.shared_state import SharedState
from stratagem.state.sliced import SlicePiece, can_slice
from stratagem.wire.shared_memory import SharedMemoryCollective, slices
from tests.state.crowd_support import together


def test_elementwise_optimizers_only() -> None:
    params = [nn.Parameter(torch.zeros(3))]
    assert can_slice(torch.optim.Adam(params), params)
    assert not can_slice(torch.optim.Rprop(params), params)

    class Own(torch.optim.SGD):
        """An optimizer that may look at whole tensors."""

    assert not can_slice(Own(params), params)
    doubles = [nn.Parameter(torch.zeros(3).double())]
    assert not can_slice(torch.optim.Adam(doubles), doubles)


FORMS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
}


@pytest.mark.parametrize("form", list(FORMS))
@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    count=st.integers(1, 4),
    unused=st.integers(0, 3),
)
def test_state_in_parts_is_the_same_state(
    form: str, sizes: list[int], count: int, unused: int
) -> None:
    """Each replica shares its parts, and all of them find the whole state."""
    shapes = [() if size == 0 else (size,) for size in sizes]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = FORMS[form](params)
    for i, param in enumerate(params):
        param.grad = torch.randn_like(param) if i != unused else None
    optimizer.step()
    before = {p: copy.deepcopy(dict(state)) for p, state in optimizer.state.items()}

    def work(collective: SharedMemoryCollective) -> None:
        shared = SharedState(optimizer, params, collective)
        pieces = []
        for i, param in enumerate(params):
            lo, hi = slices(param.numel(), count)[collective.rank]
            if lo < hi:
                flat = param.detach().view(-1)[lo:hi]
                pieces.append(SlicePiece(param, i, lo, hi, 0, flat, flat))
        if pieces:
            shared.take_in(shared.twin(optimizer, pieces), pieces)
        collective.barrier()
        for copied in (True, False):
            found = FORMS[form](params)
            found.state.clear()
            shared.give(found, copy=copied)
            assert found.state.keys() == before.keys()
            for param, state in before.items():
                mine = found.state[param]
                assert mine.keys() == state.keys()
                for name, value in state.items():
                    assert torch.equal(mine[name], value), name
                    assert mine[name].shape == value.shape, name
                    assert mine[name].dtype is value.dtype, name

    together(count, work)
