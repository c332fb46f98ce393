"""Run somebody's script in this process, up to where it would train."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stratagem.errors import UsageError
from stratagem.frontends.keras import unscoped  # noqa: F401 (it watches Keras)
from stratagem.launch.own_loop import instead_of_step
from stratagem.strategies.rehearsal import Handed, Rehearsal, instead_of_fit


def run_to_fit(words: Sequence[str]) -> Rehearsal:
    """The first fit, or step, of `python script args`; it is handed over and does not train."""
    found: list[Rehearsal] = []
    with instead_of_fit(found.append), instead_of_step(), _as_main(words):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except Handed:
            return found[0]
        except SystemExit as ended:
            if ended.code not in (None, 0):
                raise UsageError(
                    f"{words[0]} ended by itself ({ended.code}) before it trained; give it the "
                    "arguments that it needs, after its name."
                ) from None
    raise UsageError(
        f"{words[0]} never called fit, nor step of a torch optimizer, so there is no training to "
        "plan for; give plan the script that trains, and the arguments that make it train."
    )


@contextmanager
def _as_main(words: Sequence[str]) -> Iterator[None]:
    """Arguments and search path as the script expects them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
