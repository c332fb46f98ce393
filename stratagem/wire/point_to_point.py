"""Gloo's point-to-point messages: exchanges, and an all-reduce of 16-bit tensors in fp32.

    1. every member sends every peer its piece of the peer's chunk    N-1 pieces out, N-1 in
    2. each sums its chunk in fp32, and rounds once
    3. and sends the sum to all peers                                 N-1 pieces out, N-1 in

Gloo's own all-to-all posts sends before receives. On a connection the request to receive then waits
behind the data being sent, so a late member sends first and receives afterwards: half of the link's
time is lost. Here all receives are posted before any send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from torch import Tensor

from stratagem.wire.collective import add_up


class BackgroundWork:
    """Runs a function on a thread, with the interface of Gloo's work.

    A send or receive of Gloo can be waited for only once: a wait that times out ends the group.
    """

    def __init__(self, run: Callable[..., None], *args: Any) -> None:
        self._done = Event()
        self._error: BaseException | None = None
        self._work: tuple[Callable[..., None], tuple[Any, ...]] | None = (run, args)
        self._thread = Thread(target=self._go, daemon=True, name="stratagem-errand")
        self._thread.start()

    def _go(self) -> None:
        assert self._work is not None
        run, args = self._work
        try:
            run(*args)
        except BaseException as error:
            self._error = error
        # Free everything first: the interpreter may end as soon as `_done` is set.
        del run, args
        self._work = None
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait; RuntimeError after `limit`, as from Gloo, or the error of the function."""
        if not self._done.wait(None if limit is None else limit.total_seconds()):
            raise RuntimeError("it is not done yet")
        if self._error is not None:
            raise self._error


def sum_half(group: Any, rank: int, flat: Tensor, tag: int) -> None:
    """All-reduce in place over a Gloo group; uses the tags `tag` and `tag + 1`."""
    size = group.size()
    chunk = -(-flat.numel() // size)
    pieces = [flat[i * chunk : (i + 1) * chunk] for i in range(size)]
    mine = pieces[rank]
    parts = mine.new_empty(size, mine.numel())
    # From the next rank on, so that not all send to the same peer.
    peers = [(rank + i) % size for i in range(1, size)]
    full = [peer for peer in peers if pieces[peer].numel()]
    arrive = [group.recv([parts[peer]], peer, tag) for peer in peers if mine.numel()]
    # A chunk's sum comes only after all its pieces have arrived: nothing unsent is overwritten.
    back = [group.recv([pieces[peer]], peer, tag + 1) for peer in full]
    sent = [group.send([pieces[peer]], peer, tag) for peer in full]
    parts[rank].copy_(mine)
    for work in arrive:
        work.wait()
    if mine.numel():
        mine.copy_(add_up(parts))
        sent += [group.send([mine], peer, tag + 1) for peer in peers]
    for work in (*back, *sent):
        work.wait()


def exchange(
    group: Any,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    tag: int,
) -> None:
    """Send tensors to members of a Gloo group, and receive tensors from members."""
    works = [group.recv([into], peer, tag) for peer, into in receives]
    works += [group.send([data], peer, tag) for peer, data in sends]
    for work in works:
        work.wait()
