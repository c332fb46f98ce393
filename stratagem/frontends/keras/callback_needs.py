"""What callbacks may read or change between two steps, our own callbacks, and results of calls."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import torch

from stratagem.figures import trial_record
from stratagem.figures.recorder import epoch_event
from stratagem.frontends.epoch_sums import warn_of_broken
from stratagem.rules.stats import (
    EpochStats,
    Stats,
    enter_details,
    numbered_details,
    portable_details,
)


@dataclass(frozen=True)
class CallbackNeeds:
    """What the callbacks of a call need of single steps."""

    #: exact logs of each training step and test step
    train_logs: bool = False
    test_logs: bool = False
    #: whether attributes of the model may be changed
    attributes: bool = False
    #: whether something may be read or changed between two training steps
    steps: bool = False
    #: whether the call is of one step
    single: bool = False

    @property
    def acts(self) -> bool:
        """Whether a callback may change the model between two steps of one call."""
        return self.steps and self.attributes and not self.single

    def joined(self, other: CallbackNeeds) -> CallbackNeeds:
        return CallbackNeeds(
            self.train_logs or other.train_logs,
            self.test_logs or other.test_logs,
            self.attributes or other.attributes,
            self.steps or other.steps,
            self.single or other.single,
        )

    @classmethod
    def of(cls, callbacks: Any) -> CallbackNeeds:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        needs = cls()
        for callback in keras.tree.flatten(callbacks):
            if callback is not None:
                needs = needs.joined(_needs(callback))
        return needs


def _needs(callback: Any) -> CallbackNeeds:
    """Return a callback's needs: Keras' own read epochs, but for a few; others may do anything."""
    kinds = keras.callbacks
    lambdas = isinstance(callback, kinds.LambdaCallback)
    if type(callback).__module__.startswith("keras.") and not lambdas:
        steps = (
            isinstance(callback, kinds.TerminateOnNaN)
            or (isinstance(callback, kinds.ModelCheckpoint) and callback.save_freq != "epoch")
            or (isinstance(callback, kinds.TensorBoard) and callback.update_freq != "epoch")
        )
        backup = isinstance(callback, kinds.BackupAndRestore) and callback.save_freq != "epoch"
        return CallbackNeeds(train_logs=steps, test_logs=steps, steps=steps or backup)

    after = overrides(callback, "on_train_batch_end", "on_batch_end")
    before = overrides(callback, "on_train_batch_begin", "on_batch_begin")
    tests = overrides(callback, "on_test_batch_end")
    return CallbackNeeds(after, tests, True, after or before)


def overrides(callback: Any, *names: str) -> bool:
    """Whether a callback overrides one of these methods."""
    return any(
        name in callback.__dict__
        or getattr(type(callback), name, None) is not getattr(keras.callbacks.Callback, name)
        for name in names
    )


#: of a call of one step, before and after which anything may be read and changed
ONE_STEP = CallbackNeeds(True, True, True, True, single=True)


# --- callbacks of ours --------------------------------------------------------------------------


class TrialCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes a line an epoch into the record of a trial or run. It reads logs alone, so replicas
    need not wait for it."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        trial_record.record_epoch(epoch, logs or {})
        epoch_event(epoch, logs or {})


class BrokenLossCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Warns, once a fit, that the loss is not finite."""

    def __init__(self, states: Callable[[], list[Any]]) -> None:
        """`states`: the state of each replica; `broken` in it is its first such step, its name."""
        super().__init__()
        self._states, self._told = states, False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        loss = (logs or {}).get("loss", 0.0)
        if not self._told and not math.isfinite(loss):
            self._told, found = True, [each.get("broken", [None, ""]) for each in self._states()]
            first = min((step for step, _ in found if step is not None), default=None)
            owners = [name for step, name in found if step is not None and step == first]
            warn_of_broken(float(loss), epoch, first, owners)


class StatsCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes the servers' counts into Keras' history, but not into the logs."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        super().__init__()
        self._stats, self._epochs = stats, EpochStats()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        counted, details = self._epochs.turn(self._stats())
        found = {**counted, **details}
        taken = set(logs or {})  # names of the user's metrics
        enter_details(
            self.model.history.history, {k: v for k, v in found.items() if k not in taken}
        )


def with_callback(
    own: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    callback: keras.callbacks.Callback,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add a callback to the arguments of `fit`."""
    given = inspect.signature(own).bind(*args, **kwargs)
    callbacks = given.arguments.get("callbacks")
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        each = keras.tree.flatten(callbacks) if callbacks is not None else []
        given.arguments["callbacks"] = [*each, callback]
    elif isinstance(callback, TrialCallback):  # a list of the user's has its own history
        callbacks.append(callback)
    return given.args, given.kwargs


# --- results -----------------------------------------------------------------------------------


def portable(result: Any) -> Any:
    """Convert a call's result for the other workers of a cluster."""
    if isinstance(result, keras.callbacks.History):
        numbers = {k: v for k, v in result.history.items() if not _detailed(v)}
        floats = {k: [float(v) for v in values] for k, values in numbers.items()}
        rest = {k: v for k, v in result.history.items() if k not in numbers}
        details = [
            portable_details(dict(zip(rest, each, strict=True)))
            for each in zip(*rest.values(), strict=True)
        ]
        epochs = [int(e) for e in result.epoch]
        return {"history": floats, "details": details, "epoch": epochs}
    return {"result": keras.tree.map_structure(_plain, result)}


def _detailed(values: list[Any]) -> bool:
    """Whether a column of the history has the servers' details, which are dicts."""
    return bool(values) and isinstance(values[0], dict)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, bool | int | float | str) or leaf is None:
        return leaf
    value = torch.as_tensor(leaf)
    return value if value.dim() else value.item()


def from_chief(told: Any, model: Any) -> Any:
    """Restore the chief's result on another worker."""
    if told is None:
        return None
    if "history" in told:
        history = keras.callbacks.History()
        history.set_model(model)
        history.history, history.epoch = told["history"], told["epoch"]
        for details in told["details"]:
            enter_details(history.history, numbered_details(details))
        model.history = history
        return history
    return keras.tree.map_structure(
        lambda leaf: leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf, told["result"]
    )


def public_names(config: Any) -> Any:
    """Replace private names of optimizers in a compile config, inner ones too."""
    if isinstance(config, dict):
        config = {key: public_names(value) for key, value in config.items()}
        private = str(config.get("module", "")).startswith("keras.src.backend.torch.optimizers")
        if private and config.get("class_name") in dir(keras.optimizers):
            config["module"], config["registered_name"] = "keras.optimizers", None
    elif isinstance(config, list | tuple):
        config = type(config)(public_names(value) for value in config)
    return config
