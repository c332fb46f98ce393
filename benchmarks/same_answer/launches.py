"""Runs a peer's cases in processes of their own; what hangs is ended, and that is its result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers

HERE = Path(__file__).parent
#: seconds for a case; for processes to come to their first one; and to end after the last
LIMIT, START, GRACE = 60.0, 180.0, 20.0

#: what the processes left of a case, in their order: {"result": ..., "seen": ...}
Found = list[dict[str, Any]]


@dataclass(frozen=True)
class Failed:
    """A case that ended with an error, or that hung and was ended."""

    status: str
    words: str = ""
    seconds: float = 0.0


def run(peer: str, replicas: int, asked: Sequence[str]) -> dict[str, Found | Failed]:
    """Run all cases, in as many launches as it takes."""
    done: dict[str, Found | Failed] = {}
    while left := [each for each in asked if each not in done]:
        with tempfile.TemporaryDirectory() as folder, _launch(peer, replicas, left, folder) as job:
            for each in left:
                found = _wait(job, Path(folder), each, replicas)
                if found is None and each != left[0]:
                    break  # a process was late before, and ended: this one has a launch of its own
                done[each] = found or Failed("error", f"ended with {job.returncode}")
                if isinstance(found, Failed | None):
                    break
            else:
                _ended(job, GRACE)
    return done


@contextmanager
def _launch(
    peer: str, replicas: int, asked: Sequence[str], folder: str
) -> Iterator[subprocess.Popen[bytes]]:
    command = peers.peer(peer).command(replicas)
    command += [str(HERE / "child.py"), peer, str(replicas), folder, *asked]
    roots = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {
        **{k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "RANK", "WORLD_SIZE")},
        "PYTHONPATH": os.pathsep.join(roots),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "KERAS_BACKEND": "torch",
        "HF_HUB_OFFLINE": "1",
    }
    with open(Path(folder) / "log", "w") as log:
        job = subprocess.Popen(
            command, env=environ, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield job
    finally:
        _end(job, Path(folder))


def _wait(
    job: subprocess.Popen[bytes], folder: Path, case: str, replicas: int
) -> Found | Failed | None:
    """Return what all processes left of a case, or how it failed; None if they ended before it."""
    began, deadline = None, time.monotonic() + START
    while time.monotonic() < deadline:
        over = job.poll() is not None  # asked first: what it has left is there by now
        if list(folder.glob(f"{case}.*.error")):
            time.sleep(0.5)  # the first error is the cause of the others
            errors = [json.loads(path.read_text()) for path in folder.glob(f"{case}.*.error")]
            return Failed("error", min(errors, key=lambda each: each["time"])["words"])
        left = [folder / f"{case}.{rank}.json" for rank in range(replicas)]
        if all(path.exists() for path in left):
            return [json.loads(path.read_text()) for path in left]
        begun = list(folder.glob(f"{case}.*.begun"))
        if over and not begun:
            return None
        if over:
            print((folder / "log").read_text()[-2000:], file=sys.stderr)
            return Failed("error", f"ended with {job.returncode}")
        if began is None and len(begun) == replicas:
            began, deadline = time.monotonic(), time.monotonic() + LIMIT
        time.sleep(0.05)
    return Failed("hang", seconds=LIMIT if began else START)


def _ended(job: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        job.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(job: subprocess.Popen[bytes], folder: Path) -> None:
    """End the launcher, which ends its processes; then those that do not listen."""
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGTERM)
    if not _ended(job, GRACE):
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    for path in folder.glob("*.pid"):
        command = Path("/proc") / path.stem / "cmdline"
        if command.exists() and str(folder).encode() in command.read_bytes():
            os.kill(int(path.stem), signal.SIGKILL)
