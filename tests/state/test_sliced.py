"""Which optimizers may be sliced, and what a slice does to their state."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stratagem.state.sliced import Piece, _cut_state, _paste_state, can_slice


def test_elementwise_optimizers_only() -> None:
    params = [nn.Parameter(torch.zeros(3))]
    assert can_slice(torch.optim.Adam(params), params)
    assert not can_slice(torch.optim.Rprop(params), params)

    class Own(torch.optim.SGD):
        """May look at whole tensors, for all we know."""

    assert not can_slice(Own(params), params)
    doubles = [nn.Parameter(torch.zeros(3).double())]
    assert not can_slice(torch.optim.Adam(doubles), doubles)


@given(st.integers(1, 30), st.lists(st.integers(0, 30), max_size=4), st.booleans())
def test_state_cut_and_pasted_is_the_same_state(
    size: int, cuts: list[int], scalar: bool
) -> None:
    param = nn.Parameter(torch.randn(()) if scalar else torch.randn(size))
    optimizer = torch.optim.Adam([param])
    param.grad = torch.randn_like(param)
    optimizer.step()
    before: dict[str, Any] = copy.deepcopy(dict(optimizer.state[param]))
    edges = sorted({0, param.numel(), *(c for c in cuts if c < param.numel())})
    pieces = []
    for lo, hi in pairwise(edges):
        piece = Piece(0, lo, hi, lo, param.detach().view(-1)[lo:hi], torch.empty(0))
        pieces.append((lo, hi, {k: _cut_state(k, v, param, piece) for k, v in before.items()}))
    optimizer.state.clear()
    for lo, hi, state in reversed(pieces):
        _paste_state(optimizer, param, lo, hi, state)
    after = optimizer.state[param]
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert torch.equal(after[key], value) and after[key].shape == value.shape, key


@pytest.mark.parametrize("key", ["step", "exp_avg"])
def test_a_single_element_is_not_mistaken_for_a_counter(key: str) -> None:
    param = nn.Parameter(torch.zeros(()))
    piece = Piece(0, 0, 1, 0, torch.zeros(1), torch.zeros(1))
    cut = _cut_state(key, torch.tensor(3.0), param, piece)
    assert cut.dim() == (0 if key == "step" else 1)
