"""The thread of a star loses no message, never blocks, and closes what it opened."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from stratagem.cluster.handshake import encode_note
from stratagem.cluster.star import Star
from tests.clock import in_time

pytestmark = pytest.mark.timeout(60)


class Diary:
    """A handler that records its calls."""

    def __init__(self) -> None:
        self.pages: list[tuple[object, ...]] = []
        self.changed = threading.Condition()

    def write(self, *words: object) -> None:
        with self.changed:
            self.pages.append(words)
            self.changed.notify_all()

    def read(self, count: int) -> list[tuple[object, ...]]:
        """Wait for so many calls, and return them."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.pages) >= count, 20), self.pages
            return self.pages[:count]

    def alive(self, rank: int, now: float) -> None: ...

    def heard(self, rank: int, note: dict[str, object]) -> None:
        if note["t"] != "beat":
            self.write("heard", rank, note["t"])

    def lost(self, rank: int, why: str) -> None:
        self.write("lost", rank)

    def tick(self, now: float) -> None: ...


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


Ends = tuple[socket.socket, socket.socket]


def test_last_words_are_heard_though_writing_already_fails(ends: Ends) -> None:
    ours, theirs = ends
    theirs.sendall(encode_note({"t": "last words"}))
    theirs.close()
    diary = Diary()
    star = Star({1: ours}, diary)
    star.post({"t": "into the void"})
    star.start()
    assert diary.read(2) == [("heard", 1, "last words"), ("lost", 1)]
    star.stop()


def test_a_peer_that_does_not_read_blocks_nobody(ends: Ends) -> None:
    ours, _ = ends
    other, reading = socket.socketpair()
    star = Star({1: ours, 2: other}, Diary())
    star.start()
    for _ in range(8):
        star.post({"t": "x" * 500_000})
    reading.settimeout(20)
    got = 0
    while got < 8 * 500_000:
        got += len(reading.recv(1 << 20))
    began = time.monotonic()
    star.flush(0.2)  # rank 1 never takes its share
    star.stop()
    in_time(time.monotonic() - began, 2.5)
    reading.close()


def test_a_listener_that_fails_loses_that_peer_only(ends: Ends) -> None:
    ours, theirs = ends
    other, well = socket.socketpair()
    diary = Diary()
    star = Star({1: ours, 2: other}, diary)
    star.start()
    theirs.sendall(encode_note({"no": "t"}))
    assert diary.read(1) == [("lost", 1)]
    well.sendall(encode_note({"t": "still here"}))
    assert diary.read(2)[1] == ("heard", 2, "still here")
    well.close()
    star.stop()


def test_a_defect_of_the_thread_is_told_and_closes_the_connections(ends: Ends) -> None:
    ours, theirs = ends
    diary = Diary()
    star = Star({1: ours}, diary)
    star.start()
    star.call(lambda: 1 / 0)
    assert diary.read(1) == [("lost", 1)]
    theirs.settimeout(20)
    while theirs.recv(4096):
        pass
    star.stop()
    star.stop()


def test_a_goodbye_lingers_until_the_peer_has_it_but_not_for_ever(ends: Ends) -> None:
    """Closing with unread data resets a connection, and may destroy what was sent before."""
    ours, theirs = ends
    star = Star({1: ours}, Diary())
    star.start()
    star.post({"t": "bye"})
    threading.Timer(0.4, theirs.close).start()
    began = time.monotonic()
    star.stop()
    in_time(time.monotonic() - began, 0.9, least=0.3)


def test_flush_and_stop_return_at_once_when_there_is_nothing_to_wait_for(ends: Ends) -> None:
    ours, theirs = ends
    before = set(threading.enumerate())
    star = Star({1: ours}, Diary())
    star.start()
    began = time.monotonic()
    star.flush(5)
    theirs.close()
    star.stop()
    star.flush(5)
    in_time(time.monotonic() - began, 0.4)
    assert set(threading.enumerate()) <= before


def test_nobody_waits_for_an_answer_on_what_was_closed_meanwhile(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends its followers may close their sockets before the thread has seen an end,
    which it then never sees. Waiting for it cost survivors of a kill 1.0 to 1.5 s."""
    monkeypatch.setattr("stratagem.cluster.star.LINGER", 8.0)
    ours, theirs = ends
    star = Star({1: ours}, Diary())
    star.start()
    busy = threading.Event()
    star.call(busy.wait)
    theirs.close()
    ours.close()
    busy.set()
    began = time.monotonic()
    star.stop()
    in_time(time.monotonic() - began, 5.0)
