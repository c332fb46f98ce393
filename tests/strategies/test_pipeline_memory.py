"""A network that does not fit into one process trains in two: what `make demo-large` shows."""

from __future__ import annotations

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
    assert "not enough memory" in one and "PipelineStrategy" in one
    assert "trained" in two
