"""The search space of a sweep, its settings, trials and folder.

--lr 1e-4..1e-1:log    numbers between the two, evenly on a logarithmic scale
--depth 2..6           whole numbers, both ends included
--units 64,128         one of these, passed on as it is written
--epochs 5             every trial gets it as it is

sweep.json               what was asked for
journal                  Optuna's, one line per event; its dashboard reads it
trials.csv               the outcome of each trial, once the sweep is over
trial-003/args.json      its flags and its command
trial-003/log            what it printed
trial-003/metrics.jsonl  a line an epoch
trial-003/files/         where it runs: links to what lies beside the script, and what it writes
trial-003/model.*        the trained model, for as long as it is among the best
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from stratagem.errors import UsageError
from stratagem.figures.trial_record import MODEL

_NUMBER = r"[+-]?(?:\d+\.\d+|\.\d+|\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(\w*))?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)


@dataclass(frozen=True)
class NumberRange:
    """Numbers from `low` to `high`; whole numbers if both are."""

    flag: str
    low: float
    high: float
    log: bool
    whole: bool


@dataclass(frozen=True)
class Choices:
    """One of several values."""

    flag: str
    values: tuple[str, ...]


Axis = NumberRange | Choices


def name_of(flag: str) -> str:
    """A flag without its dashes: the parameter's name in the journal."""
    return flag.lstrip("-")


def read(words: Sequence[str]) -> tuple[list[Axis], list[str]]:
    """Split a script's arguments into ranges and lists, and the arguments that stay as they are."""
    axes: list[Axis] = []
    fixed: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":  # the script's own arguments follow, ranges or not
            fixed += left
            break
        if not word.startswith("--"):
            fixed.append(word)
            continue
        flag, equals, value = word.partition("=")
        separate = not equals and bool(left) and _is_value(left[0])
        value = left.pop(0) if separate else value
        axis = read_axis(flag, value)
        if axis is not None:
            axes.append(axis)
        else:
            fixed += [flag, value] if separate else [word]
    _check_once(axes, fixed)
    return axes, fixed


def _is_value(word: str) -> bool:
    return not word.startswith("-") or re.match(_NUMBER, word) is not None


def _check_once(axes: Sequence[Axis], fixed: Sequence[str]) -> None:
    flags = [axis.flag for axis in axes]
    others = [word.partition("=")[0] for word in fixed]
    for number, flag in enumerate(flags):
        if flag in flags[:number] or flag in others:
            raise UsageError(f"{flag} is given twice; give it once")


def read_axis(flag: str, value: str) -> Axis | None:
    """The range or list that a value describes; None for a plain value."""
    if found := _RANGE.fullmatch(value):
        return _range(flag, value, *found.groups())
    if ".." in value and "/" not in value and value.strip("."):
        raise UsageError(
            f"{flag} {value} is not a range; write 2..6, 1e-4..1e-1:log or a list: 64,128"
        )
    if "," in value:
        values = tuple(part.strip() for part in value.split(","))
        if not all(values) or len(set(values)) < len(values):
            raise UsageError(f"{flag} {value} has an empty or a repeated value; write 64,128")
        return Choices(flag, values)
    return None


def _range(flag: str, text: str, low: str, high: str, scale: str | None) -> NumberRange:
    if scale not in (None, "log"):
        raise UsageError(f"{flag} {text} ends in :{scale}; there is :log, and nothing else")
    first, last, log = float(low), float(high), scale == "log"
    if not first < last or last == float("inf"):
        raise UsageError(f"{flag} {text} goes from {low} to {high}; the first must be smaller")
    if log and first <= 0:
        raise UsageError(f"{flag} {text} begins at {low}, which has no logarithm; begin above 0")
    whole = all(_WHOLE.fullmatch(each) for each in (low, high))
    return NumberRange(flag, first, last, log, whole)


def grid(axes: Sequence[Axis]) -> list[dict[str, str | int]]:
    """Every combination; the last flag changes first."""
    values = [list(_all_of(axis)) for axis in axes]
    names = [name_of(axis.flag) for axis in axes]
    return [dict(zip(names, each, strict=True)) for each in itertools.product(*values)]


def _all_of(axis: Axis) -> Iterator[str | int]:
    if isinstance(axis, Choices):
        yield from axis.values
    elif axis.whole and not axis.log:
        yield from range(int(axis.low), int(axis.high) + 1)
    else:
        raise UsageError(
            f"{axis.flag} has no end of values, and a grid tries each; give it a list: "
            f"{axis.flag} {axis.low:g},{axis.high:g}"
        )


SAMPLERS = ("random", "grid", "tpe")
#: words that show how a script may read its flags
_READS_FLAGS = re.compile(r"argv|pars|click|fire|typer|absl|hydra|tyro|docopt", re.IGNORECASE)


@dataclass(frozen=True)
class SweepSettings:
    """Everything that decides which trials there are, and which are kept."""

    #: the interpreter and the script, or the interpreter, -m and the module
    command: tuple[str, ...]
    #: the script's arguments, ranges among them
    words: tuple[str, ...]
    metric: str
    larger: bool
    trials: int
    keep: int
    replicas: int
    sampler: str
    seed: int
    prune: bool
    #: where the script runs
    where: str
    #: options of `stratagem submit`, where trials are jobs
    submit: dict[str, Any] = field(default_factory=dict)

    @property
    def space(self) -> tuple[list[Axis], list[str]]:
        """The ranges and lists to try, and the arguments that stay as they are."""
        return read(self.words)

    @property
    def script(self) -> str:
        """The name of the script, module or function in messages."""
        if len(self.command) > 3:  # a function, in a file of its name
            return Path(self.command[-1]).stem
        return Path(self.command[1]).name if self.command[1] != "-m" else self.command[2]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path) -> SweepSettings:
        """Read what `to_json` wrote."""
        try:
            found: dict[str, Any] = json.loads(text)
            made = cls(**found)
        except (ValueError, TypeError) as problem:
            raise UsageError(f"{path} is not what a sweep writes: {problem}") from None
        return replace(made, command=tuple(made.command), words=tuple(made.words))

    def check_same(self, begun: SweepSettings) -> None:
        """Refuse settings that changed since the sweep was begun; the number of trials may."""
        for name, mine in asdict(self).items():
            there = asdict(begun)[name]
            if name != "trials" and mine != there:
                raise UsageError(
                    f"the sweep was begun with {name} {_shown(there)}, not {_shown(mine)}; only "
                    "--trials and --slots may change: leave the others out, or choose another --out"
                )


def _shown(value: Any) -> str:
    return " ".join(value) if isinstance(value, tuple | list) else str(value)


def read_metric(text: str | None) -> tuple[str, bool]:
    """The name of a metric, and whether larger is better."""
    name, colon, way = (text or "").partition(":")
    if not name:
        raise UsageError("which metric decides? As in: --metric val_accuracy:max")
    if not colon and name.endswith(("loss", "error")):
        return name, False
    if way not in ("max", "min"):
        raise UsageError(f"say which way is better: --metric {name}:max, or {name}:min")
    return name, way == "max"


def count_trials(axes: Sequence[Axis], sampler: str, asked: int | None) -> int:
    """How many trials there will be, at most one for each point of a grid."""
    if sampler != "grid":
        return asked or 10
    return min(asked or len(grid(axes)), len(grid(axes)))


def check_flags(script: Path, axes: Sequence[Axis]) -> None:
    """Refuse a range for a flag that, by its text, the script does not read."""
    if not script.is_file():
        return
    text = script.read_text(errors="replace")
    for axis in axes:
        words = "[-_]".join(map(re.escape, re.split("[-_]", axis.flag.lstrip("-"))))
        if re.search(rf"(?<![A-Za-z0-9]){words}(?![A-Za-z0-9])", text):
            continue
        if "ArgumentParser" in text or not _READS_FLAGS.search(text):
            raise UsageError(
                f"{script.name} has no flag {axis.flag}, so a range for it changes nothing; add "
                f'it to the script: parser.add_argument("{axis.flag}"), and read it there'
            )


def value_of(text: str) -> Any:
    """The number that a text stands for, True or False; else the text."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, int | float) else text


@dataclass
class SweepTrial:
    """One trial of a sweep: runs, done, failed or pruned; `value` is its metric if it is done."""

    number: int
    flags: Mapping[str, str]
    folder: Path
    state: str = "runs"
    value: float | None = None

    @property
    def params(self) -> dict[str, Any]:
        """The flags as keyword arguments."""
        return {flag.removeprefix("--"): value_of(text) for flag, text in self.flags.items()}


Trial = TypeVar("Trial", bound=SweepTrial)


def best_first(trials: Iterable[Trial], larger: bool) -> list[Trial]:
    """The complete trials, the best first; of equals the first."""
    sign = -1.0 if larger else 1.0
    done = [each for each in trials if each.state == "done"]
    return sorted(done, key=lambda each: (sign * (each.value or 0.0), each.number))


LOG = "log"
ARGS = "args.json"
SETTINGS = "sweep.json"


class SweepFolder:
    """The files of one sweep, which one process at a time may lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "journal"

    @property
    def begun(self) -> SweepSettings | None:
        """The settings of the sweep in this folder, if there is one."""
        file = self.path / SETTINGS
        return SweepSettings.from_json(file.read_text(), file) if file.is_file() else None

    def begin(self, settings: SweepSettings) -> None:
        """Write the settings, which begins a sweep."""
        part = self.path / f"{SETTINGS}.part"
        part.write_text(settings.to_json())
        os.replace(part, self.path / SETTINGS)

    def forget(self) -> None:
        """Remove settings and journal; the trials' folders stay for inspection."""
        (self.path / SETTINGS).unlink()
        self.journal.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process, and repair the journal."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as problem:
            raise UsageError(f"no sweep can be kept in {self.path}: {problem.strerror}") from None
        with os.fdopen(lock):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another process is at work on the sweep in {self.path}; wait for it, or "
                    "choose another --out"
                ) from None
            self._repair()
            yield

    def _repair(self) -> None:
        """Remove Optuna's lock and the unfinished line of a process that was killed."""
        self.journal.with_name("journal.lock").unlink(missing_ok=True)
        if self.journal.is_file():
            whole = self.journal.read_bytes().rfind(b"\n") + 1
            os.truncate(self.journal, whole)

    def trial(self, number: int) -> Path:
        return self.path / f"trial-{number:03d}"

    def clear(self, number: int, args: Mapping[str, Any]) -> Path:
        """Make an empty folder for a trial that begins, or begins again."""
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
        """Write the outcome of every trial as CSV."""
        import csv

        with (self.path / "trials.csv").open("w", newline="") as file:
            csv.writer(file).writerows([head, *rows])
