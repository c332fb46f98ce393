"""Processes that are ended while they save, at each of their calls to the file system in turn.

`python -m tests.state.ended_savings <folder> <what>` raises where a checkpoint is lost, and prints
how many endings were tried. A process of its own, since it forks.
"""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from stratagem.state import checkpoint

CALLS = (
    "chmod",
    "close",
    "fsync",
    "link",
    "mkdir",
    "open",
    "remove",
    "rename",
    "replace",
    "rmdir",
    "symlink",
    "unlink",
    "write",
)
ENDED = 77
FILES = ["m.safetensors", "m.state.pt"]


def trained(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A module and its optimizer, full of one number."""
    module = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return module, optimizer


def save(folder: Path, value: float) -> None:
    checkpoint.save(folder / "m", *trained(value), {"value": value})


def loaded(folder: Path) -> float | None:
    """Return the number of the checkpoint, which all its parts must have; None without one."""
    if not (folder / "m.safetensors").exists():
        return None
    module, optimizer = trained(-1.0)
    value = checkpoint.load(folder / "m", module, optimizer)["value"]
    for parameter in module.parameters():
        assert (parameter == value).all(), (value, parameter)
        assert (optimizer.state[parameter]["momentum_buffer"] == value).all(), value
    return float(value)


def check_plain(folder: Path, value: float) -> None:
    """Check that there are just two files, which belong together and load without us."""
    assert sorted(os.listdir(folder)) == FILES, sorted(os.listdir(folder))
    assert (load_file(folder / "m.safetensors")["weight"] == value).all()
    assert torch.load(folder / "m.state.pt", weights_only=True)["value"] == value


def end_at(call: int) -> None:
    """End this process before its `call`-th call to the file system."""
    counter = itertools.count()

    def ending(function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == call:
                os._exit(ENDED)
            return function(*args, **kwargs)

        return count

    for name in CALLS:
        setattr(os, name, ending(getattr(os, name)))


def end_at_byte(size: int) -> None:
    """End this process when a file that it writes, in whatever language, grows past `size`."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


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
    assert status in (0, ENDED, -signal.SIGXFSZ), status
    return status == 0


def try_endings(root: Path, ending: Callable[[int], None], step: int, *, first: bool) -> int:
    """Kill a save at every call in turn, and a second save at varying calls."""
    for at in itertools.count(0, step):
        folder = root / f"{ending.__name__}-{first}-{at}"
        folder.mkdir()
        before = None
        if not first:
            save(folder, before := 1.0)
        done = survives(folder, 2.0, ending, at)
        found = loaded(folder)
        assert found in ((2.0,) if done else (before, 2.0)), (at, found)
        moved = folder.rename(root / "moved")  # and it may be taken elsewhere
        survives(moved, 3.0, end_at, at * 5 // step % 23)
        assert loaded(moved) in (found, 3.0), at
        save(moved, 4.0)
        assert loaded(moved) == 4.0
        check_plain(moved, 4.0)
        shutil.rmtree(moved)
        if done:
            return at // step
    raise AssertionError("never reached")


def save_often(folder: Path, first: float) -> int:
    for number in range(100):
        save(folder, first + number)
    return 100


def load_often(folder: Path) -> int:
    """Load repeatedly until the saving processes have ended."""
    for number in itertools.count(1):
        loaded(folder)
        if (folder.parent / "saved").exists():
            return number
    raise AssertionError("never reached")


def main() -> None:
    torch.set_num_threads(1)
    root, what = Path(sys.argv[1]), sys.argv[2]
    if what == "end":
        for first in (False, True):
            print(try_endings(root, end_at, 1, first=first))
            print(try_endings(root, end_at_byte, 300, first=first))
        return
    print("ready", flush=True)
    sys.stdin.readline()  # all begin at once
    print(load_often(root) if what == "load" else save_often(root, float(what)))


if __name__ == "__main__":
    main()
