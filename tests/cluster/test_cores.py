"""Processors that may be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stratagem.cluster.cores import cores

HERE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_containers_are_limited(tmp_path: Path, files: dict[str, str], most: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cores(tmp_path) == min(HERE, most or HERE)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes have no mask here")
def test_a_mask_counts(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)
