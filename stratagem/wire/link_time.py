"""How long this process's links were busy, from the kernel's counters of TCP connections.

Gloo does not report how long its transfers take, and all replicas wait alike for the slowest. But
Linux counts for each socket the time in which sent bytes were unacknowledged (`tcpi_busy_time`):
much on a slow link, little elsewhere. Sockets are found by name once a second, as keeping a
duplicate would keep the connection open.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_BUSY = 168  # offset of the microseconds in Linux's `struct tcp_info`
_ESTABLISHED = 1

#: busy seconds of each Gloo socket when last read, by the kernel's name for it
_known: dict[str, float] = {}


def sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets, by the kernel's name for each."""
    found: dict[str, int] = {}
    for number in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                found[name] = int(number)
    return found


def watched(make: Callable[[], T]) -> T:
    """Call `make`, and watch the connections that it opens."""
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
    """Return a TCP connection's busy seconds; None if it is none, or Linux does not count them."""
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
