"""Files on disk: plain, whole or absent, tied weights included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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


# --- what weights can look like ------------------------------------------------------------------


class Strided(nn.Module):
    """A transposed weight, one that is repeated in place, and a convolution, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("same", torch.randn(1).expand(4))


def test_weights_that_are_not_contiguous(tmp_path: Path) -> None:
    module, other = Strided(), Strided()
    other.same = torch.zeros(4)
    assert not module.conv.weight.is_contiguous() and not module.turned.is_contiguous()
    checkpoint.save(tmp_path / "m", module, None, {})
    checkpoint.load(tmp_path / "m", other, None)
    files = load_file(tmp_path / "m.safetensors")
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
        assert torch.equal(value, files[name]), name
    assert other.conv.weight.is_contiguous(memory_format=torch.channels_last)


class Counting(nn.Module):
    """A module with extra state."""

    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


@pytest.mark.parametrize(
    "kept", [{"words": ["a", 1, 2.5, None], "at": (True, {3: "x"})}, 7, torch.arange(3)], ids=str
)
def test_extra_state_is_kept(tmp_path: Path, kept: Any) -> None:
    module, other = nn.Sequential(Counting(kept)), nn.Sequential(Counting())
    checkpoint.save(tmp_path / "m", module, None, {"history": {}})
    assert checkpoint.load(tmp_path / "m", other, None) == {"history": {}}
    assert torch.equal(other[0].layer.weight, module[0].layer.weight)
    found = other[0].kept
    assert torch.equal(found, kept) if isinstance(kept, torch.Tensor) else found == kept


def test_extra_state_needs_both_files(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "m", Counting(7), None, {})
    (tmp_path / "m.state.pt").unlink()
    with pytest.raises(UsageError, match=r"'_extra_state'.*m\.state\.pt.*beside"):
        checkpoint.load(tmp_path / "m", Counting(), None)


@pytest.mark.parametrize("odd", [Path("/x"), [object()], {"a": {1}}], ids=["path", "object", "set"])
def test_extra_state_that_is_not_plain_is_refused(tmp_path: Path, odd: Any) -> None:
    with pytest.raises(UsageError, match=r"'0._extra_state'.*get_extra_state.*plain"):
        checkpoint.save(tmp_path / "m", nn.Sequential(Counting(odd)), None, {})
    assert not list(tmp_path.iterdir())


def test_files_of_two_savings_are_refused(tmp_path: Path) -> None:
    """A save was killed between the two: the new state stands beside the old weights."""
    one = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "m", one, None, {"epoch": 1})
    old = (tmp_path / "m.safetensors").read_bytes()
    checkpoint.save(tmp_path / "m", one, None, {"epoch": 2})
    assert checkpoint.load(tmp_path / "m", one, None) == {"epoch": 2}
    (tmp_path / "m.safetensors").write_bytes(old)
    with pytest.raises(UsageError, match="not saved together"):
        checkpoint.load(tmp_path / "m", one, None)
    (tmp_path / "m.state.pt").unlink()
    assert checkpoint.load(tmp_path / "m", one, None) == {}


def test_files_without_a_number_are_loaded(tmp_path: Path) -> None:
    """Those of older versions; but not weights of other programs beside our state."""
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    checkpoint.save(tmp_path / "m", one, None, {})
    torch.save({"optimizer": None, "epoch": 3}, tmp_path / "m.state.pt")
    assert checkpoint.load(tmp_path / "m", other, None) == {"epoch": 3}
    save_file(dict(one.state_dict()), str(tmp_path / "m.safetensors"))
    assert checkpoint.load(tmp_path / "m", other, None) == {"epoch": 3}
    assert torch.equal(one.weight, other.weight)
    checkpoint.save(tmp_path / "m", one, None, {"epoch": 2})
    save_file(dict(one.state_dict()), str(tmp_path / "m.safetensors"))
    with pytest.raises(UsageError, match="not saved together"):
        checkpoint.load(tmp_path / "m", other, None)
