"""A progress bar an epoch: time left, loss, metrics, examples per second."""

from __future__ import annotations

from stratagem.frontends.callbacks import Logs, Progress
from stratagem.frontends.progress_meter import ProgressMeter, Verbosity


class ProgressBar(Progress):
    """A bar that moves at a terminal or notebook; a line an epoch elsewhere."""

    def __init__(self, epochs: int, steps: int | None, verbose: Verbosity) -> None:
        self._epochs, self._steps, self._moves = epochs, steps, verbose != 2
        self._meter: ProgressMeter | None = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        name = f"{epoch + 1}/{self._epochs}"
        self._meter = ProgressMeter(name, self._steps, title=f"epoch {name}", moves=self._moves)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if self._meter is not None and logs is not None:
            running = logs
            self._meter.advance(
                batch + 1, running["examples"], lambda: f"loss {running['loss']:.4f}"
            )

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        results = dict(logs or {})
        speed = results.pop("examples_per_second", 0.0)
        if self._meter is not None:
            self._meter.finish(results, speed)

    def close(self) -> None:
        """Leave the terminal as it was, after an error too."""
        if self._meter is not None:
            self._meter.close()
