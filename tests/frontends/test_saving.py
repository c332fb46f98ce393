"""Saved files have the rights of any file that the user makes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import stratagem as sg
from tests.support import mlp, strategy


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
