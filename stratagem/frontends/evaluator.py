"""The evaluator's `fit`: it trains nothing, and evaluates every checkpoint that the chief writes.

The same script runs on every task. Here `fit` takes from its arguments what it needs: where a
ModelCheckpoint writes, what to validate on, and where a TensorBoard callback logs.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stratagem.errors import UsageError
from stratagem.frontends.callbacks import Callback, History, ModelCheckpoint, TensorBoard
from stratagem.state import checkpoint

log = logging.getLogger("stratagem")

_PAUSE = 0.2  # seconds between two looks at the folder
_FIELD = re.compile(r"\{[^{}]*\}")
NEEDS = (
    "this task is the evaluator: it evaluates the checkpoints that the chief writes, so fit needs "
    "a ModelCheckpoint among its callbacks, and validation_data."
)


def watch(
    model: Any,
    callbacks: Sequence[Callback],
    validation: Any,
    evaluate: Callable[[], Any],
    over: Callable[[], bool],
) -> History:
    """Evaluate checkpoints as they come, until the job is over and the last has been seen.

    The history has what was found here, and what the chief had written down when it last saved.
    """
    saver = next((c for c in callbacks if isinstance(c, ModelCheckpoint)), None)
    if saver is None or validation is None:
        raise UsageError(NEEDS)
    boards = [c for c in callbacks if isinstance(c, TensorBoard)]
    for board in boards:
        board.log_dir = str(Path(board.log_dir) / "evaluator")
        board.on_train_begin()
    history, progress = History(), dict[str, Any]()
    for path, updates in new_files(checkpoint.paths(saver.path)[0], over):
        progress = checkpoint.load(path, model.module, model.optimizer)
        step = int(progress.get("updates", updates))
        logs = {f"val_{name}": value for name, value in evaluate().items()}
        log.info("%s: %s", path.name, logs)
        for each in (history, *boards):
            each.on_epoch_end(step, logs)
    for board in boards:
        board.on_train_end()
    history.history = {**progress.get("history", {}), **history.history}
    return history


def new_files(pattern: Path, over: Callable[[], bool]) -> Iterator[tuple[Path, int]]:
    """Files as they appear or change, with their number; the last after the end, too.

    `pattern` may hold fields, {epoch} say, that stand for anything.
    """
    name = _FIELD.sub("*", pattern.name)
    folder = Path(_FIELD.sub("*", str(pattern.parent)))
    known: dict[Path, tuple[int, int]] = {}
    number = 0
    while True:
        ended = over()
        found = sorted((stamp(path), path) for path in _glob(folder, name))
        fresh = [(seen, path) for seen, path in found if known.get(path) != seen]
        for seen, path in fresh:
            known[path] = seen
            number += 1
            yield path, number
        if ended and not fresh:
            return
        if not fresh:
            time.sleep(_PAUSE)


def stamp(path: Path) -> tuple[int, int]:
    """When a file was last written to, and how long it is: another stamp, another content."""
    seen = path.stat()
    return seen.st_mtime_ns, seen.st_size


def _glob(folder: Path, name: str) -> list[Path]:
    root = Path(folder.anchor)  # a glob starts at a folder and goes down
    return list(root.glob(str((folder / name).relative_to(root))))
