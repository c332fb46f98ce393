"""A command in a process of its own, so that somebody is left to say what became of it.

A script that takes more memory than there is gets killed by the system without a word.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from stratagem.errors import StratagemError
from stratagem.launch.tether import die_with

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


class Killed(StratagemError):
    """The system ended a process that did nothing wrong."""


def apart(work: Callable[[], int]) -> int:
    """The exit code of `work`, done in a child: signals are passed on, and its death is told."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        die_with(parent)
        return work()
    return _wait(child)


def _wait(child: int) -> int:
    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells both
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        raise Killed(
            "the script was killed, by the system if nobody else: its model, data and gradients "
            "most likely take more memory than there is; try a smaller model or --batch, or a "
            "machine with more."
        )
    return 128 - code if code < 0 else code
