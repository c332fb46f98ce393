"""Memory that this process has freed: glibc keeps some of it for later, and gives the rest back.

A training step takes and frees the same blocks again and again. By default glibc gives the end of
its heap back to the system whenever that is free, and the next step takes it again, page by page:
thousands of page faults, a tenth to a quarter of a step of recurrent and small networks. So a
process that trains on its CPU keeps what it has freed until its last strategy is closed, and a
process that moves a model elsewhere gives the model's memory back at once. The settings are those
of the process, so they count for all that it allocates, and processes that are forked from it
later inherit them. (torch for aarch64 has an allocator of its own, which does likewise.)
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from functools import cache
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
#: the size from which glibc takes a block from the system and gives it back: the most that it
#: chooses by itself, for a program that frees large blocks
_LARGE = 32 << 20
#: how much may be free at the end of the heap: mallopt takes an int, and -1 is without limit;
#: afterwards twice the size above, which is glibc's own choice for such a program
_ANY, _SOME = -1, 2 * _LARGE
#: by these a user has chosen
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@cache
def _glibc() -> Any:
    """The C library of this process if it is glibc."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return library if hasattr(library, "malloc_trim") else None


#: the open strategies that train here
_users: weakref.WeakSet[object] = weakref.WeakSet()


def _set(kept: int) -> None:
    if _glibc() is not None and not any(name in os.environ for name in _CHOSEN):
        _glibc().mallopt(_TRIM_THRESHOLD, kept)
        _glibc().mallopt(_MMAP_THRESHOLD, _LARGE)


def keep_freed_memory(user: object = None) -> None:
    """Have this process keep freed memory for the next step, until its last user lets go."""
    if user is not None:
        _users.add(user)
    _set(_ANY)


def let_go_of_freed_memory(user: object) -> None:
    """Give freed memory back now; after the last user, 64 MiB and more of it from now on, too."""
    if user in _users:
        _users.discard(user)
        if not _users:
            _set(_SOME)
        return_freed_memory()


def return_freed_memory() -> None:
    """Give freed memory back to the system now."""
    if _glibc() is not None:
        _glibc().malloc_trim(0)
