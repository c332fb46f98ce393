"""Ports for tests, free until whoever is to listen there comes to it.

A port that the system chose and took back may be its next choice for another test, which runs at
the same time. So these are none of those that the system chooses, and every process that runs
tests has a range of its own.
"""

from __future__ import annotations

import itertools
import os
import socket

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_START = 12_000 + 4_000 * (os.getppid() % 4) + 1_000 * (_WORKER % 4)  # up to 27,999 of 32,767
_first = os.getpid() % 1_000  # two runs may have the same range, and begin elsewhere in it
_numbers = itertools.cycle([_START + (_first + i) % 1_000 for i in range(1_000)])


def _free(port: int, host: str) -> bool:
    try:
        socket.create_server((host, port)).close()
    except OSError:
        return False
    return True


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many, all different; none comes again soon."""
    return list(itertools.islice((port for port in _numbers if _free(port, host)), count))
