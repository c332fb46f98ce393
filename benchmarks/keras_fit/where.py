"""Where the time of a step of a tiny Keras model goes, plain and in the scope of one replica.

    python benchmarks/keras_fit/where.py [--steps 120]

Python's profiler, which makes calls of Python dearer than they are: read shares, not times.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import time
from contextlib import nullcontext
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import bench
import keras
import numpy as np
import torch

import stratagem as sg

BATCH = bench.SIZES["tiny"][0]
#: part of a step -> the function of it, by the end of its file's name and its own name
PARTS = {
    "layers, forward": ("keras/src/models/sequential.py", "call"),
    "loss": ("keras/src/trainers/trainer.py", "compute_loss"),
    "metrics, counting": ("keras/src/trainers/trainer.py", "compute_metrics"),
    "backward": ("torch/_tensor.py", "backward"),
    "optimizer": ("keras/src/optimizers/base_optimizer.py", "apply"),
    "metrics, results": ("keras/src/trainers/trainer.py", "get_metrics_result"),
    "batches": ("keras/src/trainers/epoch_iterator.py", "__next__"),
    "callbacks": ("keras/src/callbacks/callback_list.py", "on_train_batch_end"),
}


def compiled(ours: bool) -> Any:
    keras.utils.set_random_seed(0)
    with sg.MirroredStrategy(["cpu:0"]).scope() if ours else nullcontext():
        model = bench.build(keras, "tiny")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return model


def cumulative(stats: Any, file: str, function: str) -> float:
    found = (row[3] for key, row in stats.items() if key[0].endswith(file) and key[2] == function)
    return max(found, default=0.0)


def shares(model: Any, x: Any, y: Any) -> dict[str, float]:
    """Of one epoch: the part of its time that each part of a step takes."""
    profile = cProfile.Profile()
    profile.runcall(model.fit, x, y, batch_size=BATCH, verbose=0)
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    whole = cumulative(stats, "keras/src/backend/torch/trainer.py", "fit")
    found = {name: cumulative(stats, *where) / whole for name, where in PARTS.items()}
    step = cumulative(stats, "keras/src/backend/torch/trainer.py", "train_step")
    around = cumulative(stats, "stratagem/frontends/keras/driver.py", "step")
    found["around the step (ours)"] = max(around - step, 0.0) / whole
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    dice = np.random.default_rng(0)
    x = dice.normal(size=(BATCH * steps, 20)).astype("float32")
    y = dice.integers(0, 10, len(x))
    models = {"plain": compiled(False), "ours": compiled(True)}
    spent: dict[str, float] = {}
    for name, model in models.items():
        model.fit(x[: 5 * BATCH], y[: 5 * BATCH], batch_size=BATCH, verbose=0)
        begin = time.process_time()
        model.fit(x, y, batch_size=BATCH, verbose=0)
        spent[name] = (time.process_time() - begin) / steps * 1000
    found = {name: shares(model, x, y) for name, model in models.items()}
    print("| part of a step | plain | ours |\n| --- | --- | --- |")
    for part in found["ours"]:
        print(f"| {part} | {found['plain'][part]:.0%} | {found['ours'][part]:.1%} |")
    times = " | ".join(f"{each:.2f}" for each in spent.values())
    print(f"| processor ms a step, without the profiler | {times} |")


if __name__ == "__main__":
    main()
