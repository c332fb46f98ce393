"""Shows the progress of a sweep: a table on a terminal, else a line for each event."""

from __future__ import annotations

import difflib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from stratagem.launch.output import wants_colour
from stratagem.launch.sweep_folder import SweepFolder, SweepSettings, SweepTrial, best_first
from stratagem.launch.sweep_study import SweepStudy

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_ROWS = 24  # of ended trials in the table: the best
_STYLES = {"runs": "", "done": "green", "failed": "bold red", "pruned": "dim"}


@dataclass
class TrialRow(SweepTrial):
    """A trial as the view shows it: while it runs, `value` is its metric after `epoch`."""

    slot: int | None = None
    epoch: int = 0
    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def words(self) -> str:
        return " ".join(f"{flag} {_short(value)}" for flag, value in self.flags.items())


def _short(value: str) -> str:
    """Shorten a long number to six digits; args.json has all of them."""
    try:
        return f"{float(value):.6g}" if len(value) > 9 else value
    except ValueError:
        return value


def time_left(ended: list[float], running: list[float], waiting: int, slots: int) -> float | None:
    """Seconds left if trials take as long as before; None until a trial has ended."""
    if not ended:
        return None
    each = sum(ended) / len(ended)
    work = each * waiting + sum(max(0.0, each - so_far) for so_far in running)
    return work / slots


def in_words(seconds: float) -> str:
    """As "40 s", "3 min" or "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class SweepView:
    """Prints what happens to trials; `rows` has every trial."""

    def __init__(
        self, metric: str, larger: bool, trials: int, slots: int, stream: TextIO | None = None
    ) -> None:
        self._metric, self._larger = metric, larger
        self._trials, self._slots = trials, slots
        self._stream = stream or sys.stdout
        self.rows: dict[int, TrialRow] = {}
        self._live: Live | None = None

    def __enter__(self) -> SweepView:
        import os

        if wants_colour(self._stream, os.environ):
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """Print a line, above the table if there is one."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def began(self, row: TrialRow, again: bool) -> None:
        self.rows[row.number] = row
        if self._live is None:
            what = "begins again" if again else "begins"
            self.say(f"trial {row.number} {what} in slot {row.slot}: {row.words}")

    def ended(self, number: int, state: str, why: str = "") -> None:
        row = self.rows[number]
        row.state, row.slot, row.seconds = state, None, time.monotonic() - row.began
        if self._live is not None and state != "failed":
            return
        what = f"{self._metric} {row.value:.6g}" if state == "done" else f"{state}: {why}"
        self.say(f"trial {number} {what} ({in_words(row.seconds)}); {self._progress()}")

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _progress(self) -> str:
        over = [row for row in self.rows.values() if row.state != "runs"]
        running = [row for row in self.rows.values() if row.state == "runs"]
        now = time.monotonic()
        left = time_left(
            [row.seconds for row in over if row.seconds is not None],
            [now - row.began for row in running],
            self._trials - len(over) - len(running),
            self._slots,
        )
        text = f"{len(over)} of {self._trials} ended"
        if best := best_first(self.rows.values(), self._larger)[:1]:
            text += f", best {best[0].value:.6g} (trial {best[0].number})"
        if left is None or len(over) == self._trials:
            return text
        return f"{text}, about {in_words(left)} left"

    def _table(self) -> Table:
        from rich.table import Table

        flags = list(next(iter(self.rows.values())).flags) if self.rows else []
        table = Table(title=self._progress(), title_justify="left")
        for head in ("trial", "state", *flags, "epoch", self._metric, "time"):
            table.add_column(head, justify="left" if head == "state" else "right")
        now = time.monotonic()
        others = [row for row in self.rows.values() if row.state in ("failed", "pruned")]
        running = [row for row in self.rows.values() if row.state == "runs"]
        ranked = best_first(self.rows.values(), self._larger)
        for row in [*running, *[*ranked, *others][:_ROWS]]:
            seconds = row.seconds if row.state != "runs" else now - row.began
            table.add_row(
                str(row.number),
                row.state if row.slot is None else f"slot {row.slot}",
                *map(_short, row.flags.values()),
                str(row.epoch or ""),
                "" if row.value is None else f"{row.value:.6g}",
                "" if seconds is None else in_words(seconds),
                style=_STYLES[row.state],
            )
        return table


_UNKNOWN = "unrecognized arguments: "  # as argparse says it


def summary(settings: SweepSettings, study: SweepStudy) -> list[str]:
    """The summary of a sweep: how its trials ended, and the best of them."""
    ranked, ended = study.ranked(), study.ended()
    counts = Counter(each.state for each in ended)
    states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    lines = [f"{len(ended)} of {settings.trials} trials ended: {states or 'none'}"]
    for place, each in enumerate(ranked[: max(1, settings.keep)], 1):
        words = " ".join(f"{flag} {value}" for flag, value in each.flags.items())
        kept = f"  {each.folder}" if place <= settings.keep else ""
        lines.append(f"{place}. {settings.metric} {each.value:.6g}  {words}{kept}")
    return lines


def write_table(settings: SweepSettings, folder: SweepFolder, study: SweepStudy) -> None:
    """Write the outcome of every trial as CSV."""
    best, rows = [each.number for each in study.ranked()][: settings.keep], []
    for each in study.ended():
        kept = each.number in best
        rows.append((each.number, each.state, each.value, kept, *each.flags.values()))
    names = [axis.flag for axis in settings.space[0]]
    folder.write_table(["trial", "state", settings.metric, "kept", *names], rows)


def without_metric(settings: SweepSettings, number: int, names: Sequence[str]) -> str:
    """The sentence for a first trial that wrote these metrics, but not the one that decides."""
    metric, script = settings.metric, settings.script
    if not names:
        return (
            f"trial {number} of {script} has ended without writing any metric; its fit must be "
            f"that of an sg.Model, or of a Keras model in a scope, or append lines as "
            f'{{"{metric}": 0.9}} to $STRATAGEM_TRIAL/metrics.jsonl'
        )
    near = difflib.get_close_matches(metric, names, 1)
    meant = f"; --metric {near[0]}?" if near else ""
    return f"{script} writes no {metric}; it writes {', '.join(names)}{meant}"


def unknown_flag(settings: SweepSettings, last_line: str, options: Sequence[str]) -> str:
    """The sentence for a flag that a script's parser has refused; "" if it has refused none."""
    _, found, flags = last_line.partition(_UNKNOWN)
    if not found:
        return ""
    flag = flags.split()[0].partition("=")[0]
    near = difflib.get_close_matches(flag, options, 1)
    meant = f", or was {near[0]} of the sweep meant?" if near else ", or leave it out"
    return f"{settings.script} has no flag {flag}; add it there{meant}"
