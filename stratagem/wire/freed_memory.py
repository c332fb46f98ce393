"""Memory that this process has freed: glibc keeps some of it for later, and gives the rest back.

A training step takes and frees the same blocks again and again. By default glibc gives the end of
its heap back to the system whenever that is free, and the next step takes it again, page by page:
thousands of page faults, a tenth to a quarter of a step of recurrent and small networks. So a
process that trains keeps what it has freed, and a process that moves a model elsewhere gives the
model's memory back at once. (torch for aarch64 has an allocator of its own, which does likewise.)
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
#: the size from which glibc takes a block from the system and gives it back: the most that it
#: chooses by itself, for a program that frees large blocks
_LARGE = 32 << 20
_NEVER = (1 << 31) - 1
#: by these a user has chosen
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@cache
def _glibc() -> Any:
    """The C library of this process if it is glibc."""
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return library if hasattr(library, "malloc_trim") else None


def keep_freed_memory() -> None:
    """Have this process, and those that it forks, keep freed memory for the next step."""
    if _glibc() is not None and not any(name in os.environ for name in _CHOSEN):
        _glibc().mallopt(_TRIM_THRESHOLD, _NEVER)
        _glibc().mallopt(_MMAP_THRESHOLD, _LARGE)


def return_freed_memory() -> None:
    """Give freed memory back to the system now."""
    if _glibc() is not None:
        _glibc().malloc_trim(0)
