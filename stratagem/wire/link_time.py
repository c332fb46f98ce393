"""How long this process's links were busy: the kernel knows it of every TCP connection.

Gloo does not tell how long its transfers take, and all replicas wait alike for the slowest. But of
each socket Linux counts the time in which sent bytes were not yet confirmed (`tcpi_busy_time`):
much on a slow way out, little elsewhere. Sockets are looked at once a second, by their names: a
duplicate that was kept would keep the connection open.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_BUSY = 168  # where Linux has the microseconds in its `struct tcp_info`
_ESTABLISHED = 1

#: by the kernel's names for Gloo's sockets: the seconds that each had been busy when looked at
_known: dict[str, float] = {}


def sockets() -> dict[str, int]:
    """The sockets of this process: the name that the kernel gives each, and its descriptor."""
    found: dict[str, int] = {}
    for number in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                found[name] = int(number)
    return found


def watched(make: Callable[[], T]) -> T:
    """Call `make`, and watch the links that it opens from now on."""
    before = set(sockets())
    made = make()
    for name, fd in sockets().items():
        if name not in before and (seconds := _busy(fd)) is not None:
            _known[name] = seconds
    return made


def busy() -> float:
    """Return the seconds that the busiest link was busy since the last call."""
    if not _known:
        return 0.0
    here, most = sockets(), 0.0
    for name, before in list(_known.items()):
        seconds = _busy(here[name]) if name in here else None
        if seconds is None:
            del _known[name]  # closed
            continue
        most = max(most, seconds - before)
        _known[name] = seconds
    return most


def _busy(fd: int) -> float | None:
    """Of a TCP connection; None for anything else, or where the kernel does not count."""
    try:
        with socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BUSY + 8)
    except OSError:  # closed meanwhile
        return None
    if len(told) < _BUSY + 8 or told[0] != _ESTABLISHED:
        return None
    return int.from_bytes(told[_BUSY : _BUSY + 8], sys.byteorder) / 1e6
