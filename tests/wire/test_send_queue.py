"""SendQueue over real sockets; two addresses stand for two hosts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from stratagem.wire import send_queue as module
from stratagem.wire.send_queue import LARGE, SendQueue
from tests.clock import unless_late

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="turns are for Linux"),
]
SIZE = 16 << 20  # more than the kernel buffers


class Line:
    """A connection to a reader."""

    def __init__(self, stack: ExitStack, reader: str = "127.0.0.2") -> None:
        with socket.create_server(("127.0.0.1", 0)) as door:
            self.reader = stack.enter_context(
                socket.create_connection(door.getsockname(), source_address=(reader, 0))
            )
            self.sender = stack.enter_context(door.accept()[0])

    def send(self, turns: SendQueue, size: int = SIZE) -> None:
        with turns.turn(self.sender, size):
            self.sender.sendall(bytes(size))

    def read(self, size: int = SIZE) -> None:
        while size:
            got = len(self.reader.recv(min(size, 1 << 20)))
            assert got, "it ended early"
            size -= got

    @property
    def arrived(self) -> bool:
        """Whether there is anything to read, without reading it."""
        try:
            return bool(self.reader.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a test changes it, no stream is overtaken, and no turn is in vain."""
    monkeypatch.setattr(module, "STILL", 60.0)
    monkeypatch.setattr(module, "_BUSY", 2.0)


def begun(line: Line) -> None:
    while not line.arrived:
        time.sleep(0.005)


def under_way(pool: ThreadPoolExecutor, turns: SendQueue, line: Line) -> Future[None]:
    """A stream's turn, which lasts until its connection is read."""
    held = pool.submit(line.send, turns)
    begun(line)
    return held


def test_one_after_the_other_in_the_order_in_which_they_came(
    stack: ExitStack, pool: ThreadPoolExecutor
) -> None:
    turns, lines = SendQueue(), [Line(stack) for _ in range(4)]
    sent: list[Future[None]] = []
    for line in lines:
        sent.append(pool.submit(line.send, turns))
        if len(sent) == 1:
            begun(line)
        while len(turns._queue) < len(sent) - 1:
            time.sleep(0.001)
    for number, line in enumerate(lines):
        begun(line)
        time.sleep(0.05)
        assert not any(other.arrived for other in lines[number + 1 :])
        line.read()
        sent[number].result(timeout=20)


@pytest.mark.parametrize("why", ["small", "near", "two at once"])
def test_who_need_not_wait(why: str, stack: ExitStack, pool: ThreadPoolExecutor) -> None:
    turns = SendQueue()
    first, second = Line(stack), Line(stack, "127.0.0.1" if why == "near" else "127.0.0.2")
    turns.at_once = 2 if why == "two at once" else 1
    size = LARGE - 1 if why == "small" else SIZE
    held = under_way(pool, turns, first)
    sent = pool.submit(second.send, turns, size)
    second.read(size)
    sent.result(timeout=20)
    assert not held.done()
    first.read()
    held.result(timeout=20)


def test_who_does_not_read_is_overtaken(
    stack: ExitStack, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STILL", 0.05)
    turns, stuck, others = SendQueue(), Line(stack), [Line(stack) for _ in range(3)]
    held = under_way(pool, turns, stuck)
    sent = [pool.submit(line.send, turns) for line in others]
    for line in others:
        line.read()
    for one in sent:
        one.result(timeout=20)
    assert not held.done()
    stuck.read()
    held.result(timeout=20)


def test_who_reads_as_slowly_as_others_keeps_its_turn(
    stack: ExitStack, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STILL", 0.2)
    turns, slow, other = SendQueue(), Line(stack), Line(stack)
    held = under_way(pool, turns, slow)
    sent = pool.submit(other.send, turns)
    for _ in range(8):
        slow.read(1 << 20)  # less than both kernels buffer, but some bytes arrive
        time.sleep(0.05)
    unless_late(not other.arrived, "nothing was read for as long as that is forgiven")
    slow.read(SIZE - (8 << 20))
    held.result(timeout=20)
    other.read()
    sent.result(timeout=20)


def test_who_reads_more_slowly_than_others_is_overtaken_and_waited_for_no_more(
    stack: ExitStack, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STILL", 0.1)
    turns, slow, other, third = SendQueue(), Line(stack), Line(stack), Line(stack)
    turns._best = 1e9  # the rate of other peers
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.02):
            slow.read(1 << 16)

    reading = pool.submit(trickle)
    held = under_way(pool, turns, slow)
    sent = pool.submit(other.send, turns)
    other.read()
    sent.result(timeout=20)
    assert not held.done()
    over.set()
    reading.result(timeout=20)
    slow.sender.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError):
        held.result(timeout=20)
    assert slow.sender in turns._slow and not turns._sending
    # it delays no stream the next time
    again = Line(stack)
    turns._slow.add(again.sender)
    held = under_way(pool, turns, again)
    sent = pool.submit(third.send, turns)
    begun(third)
    assert not held.done() and turns._busy() == 1
    third.read()
    again.read()
    for one in (held, sent):
        one.result(timeout=20)


def test_several_at_once_have_a_part_of_the_line_each(
    stack: ExitStack, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that shares the link with two others is not slow."""
    monkeypatch.setattr(module, "STILL", 0.1)
    turns, lines, other = SendQueue(), [Line(stack) for _ in range(3)], Line(stack)
    turns.at_once = 3
    over = threading.Event()

    def trickle(line: Line) -> None:
        while not over.wait(0.02):
            line.read(1 << 18)  # about 10 MB a second

    reading = [pool.submit(trickle, line) for line in lines]
    held = [pool.submit(line.send, turns, 4 * SIZE) for line in lines]
    for line in lines:
        begun(line)
    turns._best = 25e6  # the rate of one stream alone
    sent = pool.submit(other.send, turns)
    time.sleep(0.5)
    unless_late(turns._busy() == 3, "they were read more slowly than that is forgiven")
    assert not other.arrived
    over.set()
    for each in reading:
        each.result(timeout=20)
    for line in lines:
        line.sender.shutdown(socket.SHUT_RDWR)
    for each in held:
        with pytest.raises(OSError):
            each.result(timeout=20)
    other.read()
    sent.result(timeout=20)


def test_whoever_is_gone_does_not_keep_others_waiting(
    stack: ExitStack, pool: ThreadPoolExecutor
) -> None:
    turns, first, second, third = SendQueue(), Line(stack), Line(stack), Line(stack)
    held = under_way(pool, turns, first)
    gone = pool.submit(second.send, turns)
    while not turns._queue:
        time.sleep(0.001)
    sent = pool.submit(third.send, turns)
    second.reader.close()
    second.sender.shutdown(socket.SHUT_RDWR)  # as `close` of a connection does
    first.sender.shutdown(socket.SHUT_RDWR)
    for lost in (held, gone):
        with pytest.raises(OSError):
            lost.result(timeout=20)
    third.read()
    sent.result(timeout=20)
    assert not turns._queue and not turns._sending


def test_where_processors_are_the_limit_there_are_no_turns(
    stack: ExitStack, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = SendQueue()
    monkeypatch.setattr(module, "_BUSY", -1.0)
    for _ in range(module._SURE):
        line = Line(stack)
        sent = pool.submit(line.send, turns)
        line.read()
        sent.result(timeout=20)
    first, second = Line(stack), Line(stack)
    held = under_way(pool, turns, first)
    sent = pool.submit(second.send, turns)
    second.read()
    sent.result(timeout=20)
    assert not held.done()
    first.read()
    held.result(timeout=20)


def test_many_threads_all_come_to_their_turn(stack: ExitStack, pool: ThreadPoolExecutor) -> None:
    turns, lines = SendQueue(), [Line(stack) for _ in range(6)]
    turns.at_once = 2
    busiest = [0]

    def send(line: Line) -> None:
        for _ in range(5):
            with turns.turn(line.sender, LARGE):
                busiest[0] = max(busiest[0], len(turns._sending))
                line.sender.sendall(bytes(LARGE))

    readers = [threading.Thread(target=line.read, args=(5 * LARGE,)) for line in lines]
    for reader in readers:
        reader.start()
    for done in [pool.submit(send, line) for line in lines]:
        done.result(timeout=20)
    for reader in readers:
        reader.join(10)
    assert 1 <= busiest[0] <= 2
