"""Push and pull of tensors over the wire, against a bare socket loop that does nothing else.

    python benchmarks/transport/bench.py [--megabytes 40] [--tensors 20] [--rounds 7]

Two processes; one exchange is a push (tensors there, an acknowledgement back) and a pull (a
request there, tensors back). The bare loop moves the same bytes with sendall and recv_into, from
one block of memory into another: no frame, no proof, no threads. Arms take turns within a round;
printed are medians over the rounds and of the rounds' ratios to the bare loop over TCP, and the
ratios of each arm's best exchange, which say what a quiet machine would have given.
"""

from __future__ import annotations

import argparse
import operator
import os
import platform
import signal
import socket
import ssl
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from stratagem.wire.tcp import Connection, Listener, connect, local_address

SECRET = b"b" * 32
WARM, EXCHANGES = 2, 6
ARMS = ["bare", "bare unix", "tcp", "unix", "tls"]


def parameters(megabytes: int, tensors: int) -> list[torch.Tensor]:
    return [torch.randn(megabytes * 250_000 // tensors) for _ in range(tensors)]


# The peer: a loop by hand


def receive_all(sock: socket.socket, memory: memoryview) -> bool:
    got = 0
    while got < len(memory):
        count = sock.recv_into(memory[got:], len(memory) - got, socket.MSG_WAITALL)
        if not count:
            return False
        got += count
    return True


def bare_serve(sock: socket.socket, size: int) -> None:
    body, word = memoryview(bytearray(size)), memoryview(bytearray(1))
    while receive_all(sock, body):
        sock.sendall(word)
        receive_all(sock, word)
        sock.sendall(body)


def bare_exchange(sock: socket.socket, body: memoryview) -> None:
    word = memoryview(bytearray(1))
    sock.sendall(body)
    receive_all(sock, word)
    sock.sendall(word)
    receive_all(sock, body)


# Ours


def serve(connection: Connection, tensors: list[torch.Tensor]) -> None:
    while (frame := connection.receive()) is not None:
        if frame.header["do"] == "push":
            connection.read_into(tensors)
            connection.send({"ok": True})
        else:
            connection.send({"version": 1}, tensors)


def exchange(connection: Connection, tensors: list[torch.Tensor]) -> None:
    connection.send({"do": "push"}, tensors)
    connection.receive()
    connection.send({"do": "pull"})
    connection.receive()
    connection.read_into(tensors)


# One arm: a child serves, this process drives


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def child(work: Callable[[], None]) -> Iterator[None]:
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def bare_arm(kind: str, megabytes: int) -> list[float]:
    size = megabytes * 1_000_000
    if kind == "bare unix":
        near, far = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as door:
            near = socket.create_connection(door.getsockname())
            far, _ = door.accept()
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    body = memoryview(bytearray(size))
    body[:] = os.urandom(1000) * (size // 1000)
    with near, far, child(lambda: bare_serve(far, size)):
        return times_of(lambda: bare_exchange(near, body))


def our_arm(kind: str, megabytes: int, count: int) -> list[float]:
    tls = kind == "tls" or None
    address = local_address() if kind == "unix" else f"127.0.0.1:{free_port()}"
    tensors = parameters(megabytes, count)

    def host() -> None:
        mine = parameters(megabytes, count)
        Listener(address, SECRET, "ps 0", lambda connection: serve(connection, mine), tls=tls)
        time.sleep(600)

    with child(host), reach(address, tls) as connection:
        return times_of(lambda: exchange(connection, tensors))


def reach(address: str, tls: bool | None) -> Connection:
    end = time.monotonic() + 20
    while True:
        try:
            return connect(address, SECRET, limit=5, tls=tls)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def times_of(action: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(WARM + EXCHANGES):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times[WARM:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--tensors", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    choice = parser.parse_args()
    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    rows: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    for number in range(choice.rounds):
        for arm in ARMS[number % len(ARMS) :] + ARMS[: number % len(ARMS)]:
            if arm.startswith("bare"):
                rows[arm].append(bare_arm(arm, choice.megabytes))
            else:
                rows[arm].append(our_arm(arm, choice.megabytes, choice.tensors))
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{ssl.OPENSSL_VERSION}, torch {torch.__version__}; {choice.megabytes} MB in "
        f"{choice.tensors} tensors, {choice.rounds} rounds"
    )
    report(rows, 2e-3 * choice.megabytes)


def report(rows: dict[str, list[list[float]]], gigabytes: float) -> None:
    print(f"{'':10} {'median':>23}   {'best':>23}")
    print(
        f"{'arm':>10} {'ms':>8} {'GB/s':>6} {'of bare':>7}   {'ms':>8} {'GB/s':>6} {'of bare':>7}"
    )
    medians = {arm: [statistics.median(times) for times in rounds] for arm, rounds in rows.items()}
    best = {arm: min(map(min, rounds)) for arm, rounds in rows.items()}
    for arm, middles in medians.items():
        middle = statistics.median(middles)
        ratio = statistics.median(map(operator.truediv, medians["bare"], middles))
        print(
            f"{arm:>10} {middle * 1e3:8.1f} {gigabytes / middle:6.2f} {ratio:7.2f}   "
            f"{best[arm] * 1e3:8.1f} {gigabytes / best[arm]:6.2f} "
            f"{best['bare'] / best[arm]:7.2f}"
        )


if __name__ == "__main__":
    main()
