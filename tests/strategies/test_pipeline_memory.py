"""A network that does not fit into one process trains in two, as in `make demo-large`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts memory on Linux only")
def test_under_one_limit_one_device_fails_and_two_stages_train() -> None:
    command = [sys.executable, str(ROOT / "examples" / "large.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = done.stdout.split("two stages:")
    assert "Out of memory on cpu:0" in one and "PipelineStrategy" in one
    assert "trained" in two


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process holds")
def test_a_stage_takes_its_part_of_the_memory() -> None:
    """Also the first stage, in which the model was made.

    The goal of 0.65 is for the benchmark's net. This net is a quarter of it, so a process' other
    memory weighs more: 0.66 to 0.71.
    """
    command = [sys.executable, str(ROOT / "benchmarks" / "pipeline" / "memory.py")]
    command += ["--stages", "1,2", "--width", "1024"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^\| 2 \|.*\*\*([\d.]+)\*\*", done.stdout, re.MULTILINE)
    assert float(found[0]) <= 0.76, done.stdout
