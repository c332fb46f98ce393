"""The evaluator's `fit` of a Keras model: it trains nothing, and looks at what the chief saves.

The same script runs on every task. From the arguments of `fit` come the ModelCheckpoint whose
files to look for, what to validate on, and the folder of a TensorBoard callback.
"""

from __future__ import annotations

import inspect
import logging
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import keras

from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.callbacks import TensorBoard
from stratagem.frontends.evaluation import NEEDS, new_files, stamp
from stratagem.frontends.keras.callback_needs import CallbackNeeds
from stratagem.frontends.keras.driver import Call, Driver

log = logging.getLogger("stratagem")


class EvaluatorDriver(Driver):
    """Replaces a model's methods on the evaluator task, where nothing is trained or written."""

    def begin(self, call: Call) -> Any:
        if call.name == "train_on_batch":
            raise NotDistributable(
                "this task is the evaluator, which takes no part in the training; call "
                "train_on_batch on the workers only, where strategy.audience is None."
            )
        if call.name == "fit":
            given = inspect.signature(call.own).bind_partial(*call.args, **call.kwargs)
            return self._watch(given.arguments)
        return super().begin(call)

    def read(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in ("save", "save_weights"):
            return super().read(name, *args, **kwargs)
        log.warning(
            "this task is the evaluator, which writes nothing: %s is left to the chief", name
        )
        return None

    def _watch(self, given: Mapping[str, Any]) -> Any:
        """Evaluate checkpoints as they come, until the job is over and the last has been seen."""
        callbacks = given.get("callbacks")
        listed = getattr(callbacks, "callbacks", callbacks)
        each = keras.tree.flatten(listed) if listed is not None else []
        saver = next((c for c in each if isinstance(c, keras.callbacks.ModelCheckpoint)), None)
        if saver is None or given.get("validation_data") is None:
            raise UsageError(NEEDS)
        boards = [
            TensorBoard(Path(c.log_dir) / "evaluator")
            for c in each
            if isinstance(c, keras.callbacks.TensorBoard)
        ]
        history = self.model.history = keras.callbacks.History()
        history.set_model(self.model)
        for one in (history, *boards):
            one.on_train_begin()
        audience = self.strategy.audience
        assert audience is not None
        for path, number in new_files(Path(saver.filepath), audience.over):
            logs = self._look_at(path, given)
            if logs is not None:
                log.info("%s: %s", path.name, logs)
                step = int(self.model.optimizer.iterations) or number
                for one in (history, *boards):
                    one.on_epoch_end(step, logs)
        for board in boards:
            board.on_train_end()
        return history

    def _look_at(self, path: Path, given: Mapping[str, Any]) -> dict[str, float] | None:
        """Evaluate a checkpoint; None while it is still being written."""
        with tempfile.TemporaryDirectory() as folder:
            copy = _copy(path, Path(folder))
            if copy is None:
                return None
            if not self.model.built:
                self._evaluate(given, steps=1)
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
            self.model.load_weights(copy)
        return {f"val_{name}": value for name, value in self._evaluate(given).items()}

    def _evaluate(self, given: Mapping[str, Any], steps: int | None = None) -> Any:
        """Evaluate as `fit` does after an epoch."""
        x, y, weight = keras.utils.unpack_x_y_sample_weight(given["validation_data"])
        size = given.get("validation_batch_size") or given.get("batch_size")
        told = {
            "x": x,
            "y": y,
            "sample_weight": weight,
            "batch_size": size,
            "steps": steps or given.get("validation_steps"),
            "verbose": 0,
            "return_dict": True,
        }
        return self.begin(Call("evaluate", self.own("evaluate"), (), told, CallbackNeeds()))


def _copy(path: Path, folder: Path) -> Path | None:
    """Copy a file that Keras may be writing; None if the copy is not whole."""
    before, copy = stamp(path), folder / path.name
    shutil.copyfile(path, copy)
    if stamp(path) != before:
        return None  # the next look finds it again
    if path.suffix == ".keras":
        return copy if zipfile.is_zipfile(copy) else None
    try:
        h5py.File(copy, "r").close()
    except OSError as problem:
        log.info("%s is not whole yet: %s", path.name, problem)
        return None
    return copy
