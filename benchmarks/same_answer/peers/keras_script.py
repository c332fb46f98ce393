"""The Keras script of both peers that use it: Keras' own DataParallel, and stratagem's scope."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from cases import (
    CLASS_WEIGHTS,
    CLASSES,
    FEATURES,
    IGNORED,
    LENGTH,
    MOMENTUM,
    WORDS,
    Case,
    Job,
    Result,
)


class Batches(keras.utils.PyDataset):
    """Batches of so many rows, in order; `fit` shuffles batches if it is asked to."""

    def __init__(self, job: Job, batch: int) -> None:
        super().__init__()
        self.data, self.batch = job.data, batch
        # whole global batches only, where the last one is dropped
        rows = job.case.steps * job.case.batch if job.case.drop_last else job.case.rows
        self.count = -(-rows // batch)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        at = range(index * self.batch, min((index + 1) * self.batch, len(self.data)))
        rows = [self.data[i] for i in at]
        return tuple(np.stack([row[i].numpy() for row in rows]) for i in range(2))


def compiled(case: Case, synchronised: bool = False) -> keras.Model:
    """One device's model, with the weights that all peers begin with."""
    layers = keras.layers
    if case.tokens:
        parts = [keras.Input((LENGTH,), dtype="int64"), layers.Embedding(WORDS, 8)]
        parts += [layers.Dense(WORDS)]
    else:
        parts = [keras.Input((FEATURES,)), layers.Dense(8)]
        norm = layers.BatchNormalization(momentum=0.9, synchronized=synchronised)
        parts += [norm] if case.norm else []
        outputs = 1 if case.task == "evaluate" else CLASSES
        parts += [layers.Activation("tanh"), layers.Dense(outputs)]
    model = keras.Sequential(parts)
    model.set_weights(turned(case, [each.numpy() for each in case.model().state_dict().values()]))
    loss: keras.losses.Loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True,
        ignore_class=IGNORED if case.tokens else None,
        reduction="sum" if case.loss == "sum" else "sum_over_batch_size",
    )
    metrics: list[Any] = []
    if case.task == "evaluate":
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        metrics = [keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)]
        metrics += [keras.metrics.AUC(from_logits=True, name="auc")]
    accumulate = case.accumulate if case.accumulate > 1 else None
    optimizer = keras.optimizers.SGD(
        case.rate, MOMENTUM, global_clipnorm=case.clip, gradient_accumulation_steps=accumulate
    )
    model.compile(optimizer, loss, metrics=metrics)
    return model


def turned(case: Case, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Torch's weights as Keras', and back: those of dense layers are transposed."""
    kept = [each for each in arrays if each.ndim]  # a BatchNorm of torch counts its batches
    table = 0 if case.tokens else -1
    return [each.T if each.ndim == 2 and i != table else each for i, each in enumerate(kept)]


def train(job: Job, data: Callable[[], Any], synchronised: bool = False) -> Result:
    """One device's script; `data` makes what `fit` is given."""
    case = job.case
    rest: dict[str, Any] = {"epochs": case.epochs, "verbose": 0, "shuffle": case.shuffle}
    if case.loss == "weights":
        rest["class_weight"] = dict(enumerate(CLASS_WEIGHTS))
    backup = str(job.folder / os.environ.get("RANK", "0"))
    for _ in range(2 if job.stop else 1):  # the second begins where the first was `stop` batches on
        keras.utils.set_random_seed(0)
        model = compiled(case, synchronised)
        if job.stop:
            rest["callbacks"] = [
                keras.callbacks.BackupAndRestore(
                    backup, save_freq=job.stop, delete_checkpoint=False
                )
            ]
        model.fit(data(), **rest)
    found = [np.asarray(each) for each in model.get_weights()]
    return {"weights": np.concatenate([each.ravel() for each in turned(case, found)]).tolist()}


def evaluate(job: Job, data: Callable[[], Any]) -> Result:
    found = compiled(job.case).evaluate(data(), verbose=0, return_dict=True)
    return {name: [float(found[name])] for name in ("accuracy", "auc")}
