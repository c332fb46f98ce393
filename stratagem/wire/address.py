"""Addresses of the wire, and the sockets behind them.

`host:port` is TCP. `unix:@name` is a Unix socket in Linux's abstract namespace, without a file;
`unix:/path` is one with a file, for other systems.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import tempfile
import time

from stratagem.cluster import sockets
from stratagem.cluster.parsing import quote
from stratagem.errors import ClusterError, UsageError

_LINUX = sys.platform == "linux"
_UNIX = "unix:"
_PRIVATE = "stratagem-wire-"
_BACKLOG = 128
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def local_address() -> str:
    """Return a new, unguessable address for processes of this machine."""
    if _LINUX:
        return f"{_UNIX}@stratagem-{secrets.token_hex(16)}"
    return f"{_UNIX}{tempfile.mkdtemp(prefix=_PRIVATE)}/wire"


def is_unix(address: str) -> bool:
    """Whether this is the address of a Unix socket."""
    return address.startswith(_UNIX)


def encrypted(address: str, tls: bool | None) -> bool:
    """Whether to encrypt: as `tls` says, or if None, unless the address is local."""
    if is_unix(address):
        _unix_name(address)
        if tls:
            raise UsageError(
                f"{address}: a Unix socket does not leave the machine and is not encrypted; leave "
                "tls out, or give the task a host:port"
            )
        return False
    try:
        local = sockets.is_loopback(address)
    except ValueError as problem:
        raise ClusterError(
            f"the address {quote(address)} {problem}; correct: 10.0.0.5:2222, or unix:@name"
        ) from None
    return not local if tls is None else tls


def call(address: str, limit: float) -> socket.socket:
    """Connect within `limit` seconds; OSError if no listener answers."""
    if is_unix(address):
        return _call_unix(_unix_name(address), time.monotonic() + limit)
    return sockets.connect(address, limit)


def _call_unix(name: str, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            try:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                sock.connect(name)
                sock.settimeout(None)
                return sock
            except BlockingIOError:
                # The listener's backlog is full, and connect() does not block then, as TCP's does.
                if time.monotonic() >= deadline:
                    raise TimeoutError("timed out: many wait there already") from None
                time.sleep(0.01)
    except BaseException:
        sock.close()
        raise


def listen(address: str, who: str) -> socket.socket:
    """Listen on an address of this machine, on that interface only."""
    if not is_unix(address):
        return sockets.listen(address, who)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_unix_name(address))
        sock.listen(_BACKLOG)
    except OSError as problem:
        sock.close()
        raise ClusterError(
            f"{who} cannot listen on {address}: {problem.strerror or problem}. Take a fresh "
            "local_address() for each listener."
        ) from problem
    return sock


def forget(address: str) -> None:
    """Remove the file of a Unix socket, and the folder that local_address() made for it."""
    name = address.removeprefix(_UNIX)
    if not is_unix(address) or name.startswith("@"):
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)
    folder = os.path.dirname(name)
    if os.path.basename(folder).startswith(_PRIVATE):
        with contextlib.suppress(OSError):  # it holds other files
            os.rmdir(folder)


def _unix_name(address: str) -> str:
    name = address.removeprefix(_UNIX)
    if len(name) < 2 or name[0] not in "@/" or "\0" in name:
        raise ClusterError(f"the address {quote(address)} is none; correct: unix:@name, unix:/path")
    if name[0] == "/":
        return name
    if not _LINUX:
        raise ClusterError(f"{quote(address)}: unix:@name exists on Linux only; use unix:/path")
    return "\0" + name[1:]


def tune(sock: socket.socket) -> None:
    """Send small frames without delay, and use keepalive to notice a machine that is gone.

    The kernel sizes the buffers to the network; fixed ones, up to 4 MB, were no faster on loopback.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
