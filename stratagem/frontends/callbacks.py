"""Callbacks, with Keras' method names. They run once, on the chief.

    class Speak(sg.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            print(epoch, logs["loss"], self.model.optimizer.param_groups[0]["lr"])

A callback may change weights, the optimizer's settings, or plain attributes of the model
(callback_changes.py), or set `self.model.stop_training`; every replica follows.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from stratagem.errors import UsageError

log = logging.getLogger("stratagem")

Logs = dict[str, Any]


class Callback:
    """Base class of all callbacks; override the methods you need."""

    model: Any = None
    params: dict[str, Any] = {}  # noqa: RUF012
    #: whether `on_epoch_end` reads `model.optimizer.state`
    reads_optimizer_state = False

    def set_model(self, model: Any) -> None:
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        self.params = params

    def on_train_begin(self, logs: Logs | None = None) -> None: ...

    def on_train_end(self, logs: Logs | None = None) -> None: ...

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None: ...

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None: ...

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None: ...

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None: ...

    def on_test_begin(self, logs: Logs | None = None) -> None: ...

    def on_test_end(self, logs: Logs | None = None) -> None: ...

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None: ...

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None: ...

    def on_predict_begin(self, logs: Logs | None = None) -> None: ...

    def on_predict_end(self, logs: Logs | None = None) -> None: ...

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None: ...

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None: ...

    @classmethod
    def names(cls) -> str:
        """Return the names of all callback methods, for error messages."""
        return ", ".join(name for name in vars(Callback) if name.startswith("on_"))


class Progress(Callback):
    """Base class of callbacks that only display, so that replicas have no changes to follow."""


class History(Callback):
    """Records every epoch's logs; `fit` returns it."""

    def __init__(self) -> None:
        self.history: dict[str, list[float]] = {}
        self.epoch: list[int] = []

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)


class _Best:
    """The best value of a monitored number so far."""

    def __init__(self, monitor: str, mode: str, min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise UsageError(f'mode={mode!r}; it is "min", "max" or "auto".')
        self.monitor, self._mode, self._delta = monitor, mode, abs(min_delta)
        self.value: float | None = None

    def begin(self, model: Any) -> None:
        """Decide whether a higher value is better, by `mode` or the metric itself."""
        mode = self._mode if self._mode != "auto" else _direction(self.monitor, model)
        self._sign = 1.0 if mode == "max" else -1.0

    def improved(self, logs: Logs) -> bool:
        if self.monitor not in logs:
            raise UsageError(
                f'"{self.monitor}" is not among the logs ({", ".join(logs)}); choose one of them '
                "as monitor, or give validation_data."
            )
        now = float(logs[self.monitor])
        if math.isnan(now):
            return False
        if self.value is not None and self._sign * (now - self.value) <= self._delta:
            return False
        self.value = now
        return True


def _not_validated(callback: Callback, monitor: str, epoch: int) -> bool:
    """Return whether `monitor` is of a validation, and this epoch has none (`validation_freq`)."""
    validated = callback.params.get("validated")
    return monitor.startswith("val_") and validated is not None and epoch not in validated


#: directions by name, since metrics are made only with the first batch
_BETTER = {"loss": "min", "mae": "min", "mse": "min", "accuracy": "max", "acc": "max"}


def _direction(monitor: str, model: Any) -> str:
    """Return "min" or "max" for mode="auto"; raise if the direction is unknown."""
    name = monitor.removeprefix("val_").lower()
    rises = model.rises(name)
    if rises is not None:
        return "max" if rises else "min"
    if name in _BETTER:
        return _BETTER[name]
    raise UsageError(
        f'whether "{monitor}" is better small or large is not known of it; say mode="min" or '
        'mode="max".'
    )


class EarlyStopping(Callback):
    """Stop when the monitored number has not improved for `patience` epochs."""

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 0,
        min_delta: float = 0.0,
        mode: str = "auto",
        restore_best_weights: bool = False,
    ) -> None:
        self._monitor, self._mode, self._min_delta = monitor, mode, min_delta
        self.patience = patience
        self.restore = restore_best_weights

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.best = _Best(self._monitor, self._mode, self._min_delta)
        self.best.begin(self.model)
        self.wait = 0
        self.stopped_epoch: int | None = None
        self._weights: dict[str, Tensor] | None = None

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if not _not_validated(self, self._monitor, epoch):
            if self.best.improved(logs or {}):
                self.wait = 0
                if self.restore:
                    self._weights = copy.deepcopy(self.model.module.state_dict())
                return
            self.wait += 1
            if self.wait > max(self.patience - 1, 0):
                self.stopped_epoch = epoch
                self.model.stop_training = True
        last = epoch + 1 == self.params.get("epochs")  # also if training ends normally
        if (self.model.stop_training or last) and self._weights is not None:
            self.model.module.load_state_dict(self._weights)


class ModelCheckpoint(Callback):
    """Save after every epoch, after every best epoch so far, or every `every_steps` batches.

    `path` may hold `{epoch}` and any log: "runs/{epoch:02d}-{val_loss:.3f}"; with `every_steps`,
    `{step}`: "runs/{step}". With parameter servers a step is a batch that the chief computed, and
    the file has one version of all parameters; the other workers continue meanwhile. If `monitor`
    or the path needs a validation, epochs without one (`validation_freq`) save nothing.
    """

    reads_optimizer_state = True

    def __init__(
        self,
        path: str | Path,
        *,
        monitor: str = "val_loss",
        save_best_only: bool = False,
        mode: str = "auto",
        every_steps: int | None = None,
    ) -> None:
        if every_steps is not None and (every_steps < 1 or save_best_only):
            raise UsageError(
                f"every_steps={every_steps}: it is 1 or more, and without save_best_only, which "
                "looks at the logs of whole epochs."
            )
        self.path = str(path)
        self.best = _Best(monitor, mode) if save_best_only else None
        self._steps = 0
        if every_steps is not None:
            self.every_steps = every_steps
            self.on_epoch_end = self._nothing  # type: ignore[method-assign]
            self.on_train_batch_end = self._by_step  # type: ignore[method-assign]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self.best is not None:
            self.best.begin(self.model)

    def _nothing(self, epoch: int, logs: Logs | None = None) -> None:
        return None

    def _by_step(self, batch: int, logs: Logs | None = None) -> None:
        self._steps += 1
        if self._steps % self.every_steps == 0:
            self.model.save(self.path.format(step=self._steps))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        asked = self.best.monitor if self.best is not None else ""
        if _not_validated(self, "val_" if "{val_" in self.path else asked, epoch):
            return
        if self.best is None or self.best.improved(logs or {}):
            self.model.save(self._file(epoch, logs or {}))

    def _file(self, epoch: int, logs: Logs) -> str:
        try:
            return self.path.format(epoch=epoch + 1, **logs)
        except KeyError as error:
            raise UsageError(
                f"the path {self.path!r} names {error}, which is not among the logs "
                f"({', '.join(logs)}) or epoch."
            ) from error


class LearningRateScheduler(Callback):
    """Set the learning rate to `schedule(epoch, rate)`, or `schedule(step, rate)` with per="step".

    A schedule may leave out the second parameter.
    """

    def __init__(self, schedule: Callable[..., float], per: str = "epoch") -> None:
        if per not in ("epoch", "step"):
            raise UsageError(f'per={per!r}; it is "epoch" or "step".')
        self.schedule = schedule
        self._by_rate = takes(schedule, 2)
        self._step = 0
        if per == "epoch":
            self.on_epoch_begin = self._by_epoch  # type: ignore[method-assign]
        else:
            self.on_train_batch_begin = self._by_step  # type: ignore[method-assign]

    def _by_epoch(self, epoch: int, logs: Logs | None = None) -> None:
        self._apply(epoch)

    def _by_step(self, batch: int, logs: Logs | None = None) -> None:
        self._apply(self._step)
        self._step += 1

    def _apply(self, number: int) -> None:
        for group in self.model.optimizer.param_groups:
            rate = (float(group["lr"]),) if self._by_rate else ()
            group["lr"] = float(self.schedule(number, *rate))


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function accepts `count` arguments; True if it has no signature."""
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:  # written in C
        return True
    except TypeError:
        return False
    return True


class ReduceLROnPlateau(Callback):
    """Multiply the learning rate by `factor` when the monitored number stops improving.

    A change of at most `min_delta` is no improvement; `cooldown` epochs after a change of the rate
    are counted as Keras counts them.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        mode: str = "auto",
        min_lr: float = 0.0,
        min_delta: float = 0.0,
        cooldown: int = 0,
    ) -> None:
        self._monitor, self._mode, self._min_delta = monitor, mode, min_delta
        self.factor, self.patience, self.min_lr = factor, patience, min_lr
        self.cooldown = cooldown

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.best = _Best(self._monitor, self._mode, self._min_delta)
        self.best.begin(self.model)
        self.wait = self.resting = 0

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if _not_validated(self, self._monitor, epoch):
            return
        if self.resting:
            self.resting, self.wait = self.resting - 1, 0
        if self.best.improved(logs or {}) or self.resting:
            self.wait = 0
            return
        self.wait += 1
        if self.wait >= self.patience:
            self.wait, self.resting = 0, self.cooldown
            for group in self.model.optimizer.param_groups:
                group["lr"] = max(float(group["lr"]) * self.factor, self.min_lr)


class LambdaCallback(Callback):
    """Functions in place of methods: `LambdaCallback(on_epoch_end=lambda epoch, logs: ...)`."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            if not name.startswith("on_") or not hasattr(Callback, name):
                raise UsageError(
                    f"there is no callback method {name!r}; there are {Callback.names()}."
                )
            setattr(self, name, function)


class TensorBoard(Callback):
    """Write every epoch's logs for TensorBoard."""

    def __init__(self, log_dir: str | Path = "runs") -> None:
        self.log_dir = str(log_dir)
        self._writer: Any = _summary_writer()  # imported here to fail before training

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._writer = _summary_writer()(self.log_dir)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        for name, value in (logs or {}).items():
            kind = "validation" if name.startswith("val_") else "train"
            self._writer.add_scalar(f"{kind}/{name.removeprefix('val_')}", value, epoch)
        self._writer.flush()

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._writer.close()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError(
            "TensorBoard is not installed; pip install 'stratagem[tensorboard]'."
        ) from error
    return SummaryWriter
