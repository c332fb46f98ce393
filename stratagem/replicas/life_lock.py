"""A lock that a process holds as long as it lives, so that a waiting thread learns of its death.

The kernel frees the memory of a dead process before it closes its sockets, which takes 20 to 150 ms
with torch. Before both it releases the robust mutexes of each thread that ends, and wakes a thread
that waits for one: within a millisecond, and at no cost meanwhile (Linux).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import time
from contextlib import suppress

_PROCESS_SHARED = _ROBUST = 1
_ATTRIBUTES = 64  # bytes, more than any C library needs
_PF_EXITING = 0x4
_FLAGS = 6  # the position of a thread's flags after its name in /proc/<pid>/stat
_LOOK, _MOST = 0.0005, 5.0  # seconds between two looks at the threads, and until the last

#: the locks that this process holds, whose memory must stay mapped
_held: list[LifeLock] = []


class LifeLock:
    """One mutex in shared memory. The owner makes it, the process `hold`s it, the owner waits."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        self._mutex = ctypes.byref(ctypes.c_char.from_buffer(self._memory))

    @classmethod
    def make(cls) -> LifeLock | None:
        """Make a lock; None where the system has no robust mutexes."""
        c = ctypes.CDLL(None)
        if sys.platform != "linux" or not hasattr(c, "pthread_mutexattr_setrobust"):
            return None
        fd = os.memfd_create("stratagem", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        self, attributes = cls(fd), ctypes.create_string_buffer(_ATTRIBUTES)
        _check(c.pthread_mutexattr_init(attributes))
        _check(c.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
        _check(c.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(c.pthread_mutex_init(self._mutex, attributes))
        return self

    def hold(self) -> None:
        """In the process, on its main thread: hold the lock until the process ends."""
        _check(ctypes.CDLL(None).pthread_mutex_lock(self._mutex))
        os.close(self.fd)
        _held.append(self)

    def await_end(self, pid: int) -> bool:
        """Wait until the holder has died, and none of its threads will run again.

        Returns False if that is not known: it did not hold the lock yet, or /proc is hidden.
        """
        c = ctypes.CDLL(None)
        died: bool = c.pthread_mutex_lock(self._mutex) == errno.EOWNERDEAD
        if died:
            c.pthread_mutex_consistent(self._mutex)
        c.pthread_mutex_unlock(self._mutex)
        until = time.monotonic() + _MOST
        while died and _runs(pid):
            time.sleep(_LOOK)
            died = time.monotonic() < until
        return died


def _check(error: int) -> None:
    if error:
        raise OSError(error, os.strerror(error))


def _runs(pid: int) -> bool:
    """Whether a thread of a process may still run, and write into shared memory."""
    if not os.path.isdir("/proc/self/task"):
        return True
    with suppress(FileNotFoundError):  # the process was reaped
        return not all(_is_exiting(pid, thread) for thread in os.listdir(f"/proc/{pid}/task"))
    return False


def _is_exiting(pid: int, thread: str) -> bool:
    try:
        with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
            said = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return bool(int(said.rpartition(b") ")[2].split()[_FLAGS]) & _PF_EXITING)
