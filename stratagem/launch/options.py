"""Readers of numbers on a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def below(limit: float, what: str) -> Callable[[str], float]:
    """A reader of numbers from 0 to less than `limit`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < limit:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


def whole(least: int) -> Callable[[str], int]:
    """A reader of whole numbers from `least` on."""

    def read(text: str) -> int:
        if text.strip().isdecimal() and int(text) >= least:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {least} or more")

    return read
