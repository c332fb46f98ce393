"""Sockets that a forked child must not keep.

A child (a DataLoader's worker, say) that inherits a connection would hold it open after its
parent was killed, and the peer would not notice the death.
"""

from __future__ import annotations

import os
import socket
import weakref
from typing import TypeVar

_Socket = TypeVar("_Socket", bound=socket.socket)

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def not_in_children(sock: _Socket) -> _Socket:
    """Have every child forked from now on close its copy, without a word to the peer."""
    _sockets.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
