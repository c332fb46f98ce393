"""Worker processes of a DataLoader when a scheduler signals every process of a job.

The training that has them saves a checkpoint then, and needs them for the batches until that. So
they end by SIGTERM of their parent, and soon after its end, and by no other SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class OutlastSignals:
    """A `worker_init_fn` around the user's own; torch has set its handlers before."""

    own: Callable[[int], Any] | None

    def __call__(self, number: int) -> None:
        before = signal.getsignal(signal.SIGTERM)
        if self.own is not None:
            self.own(number)
        if signal.getsignal(signal.SIGTERM) is before:  # else the user has one
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    """End this process when its parent says so, or has ended behind a SIGTERM for all."""
    told: signal.struct_siginfo | None = signal.sigwaitinfo({signal.SIGTERM})
    while told is None or told.si_pid != parent:
        if os.getppid() != parent:
            break
        told = signal.sigtimedwait({signal.SIGTERM}, _POLL_SECONDS)
    os._exit(0)


@contextmanager
def outlasting(source: Any) -> Iterator[None]:
    """Have workers that a loader starts meanwhile outlast SIGTERM."""
    if not isinstance(source, DataLoader) or not source.num_workers:
        yield
        return
    own = source.worker_init_fn
    source.worker_init_fn = OutlastSignals(own)
    try:
        yield
    finally:
        source.worker_init_fn = own
