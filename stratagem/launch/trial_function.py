"""One trial of a function: python -m stratagem.launch.trial_function FILE --lr 0.1 --units 64.

FILE was written by the process that started this one (launch/notebook_sweep.py): where that process
looks for modules, in a line of JSON, and the function behind it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratagem.cluster.environment import detect
from stratagem.figures.trial_record import record_epoch


def value_of(text: str) -> Any:
    """A number if it is one; else the text."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, int | float) else text


def arguments(words: Sequence[str]) -> dict[str, Any]:
    """The flags as keyword arguments."""
    pairs: list[tuple[str, str]] = []
    left = list(words)
    while left:
        flag, equals, value = left.pop(0).partition("=")
        pairs.append((flag, value if equals else left.pop(0)))
    return {flag.removeprefix("--"): value_of(value) for flag, value in pairs}


def main(argv: Sequence[str]) -> None:
    """Call the function; numbers that its first task returns in a dict count as a last epoch."""
    import cloudpickle

    folders, _, function = Path(argv[0]).read_bytes().partition(b"\n")
    sys.path += [each for each in json.loads(folders) if each not in sys.path]
    train = cloudpickle.loads(function)
    result = train(**arguments(argv[1:]))
    place = detect(os.environ)
    if isinstance(result, dict) and (place is None or place.is_chief):
        record_epoch(0, result)


if __name__ == "__main__":
    main(sys.argv[1:])
