"""keras.callbacks.BackupAndRestore on replicas: resumes with the next batch, not the next epoch.

Keras' callback saves weights, optimizer, epoch and batch, and resumes with an epoch. Here a backup
is a folder that is committed whole, and also has the generators of the data's order, the metrics
and each replica's random numbers. Batches that were seen are read once more and skipped.

    backup/000002-step-34/latest.weights.h5         what Keras writes
    backup/000002-step-34/training_metadata.json
    backup/000002-step-34/replicas.pt               torch.load(..., weights_only=True)
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import keras
import torch
from torch.utils.data import DataLoader

from stratagem.data.passes import dice_of, set_states, states_now
from stratagem.errors import UsageError
from stratagem.frontends.keras.adapter import take_progress
from stratagem.state.change_tracker import digest
from stratagem.state.checkpoint_folder import CheckpointFolder

log = logging.getLogger("stratagem")

_FILES = ("latest.weights.h5", "training_metadata.json", "replicas.pt")
#: the callback's counters
_COUNTS = ("_current_epoch", "_last_batch_seen", "_batches_seen_since_last_saving")


def exact_backups(driver: Any, fit: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a fit in which a BackupAndRestore callback resumes with the next batch."""
    given = inspect.signature(fit).bind_partial(*args, **kwargs).arguments
    run, callbacks = partial(fit, *args, **kwargs), given.get("callbacks")
    each = getattr(callbacks, "callbacks", callbacks)
    found = [
        callback
        for callback in (each if isinstance(each, list | tuple) else [each])
        if isinstance(callback, keras.callbacks.BackupAndRestore)
    ]
    if not found or driver.strategy.settings.served is not None:
        return run()
    if len(found) > 1:
        raise UsageError("fit was given two BackupAndRestore callbacks; one of them goes on.")
    if "://" in str(found[0].backup_dir):
        log.warning("a backup that is not in a local folder goes on with whole epochs only")
        return run()
    backup = Backup(driver, found[0], given.get("x"))
    with backup.attached():
        return run()


@dataclass(frozen=True)
class BackupFiles:
    """Writes the files of one backup."""

    save_weights: Callable[..., Any]
    metadata: dict[str, int]
    progress: dict[str, Any]

    def write(self, weights: Path, metadata: Path, replicas: Path, number: str) -> None:
        self.save_weights(weights, overwrite=True)
        metadata.write_text(json.dumps(self.metadata))
        with replicas.open("wb") as out:
            torch.save({**self.progress, "pair": number}, out)


class Batches:
    """Iterates over batches for Keras, and keeps the last one."""

    def __init__(self) -> None:
        self.batches: Iterator[Any] = iter(())
        self._last: Any = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        self._last = next(self.batches)
        return self._last

    def digest(self) -> list[int]:
        """Digest the first part of the last batch."""
        leaves = keras.tree.flatten(self._last)
        first = leaves[0] if leaves else None
        return [] if first is None else digest(torch.as_tensor(first))


class Backup:
    """Saves and loads for one callback during a fit, in the chief."""

    def __init__(self, driver: Any, callback: Any, data: Any) -> None:
        self._driver, self._model, self._callback = driver, driver.model, callback
        keep = 2 if callback.double_checkpoint else 1
        self._folder = CheckpointFolder(callback.backup_dir, keep, _FILES)
        self._dice = dice_of(data) if isinstance(data, DataLoader) else []
        self._iterator: Any = None
        self._read = Batches()
        #: states of generators at the begin of the pass over the data, and its epochs so far
        self._begun: dict[str, Any] | None = None
        self._epochs = 0
        self._resumed: dict[str, Any] | None = None
        self._path = Path()
        #: whether an epoch ends, and whether a backup of its last batch is due
        self._ends = self._owed = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Replace the callback's saving and loading, and catch the data's iterator."""
        own = self._callback.__dict__
        methods = {"_save_model": self.save, "_load_model": self.load}
        own |= {**methods, "on_epoch_end": self.on_epoch_end}
        self._model.__dict__["_symbolic_build"] = self._watch_data
        try:
            yield
        finally:
            del self._model.__dict__["_symbolic_build"]
            for name in (*methods, "on_epoch_end"):
                del own[name]

    # --- saving -------------------------------------------------------------------------------

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._ends = True
        type(self._callback).on_epoch_end(self._callback, epoch, logs)
        if self._owed:
            self.save()
        self._ends = self._owed = False

    def save(self) -> None:
        """Save a backup; after an epoch's last batch, at the epoch's end: Keras takes the epoch's
        logs from that batch."""
        callback, driver = self._callback, self._driver
        seen = 0 if self._ends else callback._last_batch_seen + 1
        if seen and seen == callback.params.get("steps"):
            self._owed = True
            return
        driver.settle(counts=True, state=True)
        metadata = {"epoch": callback._current_epoch, "batch": callback._last_batch_seen}
        metrics = [v.value.detach().cpu().clone() for v in self._model.metrics_variables]
        progress = {
            "seen": seen,
            "begun": self._begun,
            "epochs": self._epochs - (seen > 0),
            "dice": [each.get_state() for each in self._dice],
            "digest": self._read.digest(),
            "replicas": driver.replica_states(),
            "metrics": metrics if seen else [],
            "counts": [getattr(callback, name) for name in _COUNTS],
        }
        steps = int(keras.ops.convert_to_numpy(self._model.optimizer.iterations))
        files = BackupFiles(driver.own("save_weights"), metadata, progress)
        self._folder.write(files, {**metadata, "step": steps})

    # --- resuming -----------------------------------------------------------------------------

    def load(self) -> None:
        """At the begin of a fit, load the newest backup; if there is none, Keras' own."""
        callback, path = self._callback, self._folder.newest()
        if path is None:
            type(callback)._load_model(callback)
            return
        names = ("_weights_path", "_training_metadata_path")
        before = [getattr(callback, name) for name in names]
        try:
            for name, file in zip(names, _FILES, strict=False):
                setattr(callback, name, str(path / file))
            type(callback)._load_model(callback)
        finally:
            for name, value in zip(names, before, strict=True):
                setattr(callback, name, value)
        self._path = path
        self._resumed = told = torch.load(path / _FILES[2], weights_only=True)
        for name, count in zip(_COUNTS, told["counts"], strict=True):
            setattr(callback, name, count)
        self._begun, self._epochs = told["begun"], told["epochs"]
        for dice, state in zip(self._dice, told["dice"], strict=True):
            dice.set_state(state)
        self._driver.resumed = told["replicas"]
        take_progress(self._model, told["replicas"][0], self._driver.replica)

    def _watch_data(self, iterator: Any = None, data_batch: Any = None) -> Any:
        """Replace the model's `_symbolic_build`, to which `fit` gives its iterator first of all."""
        result = self._driver.own("_symbolic_build")(iterator=iterator, data_batch=data_batch)
        if self._iterator is None:
            self._iterator = iterator
            iterator._enumerate_iterator = partial(self._positions, iterator._enumerate_iterator)
        return result

    def _positions(self, plain: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterate over the batches of an epoch; of a resumed one, over those that were not seen."""
        told, self._resumed = self._resumed, None
        # with steps_per_epoch one pass over the data may be many epochs
        many = self._iterator.steps_per_epoch is not None
        positions = None
        if told is not None and not many and hasattr(self._iterator.data_adapter, "_epoch"):
            self._iterator.data_adapter._epoch += told["epochs"]  # Keras 3.16 orders rows by it
        if told is not None and (told["seen"] or many):
            positions = self._replayed(plain, told, told["epochs"] if many else 0)
        elif self._begun is None or not many:
            self._begun = states_now(self._dice)
        self._epochs += 1
        for begin, end, batches in plain() if positions is None else positions:
            self._read.batches = batches
            yield begin, end, self._read

    def _replayed(
        self, plain: Callable[[], Iterator[Any]], told: dict[str, Any], epochs: int
    ) -> Iterator[Any]:
        """Read the batches that were seen once more, then restore the backup's state."""
        set_states(told["begun"], self._dice)
        for _ in range(epochs):
            for position in plain():
                self._reread(position)
        positions, seen = plain(), 0
        while seen < told["seen"]:
            position = next(positions)
            self._reread(position)
            seen = position[1] + 1
        if self._read.digest() != told["digest"]:
            log.warning(
                "the batches that were seen before this training broke off are not read again "
                "alike, so rows may come twice in this epoch, or not at all: the data is another, "
                "or is drawn from random numbers that the model draws from, too. Give a generator "
                "of its own to what orders it; if rows have noise and an order of their own, all "
                "is well."
            )
        self._put_back(told)
        return positions

    def _reread(self, position: Any) -> None:
        self._read.batches = position[2]
        for _ in islice(self._read, self._iterator.steps_per_execution):
            pass

    @torch.no_grad()
    def _put_back(self, told: dict[str, Any]) -> None:
        """Restore the state after `on_epoch_begin` of callbacks, which may have set the rate."""
        if told["seen"]:
            self._model.load_weights(self._path / _FILES[0])
            variables = self._model.metrics_variables
            for variable, value in zip(variables, told["metrics"], strict=True):
                variable.value.copy_(value)
        take_progress(self._model, told["replicas"][0], self._driver.replica)
