"""A Keras script on the evaluator task: its `fit` looks at checkpoints, and trains nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.frontends.keras.evaluator import _copy
from tests.frontends.keras.served_support import handwriting
from tests.replicas.scripts import wait_for
from tests.servers.server_threads import evaluator

pytestmark = pytest.mark.timeout(60)


def made(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


class Count(keras.callbacks.Callback):  # type: ignore[misc]
    batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1


def test_each_checkpoint_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRATAGEM_SECRET", raising=False)
    x, y, test_x, test_y = handwriting()
    chiefs = [made(1), made(2)]
    chiefs[1].fit(x, y, epochs=1, batch_size=300, verbose=0)
    expected = [m.evaluate(test_x, test_y, verbose=0, return_dict=True) for m in chiefs]
    count = Count()
    with evaluator() as (job, strategy):
        with strategy.scope():
            model = made(0)
        saver = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
        board = keras.callbacks.TensorBoard(str(tmp_path / "logs"))
        with pytest.raises(sg.UsageError, match="needs a ModelCheckpoint"):
            model.fit(x, y, verbose=0)
        with pytest.raises(sg.NotDistributable, match=r"is the evaluator.*train_on_batch"):
            model.train_on_batch(x[:10], y[:10])

        def seen() -> int:
            return len(model.history.epoch) if hasattr(model, "history") else 0

        def be_chief() -> None:
            try:
                chiefs[0].save(tmp_path / "1.keras")
                wait_for(lambda: seen() == 1)
                (tmp_path / "2.keras").write_bytes(b"half of it")
                chiefs[1].save(tmp_path / "2.keras")
                wait_for(lambda: seen() == 2)
            finally:
                job.workers[0].close()

        chief = threading.Thread(target=be_chief)
        chief.start()
        history = model.fit(
            x,
            y,
            epochs=3,
            batch_size=50,
            validation_data=(test_x, test_y),
            verbose=0,
            callbacks=[saver, board, count],
        )
        chief.join()
        model.save(tmp_path / "mine.keras")
        model.save_weights(tmp_path / "mine.weights.h5")
    assert count.batches == 0
    assert history.epoch == [1, 5]  # no update yet, so the number of the file; then five
    for name in ("loss", "accuracy"):
        wanted = [each[name] for each in expected]
        np.testing.assert_allclose(history.history[f"val_{name}"], wanted, rtol=1e-5)
    assert np.array_equal(model.get_weights()[0], chiefs[1].get_weights()[0])
    assert {path.name for path in tmp_path.iterdir()} == {"1.keras", "2.keras", "logs"}
    assert list((tmp_path / "logs").glob("evaluator/events*"))


def test_files_that_are_not_whole_are_left_for_later(tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    model = made(0)
    for name in ("model.keras", "model.weights.h5"):
        path = tmp_path / name
        (model.save if name.endswith(".keras") else model.save_weights)(path)
        assert _copy(path, tmp_path / "copies") is not None
        path.write_bytes(path.read_bytes()[:-200])
        assert _copy(path, tmp_path / "copies") is None
