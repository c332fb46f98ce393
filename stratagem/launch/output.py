"""What the tasks print, line by line, each behind its task's name and in its own stream."""

from __future__ import annotations

import os
import re
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TextIO

from stratagem.launch.processes import Process

PATIENCE = 2.0  # seconds until an unfinished line or a progress bar is shown
_LONGEST = 1 << 16  # bytes; a line beyond it is cut


class Lines:
    """Cuts a stream of bytes into lines; keeps the last state of a bar redrawn by \\r."""

    def __init__(self) -> None:
        self._rest = b""
        self._since = 0.0
        self._continued = False

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Return the lines that are complete by now."""
        self._since = self._since if self._rest else now
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [line for raw in whole for line in self._finish(raw)]
        return lines + (self.flush() if len(self._rest) > _LONGEST else [])

    def stale(self, now: float) -> list[bytes]:
        """Return an unfinished line that has waited too long for its end."""
        return self.flush() if self._rest and now - self._since >= PATIENCE else []

    def flush(self) -> list[bytes]:
        """Return the unfinished line; later bytes begin a new one."""
        state, self._rest = _state(self._rest), b""
        self._continued = self._continued or bool(state)
        return [state] if state else []

    def _finish(self, raw: bytes) -> list[bytes]:
        state, continued = _state(raw), self._continued
        self._continued = False
        return [state] if state or not continued else []


def _state(raw: bytes) -> bytes:
    """Return roughly what a terminal would show: the text since the last carriage return."""
    return next((text for text in reversed(raw.split(b"\r")) if text.strip()), b"")


_INSIDE = re.compile(rb"\s|Traceback \(most recent|During handling of|The above exception|$")


class Interrupts:
    """Filters the tracebacks of KeyboardInterrupt from the output of tasks after Ctrl-C."""

    def __init__(self) -> None:
        self._held: list[bytes] = []

    def feed(self, lines: list[bytes]) -> list[bytes]:
        """Return the lines to show by now."""
        shown: list[bytes] = []
        for line in lines:
            if line.startswith(b"Traceback (most recent") or (self._held and _INSIDE.match(line)):
                self._held.append(line)
            elif self._held and line.startswith(b"KeyboardInterrupt"):
                self._held.clear()
            else:
                shown += [*self.flush(), line]
        return shown

    def flush(self) -> list[bytes]:
        """Return the lines that were held back."""
        held, self._held = self._held, []
        return held


TAIL = 10  # lines of stderr that are kept to explain a failure
_PIPE = 1 << 20  # bytes; the most that a pipe holds
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


def wants_colour(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether the stream is a terminal and NO_COLOR is not set (no-color.org)."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class Sink:
    """Writes whole lines to stdout or stderr, past the buffer if there is a file descriptor."""

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
            except BlockingIOError:  # another process that shares the terminal made it non-blocking
                select.select([], [self._fd], [])


@dataclass
class _Source:
    """The stdout or stderr of a task, and where its lines go."""

    fd: int
    prefix: bytes
    sink: Sink
    tail: deque[bytes]
    lines: Lines = field(default_factory=Lines)
    interrupts: Interrupts = field(default_factory=Interrupts)


class Relay:
    """A thread that copies lines of tasks, so that a stalled reader never blocks the supervisor.

    `broken` is set when stdout or stderr was closed by its reader.
    """

    def __init__(self, out: Sink, err: Sink) -> None:
        self.broken = threading.Event()
        #: set after Ctrl-C, unless whole tracebacks are wanted
        self.interrupted = threading.Event()
        self._out, self._err = out, err
        self._tails: dict[int, deque[bytes]] = {}
        self._notes: SimpleQueue[str] = SimpleQueue()
        self._coming: SimpleQueue[_Source] = SimpleQueue()
        self._closing = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="stratagem-output", daemon=True)

    def add(self, process: Process, number: int, own: Sink | None = None) -> None:
        """Copy this task's streams, to the sink `own` if one is given."""
        kept: deque[bytes] = deque(maxlen=TAIL)
        self._tails[process.pid] = kept
        for fd, sink, tail in (
            (process.stdout, own or self._out, deque[bytes](maxlen=0)),
            (process.stderr, own or self._err, kept),
        ):
            os.set_blocking(fd, False)
            source = _Source(fd, sink.prefix(str(process.task), number), sink, tail)
            self._coming.put(source)

    def start(self) -> None:
        self._thread.start()

    def note(self, text: str) -> None:
        """Print a line of the launcher among the lines of the tasks."""
        self._notes.put(text)

    def close(self) -> None:
        """Ask the thread to end once it has copied what was written so far."""
        self._closing.set()

    def join(self, timeout: float) -> bool:
        """Wait so long; return whether everything was copied."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def tail(self, process: Process) -> list[str]:
        """The last lines of the task's stderr."""
        return [line.decode(errors="replace") for line in self._tails[process.pid]]

    def _run(self) -> None:
        while not self._closing.is_set():
            self._begin_to_read()
            notes = self._take_notes()  # before reading: a note follows the lines that it is about
            for key, _ in self._selector.select(0 if notes else 0.05):
                self._read(key.data, 1 << 16)
            self._show_notes(notes)
            now = time.monotonic()
            for source in self._sources():
                self._show(source, source.lines.stale(now))
        self._begin_to_read()
        for source in self._sources():
            self._read(source, _PIPE)
            self._show(source, source.lines.flush())
            self._show(source, source.interrupts.flush())
        self._show_notes(self._take_notes())

    def _begin_to_read(self) -> None:
        while not self._coming.empty():
            source = self._coming.get()
            self._selector.register(source.fd, selectors.EVENT_READ, source)

    def _sources(self) -> list[_Source]:
        return [key.data for key in self._selector.get_map().values()]

    def _read(self, source: _Source, most: int) -> None:
        """Copy at most `most` bytes of a stream, so that the other streams get their turn."""
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
        if self.interrupted.is_set():
            lines = source.interrupts.feed(lines)
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
        except OSError:  # go on reading: a task would block on a full pipe
            self.broken.set()
