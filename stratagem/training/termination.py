"""SIGTERM while a training keeps checkpoints: it saves one more, and ends with a code of its own.

Schedulers send SIGTERM some time before they take a machine away. `EXIT_CODE` means that everything
is saved: the same command, started again, goes on from there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

#: EX_TEMPFAIL of sysexits.h: a failure that passes; try again
EXIT_CODE = 75


#: seconds in which a second SIGTERM is the first once more: schedulers signal every process, and a
#: launcher among them passes it on
_AT_ONCE = 2.0


class Termination:
    """While it is open, SIGTERM only sets `asked`; a later SIGTERM ends the process."""

    def __init__(self) -> None:
        self.asked = False
        self._since = 0.0
        self._before: Any = None
        self._open = False

    def open(self) -> None:
        """Begin to catch SIGTERM, unless it is caught already."""
        if not self._open:
            self.__enter__()

    def close(self) -> None:
        """Catch SIGTERM no more."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Termination:
        # a user's own handler stays: it may save a checkpoint itself
        default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if threading.current_thread() is threading.main_thread() and default:
            self._before = signal.signal(signal.SIGTERM, self._receive)
            self._open = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._open:
            signal.signal(signal.SIGTERM, self._before)
            self._open = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.asked and time.monotonic() - self._since > _AT_ONCE:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if not self.asked:
            self.asked, self._since = True, time.monotonic()
