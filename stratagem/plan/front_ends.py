"""How a plan comes to the front ends: neither knows the other, so the package tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_opener: list[Callable[[], Any]] = []


def opened_by(function: Callable[[], Any]) -> Callable[[], Any]:
    """Say what loads the front ends and returns the class that compiles a plain module."""
    _opener[:] = [function]
    return function


def open_front_ends() -> Any:
    """Load the front ends, so that their `fit` can be watched; returns sg.Model."""
    return _opener[0]()
