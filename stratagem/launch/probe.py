"""Measure a connection between two tasks, answer one that measures, and say what was found."""

from __future__ import annotations

import errno
import socket
import statistics
import time
from dataclasses import dataclass

from stratagem.cluster.handshake import (
    SECRET_VARIABLE,
    Ended,
    Stranger,
    WrongSecret,
    prove,
    recv_note,
    send_note,
)
from stratagem.cluster.parsing import endpoint
from stratagem.errors import HandshakeError

GREETING = 5.0  # seconds for the handshake
PROGRESS = 10.0  # seconds in which something must have moved
ROUND_TRIPS = 20
MOST_BYTES = 4 << 30  # the most that a peer may ask for

_BLOCK = 1 << 18


@dataclass(frozen=True)
class Speed:
    """The speed of a connection: seconds of a round trip, bytes a second each way."""

    latency: float
    up: float
    down: float


def introduce(sock: socket.socket, secret: bytes, me: str) -> dict[str, object]:
    """Prove the secret, say that this is a check, and return the peer's description of itself."""
    prove(sock, secret, limit=GREETING)
    send_note(sock, {"purpose": "check", "from": me}, limit=GREETING)
    return recv_note(sock, limit=GREETING)


def measure(sock: socket.socket, size: int) -> Speed:
    """Measure the connection to a peer that runs `answer`, and close it."""
    trips = [_ping(sock) for _ in range(ROUND_TRIPS)]
    latency = statistics.median(trips)
    up = _timed_up(sock, size)
    down = _timed_down(sock, size)
    send_note(sock, {"ask": "done"}, limit=PROGRESS)
    # Half a round trip is the acknowledgement; on a fast link it may exceed what was measured.
    return Speed(latency, *(size / max(t - latency / 2, t / 2, 1e-9) for t in (up, down)))


def _ping(sock: socket.socket) -> float:
    start = time.perf_counter()
    send_note(sock, {"ask": "ping"}, limit=PROGRESS)
    recv_note(sock, limit=PROGRESS)
    return time.perf_counter() - start


def _timed_up(sock: socket.socket, size: int) -> float:
    start = time.perf_counter()
    send_note(sock, {"ask": "take", "bytes": size}, limit=PROGRESS)
    _pour(sock, size)
    recv_note(sock, limit=PROGRESS)
    return time.perf_counter() - start


def _timed_down(sock: socket.socket, size: int) -> float:
    start = time.perf_counter()
    send_note(sock, {"ask": "give", "bytes": size}, limit=PROGRESS)
    _drain(sock, size)
    return time.perf_counter() - start


def answer(conn: socket.socket, me: str) -> str:
    """Answer a check that has proved the secret; return the task it came from ("" if none)."""
    hello = recv_note(conn, limit=GREETING)
    if hello.get("purpose") != "check":
        # A task that already trains takes this check for its chief: it will connect again.
        send_note(conn, {"again": f"`stratagem check` still runs as {me}"}, limit=PROGRESS)
        return ""
    send_note(conn, {"check": me}, limit=PROGRESS)
    while True:
        note = recv_note(conn, limit=PROGRESS * 3)
        if note.get("ask") == "done":
            return str(hello.get("from", ""))
        _serve(conn, note)


def _serve(conn: socket.socket, note: dict[str, object]) -> None:
    ask = note.get("ask")
    if ask == "ping":
        send_note(conn, {}, limit=PROGRESS)
        return
    size = note.get("bytes")
    if ask not in ("take", "give") or not isinstance(size, int) or not 0 <= size <= MOST_BYTES:
        raise HandshakeError(f"it asked for {ask!r}, {size!r} bytes: not the same stratagem?")
    if ask == "take":
        _drain(conn, size)
        send_note(conn, {}, limit=PROGRESS)
    else:
        _pour(conn, size)


def _pour(sock: socket.socket, size: int) -> None:
    """Send `size` zero bytes."""
    sock.settimeout(PROGRESS)
    block = memoryview(bytes(_BLOCK))
    while size > 0:
        size -= sock.send(block[: min(size, _BLOCK)])


def _drain(sock: socket.socket, size: int) -> None:
    """Receive and discard `size` bytes."""
    sock.settimeout(PROGRESS)
    block = memoryview(bytearray(_BLOCK))
    while size > 0:
        taken = sock.recv_into(block[: min(size, _BLOCK)])
        if taken == 0:
            raise ConnectionResetError("it hung up in the middle of a measurement")
        size -= taken


UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


@dataclass(frozen=True)
class CheckRow:
    """One line of the table; `certain` means that trying again would not help."""

    task: str
    address: str
    state: str
    ok: bool = False
    speed: Speed | None = None
    remedy: str = ""
    certain: bool = False


def measured(task: str, address: str, speed: Speed) -> CheckRow:
    """The row of a task that was reached and measured."""
    return CheckRow(task, address, "reached", ok=True, speed=speed, certain=True)


def broke_off(task: str, address: str, problem: OSError) -> CheckRow:
    """The row of a task whose connection broke off while it was measured."""
    remedy = f"the connection ended during the measurement ({problem}): is the check there over?"
    return CheckRow(task, address, "broke off", remedy=remedy)


def answered(task: str, address: str, said: dict[str, object]) -> CheckRow:
    """The row of a peer that belongs to the job, by its description of itself."""
    if said.get("check") == task:
        return CheckRow(task, address, "reached", ok=True, remedy="not measured in time")
    if said.get("training"):
        return CheckRow(
            task,
            address,
            "reached: training",
            ok=True,
            remedy="the training itself waits there for its tasks, so nothing was measured",
            certain=True,
        )
    return CheckRow(
        task,
        address,
        "another task",
        remedy=f"{said.get('check') or 'something'} answers there: two names or forwarded ports "
        "lead to one machine; correct the cluster",
        certain=True,
    )


def own(task: str, address: str, problem: Exception | None) -> CheckRow:
    """The row of the task that runs the check."""
    if problem is None:
        return CheckRow(task, address, "this task, listening", ok=True, certain=True)
    _, port = endpoint(address)
    cause = problem.__cause__
    if isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE:
        remedy = (
            f"port {port} of this machine is held by another process (by the training itself? by "
            "an earlier run? `ss -ltnp` names it): end it, or choose another port"
        )
        return CheckRow(task, address, "port in use", remedy=remedy, certain=True)
    return CheckRow(task, address, "cannot listen", remedy=str(problem), certain=True)


def diagnose(task: str, address: str, problem: OSError) -> CheckRow:
    """The row of a task that was not reached."""
    state, remedy = _explain(address, problem)
    certain = isinstance(problem, Stranger | WrongSecret)
    return CheckRow(task, address, state, remedy=remedy, certain=certain)


def _explain(address: str, problem: OSError) -> tuple[str, str]:
    host, port = endpoint(address)
    if isinstance(problem, socket.gaierror):
        return "unknown name", (
            f"{host} does not resolve on this machine: correct the cluster, or add the name to DNS "
            "or /etc/hosts"
        )
    if isinstance(problem, WrongSecret):
        return "handshake refused", (
            f"another job, or another secret: set the same {SECRET_VARIABLE} and give the same "
            "cluster on every task"
        )
    if isinstance(problem, Stranger):
        return "something else", (
            f"what answers at port {port} is not this version of stratagem: choose another port, "
            "or install the same version there"
        )
    if isinstance(problem, Ended):
        return "hung up", (
            f"what answers at port {port} of {host} ended the connection during the greeting: a "
            "task that was just ended, or another program. Its own log says which"
        )
    if isinstance(problem, HandshakeError):
        return "no answer", (
            f"{host} accepts the connection but says nothing: another program on port {port}, or "
            "a check that is stopped"
        )
    if isinstance(problem, ConnectionRefusedError):
        return "refused", (
            f"the machine answers, but nothing listens on port {port}: start `stratagem check` "
            "there too"
        )
    if isinstance(problem, TimeoutError):
        return "timed out", (
            f"packets are dropped, by a firewall most likely: open TCP port {port} of {host} from "
            f"{socket.gethostname()}"
        )
    if problem.errno in UNREACHABLE:
        return "no route", (
            f"no network leads from here to {host}, or the machine is down: check its address, "
            "the route and that it runs"
        )
    return "failed", f"{problem.strerror or problem}: see the log of the other side"
