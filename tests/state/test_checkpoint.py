"""Files on disk: plain, whole or absent, tied weights included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stratagem.errors import UsageError
from stratagem.state import checkpoint


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        block = torch.randn(10)
        self.register_buffer("left", block[:5])
        self.register_buffer("right", block[5:])


def test_tied_weights_and_views_survive(tmp_path: Path) -> None:
    module, other = Tied(), Tied()
    checkpoint.save(tmp_path / "m", module, None, {"history": {"loss": [1.0]}})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.safetensors", "m.state.pt"]
    assert torch.equal(load_file(tmp_path / "m.safetensors")["b.weight"], module.a.weight)
    progress = checkpoint.load(tmp_path / "m.safetensors", other, None)
    assert progress["history"] == {"loss": [1.0]}
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert other.a.weight is other.b.weight


def test_names_with_dots_are_kept(tmp_path: Path) -> None:
    weights, state = checkpoint.paths(tmp_path / "epoch-1.25")
    assert weights.name == "epoch-1.25.safetensors" and state.name == "epoch-1.25.state.pt"


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "m", nn.Linear(2, 2), None, {})
    before = (tmp_path / "m.safetensors").read_bytes()

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(tmp_path / "m", nn.Linear(2, 2), None, {})
    assert (tmp_path / "m.safetensors").read_bytes() == before
    assert not list(tmp_path.glob(".*.part"))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no saved model"):
        checkpoint.load(tmp_path / "absent", nn.Linear(2, 2), None)
