"""Ties the tasks to the launcher's life; run as a script, so it imports nothing of stratagem.

tether.py hold PID COMMAND...   become COMMAND, which dies when its parent PID does
tether.py guard FOLDER          when stdin closes, kill the process groups that it named, and
                                remove the launcher's folder if it is still there
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1  # kept across exec


def die_with(parent: int) -> None:
    """Be killed by the kernel when `parent` is gone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


def hold(parent: int, command: list[str]) -> None:
    """Become `command`, which dies with `parent`."""
    die_with(parent)
    # An interpreter ignores SIGPIPE, a shell's background job SIGINT; both would outlive exec.
    for name in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(name, signal.SIG_DFL)
    os.execv(command[0], command)


def guard(lines: Iterable[str], folder: str) -> None:
    """Keep the process groups that lines add (+pid) and remove (-pid); at the end, kill them.

    The kernel kills only the launcher's children; the processes that they started are killed here.
    """
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    groups: set[int] = set()
    for line in lines:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):  # the launcher has removed it
        for file in os.listdir(folder):
            os.unlink(os.path.join(folder, file))
        os.rmdir(folder)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(int(sys.argv[2]), sys.argv[3:])
    else:
        guard(sys.stdin, sys.argv[2])
