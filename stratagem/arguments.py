"""Errors for wrong arguments: a sentence instead of a TypeError."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from stratagem.errors import UsageError

Args = ParamSpec("Args")
Result = TypeVar("Result")


def by_name(
    method: Callable[Args, Result], elsewhere: Mapping[str, str] | None = None
) -> Callable[Args, Result]:
    """Wrap a method so that an unknown argument raises a sentence.

    `elsewhere`: names of such arguments in other libraries, and what to do instead.
    """
    parameters = list(inspect.signature(method).parameters.values())[1:]
    known = [p.name for p in parameters]
    placed = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    @wraps(method)
    def checked(*args: Args.args, **options: Args.kwargs) -> Result:
        made = method.__name__ == "__init__"
        called = type(args[0]).__name__ if made else method.__name__
        if len(args) > len(placed) + 1:
            raise UsageError(
                f"{called} takes {' and '.join(placed) or 'nothing'} by their place, and "
                f"{len(args) - 1} were given; give the others by name: {', '.join(known)}."
            )
        for name in options:
            if name not in known:
                raise UsageError(f"{called} has no {name}: {_instead(name, known, elsewhere)}.")
        return method(*args, **options)

    return checked


def _instead(name: str, known: Sequence[str], elsewhere: Mapping[str, str] | None) -> str:
    if elsewhere is not None and name in elsewhere:
        return elsewhere[name]
    if alike := get_close_matches(name, known, 1):
        return f"perhaps it is {alike[0]}"
    return f"there are {', '.join(known)}"
