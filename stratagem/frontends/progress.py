"""A progress bar an epoch: time left, loss, metrics, examples per second."""

from __future__ import annotations

import sys
import time
from typing import Any

from stratagem.frontends.callbacks import Logs, Progress

_REFRESH = 0.1


class ProgressBar(Progress):
    """A bar that moves at a terminal or notebook; a line an epoch elsewhere."""

    def __init__(self, epochs: int, steps: int | None, verbose: int) -> None:
        from rich.console import Console

        self._console = Console(file=sys.stdout)
        live = self._console.is_terminal or self._console.is_jupyter
        self._epochs, self._steps = epochs, steps
        self._live = live and verbose == 1
        self._bar: Any = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._started = self._drawn = time.perf_counter()
        if self._live:
            self._bar, self._task = _bar(self._console, f"{epoch + 1}/{self._epochs}", self._steps)
            self._bar.start()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        now = time.perf_counter()
        if self._bar is None or now - self._drawn < _REFRESH or logs is None:
            return
        self._drawn = now
        speed = logs["examples"] / (now - self._started)
        self._bar.update(self._task, completed=batch + 1, figures=f"loss {logs['loss']:.4f}",
                         speed=f"{speed:,.0f} examples/s")  # fmt: skip

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        logs = dict(logs or {})
        speed = logs.pop("examples_per_second", 0.0)
        figures = "  ".join(f"{name} {value:.4f}" for name, value in logs.items())
        seconds = time.perf_counter() - self._started
        if self._bar is not None:
            self._bar.update(self._task, completed=self._steps, total=self._steps, figures=figures,
                             speed=f"{speed:,.0f} examples/s")  # fmt: skip
            self.close()
        else:
            self._console.print(
                f"epoch {epoch + 1}/{self._epochs}  {seconds:.1f} s  {figures}  "
                f"{speed:,.0f} examples/s", highlight=False, soft_wrap=True,
            )  # fmt: skip

    def close(self) -> None:
        """Leave the terminal as it was, after an error too."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar(console: Any, name: str, steps: int | None) -> tuple[Any, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    bar = RichProgress(
        TextColumn("[bold]{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True), TextColumn("{task.fields[figures]}"),
        TextColumn("[dim]{task.fields[speed]}"), console=console, auto_refresh=False,
    )  # fmt: skip
    bar.live.auto_refresh = True
    return bar, bar.add_task(name, total=steps, figures="", speed="")
