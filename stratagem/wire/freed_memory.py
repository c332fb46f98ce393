"""Memory that this process has freed, and its C library keeps for later."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


@cache
def _trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; other C libraries have none."""
    if not sys.platform.startswith("linux"):
        return None
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


def return_freed_memory() -> None:
    """Give freed memory back to the system now.

    Once glibc has seen a block of some megabytes freed, it takes blocks of that size from its heap
    and keeps them there. A process that moves a model elsewhere would hold its memory twice.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
