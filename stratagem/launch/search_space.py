"""What a sweep tries: flags of a script with ranges or lists in place of values.

--lr 1e-4..1e-1:log    numbers between the two, evenly on a logarithmic scale
--depth 2..6           whole numbers, both ends included
--units 64,128         one of these, handed on as it is written
--epochs 5             every trial gets it as it is
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stratagem.errors import UsageError

_NUMBER = r"[+-]?(?:\d+\.\d+|\.\d+|\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(\w*))?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)


@dataclass(frozen=True)
class NumberRange:
    """Numbers from `low` to `high`; whole ones where both are."""

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
    """Tell the ranges and lists among a script's arguments from what stays as it is."""
    axes: list[Axis] = []
    fixed: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":  # what follows is the script's, whatever it looks like
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
    """Every combination, the last flag changing first."""
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
