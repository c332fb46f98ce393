"""Threads that move tensors between a worker and its servers while the worker computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable

_LEAVES = 2.0  # seconds that a thread may take whose connection has been closed


class TransferThread:
    """Carries bytes between a worker and one server while the worker computes.

    It runs errands one after the other; `wait` brings back what went wrong with one.
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
        """Run an errand beside the caller."""
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
        """Let it go, and wait for that: Python does not survive a thread that still frees tensors
        while the interpreter ends."""
        self._errands.put(None)
        self._thread.join(_LEAVES)

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            try:
                if self._problem is None:  # the rest would only follow from it
                    errand()
            except BaseException as problem:
                self._problem = problem
            del errand  # and all that it holds, before anybody relies on its being done
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._idle.set()


class TransferThreads:
    """Those of one worker: one for each line, made when it is first needed; none until `begin`."""

    def __init__(self) -> None:
        self._begun = False
        self._threads: dict[Hashable, TransferThread] = {}

    def __bool__(self) -> bool:
        """Whether anything travels beside the computation."""
        return self._begun

    def begin(self) -> None:
        self._begun = True

    def carry(self, line: Hashable, errand: Callable[[], None]) -> None:
        """Run an errand after all earlier ones over this line."""
        if not self._begun:
            errand()
            return
        if line not in self._threads:
            self._threads[line] = TransferThread("transfer")
        self._threads[line].send(errand)

    def wait(self) -> None:
        """Wait until all errands are done; raise the error of one that failed."""
        for thread in list(self._threads.values()):
            thread.wait()

    def end(self) -> None:
        for thread in self._threads.values():
            thread.end()
        self._threads.clear()
        self._begun = False
