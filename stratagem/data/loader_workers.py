"""DataLoader workers that survive the SIGTERM which a scheduler sends to every process of a job.

Their training saves a checkpoint then, and needs them for the batches until that. So they end by a
SIGTERM from their parent, and soon after its end, but by no other SIGTERM. Processes that they
start end by any SIGTERM, as usual.
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
    """Unblock SIGTERM in child processes, which inherit the mask: it may be used to end them."""
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
    """End this process when its parent sends SIGTERM, or has ended after a SIGTERM for all."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # a forked worker keeps the parent's sentinel open itself; others are children of a fork server
    forked = os.getppid() == parent.pid
    received: signal.struct_siginfo | None = signal.sigwaitinfo(_SIGNALS)
    while received is None or received.si_pid != parent.pid:
        if os.getppid() != parent.pid if forked else not parent.is_alive():
            break
        received = signal.sigtimedwait(_SIGNALS, _POLL_SECONDS)
    os._exit(0)


@contextmanager
def outlasting(source: Any) -> Iterator[None]:
    """Have workers that a loader starts in this block survive SIGTERM."""
    if not isinstance(source, DataLoader) or not source.num_workers:
        yield
        return
    own = source.worker_init_fn
    source.worker_init_fn = OutlastSignals(own)
    try:
        yield
    finally:
        source.worker_init_fn = own
