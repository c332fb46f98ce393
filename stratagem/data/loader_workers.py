"""Worker processes of a DataLoader when a scheduler signals every process of a job.

The training that has them saves a checkpoint then, and needs them for the batches until that. So
they end by SIGTERM of their parent, and soon after its end, and by no other SIGTERM. What they
start themselves ends by any, as always.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

_POLL_SECONDS = 0.2
_SIGNALS = {signal.SIGTERM}


@dataclass(frozen=True)
class OutlastSignals:
    """A `worker_init_fn` around the user's own; torch has set its handlers before."""

    own: Callable[[int], Any] | None

    def __call__(self, number: int) -> None:
        before = signal.getsignal(signal.SIGTERM)
        if self.own is not None:
            self.own(number)
        if signal.getsignal(signal.SIGTERM) is before:  # else the user has one
            _unblock_in_children()
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
            threading.Thread(target=_watch, daemon=True).start()


def _unblock_in_children() -> None:
    """A mask is inherited, and who starts a program may end it by SIGTERM, and wait for that."""
    unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, _SIGNALS)
    os.register_at_fork(after_in_child=unblock)
    start = subprocess.Popen.__init__

    def start_unblocked(self: Any, *args: Any, **options: Any) -> None:
        before = unblock()
        try:
            start(self, *args, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    subprocess.Popen.__init__ = start_unblocked  # type: ignore[method-assign]


def _watch() -> None:
    """End this process when its parent says so, or has ended behind a SIGTERM for all."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # forked ones keep open what tells others of a parent's end; others are a fork server's
    forked = os.getppid() == parent.pid
    told: signal.struct_siginfo | None = signal.sigwaitinfo(_SIGNALS)
    while told is None or told.si_pid != parent.pid:
        if os.getppid() != parent.pid if forked else not parent.is_alive():
            break
        told = signal.sigtimedwait(_SIGNALS, _POLL_SECONDS)
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
