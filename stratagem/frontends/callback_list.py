"""Calls several callbacks as one, and the logs that are passed to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import MethodType
from typing import Any

import torch

from stratagem.errors import UsageError
from stratagem.frontends.callback_changes import CallbackChanges
from stratagem.frontends.callbacks import Callback, LambdaCallback, Logs, Progress, takes

#: Lightning's hook names, and their equivalents here
_LIGHTNING_HOOKS = {
    "on_fit_start": "on_train_begin",
    "on_fit_end": "on_train_end",
    "on_train_start": "on_train_begin",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_train_batch_start": "on_train_batch_begin",
    "on_validation_start": "on_test_begin",
    "on_validation_end": "on_test_end",
    "on_validation_epoch_start": "on_test_begin",
    "on_validation_epoch_end": "on_test_end",
    "on_validation_batch_start": "on_test_batch_begin",
    "on_validation_batch_end": "on_test_batch_end",
    "on_test_start": "on_test_begin",
    "on_test_batch_start": "on_test_batch_begin",
    "on_predict_start": "on_predict_begin",
    "on_predict_batch_start": "on_predict_batch_begin",
}


def overrides(callback: Callback, name: str) -> bool:
    """Return whether a callback overrides a hook."""
    return getattr(type(callback), name, None) is not getattr(Callback, name) or (
        name in vars(callback)
    )


def _refuse_unknown(callback: Callback) -> None:
    """Raise for Lightning's hook names, which would never be called."""
    for name, ours in _LIGHTNING_HOOKS.items():
        if hasattr(callback, name):
            raise UsageError(
                f"{type(callback).__name__}.{name} would never be called; here it is {ours}. There "
                f"are {Callback.names()}."
            )


class CallbackList:
    """Several callbacks as one; batch hooks that no callback overrides cost nothing."""

    def __init__(self, callbacks: Sequence[Callback], model: Any, params: dict[str, Any]) -> None:
        self.callbacks = list(callbacks)
        self._model = model
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise UsageError(_no_callback(callback))
            _refuse_unknown(callback)
            callback.set_model(model)
            callback.set_params(params)
        self._begin = self._overriding("on_train_batch_begin", "on_batch_begin")
        self._begun = [_with_logs(c.on_train_batch_begin, 1) for c in self._begin]
        self._end = self._overriding("on_train_batch_end", "on_batch_end")
        self._test_begin = self._overriding("on_test_batch_begin")
        self._test_end = self._overriding("on_test_batch_end")
        self._predict_begin = self._overriding("on_predict_batch_begin")
        self._predict_end = self._overriding("on_predict_batch_end")
        self._logs = LastLogs()
        #: callbacks with a hook around training batches
        self.at_batches = [*self._begin, *self._end]
        #: whether a callback has a hook around batches of a validation, or of `predict`
        self.between_tests = bool(self._test_begin + self._test_end)
        self.between_predictions = bool(self._predict_begin + self._predict_end)
        #: whether a callback has a hook around a validation
        self.around_tests = self.between_tests or bool(
            self._overriding("on_test_begin", "on_test_end")
        )
        #: whether a callback may change something between two steps
        self.between_steps = any(not isinstance(c, Progress) for c in self._begin + self._end)
        own = any(
            isinstance(c, LambdaCallback) or not type(c).__module__.startswith("stratagem.")
            for c in self.callbacks
        )
        self.changes = CallbackChanges(model if self.callbacks else None, own=own)

    def _overriding(self, *names: str) -> list[Callback]:
        """Return the callbacks that override one of these hooks."""
        return [c for c in self.callbacks if any(overrides(c, name) for name in names)]

    @classmethod
    def none(cls) -> CallbackList:
        return cls([], None, {})

    @property
    def reads_optimizer_state(self) -> bool:
        return any(c.reads_optimizer_state for c in self.callbacks)

    @property
    def model(self) -> Any:
        """The model in training; None without callbacks."""
        return self._model

    @property
    def stop(self) -> bool:
        return self._model is not None and bool(self._model.stop_training)

    def train_begin(self) -> None:
        self.changes.mark()
        for callback in self.callbacks:
            _with_logs(callback.on_train_begin)()

    def train_end(self) -> None:
        for callback in self.callbacks:
            _with_logs(callback.on_train_end)()

    def epoch_begin(self, epoch: int) -> None:
        self.changes.mark()
        for callback in self.callbacks:
            _with_logs(callback.on_epoch_begin, 1)(epoch)

    def epoch_end(self, epoch: int, logs: Logs) -> None:
        self.changes.mark()
        for callback in self.callbacks:
            callback.on_epoch_end(epoch, logs)

    def test_begin(self) -> None:
        self.changes.mark()
        for callback in self.callbacks:
            _with_logs(callback.on_test_begin)()

    def test_end(self, logs: Logs) -> None:
        self.changes.mark()
        for callback in self.callbacks:
            callback.on_test_end(logs)

    @torch.enable_grad()
    def test_batch_begin(self, batch: int) -> None:
        self._logs.keep()
        for callback in self._test_begin:
            _with_logs(callback.on_test_batch_begin, 1)(batch)

    @torch.enable_grad()
    def test_batch_end(self, batch: int, tally: Any) -> None:
        self.changes.mark()
        logs = self._logs.of(tally)
        for callback in self._test_end:
            callback.on_test_batch_end(batch, logs)

    def predict_begin(self) -> None:
        for callback in self.callbacks:
            _with_logs(callback.on_predict_begin)()

    def predict_end(self) -> None:
        for callback in self.callbacks:
            _with_logs(callback.on_predict_end)()

    @torch.enable_grad()
    def predict_batch_begin(self, batch: int) -> None:
        for callback in self._predict_begin:
            _with_logs(callback.on_predict_batch_begin, 1)(batch)

    @torch.enable_grad()
    def predict_batch_end(self, batch: int, outputs: Any) -> None:
        self.changes.mark()
        for callback in self._predict_end:
            callback.on_predict_batch_end(batch, {"outputs": outputs})

    def batch_begin(self, batch: int) -> None:
        self._logs.keep()
        for begun in self._begun:
            begun(batch)

    def batch_end(self, batch: int, tally: Any) -> None:
        if self.between_steps:
            self.changes.mark()
        if not self._end:
            return
        logs = self._logs.of(tally)
        for callback in self._end:
            callback.on_train_batch_end(batch, logs)


def _no_callback(given: Any) -> str:
    if isinstance(given, type) and issubclass(given, Callback):
        return f"{given.__name__} is a class; give an instance of it: {given.__name__}(...)."
    return f"{given!r} is no callback; derive it from stratagem.callbacks.Callback."


def _with_logs(method: Callable[..., Any], before: int = 0) -> Callable[..., Any]:
    """Return the method, called with empty logs if it takes them, as Keras calls it."""
    if isinstance(method, MethodType):
        more = _takes_cached(method.__func__, before + 2)  # self and logs
    else:
        more = takes(method, before + 1)
    return (lambda *args: method(*args, {})) if more else method


_takes_cached = lru_cache(256)(takes)  # reading a signature takes as long as some steps


class RunningLogs(dict[str, Any]):
    """Logs in mid-epoch, whose loss is read from the device only on access."""

    def __init__(self, tally: Any) -> None:
        super().__init__()
        self._tally = tally

    def _read(self) -> RunningLogs:
        if not super().__len__():
            self["loss"] = self._tally.mean()
        return self

    def __missing__(self, key: str) -> Any:
        if key == "examples":
            return self._tally.examples
        if key == "loss":
            return self._read()["loss"]
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __contains__(self, key: object) -> bool:
        return key == "loss" or super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        return super(RunningLogs, self._read()).__iter__()

    def __len__(self) -> int:
        return super(RunningLogs, self._read()).__len__()

    def keys(self) -> Any:
        return super(RunningLogs, self._read()).keys()

    def values(self) -> Any:
        return super(RunningLogs, self._read()).values()

    def items(self) -> Any:
        return super(RunningLogs, self._read()).items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __repr__(self) -> str:
        return repr(self.copy())


class LastLogs:
    """A weak reference to the logs of the last batch, which a callback may have kept."""

    def __init__(self) -> None:
        # returns None and, unlike a lambda, pickles by name
        self._last: Callable[[], RunningLogs | None] = type(None)

    def of(self, tally: Any) -> RunningLogs:
        logs = RunningLogs(tally)
        self._last = weakref.ref(logs)
        return logs

    def keep(self) -> None:
        """Read logs that a callback has kept, before the next batch changes the running loss."""
        if (kept := self._last()) is not None:
            kept.keys()
