"""Keras models whose gradients travel compressed."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.support import data, strategy

pytestmark = pytest.mark.timeout(120)


def made(scope: Any, optimizer: Any) -> Any:
    keras.utils.set_random_seed(3)
    with scope:
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(4)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss)
    return model


def trained(wire: Any, **options: Any) -> list[Any]:
    x, y = (each.numpy() for each in data(50))
    with strategy(2, wire=wire) as where:
        model = made(where.scope(), keras.optimizers.SGD(0.1))
        model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, **options)
        return [np.array(w) for w in model.get_weights()]


def far(a: list[Any], b: list[Any]) -> float:
    return max(float(np.abs(v - w).max()) for v, w in zip(a, b, strict=True))


def test_a_keras_model_trains_with_the_same_records() -> None:
    """A share of 1 leaves nothing out; eight bits leave little out, and a tenth much."""
    exact = trained(None)
    assert far(trained(sg.TopK(1.0)), exact) < 2e-6
    assert 1e-7 < far(trained(sg.Int8()), exact) < 5e-3
    assert 1e-3 < far(trained(sg.TopK(0.1)), exact) < 0.3


def test_adam_is_refused_under_top_k() -> None:
    x, y = (each.numpy() for each in data(20))
    with strategy(2, wire=sg.TopK(0.1)) as where:
        model = made(where.scope(), "adam")
        with pytest.raises(sg.NotDistributable, match="Adam divides by"):
            model.fit(x, y, batch_size=10, verbose=0)


def test_a_backup_has_what_was_left_out(tmp_path: Any) -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen == 6:
                raise KeyboardInterrupt

    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=1)

    wire = sg.TopK(0.1, momentum=0.5)
    expected = trained(wire)
    with pytest.raises(KeyboardInterrupt):
        trained(wire, callbacks=[backup(), Stop()])
    assert far(trained(wire, callbacks=[backup()]), expected) == 0.0
