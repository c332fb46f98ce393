"""The exercise in its small form: every strategy learns the digits, and its time is known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STUDY = Path(__file__).parents[2] / "studies" / "exercise" / "study.py"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_arm_reaches_the_target(tmp_path: Path) -> None:
    subprocess.run([sys.executable, STUDY, "--small", "--out", tmp_path], check=True, timeout=200)
    data = json.loads((tmp_path / "data.json").read_text())
    runs = {(row["arm"], row["condition"]): row for row in data["runs"]}
    assert len(runs) == len(data["runs"]) == 10
    for row in data["runs"]:
        assert row["seconds"] is not None, row
        assert row["curve"][-1][1] >= data["size"]["target"]
        # two workers share the epoch, and neither is quicker than its sleep
        least = data["size"]["step"] * data["size"]["train"] / data["size"]["share"] / 2
        if row["arm"] != "servers, 1 spare":
            assert row["seconds"] >= 0.9 * least * row["epochs"], row
    same = [
        runs[arm, "undisturbed"]["curve"]
        for arm in ("mirrored", "central storage", "servers, synchronous")
    ]
    for curve in same:  # one model, whoever keeps it
        assert [a for _, a in curve] == pytest.approx([a for _, a in same[0]], abs=0.02)
