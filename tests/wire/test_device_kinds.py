"""Only the table of device kinds makes a kind's own calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import stratagem
from stratagem.wire.device_kinds import KINDS, kind_of

ROOT = Path(stratagem.__file__).parent


def test_nobody_else_calls_a_kind() -> None:
    """So a replica without a GPU makes no CUDA call."""
    calls = re.compile(r"\btorch\.(cuda|mps|tpu)\b")
    found = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in ROOT.rglob("*.py")
        if path.name != "device_kinds.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if calls.search(line)
    }
    assert found == set()


def test_the_cpu_needs_no_call() -> None:
    cpu, kind = torch.device("cpu"), kind_of("cpu:3")
    assert kind is KINDS["cpu"] and kind.has(100) and kind.place(7) == cpu
    assert kind.rng_state(cpu) is None and kind.mark() is None
    with kind.seat(cpu, 0, 2) as device:
        assert device == cpu


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_has_its_name(name: str) -> None:
    assert KINDS[name].name == name
    assert KINDS[name].backend == {"cuda": "nccl", "tpu": "tpu_dist"}.get(name, "gloo")
