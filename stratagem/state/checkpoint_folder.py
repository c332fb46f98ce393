"""A folder of checkpoints, of which the last few are kept.

    run/000007-step-120/model.safetensors    the weights; load with safetensors and torch alone
    run/000007-step-120/model.state.pt       optimizer, progress, random numbers, callbacks, ...;
                                             torch.load(..., weights_only=True)
    run/000007-step-120/manifest.json        sizes and checksums of both, and training progress

A checkpoint is written into a hidden folder, flushed, and renamed: that is the commit. The first
number only grows, so the newest has the highest. A process that ends at any moment leaves the
older checkpoints, and perhaps a hidden folder, which the next save removes. Loading compares
checksums, and falls back to the checkpoint before a damaged one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from stratagem.errors import UsageError
from stratagem.state import checkpoint
from stratagem.state.checkpoint import CheckpointCopy
from stratagem.state.file_pair import flush, told, turn

log = logging.getLogger("stratagem")

_NAME = re.compile(r"(\d{6,})-step-(\d+)")
_HIDDEN = re.compile(r"\.\d{6,}-step-\d+\.(part|old)-[0-9a-f]{16}")
_FILES = ("model.safetensors", "model.state.pt")
_TRAINING = ".training"
_MANIFEST = "manifest.json"
_FORMAT = 1
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Checkpoints:
    """Where `fit` keeps checkpoints, how often, and how many of them.

        model.fit(x, y, checkpoint=sg.Checkpoints("run/", seconds=60, keep=3), resume=True)

    Args:
        path: a folder for these checkpoints only.
        every: batches between checkpoints.
        seconds: seconds between checkpoints; with `every`, whichever comes first. There is always
            one at the end of each epoch.
        keep: how many checkpoints are kept.
    """

    path: str | os.PathLike[str]
    every: int | None = None
    seconds: float | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise UsageError(f"every={self.every}: a checkpoint comes after 1 batch or more.")
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"seconds={self.seconds}: it is a time above 0.")
        if self.keep < 1:
            raise UsageError(f"keep={self.keep}: 1 checkpoint or more stays.")


class Snapshot(Protocol):
    """The content of a checkpoint."""

    def write(self, *paths_and_number: Any) -> None:
        """Write the files at these paths, with the number of this save."""


class CheckpointFolder:
    """The checkpoints of one training."""

    def __init__(
        self, path: str | os.PathLike[str], keep: int = 3, files: Sequence[str] = _FILES
    ) -> None:
        self.path, self._keep, self._files = Path(path), keep, files

    @contextmanager
    def held(self, *, successor: bool = False) -> Iterator[None]:
        """Keep other trainings out of the folder. `successor`: the process before this one may
        still stand still somewhere, so that this is only told."""
        file = self.path / _TRAINING
        with self._told():
            self.path.mkdir(parents=True, exist_ok=True)
            opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # of a process, so that replicas, which are forked, do not hold it
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(opened, 0)
            os.write(opened, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError:
            other = os.read(opened, 200).decode(errors="replace") or "another process"
            os.close(opened)
            text = (
                f"give this training a checkpoint folder of its own, or end the other: {other} "
                f"trains and keeps its checkpoints in {self.path}, and both would write over each "
                "other."
            )
            if not successor:
                raise UsageError(text) from None
            log.warning(text)
            yield
            return
        except OSError as problem:
            log.info("%s cannot be locked: %s", file, problem)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            os.close(opened)

    def names(self) -> list[Path]:
        """Return the committed checkpoints, the oldest first."""
        if not self.path.is_dir():
            return []
        found = [(_NAME.fullmatch(each.name), each) for each in self.path.iterdir()]
        return [path for _, path in sorted((int(m[1]), each) for m, each in found if m)]

    def write(self, snapshot: Snapshot, position: dict[str, Any]) -> Path:
        """Commit a checkpoint, and remove the oldest beyond `keep`; `position` goes into the
        manifest and has the number of steps."""
        with self._told():
            self.path.mkdir(parents=True, exist_ok=True)
            with turn(self.path / ".lock"):
                self._tidy()
                return self._write(snapshot, position)
        raise AssertionError("told() raises or lets pass")

    def _told(self) -> AbstractContextManager[None]:
        left = "Those that were saved there before are as they were."
        return told(self.path, f"a checkpoint could not be saved in {self.path}", left)

    def _write(self, snapshot: Snapshot, position: dict[str, Any]) -> Path:
        before = self.names()
        last = int(_NAME.fullmatch(before[-1].name)[1]) if before else 0  # type: ignore[index]
        path = self.path / f"{last + 1:06d}-step-{position['step']}"
        number = secrets.token_hex(8)
        part = self.path / f".{path.name}.part-{number}"
        part.mkdir()
        files = [part / name for name in self._files]
        snapshot.write(*files, number)
        mode = stat.S_IMODE(files[-1].stat().st_mode)
        files[0].chmod(mode)  # safetensors makes its own 0600
        sums = {each.name: _checksum(each) for each in files}
        manifest = {"format": _FORMAT, **position, "files": sums}
        (part / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for each in (*files, part / _MANIFEST, part, self.path):
            flush(each)
        os.replace(part, path)  # the commit
        flush(self.path)
        for old in [*before, path][: -self._keep]:
            self._remove(old)
        return path

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint, renaming it first so that it is never half there."""
        hidden = self.path / f".{path.name}.old-{secrets.token_hex(8)}"
        with _logged(path):
            os.replace(path, hidden)
            shutil.rmtree(hidden)

    def _tidy(self) -> None:
        """Remove what interrupted saves have left."""
        for each in list(self.path.iterdir()):
            if _HIDDEN.fullmatch(each.name):
                with _logged(each):
                    shutil.rmtree(each)

    def newest(self) -> Path | None:
        """Return the newest undamaged checkpoint, if there is one."""
        found = self.names()
        for path in reversed(found):
            flaw = self.flaw(path)
            if flaw is None:
                return path
            log.warning("%s is damaged (%s); taking the checkpoint before it", path, flaw)
        if found:
            raise UsageError(
                f"none of the {len(found)} checkpoints in {self.path} is whole. Put a whole copy "
                "in its place, or give another folder to begin anew."
            )
        return None

    def flaw(self, path: Path) -> str | None:
        """Return what is wrong with a checkpoint; None if it is undamaged."""
        try:
            manifest = json.loads((path / _MANIFEST).read_text())
            if manifest["format"] != _FORMAT:
                return f"its format is {manifest['format']!r}, and this version knows {_FORMAT}"
            for name in self._files:
                if manifest["files"][name] != _checksum(path / name):
                    return f"{name} does not have the checksum that was written"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            return f"{type(problem).__name__}: {problem}"
        return None


def load_newest(
    plan: Checkpoints,
    module: nn.Module,
    optimizer: Optimizer | None,
    made_by: str,
    batch_size: int | None,
) -> dict[str, Any] | None:
    """Load the newest checkpoint into model and optimizer; return its other content, or None.

    `made_by`: "fit", or "loop" for custom loops, which save other content.
    """
    folder = CheckpointFolder(plan.path, plan.keep)
    path = folder.newest()
    if path is None:
        log.info("%s has no checkpoint; the training begins", folder.path)
        return None
    found: dict[str, Any] | None = checkpoint.load(path / "model", module, optimizer).get("resume")
    if found is None:
        raise UsageError(
            f"{path} has weights and no progress of a training; it was put there by something "
            "else. Give a folder of checkpoints of its own."
        )
    if found.get("made_by", "fit") != made_by:
        names = {"fit": "fit(..., checkpoint=...)", "loop": "prepare(..., resume=...)"}
        raise UsageError(
            f"{path} was saved by {names[found.get('made_by', 'fit')]}, and {names[made_by]} "
            "cannot go on from it. Give another folder, or load its weights: "
            "safetensors.torch.load_file."
        )
    before = found.get("batch_size")
    if found["batch"] and None not in (before, batch_size) and before != batch_size:
        raise UsageError(
            f"{path} was saved in mid-epoch with batch_size={before}, and batch_size={batch_size} "
            f"would read rows twice, or not at all; give batch_size={before} until the epoch ends."
        )
    log.info("going on from %s", path)
    return found


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Log a failed removal: it costs disk space, but no checkpoint."""
    try:
        yield
    except OSError as problem:
        log.warning("%s could not be removed: %s", path, problem)


def _checksum(path: Path) -> dict[str, Any]:
    total, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            total.update(chunk)
            size += len(chunk)
    return {"bytes": size, "sha256": total.hexdigest()}


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread, while training goes on."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._held = ExitStack()

    def open(self, *, successor: bool) -> None:
        """Keep other trainings out of the folder, until `close`."""
        self._held.enter_context(self.folder.held(successor=successor))

    def close(self) -> None:
        """Wait until everything is written, and let others in."""
        with self._held:
            self.wait()

    def save(self, snapshot: CheckpointCopy, position: dict[str, Any]) -> None:
        """Begin to write, after waiting for the last one; raise the error of that, if any."""
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, position), name="stratagem-checkpoint"
        )
        self._thread.start()

    def _write(self, snapshot: CheckpointCopy, position: dict[str, Any]) -> None:
        try:
            self.folder.write(snapshot, position)
        except BaseException as problem:  # raised where training waits for it
            self._problem = problem

    def wait(self) -> None:
        """Wait until everything is written; raise the error of the last write, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
