"""A Keras model in a run that is recorded."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.figures import recorder
from stratagem.figures.run_folder import RunFolder
from stratagem.launch.report_command import page


@pytest.mark.timeout(120)
def test_the_losses_of_its_epochs_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(recorder.VARIABLE, str(tmp_path))
    monkeypatch.setattr(recorder, "_recorders", {})
    with closing(sg.MirroredStrategy(["cpu:0", "cpu:1"])) as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = np.ones((8, 4), dtype="float32")
        history = model.fit(x, x[:, :1], epochs=2, verbose=0).history
    run = RunFolder(tmp_path)
    run.read()
    logs = [each["logs"]["loss"] for each in run.events if each["event"] == "epoch"]
    assert logs == pytest.approx(history["loss"])
    assert "Loss, by epoch" in page(run)
