"""Addresses of the wire, and the sockets behind them.

`host:port` is TCP. `unix:@name` is a Unix socket in Linux's abstract namespace, without a file.
"""

from __future__ import annotations

import secrets
import socket
import sys

from stratagem.cluster import sockets
from stratagem.cluster.parsing import quote
from stratagem.errors import ClusterError

_UNIX = "unix:@"
_BACKLOG = 128
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def local_address() -> str:
    """Return a new address for processes of this machine; unguessable, where Linux has such."""
    if sys.platform == "linux":
        return f"{_UNIX}stratagem-{secrets.token_hex(16)}"
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def is_unix(address: str) -> bool:
    """Whether this is the address of a Unix socket."""
    return address.startswith(_UNIX)


def encrypted(address: str, tls: bool | None) -> bool:
    """Whether to encrypt: as `tls` says, or if None, unless the address is local."""
    if is_unix(address):
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
    if not is_unix(address):
        return sockets.connect(address, limit)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(limit)
        sock.connect(_unix_name(address))
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


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
        raise ClusterError(f"{who} cannot listen on {address}: {problem.strerror}") from problem
    return sock


def _unix_name(address: str) -> str:
    return "\0" + address.removeprefix(_UNIX)


def tune(sock: socket.socket) -> None:
    """Use keepalive to notice a machine that is gone.

    The kernel sizes the buffers to the network; fixed ones, up to 4 MB, were no faster on loopback.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
