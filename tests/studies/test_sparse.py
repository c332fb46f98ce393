"""The study of sparse models, in its small form: real servers, and the simulator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
STUDY = Path(__file__).parents[2] / "studies" / "sparse" / "study.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("sparse")
    subprocess.run([sys.executable, STUDY, "--small", "--out", out], check=True, timeout=200)
    return json.loads((out / "data.json").read_text())


@pytest.mark.timeout(240)
def test_sparse_and_dense_are_one_model(data: Any) -> None:
    arms = data["real"]["arms"]
    assert len(arms) == 8
    for arm in arms:
        assert arm["updates_per_s"] > 0
        if arm["rule"] == "synchronous" or arm["workers"] == 1:
            assert arm["apart"] < 1e-5, arm


@pytest.mark.timeout(240)
def test_rows_are_as_many_as_the_formula_says(data: Any) -> None:
    sent = data["traffic"]
    assert sent["rows counted"] == pytest.approx(sent["rows by formula"], rel=0.1)
    assert sent["sparse"] < sent["dense"] / 5


@pytest.mark.timeout(240)
def test_on_a_narrow_link_sparse_goes_further(data: Any) -> None:
    best = {
        row["kind"]: row["best"]
        for row in data["knees"]
        if (row["rule"], row["link"], row["servers"]) == ("synchronous", "1 Gbit/s", 1)
    }
    assert best["dense"] < best["sparse"] < best["needed"]
    assert all(0 < row["speedup"] <= 1.3 * row["workers"] for row in data["simulated"])


@pytest.mark.timeout(240)
def test_what_messages_cost_is_measured_and_explains_a_part(data: Any) -> None:
    costs = data["real"]["overhead"]
    assert costs["server_message"] > 0 and costs["worker_step"] > 0 and costs["server_step"] > 0
    assert all(0 <= cost < 0.1 for cost in costs.values())
    for row in data["predicted"]:
        assert row["error, overhead"] < row["error, alone"], "messages make it slower"
