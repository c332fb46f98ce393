"""Calls several callbacks as one, and the logs that are passed to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stratagem.errors import UsageError
from stratagem.frontends.callback_changes import CallbackChanges
from stratagem.frontends.callbacks import Callback, LambdaCallback, Progress, takes

#: what turns Lightning's hook names into those here, in this order
_LIGHTNING = {
    "_start": "_begin",
    "on_fit": "on_train",
    "validation": "test",
    "train_epoch": "epoch",
    "test_epoch": "test",
}


def overrides(callback: Callback, name: str) -> bool:
    """Return whether a callback overrides a hook."""
    return getattr(type(callback), name, None) is not getattr(Callback, name) or (
        name in vars(callback)
    )


def _refuse_unknown(callback: Callback) -> None:
    """Raise for Lightning's hook names, which would never be called."""
    for name in dir(callback):
        ours = name
        for theirs, here in _LIGHTNING.items():
            ours = ours.replace(theirs, here)
        if ours != name and ours.startswith("on_") and hasattr(Callback, ours):
            raise UsageError(
                f"{type(callback).__name__}.{name} would never be called; here it is {ours}. There "
                f"are {Callback.names()}."
            )


class CallbackList:
    """Several callbacks as one; batch hooks that no callback overrides cost nothing."""

    def __init__(self, callbacks: Sequence[Callback], model: Any, params: dict[str, Any]) -> None:
        self.callbacks = list(callbacks)
        #: the model in training; None without callbacks
        self.model = model
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise UsageError(_no_callback(callback))
            _refuse_unknown(callback)
            callback.set_model(model)
            callback.set_params(params)
        #: by name: the methods of all callbacks that have such a hook
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        #: the logs of the last batch, which a callback may have kept
        self._last: weakref.ref[RunningLogs] | None = None
        #: callbacks with a hook around training batches
        self.at_batches = [
            *self._with("train_batch_begin", "batch_begin"),
            *self._with("train_batch_end", "batch_end"),
        ]
        #: whether a callback has a hook around batches of a validation, or of `predict`
        self.between_tests = bool(self._with("test_batch_begin", "test_batch_end"))
        self.between_predictions = bool(self._with("predict_batch_begin", "predict_batch_end"))
        #: whether a callback has a hook around a validation
        self.around_tests = self.between_tests or bool(self._with("test_begin", "test_end"))
        #: whether a callback may change something between two steps
        self.between_steps = any(not isinstance(c, Progress) for c in self.at_batches)
        own = any(
            isinstance(c, LambdaCallback) or not type(c).__module__.startswith("stratagem.")
            for c in self.callbacks
        )
        self.changes = CallbackChanges(model if self.callbacks else None, own=own)

    def _with(self, *names: str) -> list[Callback]:
        """Return the callbacks that override one of these hooks."""
        return [c for c in self.callbacks if any(overrides(c, f"on_{name}") for name in names)]

    @classmethod
    def none(cls) -> CallbackList:
        return cls([], None, {})

    @property
    def reads_optimizer_state(self) -> bool:
        return any(c.reads_optimizer_state for c in self.callbacks)

    @property
    def stop(self) -> bool:
        return self.model is not None and bool(self.model.stop_training)

    def call(self, name: str, *given: Any, tally: Any = None) -> None:
        """Call the hook `on_<name>` of every callback.

        `given` ends with the logs, if there are any; for those of a batch, `tally` is the running
        loss.
        """
        if name.endswith("batch_begin"):
            if self._last is not None and (kept := self._last()) is not None:
                kept.read()  # before this batch changes the running loss
        elif self.between_steps or name != "train_batch_end":
            self.changes.mark()
        hooks = self._hooks.get(name)
        if hooks is None:
            hooks = self._hooks[name] = self._methods(name, len(given) + (tally is not None))
        if not hooks:
            return
        if tally is not None:
            logs = RunningLogs(tally)
            self._last, given = weakref.ref(logs), (*given, logs)
        with torch.enable_grad():
            for hook in hooks:
                hook(*given)

    def _methods(self, name: str, count: int) -> list[Callable[..., Any]]:
        """Return the methods for `count` arguments; without logs, some take empty ones beside."""
        names = [name, name.removeprefix("train_")] if "train_batch" in name else [name]
        methods = [getattr(callback, f"on_{name}") for callback in self._with(*names)]
        if not name.endswith("begin") and name not in ("train_end", "predict_end"):
            return methods  # their logs are given
        return [_with_logs(each) if takes(each, count + 1) else each for each in methods]


def _with_logs(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: method(*args, {})


def _no_callback(given: Any) -> str:
    if isinstance(given, type) and issubclass(given, Callback):
        return f"{given.__name__} is a class; give an instance of it: {given.__name__}(...)."
    return f"{given!r} is no callback; derive it from stratagem.callbacks.Callback."


class RunningLogs(dict[str, Any]):
    """Logs in mid-epoch, whose loss is read from the device only on access."""

    def __init__(self, tally: Any) -> None:
        super().__init__()
        self._tally = tally

    def read(self) -> None:
        if not dict.__len__(self):
            self["loss"] = self._tally.mean()

    def __missing__(self, key: str) -> Any:
        if key == "examples":
            return self._tally.examples
        if dict.__len__(self):
            raise KeyError(key)
        self.read()
        return self[key]


def _reading(name: str) -> Callable[..., Any]:
    """Return a method of dicts that reads the logs first."""
    plain = getattr(dict, name)

    def method(self: RunningLogs, *args: Any) -> Any:
        self.read()
        return plain(self, *args)

    return method


_READING = "__contains__ __iter__ __len__ __repr__ copy get items keys values"
for _name in _READING.split():
    setattr(RunningLogs, _name, _reading(_name))
