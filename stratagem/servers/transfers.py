"""Transfers between a worker and the servers: values to the worker, gradients to the servers.

    fetch   the newest values of a shard               every server
    stage   this server's part of the gradient         every server but the coordinator

Threads carry large transfers while the worker computes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from stratagem.figures.meter import METER
from stratagem.servers.connections import Connections, Line, LineLost
from stratagem.servers.server_state import ServerState
from stratagem.servers.worker_memory import WorkerMemory
from stratagem.wire.tcp import Frame

_LEAVES = 2.0  # seconds that a thread may take to end after its connection was closed


class TransferThread:
    """Carries bytes between a worker and one server while the worker computes.

    It runs errands one after the other; `wait` raises the error of one that failed.
    """

    def __init__(self, name: str) -> None:
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._open = 0
        self._lock = threading.Lock()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"stratagem-{name}", daemon=True)
        self._thread.start()

    def send(self, errand: Callable[[], None]) -> None:
        """Run an errand in the thread."""
        with self._lock:
            self._open += 1
            self._idle.clear()
        self._errands.put(errand)

    def wait(self) -> None:
        """Wait until every errand is done."""
        self._idle.wait()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def end(self) -> None:
        """End the thread, and wait for it: Python crashes if a thread frees tensors while the
        interpreter ends."""
        self._errands.put(None)
        self._thread.join(_LEAVES)

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            try:
                if self._problem is None:  # later errands depend on earlier ones
                    errand()
            except BaseException as problem:
                self._problem = problem
            del errand  # frees what it holds before `wait` returns
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._idle.set()


_MUCH = 1 << 20  # bytes of values from which threads pay off


class Transfers(ServerState):
    """The part of a client that moves values and gradients."""

    def __init__(self, index: int, lines: Connections) -> None:
        super().__init__(index, lines)
        #: by line; made when first needed. None: the caller's thread carries everything
        self._threads: dict[Line, TransferThread] | None = None
        #: by shard: the gradient that was sent last
        self._sent: dict[int, tuple[dict[str, Any], list[Tensor]]] = {}
        #: how many orders had been given when the last ticket was
        self._dealt = 0
        #: servers to which gradients travel while backward makes them
        self._streamed: set[int] = set()

    def begin_transfers(self, memory: WorkerMemory) -> None:
        """Begin a training."""
        self.memory = memory
        #: by server: the version of the values here
        self._have = [-1] * len(self.lines)
        #: the order after which servers have the values that are needed next
        self._after = self.lines.news = 0
        #: whether servers may still have rows of a gradient that did not count
        self._leftovers = False
        #: by variable: whether it has had a gradient; whether any of them was sparse
        self._had, self._sparse = [False] * len(memory.params), False
        self.end_threads()
        if not self.lines.near and memory.values.nbytes >= _MUCH:
            self._threads = {}

    def end_threads(self) -> None:
        """End the transfer threads."""
        threads, self._threads = self._threads, None
        for thread in (threads or {}).values():
            thread.end()

    def _carry(self, line: Line, errand: Callable[[], None]) -> None:
        """Run an errand after all earlier ones of this line."""
        if self._threads is None:
            errand()
            return
        if line not in self._threads:
            self._threads[line] = TransferThread("transfer")
        self._threads[line].send(errand)

    def _wait_for_threads(self) -> None:
        """Wait until all errands are done; raise the error of one that failed."""
        for thread in list((self._threads or {}).values()):
            thread.wait()

    @property
    def version(self) -> int:
        """The version of the oldest shard here."""
        return min(self._have)

    @property
    def is_late(self) -> bool:
        """Whether the other workers went on without the gradient that is being computed."""
        self.lines.listen()
        return self.lines.news > self.version

    # --- values -----------------------------------------------------------------------------

    def arrive(self) -> None:
        """Wait for the values that come with a ticket."""
        with METER.sending():
            self._wait_for_threads()
        self.memory.arrived()
        self.lines.news = max(self.lines.news, self.version)

    def refresh(self) -> None:
        """Fetch the newest values from every server."""
        for i in range(len(self.lines)):
            self._fetch(i, self._after if i else 0, self._have[i])
        self.memory.arrived()

    def _fetch(self, i: int, after: int, have: int = -1) -> None:
        """Fetch a shard's new values, or all of them if its server dies meanwhile."""
        while True:
            try:
                header = {"t": "fetch", "have": have, "after": after}
                self._take_values(i, self.lines.call(i, header).header)
                return
            except LineLost:
                have = -1

    def _take_from(self, i: int, after: int) -> None:
        try:
            self._take_values(i, self.lines.receive(i).header)
        except LineLost:
            self._fetch(i, after)

    def _take_values(self, i: int, told: Mapping[str, Any]) -> None:
        into, settle = self.memory.incoming(i, told)
        if into:
            self.lines.read_into(i, into)
        settle()
        self._have[i] = int(told["version"])

    # --- gradients --------------------------------------------------------------------------

    def begin_backward(self, *, listens: bool = False) -> None:
        """Before a backward: send each gradient as soon as it is made, if threads may.

        `listens` keeps the coordinator's connection free for its news.
        """
        if self._threads is not None and self.memory.streams:
            self.memory.begin()
            self._streamed = set(range(int(listens), len(self.lines)))
            stream, memory = self.lines.stream, self.memory
            header = {**self._stage_header(), **memory.outbox.header()}
            for i in self._streamed:
                for line in self.lines.of(i):
                    size, parts = memory.outbox.part(i).nbytes, memory.parts(i)
                    self._carry(line, partial(stream, i, line, header, size, parts))

    def finish_stream(self) -> set[int]:
        """Wait for gradients that were sent during backward; return their servers."""
        if self._threads is None:
            return set()
        streamed, self._streamed = self._streamed, set()
        if streamed:
            self.memory.complete()
            self._wait_for_threads()
        # Streaming begins once every variable has had a gradient and none was sparse.
        used = self.memory.used() or [True] * len(self._had)
        self._had = [a or b for a, b in zip(self._had, used, strict=True)]
        self._sparse = self._sparse or self.memory.has_rows
        self.memory.streams = all(self._had) and not self._sparse
        return streamed

    def _stage_header(self) -> dict[str, Any]:
        """Return the header of a gradient for a server that values are not fetched from."""
        assert self.plan is not None
        return {"t": "stage", "after": self._dealt} if self.plan.backups else {"t": "stage"}

    def _send_gradients(self, shards: Sequence[int]) -> None:
        """Send servers their parts of the gradient, unless they share its memory."""
        sent = []
        self._sent.clear()
        for i in shards:
            self._sent[i] = self.memory.outgoing(i)
            sent += self._send_part(i, self.lines.of(i), again=self._leftovers)
        for each in sent:
            self.lines.finish(*each)

    def _send_part(self, i: int, lines: Sequence[Line], *, again: bool) -> list[tuple[int, Line]]:
        header, body = self._sent[i]
        if self.memory.handle is not None and not header and not again:
            return []
        return self.lines.write_to(i, lines, {**self._stage_header(), **header}, body)

    def _settle(self, after: int) -> list[tuple[int, Line]]:
        """Ask holders that read gradients in this worker's memory, and send no values, to answer
        when they have read them."""
        assert self.plan is not None
        self._dealt = after
        asked: list[tuple[int, Line]] = []
        if self.plan.backups and self.memory.handle is not None:
            for i in range(1, len(self.lines)):
                others = self.lines.of(i)[1:]
                asked += self.lines.write_to(i, others, {"t": "settled", "after": after})
        return asked

    def _send_to_new_holders(self) -> None:
        """Send a server that has come back the gradient that other holders have."""
        for i, line in self.renew(self.fits - 1):
            if i not in self._sent:
                self._sent[i] = self.memory.outgoing(i)
            for each in self._send_part(i, [line], again=False):
                self.lines.finish(*each)

    def _ask_for_verdict(self, header: dict[str, Any], *, sent: bool) -> Frame:
        """Push; push again if servers came back meanwhile, once they have the gradient, too."""
        assert self.plan is not None
        body: Sequence[Tensor] = ()
        if not sent:
            how, body = self.memory.outgoing(0)
            header = {**header, **how}
        while True:
            told = {**header, "sent": True} if sent else header
            if self.plan.backups:
                told = {**told, "holders": self._generation, "lost": self.lines.take_lost()}
            self.lines.write(0, told, body)
            frame = self.lines.receive(0)
            if "again" not in frame.header:
                return frame
            self._send_to_new_holders()
            sent, body = True, ()
