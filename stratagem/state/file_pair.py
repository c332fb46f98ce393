"""Two files that are replaced together, by one rename.

A save writes both into a folder beside them, `model.part-<number>`, and flushes them to disk. Then
it renames the weights: that is the commit, because the weights contain the number of their save.
At last it renames the state and removes the folder. If the process ends

    before the commit   the old files are unchanged, and the folder is left over
    after it            the weights are new, and their number leads to the folder's state

The next save finishes or removes such folders. Saves to one name take turns by a lock on
`.model.safetensors.lock`, which ends with its process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from stratagem.errors import UsageError

log = logging.getLogger("stratagem")

_NUMBER = re.compile(r"[0-9a-f]{16}")
_WEIGHTS, _STATE = "weights.safetensors", "state.pt"  # inside the folder of a save
#: as safetensors and HDF5 write an error of the system
_NUMBERED = re.compile(r"(?:os error |errno = )(\d+)")
_ERRORS = (OSError, RuntimeError, SafetensorError)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PAUSE, _LONG = 0.02, 10.0  # seconds between two tries for the lock, and before a warning
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # Lustre without -o flock, for one


@dataclass(frozen=True)
class FilePair:
    """The weights and state files of one name; `number_of` reads a weights file's number."""

    weights: Path
    state: Path
    number_of: Callable[[Path], str | None]

    def replace(self, write: Callable[[Path, Path, str], None]) -> None:
        """Replace both files, or neither; `write` gets two paths and the number of this save."""
        number = secrets.token_hex(8)
        part = self._part(number)
        weights, state = part / _WEIGHTS, part / _STATE
        with turn(self._lock):
            self._settle()
            part.mkdir()
            try:
                write(weights, state, number)
                weights.chmod(stat.S_IMODE(state.stat().st_mode))  # safetensors makes its own 0600
                for path in (weights, state, part, part.parent):
                    flush(path)
                os.replace(weights, self.weights)  # the commit
            finally:
                try:
                    self._settle()
                except OSError as problem:  # the files are valid, committed or not
                    log.warning("while %s was saved: %s", self.weights, problem)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Hold the lock against saves, where that is possible: not in a read-only folder."""
        with ExitStack() as held:
            try:
                held.enter_context(turn(self._lock))
            except OSError as problem:
                log.info("%s is read while others may replace it: %s", self.weights, problem)
            yield

    def state_of(self, number: str | None) -> Path:
        """Return the state file for weights with this number: in the folder of their save if that
        was interrupted, else under its own name."""
        if number is not None and _NUMBER.fullmatch(number):
            waiting = self._part(number) / _STATE
            if waiting.is_file():
                return waiting
        return self.state

    def _settle(self) -> None:
        """Finish an interrupted save that was committed, and remove other leftovers."""
        named = re.compile(re.escape(self._beside("part-").name) + _NUMBER.pattern)
        for part in [each for each in self.weights.parent.iterdir() if named.fullmatch(each.name)]:
            try:
                self._settle_one(part)
            except OSError as problem:
                raise OSError(
                    f"{part}, which a saving has left, cannot be moved to {self.state.name} or "
                    f"removed ({problem.strerror or problem}); put that right and save again"
                ) from problem

    def _settle_one(self, part: Path) -> None:
        state = part / _STATE
        if state.is_file() and part == self._part(self._committed()):
            flush(part.parent)  # else a power cut may take the weights' move back, not this
            os.replace(state, self.state)
        shutil.rmtree(part)

    @property
    def _lock(self) -> Path:
        return self.weights.with_name(f".{self.weights.name}.lock")

    def _committed(self) -> str | None:
        return self.number_of(self.weights) if self.weights.is_file() else None

    def _part(self, number: str | None) -> Path:
        return self._beside(f"part-{number}")

    def _beside(self, ending: str) -> Path:
        return self.weights.with_name(f"{self.weights.stem}.{ending}")


@contextmanager
def told(where: Path, what: str, left: str, of: tuple[Any, ...] = _ERRORS) -> Iterator[None]:
    """Tell why files could not be written; libraries tell a full disk in words of their own."""
    try:
        yield
    except UsageError:
        raise
    except of as problem:
        number = _number_of(problem)
        if number not in _FULL:
            raise OSError(f"{what}: {problem}. {left}") from problem
        why = os.strerror(number)
        text = f"make room in {where} and save again; {what}: {why} ({where}). {left}"
        raise OSError(number, text) from problem


def _number_of(problem: BaseException | None) -> int | None:
    """The system's number of an error, or of one that it came of."""
    while problem is not None:
        named = _NUMBERED.search(str(problem))
        if isinstance(problem, OSError) and problem.errno:
            return problem.errno
        if named:
            return int(named[1])
        problem = problem.__cause__ or problem.__context__
    return None


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as problem:
        if not path.is_dir() or problem.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        log.debug("the file system cannot flush the names in %s: %s", path, problem)
    finally:
        os.close(opened)


@contextmanager
def turn(lock: Path) -> Iterator[None]:
    """Wait for the lock, and hold it."""
    since, warned = time.monotonic(), False
    while (held := _take(lock)) is None:
        if not warned and time.monotonic() - since > _LONG:
            warned = True
            log.warning(
                "another process has been saving here for %.0f s and holds %s; waiting for it. If "
                "it is stopped, end it: the lock ends with it.",
                _LONG,
                lock,
            )
        time.sleep(_PAUSE)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(held)


def _take(lock: Path) -> int | None:
    """Return the open lock; None if another process holds it, or has just removed it."""
    opened = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(lock), os.fstat(opened)):
            return opened
    except (BlockingIOError, FileNotFoundError):
        log.debug("%s is held by another process", lock)
    except OSError as problem:
        if problem.errno not in _NO_LOCKS:
            os.close(opened)
            raise
        warnings.warn(
            f"the file system of {lock.parent} has no locks ({problem.strerror}): let one process "
            "at a time save to one name there.",
            stacklevel=2,
        )
        return opened
    os.close(opened)
    return None
