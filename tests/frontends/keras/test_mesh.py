"""Keras models on rows of pipelines: the weights, losses and metrics of one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras import layers

import stratagem as sg
from stratagem.training.replica import current_replica
from tests.frontends.keras.test_stages import (
    SPARSE,
    Spectral,
    apart,
    deep,
    knotted,
    named_once,
    numbers,
    same,
    shuffled,
    stacked,
    trained,
)

pytestmark = pytest.mark.timeout(120)

#: processes are more than cores
PATIENT = sg.Patience(answer=30.0)


def adam() -> Any:
    return keras.optimizers.Adam(0.01, global_clipnorm=0.05)


@pytest.fixture(scope="module")
def mesh() -> Iterator[sg.Mesh]:
    made = sg.Mesh(data=2, stage=2, microbatches=2, patience=PATIENT)
    yield made
    made.close()


def test_any_number_of_rows(mesh: sg.Mesh) -> None:
    """Also one, of which the second row has nothing: as a last batch, and as the only one."""
    for rows in (1, 3):
        x, y = numbers(9 + rows)
        same(mesh, deep, x, y, batch=9, epochs=1, optimizer=adam)
    x, y = numbers(1)
    same(mesh, deep, x, y, batch=1, optimizer=adam)


def test_rows_are_shuffled_as_on_one_device(mesh: sg.Mesh) -> None:
    shuffled(mesh)


def test_three_rows() -> None:
    x, y = numbers(25)
    with sg.Mesh(data=3, stage=2, microbatches=3, schedule="gpipe", patience=PATIENT) as on:
        same(on, deep, x, y, batch=11)
        same(on, deep, *numbers(2), batch=2)


@pytest.mark.parametrize("op", ["shared_memory", "ring"])
def test_skips_ties_regularisers_and_several_outputs(mesh: sg.Mesh, op: str) -> None:
    """In memory that a row shares, and with each stage's own."""
    x, y = numbers(21)
    compiled: Any = {
        "loss": {"kind": SPARSE(from_logits=True), "size": "mse"},
        "loss_weights": {"kind": 1.0, "size": 0.3},
        "metrics": {"kind": ["accuracy"], "size": ["mae"]},
        "optimizer": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.05),
    }
    targets = {"kind": y, "size": x[:, :1] * 2}
    with sg.Mesh(2, 2, microbatches=3, cross_device_ops=op, patience=PATIENT) as on:
        same(on, named_once(knotted), x, targets, batch=9, **compiled)


def test_sample_weights_sums_and_metrics_of_batches(mesh: sg.Mesh) -> None:
    x, y = numbers(23)
    weight = np.random.default_rng(1).uniform(size=23)
    same(mesh, deep, x, y, fit={"sample_weight": weight}, weighted_metrics=["accuracy"])
    summed = SPARSE(from_logits=True, reduction="sum")
    same(mesh, deep, x, y, loss=lambda: summed, optimizer=keras.optimizers.SGD)


class Noting(layers.Layer):
    """Notes the rows that come through it in training, by process."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(name=name)
        self.noted = str(folder / name)

    def call(self, x: Any) -> Any:
        if torch.is_grad_enabled() and x.device.type != "meta":
            with open(f"{self.noted} {current_replica().index}", "a") as file:
                file.write(f"{len(x)} ")
        return x


def test_every_process_computes_its_rows_and_layers(tmp_path: Path) -> None:
    """The second row's processes, which measure nothing: 8 of 16 rows, in 2 microbatches."""

    def noting() -> Any:
        body = [layers.Dense(6), Noting(tmp_path, "a"), layers.Dense(6, name="b")]
        return keras.Sequential([keras.Input((6,)), *body, Noting(tmp_path, "c"), layers.Dense(3)])

    with sg.Mesh(2, 2, microbatches=2, split=["b"], patience=PATIENT) as on:
        trained(on, noting, *numbers(32), epochs=1)
        trained(on, noting, *numbers(1), epochs=1)  # none for the second row
    assert (tmp_path / "a 2").read_text() == "4 4 4 4 "
    assert (tmp_path / "c 3").read_text() == "4 4 4 4 "
    assert not (tmp_path / "a 3").exists() and not (tmp_path / "c 2").exists()


def test_other_calls_callbacks_and_files(mesh: sg.Mesh, tmp_path: Path) -> None:
    """Single batches, weights that are put back, evaluation, prediction, one plain file."""
    x, y = numbers(37)
    models = [trained(on, deep, x, y, epochs=1)[0] for on in (None, mesh)]
    for each in models:
        each.train_on_batch(x[:5], y[:5])
        stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
        rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.2 / (epoch + 1))
        told = {"callbacks": [stop, rate], "validation_data": (x[:9], y[:9])}
        each.fit(x, y, batch_size=9, epochs=4, verbose=0, shuffle=False, **told)
        each.layers[0].set_weights([w * 0.5 for w in each.layers[0].get_weights()])
        each.fit(x, y, batch_size=9, verbose=0, shuffle=False)
    one, model = models
    assert apart(one, model) < 1e-6
    np.testing.assert_allclose(model.evaluate(x, y, verbose=0), one.evaluate(x, y, verbose=0), 1e-5)
    found, expected = model.predict(x, verbose=0), one.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    model.save(tmp_path / "mesh.keras")
    one.save(tmp_path / "one.keras")
    loaded = []
    for on, name in ((None, "mesh"), (mesh, "one")):
        with on.scope() if on is not None else nullcontext():
            again = keras.models.load_model(tmp_path / f"{name}.keras")
            again.compile(optimizer=again.optimizer, loss=again.loss)
        again.fit(x, y, batch_size=9, verbose=0, shuffle=False)
        loaded.append(again)
    assert apart(loaded[0], one) > 1e-3  # with the state of the optimizer
    assert apart(*loaded) < 1e-6


def test_dropout_draws_by_row(mesh: sg.Mesh) -> None:
    """Repeatable; and both rows do not draw the same."""

    def dropping() -> Any:
        body = [layers.Dense(8, "tanh"), layers.Dropout(0.5), layers.Dense(3)]
        return keras.Sequential([keras.Input((6,)), *body])

    x, y = numbers(8)
    x[4:], y[4:] = x[:4], y[:4]  # both rows have the same, so with the same draws one is enough
    with sg.PipelineStrategy(["cpu:0", "cpu:1"], 2, patience=PATIENT) as pipe:
        half = trained(pipe, dropping, x[:4], y[:4], batch=4, epochs=1)[0]
    found = [trained(mesh, dropping, x, y, batch=8, epochs=1)[0] for _ in range(2)]
    assert apart(*found) == 0.0
    assert apart(found[0], half) > 1e-3


def test_refusals(mesh: sg.Mesh) -> None:
    def tagger() -> Any:
        body = [layers.Embedding(9, 6, mask_zero=True), layers.Dense(6), layers.Dense(3)]
        return keras.Sequential([keras.Input((5,), dtype="int32"), *body])

    words = np.random.default_rng(3).integers(0, 5, (23, 5))
    with pytest.raises(
        sg.NotDistributable, match=r"divided by a mask.*one PipelineStrategy with mic"
    ):
        trained(mesh, tagger, words, words % 3)
    x, y = numbers(17)
    with sg.Mesh(2, 2, microbatches=1, patience=PATIENT) as on:
        normed = stacked(layers.BatchNormalization())
        with pytest.raises(sg.NotDistributable, match=r"looks at all rows.*one PipelineStrategy"):
            trained(on, normed, x, y)
        with pytest.raises((sg.NotDistributable, sg.ReplicaFailed), match=r"writes to .*spectral"):
            trained(on, stacked(Spectral(name="spectral")), x, y)
    with pytest.raises(sg.UsageError, match="4 layers that can be cut apart"):
        trained(sg.Mesh(2, 5), deep, x, y)
