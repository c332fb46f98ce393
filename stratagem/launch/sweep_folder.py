"""The folder of a sweep.

sweep.json               what was asked for
journal                  Optuna's, one line per event; its dashboard reads it
trials.csv               the outcome of each trial, once the sweep is over
trial-003/args.json      its flags and its command
trial-003/log            what it printed
trial-003/metrics.jsonl  a line an epoch
trial-003/model.*        the trained model, for as long as it is among the best
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem.errors import UsageError
from stratagem.figures.trial_record import MODEL
from stratagem.launch.sweep_settings import SweepSettings

LOG = "log"
ARGS = "args.json"
SETTINGS = "sweep.json"


class SweepFolder:
    """Files of one sweep; one process at a time may work on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "journal"
        self._lock = -1

    @property
    def begun(self) -> SweepSettings | None:
        """What it was begun with, if it was."""
        file = self.path / SETTINGS
        return SweepSettings.from_json(file.read_text(), file) if file.is_file() else None

    def begin(self, settings: SweepSettings) -> None:
        """Write down what is asked for: a sweep is there from then on."""
        part = self.path / f"{SETTINGS}.part"
        part.write_text(settings.to_json())
        os.replace(part, self.path / SETTINGS)

    def forget(self) -> None:
        """Make as if it had not been begun; the trials' folders stay to be looked at."""
        (self.path / SETTINGS).unlink()
        self.journal.unlink(missing_ok=True)

    def lock(self) -> None:
        """Take the folder for this process, until it ends; however the last one ended."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as problem:
            raise UsageError(f"no sweep can be kept in {self.path}: {problem.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.unlock()
            raise UsageError(
                f"another process is at work on the sweep in {self.path}; wait for it, or choose "
                "another --out"
            ) from None
        self._mend()

    def unlock(self) -> None:
        os.close(self._lock)

    def _mend(self) -> None:
        """Undo what a process left that was killed while it wrote to the journal."""
        self.journal.with_name("journal.lock").unlink(missing_ok=True)
        if self.journal.is_file():
            whole = self.journal.read_bytes().rfind(b"\n") + 1
            os.truncate(self.journal, whole)

    def trial(self, number: int) -> Path:
        return self.path / f"trial-{number:03d}"

    def clear(self, number: int, args: Mapping[str, Any]) -> Path:
        """An empty folder for a trial that begins, or begins again."""
        folder = self.trial(number)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        (folder / ARGS).write_text(json.dumps(args, indent=2) + "\n")
        return folder

    def drop_models(self, numbers: Iterable[int]) -> None:
        """Remove the models of these trials."""
        for number in numbers:
            for each in self.trial(number).glob(f"{MODEL}*"):
                shutil.rmtree(each) if each.is_dir() else each.unlink()

    def last_line(self, number: int) -> str:
        """The last line that a trial printed."""
        file = self.trial(number) / LOG
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - 10_000))
            text = log.read().decode(errors="replace")
        return next((line for line in reversed(text.splitlines()) if line.strip()), "")

    def write_table(self, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """The outcome of every trial, for spreadsheets."""
        import csv

        with (self.path / "trials.csv").open("w", newline="") as file:
            csv.writer(file).writerows([head, *rows])
