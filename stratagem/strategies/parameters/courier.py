"""A thread that carries bytes between a worker and one server while the worker computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_LEAVES = 2.0  # seconds that one may take whose connection has been closed


class Courier:
    """Runs errands one after the other; `wait` brings back what went wrong with one."""

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
        """Have it run beside what the caller does."""
        with self._lock:
            self._open += 1
            self._idle.clear()
        self._errands.put(errand)

    def wait(self) -> None:
        """Until every errand is done."""
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
