"""Sockets for host:port, in calls that Ctrl-C can interrupt, and closed in forked children."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import queue
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from typing import TypeVar

from stratagem.cluster.parsing import endpoint
from stratagem.errors import ClusterError

log = logging.getLogger("stratagem")

RESOLVE = 10.0  # seconds that a name server may take

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # an address of another machine

_Found = list[tuple[socket.AddressFamily, tuple[object, ...]]]


def readable(sockets: Iterable[socket.socket], seconds: float) -> list[socket.socket]:
    """Return those that have something to read, or have ended, within `seconds`.

    select() does the same for descriptors below 1024 only, and programs have more.
    """
    return _ready(sockets, select.POLLIN, seconds)


def writable(sock: socket.socket, seconds: float) -> bool:
    """Whether a socket takes something within `seconds`."""
    return bool(_ready([sock], select.POLLOUT, seconds))


def _ready(sockets: Iterable[socket.socket], event: int, seconds: float) -> list[socket.socket]:
    poll, found = select.poll(), {sock.fileno(): sock for sock in sockets}
    for number in found:
        poll.register(number, event)
    return [found[number] for number, _ in poll.poll(1000 * seconds)]


def is_loopback(address: str) -> bool:
    """Whether host:port can be reached from this machine only."""
    host, _ = endpoint(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def resolve(address: str, limit: float = RESOLVE) -> _Found:
    """Look up host:port; gaierror if the name is unknown, TimeoutError without an answer."""
    host, port = endpoint(address)
    with contextlib.suppress(socket.gaierror):
        return _look_up(host, port, socket.AI_NUMERICHOST)
    # On a thread, as getaddrinfo cannot be interrupted and may take half a minute.
    answers: queue.SimpleQueue[_Found | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(_look_up(host, port, 0))
        except OSError as problem:
            answers.put(problem)

    threading.Thread(target=ask, name="stratagem-resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=limit)
    except queue.Empty:
        raise TimeoutError(f"the name server did not say where {host} is") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def _look_up(host: str, port: int, flags: int) -> _Found:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, where) for family, _, _, _, where in found]


def connect(address: str, limit: float) -> socket.socket:
    """Connect to host:port within `limit` seconds; OSError of the last address tried."""
    deadline = time.monotonic() + limit
    problem: OSError = TimeoutError("timed out")
    for family, where in resolve(address, limit):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(where)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sock.getsockname() == sock.getpeername():
                # An ephemeral port without a listener can connect to itself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            sock.settimeout(None)
            return sock
        except OSError as failed:
            problem = failed
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise problem


def listen(address: str, who: str) -> socket.socket:
    """Listen on the address of this task, on that interface only if this machine has it.

    A loopback address, which needs no secret, is never widened to other interfaces.
    """
    try:
        return _bind(address)
    except OSError as problem:
        unknown = isinstance(problem, socket.gaierror | TimeoutError)
        if is_loopback(address) or not (unknown or problem.errno in _NOT_HERE):
            raise _cannot_listen(address, who, problem) from problem
    _, port = endpoint(address)
    log.warning(
        "the address of %s, %s, is none of this machine's (behind NAT, in a container?): listening "
        "on port %d of all its interfaces",
        who,
        address,
        port,
    )
    try:
        return socket.create_server(("", port), backlog=128)
    except OSError as problem:
        raise _cannot_listen(address, who, problem) from problem


def _bind(address: str) -> socket.socket:
    problem: OSError = socket.gaierror("unknown")
    for family, where in resolve(address):
        try:
            return socket.create_server(where, family=family, backlog=128)
        except OSError as failed:
            if failed.errno not in _NOT_HERE:
                raise
            problem = failed
    raise problem


def _cannot_listen(address: str, who: str, problem: OSError) -> ClusterError:
    _, port = endpoint(address)
    if problem.errno == errno.EADDRINUSE:
        return ClusterError(
            f"{who} cannot listen on {address}: port {port} of this machine is already in use. End "
            "what holds it (an earlier run of this job? `ss -ltnp` names it) or give the task "
            "another port in the cluster."
        )
    return ClusterError(
        f"{who} cannot listen on {address}: {problem.strerror or problem}. Give the task an "
        "address and port of this machine that this user may open (1024 and above)."
    )


_Socket = TypeVar("_Socket", bound=socket.socket)

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def not_in_children(sock: _Socket) -> _Socket:
    """Close the socket in every child that is forked from now on, without shutting it down.

    A child (a DataLoader's worker, say) would hold the connection open after its parent was killed,
    and the peer would not notice the death.
    """
    _sockets.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
