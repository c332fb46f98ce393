"""Trainings of a Keras model with BackupAndRestore, and processes that are killed in one.

`python -m tests.frontends.keras.backup_runs <replicas> <folder> <batch>` kills itself, and with it
everything that it has started, after so many batches (0: not at all). What came of it is in
`<folder>.pt`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.support import cpus

ROWS, BATCH, EPOCHS = 53, 8, 3
STEPS = -(-ROWS // BATCH)


class After(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls a function after a number of batches."""

    def __init__(self, count: int, act: Callable[[], Any]) -> None:
        super().__init__()
        self.count, self.act = count, act

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count -= 1
        if not self.count:
            self.act()


def data_of(kind: str) -> dict[str, Any]:
    dice = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, 6, generator=dice), torch.arange(ROWS) % 4
    if kind == "loader":
        order = torch.Generator().manual_seed(3)
        rows = TensorDataset(x, y)
        return {"x": DataLoader(rows, batch_size=BATCH, shuffle=True, generator=order)}
    if kind == "generator":
        return {"x": batches(x, y), "steps_per_epoch": STEPS}
    return {
        "x": x.numpy(),
        "y": y.numpy(),
        "batch_size": BATCH,
        "shuffle": kind in ("arrays", "accumulated") or kind,
    }


def batches(x: Any, y: Any) -> Any:
    dice = torch.Generator().manual_seed(5)
    while True:
        order = torch.randperm(ROWS, generator=dice)
        for at in range(0, ROWS, BATCH):
            rows = order[at : at + BATCH]
            yield x[rows].numpy(), y[rows].numpy()


def train(
    strategy: Any,
    kind: str,
    folder: Path,
    freq: Any,
    *,
    after: int = 0,
    act: Any = None,
    draws: bool = True,
) -> dict[str, Any]:
    """Train to the end; returns weights, history and random numbers."""
    keras.utils.set_random_seed(7)
    with strategy.scope(check=False):
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(16),
                *([layers.BatchNormalization(), layers.Dropout(0.2)] if draws else []),
                layers.Dense(4, activation="softmax"),
            ]
        )
        steps = 2 if kind == "accumulated" else None
        adam = keras.optimizers.Adam(gradient_accumulation_steps=steps)
        model.compile(adam, "sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        After(after, act),
        keras.callbacks.BackupAndRestore(folder, save_freq=freq, delete_checkpoint=False),
    ]
    history = model.fit(**data_of(kind), epochs=EPOCHS, callbacks=callbacks, verbose=0)
    return {
        "weights": [torch.from_numpy(np.array(w)) for w in model.get_weights()],
        "optimizer": [v.value.detach().clone() for v in model.optimizer.variables],
        "history": history.history,
        "drawn": torch.rand(4),
    }


def main() -> None:
    torch.set_num_threads(1)
    replicas, folder, after = sys.argv[1:]
    act = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    with sg.MirroredStrategy(cpus(int(replicas))) as strategy:
        found = train(strategy, "arrays", Path(folder), 2, after=int(after), act=act)
    torch.save(found, f"{folder}.pt")


if __name__ == "__main__":
    main()
