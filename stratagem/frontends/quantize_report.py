"""Compares a quantised model with its float forms: accuracy, bytes and time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratagem.errors import UsageError

_BATCH = 256  # examples of the timed batch
_ROUNDS = 15
_SECONDS = 3.0  # stop timing after this, with fewer rounds

Predict = Callable[[NDArray[Any]], NDArray[Any]]


@dataclass(frozen=True)
class Form:
    """One form of a model: its predict function, and the bytes of its file."""

    predict: Predict
    bytes: int


@dataclass(frozen=True)
class FormScores:
    """The measurements of one form; `accuracy` is None without labels."""

    name: str
    accuracy: float | None
    agreement: float
    bytes: int
    milliseconds: float


@dataclass(frozen=True)
class QuantizeReport:
    """The measured forms of a model, from float to 8 bits; `str` is a table.

    `compared` is the index of the float form in the same runtime as the quantised one; `batch` is
    the number of examples that the milliseconds are for, on one thread.
    """

    rows: tuple[FormScores, ...]
    batch: int
    compared: int = 0

    @property
    def drop(self) -> float | None:
        """The accuracy lost by quantisation; None without labels."""
        first, last = self.rows[0].accuracy, self.rows[-1].accuracy
        return None if first is None or last is None else first - last

    @property
    def agreement(self) -> float:
        """The fraction of examples with the same predicted class as in floats."""
        return self.rows[-1].agreement

    @property
    def smaller(self) -> float:
        """The size of the quantised file, as a fraction of the float file's."""
        return self.rows[-1].bytes / self.rows[self.compared].bytes

    @property
    def faster(self) -> float:
        """The speed-up over the float form."""
        return self.rows[self.compared].milliseconds / self.rows[-1].milliseconds

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [f"{'':{width}}  accuracy  as float       bytes        ms"]
        lines += [_line(row, width) for row in self.rows]
        lines.append(
            f"{self.smaller:.2f} of the bytes and {self.faster:.1f} times as fast as "
            f"{self.rows[self.compared].name} (batches of {self.batch}, one thread)."
        )
        return "\n".join(lines)

    def refuse_worse(self, most: float) -> None:
        """Raise if the accuracy dropped by more than `most`."""
        if self.drop is not None and self.drop > most + 1e-12:
            raise UsageError(
                f"in 8 bits {self.rows[-1].accuracy:.4f} of the answers are right, and "
                f"{self.rows[0].accuracy:.4f} in floats: {self.drop:.4f} less, and max_drop is "
                f"{most:g}, so nothing was written; calibrate with examples such as the model "
                "will see, more of them, or allow more."
            )


def _line(row: FormScores, width: int) -> str:
    right = "-" if row.accuracy is None else f"{row.accuracy:.4f}"
    return (
        f"{row.name:{width}}  {right:>8}  {row.agreement:8.4f}  {row.bytes:10,}  "
        f"{row.milliseconds:8.2f}"
    )


def compare_forms(
    forms: Mapping[str, Form], x: NDArray[Any], y: NDArray[Any] | None, compared: int = 0
) -> QuantizeReport:
    """Measure every form on the same examples; agreement is with the first form."""
    batches = [x[i : i + _BATCH] for i in range(0, len(x), _BATCH)]
    answers = {name: _classes(form.predict, batches) for name, form in forms.items()}
    spent = _times([form.predict for form in forms.values()], batches[0])
    first = next(iter(answers.values()))
    target = None if y is None else _target(y, len(x))
    rows = tuple(
        FormScores(
            name,
            None if target is None else float((found == target).mean()),
            float((found == first).mean()),
            forms[name].bytes,
            took,
        )
        for (name, found), took in zip(answers.items(), spent, strict=True)
    )
    return QuantizeReport(rows, len(batches[0]), compared)


def _classes(predict: Predict, batches: Sequence[NDArray[Any]]) -> NDArray[Any]:
    found = [predict(batch) for batch in batches]
    if found[0].ndim != 2 or found[0].shape[1] < 2:
        shape = "x".join(map(str, found[0].shape[1:])) or "one number"
        raise UsageError(
            f"the model answers each example with {shape}, and sg.quantize compares classifiers: "
            "a row of two or more classes for each example."
        )
    chosen: NDArray[Any] = np.concatenate(found).argmax(axis=1)
    return chosen


def _target(y: NDArray[Any], rows: int) -> NDArray[Any]:
    target = y.reshape(-1)
    if len(target) != rows or not np.issubdtype(target.dtype, np.integer):
        raise UsageError(
            f"there are {rows} examples and labels of shape {y.shape} and type {y.dtype}; labels "
            "are class numbers, one for each example."
        )
    return target


def _times(forms: Sequence[Predict], batch: NDArray[Any]) -> list[float]:
    """Return the median milliseconds of a batch, from rounds in which the forms take turns."""
    spent: list[list[float]] = [[] for _ in forms]
    end = time.perf_counter() + _SECONDS
    while len(spent[0]) < 3 or (len(spent[0]) < _ROUNDS and time.perf_counter() < end):
        for predict, times in zip(forms, spent, strict=True):
            begin = time.perf_counter()
            predict(batch)
            times.append((time.perf_counter() - begin) * 1000)
    return [statistics.median(times) for times in spent]
