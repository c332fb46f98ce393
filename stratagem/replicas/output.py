"""What followers print appears where their owner prints, a notebook's cell included."""

from __future__ import annotations

import os
import selectors
import sys
import threading


class Relay:
    """Copies lines from the followers' pipes, each behind its replica's name.

    A pipe has the replica's name and that of the stream it leads to: "stdout" or "stderr".
    """

    def __init__(self, pipes: dict[int, tuple[str, str]]) -> None:
        self._pipes = pipes
        self._partial = dict.fromkeys(pipes, b"")
        self._selector = selectors.DefaultSelector()
        for fd in pipes:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="stratagem-output", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._open and self._selector.get_map():
            if self._selector.select(0.2):
                self.drain()

    def drain(self) -> None:
        """Show everything that has arrived by now."""
        with self._lock:
            for fd in [key for key in self._selector.get_map() if isinstance(key, int)]:
                self._read(fd)

    def _read(self, fd: int) -> None:
        while True:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(fd)
                return
            *lines, self._partial[fd] = (self._partial[fd] + data).split(b"\n")
            for line in lines:
                self._show(fd, line)

    def _show(self, fd: int, line: bytes) -> None:
        name, stream = self._pipes[fd]
        getattr(sys, stream).write(f"[{name}] {line.decode(errors='replace')}\n")

    def close(self) -> None:
        self.drain()
        self._open = False
        self._thread.join()
        for fd, line in self._partial.items():
            if line:
                self._show(fd, line)  # the last words of one that died in mid-sentence
        self._selector.close()
        for fd in self._pipes:
            os.close(fd)
