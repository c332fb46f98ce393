"""Several devices of one worker go in step; between workers goes what the rule says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, os
import torch
import stratagem as sg
from tests.served_support import apart, digits, net

torch.set_num_threads(1)
workers = int(os.environ["WORKERS"])
first = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0
where = sg.ParameterServerStrategy(
    updates=sg.Synchronous() if workers > 1 else sg.Asynchronous(),
    devices=["cpu:0", "cpu:1"] if first else "cpu:0",
)
x, y, _, _ = digits()
made = []
for strategy in (where, None) if first else (where,):
    one = sg.Model(net(), strategy)
    one.compile(lambda p: torch.optim.Adam(p, lr=0.01), "cross_entropy", ["accuracy"])
    torch.manual_seed(5)
    one.fit(x[:301], y[:301], epochs=2, batch_size=50, verbose=0)
    made.append(one)
if first:
    logs = [one.history.history for one in made]
    assert apart(made[0].module, made[1].module) < 2e-5
    for key in ("loss", "accuracy"):
        assert all(abs(a - b) < 1e-5 for a, b in zip(logs[0][key], logs[1][key], strict=True))
    try:
        where.prepare(net(), torch.optim.SGD(net().parameters(), lr=0.1), None)
    except sg.NotDistributable as error:
        assert "2 devices" in str(error)
    else:
        raise AssertionError("one's own loop on two devices was not refused")
    import keras
    with where.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
        model.compile("sgd", "mse")
    try:
        model.fit(x[:20].numpy(), x[:20, :10].numpy(), verbose=0)
    except sg.NotDistributable as error:
        assert "2 devices" in str(error)
    else:
        raise AssertionError("Keras on two devices was not refused")
    print("as one device")
"""


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize("workers", [1, 2])
def test_the_devices_of_a_worker_share_its_batches(workers: int, tmp_path: Path) -> None:
    """One worker alone is as one device without waiting for anybody, too."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "stratagem", "run", "--workers", str(workers), "--ps", "1",
         str(tmp_path / "train.py")],
        capture_output=True, text=True, timeout=80, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
             "KERAS_BACKEND": "torch",
             "WORKERS": str(workers)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as one device" in done.stdout
