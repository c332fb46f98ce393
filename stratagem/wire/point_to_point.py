"""Single messages of Gloo: exchanges, and a sum of sixteen-bit tensors that is rounded once.

    1. every member sends every other one its piece of that one's chunk    N-1 pieces out, N-1 in
    2. each adds up its chunk in fp32, and rounds it
    3. and sends it to all others                                          N-1 pieces out, N-1 in

Gloo's own all-to-all offers to send before it offers to receive. On a connection the offer to
receive then waits behind what is being sent, so whoever comes late sends first, and receives when
that is over: half of the link's time is lost. Here all is offered to be received before anything
is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from torch import Tensor

from stratagem.wire.collective import add_up


class BackgroundWork:
    """Work in a thread of its own, with the verbs of Gloo's.

    A send or receive of Gloo can be waited for only once: to stop waiting ends the whole group.
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
        # Nothing may be left to free here: the interpreter may end as soon as it is done.
        del run, args
        self._work = None
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, limit: timedelta | None = None) -> None:
        """RuntimeError if it takes longer, as Gloo's work does; whatever went wrong otherwise."""
        if not self._done.wait(None if limit is None else limit.total_seconds()):
            raise RuntimeError("it is not done yet")
        if self._error is not None:
            raise self._error


def sum_half(group: Any, rank: int, flat: Tensor, tag: int) -> None:
    """Add up over a group of Gloo, in place; `tag` and the next number must be free."""
    size = group.size()
    chunk = -(-flat.numel() // size)
    pieces = [flat[i * chunk : (i + 1) * chunk] for i in range(size)]
    mine = pieces[rank]
    parts = mine.new_empty(size, mine.numel())
    # Whoever comes next first, so that not all send to the same one.
    others = [(rank + i) % size for i in range(1, size)]
    full = [other for other in others if pieces[other].numel()]
    arrive = [group.recv([parts[other]], other, tag) for other in others if mine.numel()]
    # A chunk comes back only after all of its pieces have arrived: nothing is overwritten unsent.
    back = [group.recv([pieces[other]], other, tag + 1) for other in full]
    sent = [group.send([pieces[other]], other, tag) for other in full]
    parts[rank].copy_(mine)
    for work in arrive:
        work.wait()
    if mine.numel():
        mine.copy_(add_up(parts))
        sent += [group.send([mine], other, tag + 1) for other in others]
    for work in (*back, *sent):
        work.wait()


def pass_on(
    group: Any,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    tag: int,
) -> None:
    """Send tensors to members of a group of Gloo, and fill tensors from members."""
    works = [group.recv([into], other, tag) for other, into in receives]
    works += [group.send([data], other, tag) for other, data in sends]
    for work in works:
        work.wait()
