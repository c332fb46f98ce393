"""Saved files have the same mode as any file of the user, and load without stratagem."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import stratagem as sg
from tests.support import distance, mlp, strategy


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_files_follow_the_umask(tmp_path: Path, mask: int) -> None:
    model = sg.Model(mlp(), strategy(1))
    model.compile("adam", "cross_entropy")
    before = os.umask(mask)
    try:
        (tmp_path / "plain").write_text("")
        model.save(tmp_path / "m")
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()}
    assert set(modes) == {"plain", "m.safetensors", "m.state.pt"}
    assert set(modes.values()) == {oct(0o666 & ~mask)}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(tokens)))


@pytest.mark.timeout(60)
def test_tied_weights_load_as_the_guide_says(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = sg.Model(Tied(), strategy(1))
    model.compile("adam", "cross_entropy")
    model.fit(torch.randint(0, 9, (30,)), torch.randint(0, 9, (30,)), verbose=0)
    path = model.save(tmp_path / "m")
    plain = Tied()
    plain.load_state_dict(load_file(path))
    assert plain.out.weight is plain.embed.weight
    assert distance(plain, model.module) == 0.0
