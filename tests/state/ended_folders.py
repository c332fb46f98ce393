"""Processes that are ended while they save into a folder of checkpoints, at each of their calls.

`python -m tests.state.ended_folders <folder>` raises where a checkpoint is lost, and prints how
many endings were tried. A process of its own, since it forks.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from stratagem.state import checkpoint
from stratagem.state.checkpoint_folder import CheckpointFolder, CheckpointWriter
from tests.state.ended_savings import end_at, end_at_byte, trained

KEEP = 2


def save(folder: Path, value: float) -> None:
    """Save as a training does: in a thread, from a copy."""
    taken = checkpoint.snapshot(*trained(value), {"value": value}, copy=True)
    writer = CheckpointWriter(CheckpointFolder(folder, KEEP))
    writer.save(taken, {"step": int(value)})
    writer.wait()


def loaded(folder: Path) -> float | None:
    """Return the number of the newest checkpoint, which all its parts must have."""
    path = CheckpointFolder(folder, KEEP).newest()
    if path is None:
        return None
    module, optimizer = trained(-1.0)
    value = checkpoint.load(path / "model", module, optimizer)["value"]
    for parameter in module.parameters():
        assert (parameter == value).all(), (value, parameter)
        assert (optimizer.state[parameter]["momentum_buffer"] == value).all(), value
    assert path.name.endswith(f"-step-{int(value)}")
    return float(value)


def survives(folder: Path, value: float, ending: Callable[[int], None], at: int) -> bool:
    """Save in a process that is killed; return whether it finished before."""
    child = os.fork()
    if child == 0:
        try:
            ending(at)
            save(folder, value)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status != 1
    return status == 0


def try_endings(root: Path, ending: Callable[[int], None], step: int, before: int) -> int:
    """Kill a save at every call in turn; `before`: how many checkpoints exist."""
    template = root / f"template-{ending.__name__}-{before}"
    template.mkdir()
    for value in range(1, before + 1):
        save(template, float(value))
    for at in itertools.count(0, step):
        folder = root / f"{ending.__name__}-{before}-{at}"
        shutil.copytree(template, folder)
        done = survives(folder, before + 1.0, ending, at)
        found = loaded(folder)
        assert found in ((before + 1,) if done else (before or None, before + 1)), (at, found)
        save(folder, 10.0)
        assert loaded(folder) == 10.0
        names = sorted(os.listdir(folder))
        assert len(names) <= KEEP and not any(name.startswith(".") for name in names), names
        shutil.rmtree(folder)
        if done:
            return at // step
    raise AssertionError("never reached")


def main() -> None:
    torch.set_num_threads(1)
    root = Path(sys.argv[1])
    for before in (0, KEEP):
        print(try_endings(root, end_at, 1, before))
        print(try_endings(root, end_at_byte, 1000, before))


if __name__ == "__main__":
    main()
