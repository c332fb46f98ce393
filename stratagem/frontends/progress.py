"""Progress of a pass over the data: a bar in terminals and notebooks, else a line at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from stratagem.errors import UsageError
from stratagem.frontends.callbacks import Logs, Progress

_REFRESH = 0.1
Verbosity = int | str


def check_verbose(verbose: Verbosity) -> None:
    if verbose not in ("auto", 0, 1, 2):
        raise UsageError(f'verbose is {verbose!r}; it is "auto", 0, 1 or 2.')


class ProgressMeter:
    """Progress of one pass: `advance` after each batch, `finish` at its end, `close` in any case.

    Args:
        name: the text before the bar.
        title: the beginning of the line that is printed if there is no bar; None prints no line.
        moves: whether to draw a bar, if the output can and no other bar is shown (a callback of
            `fit` that calls `evaluate`).
    """

    _moving: ClassVar[ProgressMeter | None] = None

    def __init__(self, name: str, steps: int | None, *, title: str | None, moves: bool) -> None:
        from rich.console import Console

        self._console = Console(file=sys.stdout)
        self._steps, self._title = steps, title
        self._started = self._drawn = time.perf_counter()
        self._examples = 0
        self._bar: _TerminalBar | _NotebookBar | None = None
        if not moves or ProgressMeter._moving is not None:
            return
        if self._console.is_jupyter:
            self._bar = _NotebookBar(self._console, name, steps)
        elif self._console.is_terminal:
            self._bar = _TerminalBar(self._console, name, steps)
        ProgressMeter._moving = self if self._bar is not None else None

    def advance(self, done: int, examples: int, figures: Callable[[], str] = str) -> None:
        """Set the batches and examples done; `figures` is called only to draw the bar."""
        self._examples = examples
        if self._bar is None:
            return
        now, full = time.perf_counter(), done == self._steps
        if full or now - self._drawn >= _REFRESH:
            self._drawn = now
            speed = f"{examples / (now - self._started):,.0f} examples/s"
            # drawn at once at the end, since a callback may then print
            self._bar.show(completed=done, figures=figures(), speed=speed, refresh=full)

    def finish(self, results: Mapping[str, float], speed: float | None = None) -> None:
        """End the pass, and show its results."""
        seconds = time.perf_counter() - self._started
        if speed is None:
            speed = self._examples / max(seconds, 1e-9)
        rate = f"{speed:,.0f} examples/s"
        figures = [f"{name} {_formatted(value)}" for name, value in results.items()]
        if self._bar is not None:
            self._bar.show(completed=self._steps, total=self._steps)
            self._bar.conclude(figures, rate)
        elif self._title is not None:
            parts = [self._title, f"{seconds:.1f} s", "  ".join(figures), rate]
            line = "  ".join(part for part in parts if part)
            self._console.print(line, highlight=False, soft_wrap=True)
        self.close()

    def close(self) -> None:
        """Restore the terminal, also after an error."""
        if self._bar is not None:
            ProgressMeter._moving = None
            self._bar.stop()
            self._bar = None


def _formatted(value: float) -> str:
    """Format a count as an integer, and a measured value with four digits."""
    return f"{value:,d}" if isinstance(value, int) else f"{value:.4f}"


class _Bar:
    """Base class of the terminal and the notebook bar."""

    _rich: Any
    _task: Any

    def show(self, **fields: Any) -> None:
        raise NotImplementedError

    def conclude(self, figures: list[str], speed: str) -> None:
        """Show all results; if they do not fit, without the speed, and on several lines."""
        room = self._room()
        whole = "  ".join(figures)
        if len(whole) + len(speed) <= room:
            self.show(figures=whole, speed=speed)
            return
        lines = figures[:1]
        for figure in figures[1:]:
            longer = f"{lines[-1]}  {figure}"
            lines = [*lines[:-1], longer] if len(longer) <= room else [*lines, figure]
        self.show(figures="\n".join(lines), speed="")

    def _room(self) -> int:
        """Return the number of columns that the bar leaves for figures and speed."""
        from rich.measure import Measurement

        console = self._rich.console
        self._rich.update(self._task, figures="", speed="")
        table = self._rich.make_tasks_table(self._rich.tasks)
        wide = console.options.update(max_width=10_000)
        return int(console.width - Measurement.get(console, wide, table).maximum)


class _TerminalBar(_Bar):
    """A line of the terminal that rich redraws."""

    def __init__(self, console: Any, name: str, steps: int | None) -> None:
        self._rich, self._task = _columns(console, name, steps)
        self._rich.live.auto_refresh = True
        self._rich.start()

    def show(self, **fields: Any) -> None:
        self._rich.update(self._task, **fields)

    def stop(self) -> None:
        self._rich.stop()


class _NotebookBar(_Bar):
    """A cell output that is replaced; rich's own notebook display needs ipywidgets."""

    def __init__(self, console: Any, name: str, steps: int | None) -> None:
        from IPython.display import display

        self._rich, self._task = _columns(console, name, steps)
        self._handle: Any = display(self._picture(), display_id=True)  # type: ignore[no-untyped-call]

    def _picture(self) -> Any:
        return self._rich.make_tasks_table(self._rich.tasks)

    def show(self, **fields: Any) -> None:
        self._rich.update(self._task, **fields)
        self._handle.update(self._picture())

    def stop(self) -> None:
        """Do nothing: the last output stays."""


def _columns(console: Any, name: str, steps: int | None) -> tuple[Any, Any]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[figures]}"),
        TextColumn("[dim]{task.fields[speed]}"),
        console=console,
        auto_refresh=False,
    )
    return bar, bar.add_task(name, total=steps, figures="", speed="")


def meter_for(
    verb: str, steps: int | None, verbose: Verbosity, *, shown: bool
) -> ProgressMeter | None:
    """Return a progress meter for `evaluate` or `predict`; None if nothing is shown."""
    check_verbose(verbose)
    if not verbose or not shown:
        return None
    title = None if verbose == "auto" else verb
    return ProgressMeter(verb, steps, title=title, moves=verbose != 2)


class ProgressBar(Progress):
    """The progress bar of `fit`, or a line per epoch outside of terminals and notebooks."""

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
        """Restore the terminal, also after an error."""
        if self._meter is not None:
            self._meter.close()
