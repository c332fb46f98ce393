"""Trainings that are killed and resumed, for test_resume.py.

`python -m tests.frontends.resume_runs <strategy> <data> <folder> <batch>` trains with checkpoints,
and kills itself and all its child processes after that many batches (0: never). The results are
written to `<folder>.pt`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stratagem as sg

ROWS, BATCH, EPOCHS = 83, 12, 3
STEPS = -(-ROWS // BATCH)


class Rows(Dataset[Any]):
    """Numbered, noisy rows; each read is logged to a file by the row's number."""

    def __init__(self, noise: float, log: Path | None) -> None:
        self.noise, self.log = noise, log

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> tuple[Any, int]:
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{i}\n")
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        drawn = torch.randn(6) + np.random.rand() + random.random() if self.noise else 0.0
        return x + self.noise * drawn, i % 4


class Stop(sg.callbacks.Callback):
    """Calls `act` after a number of batches in this process."""

    def __init__(self, after: int, act: Any) -> None:
        self.after, self.act = after, act
        self.count = -1_000_000  # of the training, through all its processes

    def on_train_begin(self, logs: Any = None) -> None:
        global _seen
        _seen = self.count = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        global _seen
        self.count += 1
        _seen += 1
        if _seen == self.after:
            self.act()


_seen = 0


def make(kind: str) -> Any:
    """Make a strategy by a name such as one, ring-2, shared_memory-3, sharded-2 or servers-2-1."""
    name, *counts = kind.split("-")
    if name == "servers":
        workers, ps = map(int, counts)
        return sg.ParameterServerStrategy(
            sg.LocalCluster(workers=workers, ps=ps), updates=sg.Synchronous()
        )
    devices = [f"cpu:{i}" for i in range(int(counts[0]) if counts else 1)]
    if name == "fully_sharded":
        return sg.ShardedStrategy(devices, "ring")
    if name == "sharded":
        return sg.ShardedStrategy(devices)
    return sg.MirroredStrategy(devices, **({"cross_device_ops": name} if counts else {}))


def data_of(kind: str, noise: float, log: Path | None) -> tuple[list[Any], dict[str, Any]]:
    if kind == "arrays":
        x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
        return [x, torch.arange(ROWS) % 4], {"batch_size": BATCH}
    rows = Rows(0.0 if kind == "workers" else noise, log)
    if kind == "dataset":
        return [rows], {"batch_size": BATCH}
    if kind == "generator":
        return [batches(EPOCHS)], {"steps_per_epoch": STEPS}
    workers = 2 if kind == "workers" else 0
    return [DataLoader(rows, batch_size=BATCH, shuffle=True, num_workers=workers)], {}


def batches(epochs: int) -> Any:
    for _ in range(epochs):
        order = torch.randperm(ROWS)
        for at in range(0, ROWS, BATCH):
            rows = order[at : at + BATCH]
            yield torch.stack([torch.sin(r * torch.arange(1.0, 7.0)) for r in rows]), rows % 4


def train(
    strategy: Any,
    data: str,
    folder: Path | None = None,
    *,
    draws: bool = True,
    accumulate: int = 1,
    log: Path | None = None,
    extra: Any = (),
    keep: int = 3,
    every: int = 1,
    resume: bool = True,
) -> dict[str, Any]:
    """Train to the end; return the results, without times."""
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    parts: list[nn.Module] = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)]
    if draws:
        parts[1:1] = [nn.BatchNorm1d(16), nn.Dropout(0.2)]
    with strategy.scope():
        model = sg.Model(nn.Sequential(*parts))
        model.compile("adam", "cross_entropy", ["accuracy"], accumulate=accumulate, check=not draws)
    given, options = data_of(data, 0.1 * draws, log)
    callbacks = [
        sg.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True),
        sg.callbacks.ReduceLROnPlateau("val_accuracy", patience=1, factor=0.5),
        sg.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        *extra,
    ]
    held = torch.randn(20, 6, generator=torch.Generator().manual_seed(2)), torch.arange(20) % 4
    if folder is not None:
        plan = sg.Checkpoints(folder, every=every, keep=keep)
        options |= {"checkpoint": plan, "resume": resume}
    history = model.fit(
        *given, **options, epochs=EPOCHS, validation_data=held, callbacks=callbacks, verbose=0
    )
    timed = ("examples_per_second", "waiting", "waiting_by_worker", "staleness_histogram")
    return {
        "weights": model.module.state_dict(),
        "optimizer": model.optimizer.state_dict() if model.optimizer else None,
        "history": {k: v for k, v in history.history.items() if k not in timed},
        "drawn": torch.rand(4),
        "early": [callbacks[0].best.value, callbacks[0].wait],
    }


def alike(a: Any, b: Any) -> bool:
    """Return whether two trees are bitwise equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    torch.set_num_threads(1)
    name, data, folder, after = sys.argv[1:5]
    acts = {"kill": kill, "term": lambda: os.kill(os.getpid(), signal.SIGTERM)}
    act = acts[sys.argv[5] if len(sys.argv) > 5 else "kill"]
    with contextlib.closing(make(name)) as strategy:
        found = train(strategy, data, Path(folder), extra=[Stop(int(after), act)])
    torch.save(found, f"{folder}.pt")


if __name__ == "__main__":
    main()
