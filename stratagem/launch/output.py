"""What the tasks print, line by line, each behind its task's name and in its own stream."""

from __future__ import annotations

import os
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TextIO

from stratagem.launch.lines import Lines
from stratagem.launch.processes import Process

TAIL = 10  # lines of stderr that are kept to explain a failure
_PIPE = 1 << 20  # bytes; the most that a pipe holds
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether this is a terminal whose owner has nothing against colours (no-color.org)."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class Sink:
    """Writes whole lines to one of our own streams, past its buffer where it has a descriptor."""

    def __init__(self, stream: TextIO, *, colour: bool) -> None:
        self.colour = colour
        self._stream = stream
        try:
            self._fd: int | None = stream.fileno()
        except (OSError, ValueError):  # a notebook's
            self._fd = None

    def prefix(self, name: str, number: int) -> bytes:
        label = f"[{name}]"
        code = _COLOURS[number % len(_COLOURS)]
        return (f"\033[{code}m{label}\033[0m " if self.colour else f"{label} ").encode()

    def write(self, data: bytes) -> None:
        if self._fd is None:
            self._stream.write(data.decode(errors="replace"))
            return
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # whoever shares the terminal with us has made it so
                select.select([], [self._fd], [])


@dataclass
class _Source:
    """One stream of one task on its way to us."""

    fd: int
    prefix: bytes
    sink: Sink
    tail: deque[bytes]
    lines: Lines = field(default_factory=Lines)


class Relay:
    """A thread that copies lines, so that a reader who stalls never holds up the supervisor.

    `broken` is set once one of our own streams is closed at its other end.
    """

    def __init__(self, out: Sink, err: Sink) -> None:
        self.broken = threading.Event()
        self._out, self._err = out, err
        self._tails: dict[int, deque[bytes]] = {}
        self._notes: SimpleQueue[str] = SimpleQueue()
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="stratagem-output", daemon=True)

    def add(self, process: Process, number: int) -> None:
        """Read this task's streams; before `start`."""
        kept: deque[bytes] = deque(maxlen=TAIL)
        self._tails[process.pid] = kept
        for fd, sink, tail in (
            (process.stdout, self._out, deque[bytes](maxlen=0)),
            (process.stderr, self._err, kept),
        ):
            os.set_blocking(fd, False)
            source = _Source(fd, sink.prefix(str(process.task), number), sink, tail)
            self._selector.register(fd, selectors.EVENT_READ, source)

    def start(self) -> None:
        self._thread.start()

    def note(self, text: str) -> None:
        """Say something of the launcher's own among the lines of the tasks."""
        self._notes.put(text)

    def close(self) -> None:
        """Ask it to end with what has been written by now."""
        self._closing.set()

    def join(self, timeout: float) -> bool:
        """Whether everything is out."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def tail(self, process: Process) -> list[str]:
        """The last lines of the task's stderr."""
        return [line.decode(errors="replace") for line in self._tails[process.pid]]

    def _run(self) -> None:
        while not self._closing.is_set():
            notes = self._take_notes()  # before reading: a note follows the lines it speaks of
            for key, _ in self._selector.select(0 if notes else 0.05):
                self._read(key.data, 1 << 16)
            self._show_notes(notes)
            now = time.monotonic()
            for source in self._sources():
                self._show(source, source.lines.stale(now))
        for source in self._sources():
            self._read(source, _PIPE)
            self._show(source, source.lines.flush())
        self._show_notes(self._take_notes())

    def _sources(self) -> list[_Source]:
        return [key.data for key in self._selector.get_map().values()]

    def _read(self, source: _Source, most: int) -> None:
        """Show what has come, but no more than `most` bytes: others are waiting, too."""
        while most > 0:
            try:
                data = os.read(source.fd, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(source.fd)
                self._show(source, source.lines.flush())
                return
            most -= len(data)
            self._show(source, source.lines.feed(data, time.monotonic()))

    def _show(self, source: _Source, lines: Iterable[bytes]) -> None:
        lines = list(lines)
        source.tail.extend(lines)
        if lines:
            self._write(source.sink, b"".join(source.prefix + line + b"\n" for line in lines))

    def _take_notes(self) -> list[str]:
        return [self._notes.get() for _ in range(self._notes.qsize())]

    def _show_notes(self, notes: Iterable[str]) -> None:
        for text in notes:
            self._write(self._err, f"[stratagem] {text}\n".encode())

    def _write(self, sink: Sink, data: bytes) -> None:
        try:
            sink.write(data)
        except OSError:  # go on reading, so that no task stands still before a full pipe
            self.broken.set()
