"""Assignment of GPUs to tasks, and amounts of GPU memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stratagem.cluster.spec import Task
from stratagem.launch import run

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("workers", "count", "one_each", "expected"),
    [
        (2, 0, True, ["", ""]),
        (2, 0, False, ["", ""]),
        (1, 4, True, ["0"]),
        (4, 4, True, ["0", "1", "2", "3"]),
        (5, 2, True, ["0", "1", "0", "1", "0"]),
        (1, 4, False, ["0,1,2,3"]),
        (2, 4, False, ["0,1", "2,3"]),
        (3, 8, False, ["0,1", "2,3,4", "5,6,7"]),
        (4, 4, False, ["0", "1", "2", "3"]),
        (3, 2, False, ["0", "1", "0"]),
    ],
)
def test_gpu_assignment(workers: int, count: int, one_each: bool, expected: list[str]) -> None:
    tasks = [Task("worker", i) for i in range(workers)]
    dealt = run.assign(tasks, [str(i) for i in range(count)], one_each=one_each)
    assert [",".join(dealt[task]) for task in tasks] == expected


@pytest.mark.parametrize("workers", range(1, 10))
@pytest.mark.parametrize("count", range(1, 10))
def test_blocks_use_every_gpu_and_leave_no_worker_without(workers: int, count: int) -> None:
    tasks = [Task("worker", i) for i in range(workers)]
    dealt = run.assign(tasks, [str(i) for i in range(count)], one_each=False)
    assert all(dealt.values()) and len({g for block in dealt.values() for g in block}) == count
    if workers <= count:
        assert [int(g) for task in tasks for g in dealt[task]] == list(range(count))


def test_servers_get_no_gpu_and_the_evaluator_the_next() -> None:
    tasks = [Task("worker", 0), Task("worker", 1), Task("ps", 0), Task("evaluator")]
    dealt = run.assign(tasks, ["0", "1", "2"], one_each=True)
    assert list(dealt.values()) == [("0",), ("1",), (), ("2",)]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("", []),
        ("-1", []),
        ("2", ["2"]),
        ("3, 1", ["3", "1"]),
        ("0,-1,1", ["0"]),
        ("GPU-8932f937,MIG-3", ["GPU-8932f937", "MIG-3"]),
    ],
)
def test_visible_gpus_of_the_user(chosen: str, expected: list[str]) -> None:
    assert run.visible({"CUDA_VISIBLE_DEVICES": chosen}) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "GPU 0: H100 (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: MIG-2)\nGPU 1: H100",
            ["0", "1"],
        ),
        ("No devices found.", []),
    ],
)
def test_gpus_are_counted(
    said: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{said}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert run.visible({}) == expected


def test_gpus_are_counted_without_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(run, "_PROC", tmp_path)
    (tmp_path / "0000:01:00.0").mkdir()
    assert run.visible({}) == ["0"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", "8GiB"),
        ("8 gb", "8GB"),
        ("512MIB", "512MiB"),
        ("1.5TiB", "1.5TiB"),
        ("50%", "50%"),
        ("100 %", "100%"),
        ("0.5", "0.5"),
        (".25", ".25"),
        ("1", "1"),
    ],
)
def test_memory_limits(text: str, expected: str) -> None:
    assert run.memory_limit(text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "8", "1.1", "0%", "101%", "-1GiB", "0GiB", "8Gi", "half"]
)
def test_what_is_no_memory_limit(text: str) -> None:
    with pytest.raises(ValueError, match="write 8GiB, 50% or"):
        run.memory_limit(text)
