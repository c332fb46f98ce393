"""A hook by which the planner loads the front ends without importing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_opener: list[Callable[[], Any]] = []


def opened_by(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register the function that loads the front ends and returns sg.Model."""
    _opener[:] = [function]
    return function


def open_front_ends() -> Any:
    """Load the front ends, so that their `fit` can be watched; returns sg.Model."""
    return _opener[0]()
