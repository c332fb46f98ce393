"""Run the user's script in this process, up to where it would train."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stratagem.errors import UsageError
from stratagem.frontends.keras import scope  # noqa: F401 (it watches Keras)
from stratagem.launch.loop_recorder import instead_of_step
from stratagem.training.dry_run import DryRun, DryRunHandedOver, instead_of_fit


class _InsideStep(BaseException):
    """Ends a script whose optimizer takes a closure; `except Exception` does not catch it."""


def run_to_fit(words: Sequence[str]) -> DryRun:
    """Run `python script args` up to its first fit or step, and return that as a dry run.

    `beside` must be open.
    """
    found: list[DryRun] = []
    inside: list[str] = []
    with instead_of_fit(found.append), instead_of_step(), _no_closures(inside), _as_main(words):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except DryRunHandedOver:
            return found[0]
        except _InsideStep:
            pass  # the error below names the optimizer, which is in `inside`
        except SystemExit as ended:
            if ended.code not in (None, 0) and not found and not inside:
                raise UsageError(
                    f"{words[0]} ended by itself ({ended.code}) before it trained; give it the "
                    "arguments that it needs, after its name."
                ) from None
    if found:
        print(
            f"stratagem plan: {words[0]} caught the end of its training (a bare except:), and went "
            "on to its own end; planned from the first step",
            file=sys.stderr,
            flush=True,
        )
        return found[0]
    if inside:
        raise UsageError(
            f"{words[0]} gives its {inside[0]} a function that computes inside of the step, so no "
            "step can be tried out by itself; plan with an optimizer that is stepped without."
        )
    raise UsageError(
        f"{words[0]} never called fit, nor step of a torch optimizer, so there is no training to "
        "plan for; give plan the script that trains, and the arguments that make it train."
    )


@contextmanager
def _no_closures(inside: list[str]) -> Iterator[None]:
    """Until closed, a step with a closure ends the script; `inside` gets the optimizer."""

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(callable(each) for each in (*args, *kwargs.values())):
            inside.append(type(optimizer).__name__)
            raise _InsideStep

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def beside(script: str) -> Iterator[None]:
    """Until closed, modules beside the script can be imported, as under `python script`.

    Open longer than the script runs: other processes import the same modules with its model.
    """
    path = list(sys.path)
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.path[:] = path


@contextmanager
def _as_main(words: Sequence[str]) -> Iterator[None]:
    """Set sys.argv as the script expects it."""
    argv = sys.argv
    sys.argv = list(words)
    try:
        yield
    finally:
        sys.argv = argv
