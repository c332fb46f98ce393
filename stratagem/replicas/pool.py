"""The followers of one strategy, seen from the process that owns them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from stratagem.cluster.sockets import readable
from stratagem.errors import ReplicaLost
from stratagem.replicas import graph_pickle, pipe_frames
from stratagem.replicas.follower import PRELOAD, CallResult
from stratagem.replicas.life_lock import LifeLock
from stratagem.replicas.zygote import ZygoteGone, ZygoteProcess

_LATER = 0.1  # seconds in which a group that has just formed needs the processors


class Follower:
    """One follower: its process id and the sockets that lead to it."""

    def __init__(self, name: str) -> None:
        self.name, self.preloaded = name, False
        self._failure: CallResult | None = None
        self.control, control = socket.socketpair()
        self._inbox = pipe_frames.PipeReader(self.control)
        self.member, member = socket.socketpair()
        self.output, output = os.pipe()
        self.errors, errors = os.pipe()
        fds = [control.fileno(), member.fileno(), output, errors]
        self.life = LifeLock.make()
        fds += [] if self.life is None else [self.life.fd]
        zygote = ZygoteProcess.get()
        try:
            self.setting = zygote.setting()
            self.pid = zygote.fork(self.setting, fds)
        except ZygoteGone:
            raise zygote.why_gone([name]) from None
        finally:
            control.close()
            member.close()
            for fd in fds[2:]:
                os.close(fd)

    def send(self, data: bytes, watch: Callable[[], None]) -> None:
        """Send a call; ConnectionError if the follower is gone."""
        self._failure = None
        pipe_frames.send(self.control, data, watch)

    def answer(self, seconds: float, watch: Callable[[], None] | None = None) -> CallResult | None:
        """Return the answer to the last call if it comes in time; a failure may be read again.

        Once an answer has begun, `watch` is called while the rest is awaited, and may raise;
        without it the rest must come in time, too.
        """
        if self._failure is not None or not readable([self.control], seconds):
            return self._failure
        until = time.monotonic() + seconds

        def give_up() -> None:
            if time.monotonic() > until:
                raise TimeoutError

        data = None
        with contextlib.suppress(ConnectionError, TimeoutError):
            data = self._inbox.receive(watch or give_up)
        answer: CallResult | None = None if data is None else graph_pickle.loads(data)
        if answer is not None and answer.failed:
            self._failure = answer
        return answer

    def preload(self, call: bytes) -> None:
        """Have the follower import what a call needs, before it gets one."""
        self.preloaded = True
        with contextlib.suppress(OSError):  # a dead follower is noticed when it is needed
            pipe_frames.send(self.control, PRELOAD + call)

    def waits(self) -> bool:
        """Whether the follower has neither closed its socket nor answered a call."""
        return not readable([self.control], 0)

    def close(self, *, pipes: bool = False) -> None:
        """Close the sockets; with `pipes` those of the output, too, unless a relay has them."""
        self.control.close()
        self.member.close()
        for fd in (self.output, self.errors) if pipes else ():
            os.close(fd)


class FollowerRelay:
    """Copies lines from the followers' pipes, each behind its replica's name.

    A pipe has the replica's name and that of the stream: "stdout" or "stderr".
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
        self._start()

    def _start(self) -> None:
        self._runs = True
        self._thread = threading.Thread(target=self._run, name="stratagem-output", daemon=True)
        self._thread.start()

    def add(self, follower: Follower) -> None:
        """Copy the output of another follower, too."""
        with self._lock:
            for fd, stream in ((follower.output, "stdout"), (follower.errors, "stderr")):
                self._pipes[fd], self._partial[fd] = (follower.name, stream), b""
                os.set_blocking(fd, False)
                self._selector.register(fd, selectors.EVENT_READ)
            if not self._runs:
                self._start()

    def _run(self) -> None:
        while self._goes_on():
            if self._selector.select(0.2):
                self.drain()

    def _goes_on(self) -> bool:
        with self._lock:
            self._runs = self._open and bool(self._selector.get_map())
            return self._runs

    def drain(self) -> None:
        """Show all output that has arrived."""
        with self._lock:
            if not self._open:
                return
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
        with self._lock:
            before, self._open = self._open, False
        if not before:
            return  # its pool could not be replaced, and is ended with the others
        self._thread.join()
        for fd, line in self._partial.items():
            if line:
                self._show(fd, line)  # the unfinished line of a follower that died
        self._selector.close()
        for fd in self._pipes:
            os.close(fd)


class Pool:
    """The followers of one process, which run one call at a time."""

    def __init__(self, names: list[str], spares: Sequence[Follower] = ()) -> None:
        """`spares` take the first of the names."""
        self._zygote = ZygoteProcess.get()
        self.followers = [*spares, *(Follower(name) for name in names[len(spares) :])]
        self._relay = FollowerRelay(
            {f.output: (f.name, "stdout") for f in self.followers}
            | {f.errors: (f.name, "stderr") for f in self.followers}
        )
        self._segments: list[Any] = []
        #: the call that the followers run now, for a standby
        self.call: bytes | None = None

    @property
    def pids(self) -> list[int]:
        return [follower.pid for follower in self.followers]

    def submit(
        self,
        function: Callable[..., Any],
        arguments: list[tuple[Any, ...]],
        watch: Callable[[], None],
    ) -> None:
        """Have follower i run `function(*arguments[i])`; `collect` returns the answers."""
        last: tuple[Any, bytes] | None = None
        for follower, args in zip(self.followers, arguments, strict=True):
            if last is None or last[0] is not args:
                data, segments = graph_pickle.dumps((function, args, {}))
                self._segments += segments
                last = (args, data)
            try:
                follower.send(last[1], watch)
            except ConnectionError:
                self._raise_ended(follower, watch)
                raise
        self.call = None if last is None else last[1]

    def replace(self, index: int, follower: Follower) -> int:
        """Put another process in the place of a dead one; return the dead one's process id."""
        dead, self.followers[index] = self.followers[index], follower
        self._relay.add(follower)
        dead.control.close()
        return dead.pid

    def collect(self, watch: Callable[[], None]) -> list[CallResult]:
        """Return every follower's answer; `watch` is called meanwhile and may raise."""
        answers: dict[int, CallResult] = {}
        while len(answers) < len(self.followers):
            waiting = {f.control: i for i, f in enumerate(self.followers) if i not in answers}
            ready = readable(waiting, 0.05)
            for sock in ready:
                one = self.followers[waiting[sock]]
                if one.control is not sock:
                    continue  # a standby has replaced it
                answer = one.answer(0.0, watch)
                if answer is not None:
                    answers[waiting[sock]] = answer
                elif one in self.followers:
                    self._raise_ended(one, watch)
            if not ready:
                watch()
        self.release()
        self.call = None
        self.drain()
        return [answers[i] for i in range(len(self.followers))]

    def _raise_ended(self, one: Follower, watch: Callable[[], None]) -> None:
        """Raise the death of a follower, once the membership names it: a closed socket alone names
        none. Returns if a standby replaces it."""
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            watch()
            if one not in self.followers:
                return
            time.sleep(0.01)
        raise ChildProcessError(f"{one.name} has ended.")

    def release(self) -> None:
        """Free the memory in which a call was sent, once all followers have mapped it."""
        self._segments.clear()

    def drain(self) -> None:
        """Show all that followers have printed so far."""
        self._relay.drain()

    def orphaned(self) -> ReplicaLost | None:
        """Return the error to raise if the zygote has ended, and its followers with it."""
        status = self._zygote.ended()
        if status is None:
            return None
        return self._zygote.lost([follower.name for follower in self.followers], status)

    def end(self) -> dict[int, int | None]:
        """Kill all followers; return their exit statuses. Ctrl-C does not interrupt this."""
        with _unbroken():
            status = self._zygote.end(self.pids) if self.followers else {}
            self._close()
        return status

    def kill(self) -> None:
        """Kill all followers, without waiting for the zygote or for their ends."""
        if self._zygote.ended() is None:
            for pid in self.pids:  # not reaped before `end`, unless the zygote ends just now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _close(self) -> None:
        self._relay.close()
        for follower in self.followers:
            follower.close()
        self.release()


class _unbroken:
    """Keep SIGINT out of a teardown (only the main thread receives signals)."""

    def __enter__(self) -> None:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)


class Spares:
    """Unused followers without a name, forked in the background, one set at a time."""

    def __init__(self) -> None:
        self._waiting: list[Follower] = []
        self._thread: threading.Thread | None = None
        self._open = True
        self._hurry = threading.Event()

    def prepare(self, count: int) -> None:
        """Fork followers in the background until there are `count`."""
        self._join()
        self._hurry.clear()
        if len(self._waiting) < count and self._open:
            missing = count - len(self._waiting)
            self._thread = threading.Thread(target=self._fork, args=(missing,), daemon=True)
            self._thread.start()

    def preload(self, call: bytes) -> None:
        """Have spares import what this call needs: the next one will need it, too."""
        before = self._thread
        if before is None and all(one.preloaded for one in self._waiting):
            return

        def run() -> None:
            if before is not None:
                before.join()
            for one in self._waiting:
                if not one.preloaded:
                    one.preload(call)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def take(self, names: list[str]) -> list[Follower]:
        """Return as many spares as there are, under these names; none if the settings of this
        process have changed since they were forked."""
        self._join()
        now = ZygoteProcess.setting()
        if any(one.setting != now or not one.waits() for one in self._waiting):
            self._end_waiting()
        taken = self._waiting[: len(names)]
        del self._waiting[: len(taken)]
        for one, name in zip(taken, names, strict=False):
            one.name = name
        return taken

    def end(self) -> None:
        """End all spares, and make no more."""
        self._open = False
        self._join()
        self._end_waiting()

    def _fork(self, count: int) -> None:
        self._hurry.wait(_LATER)
        for _ in range(count):
            if not self._open:
                return
            try:
                self._waiting.append(Follower("a spare replica"))
            except (OSError, ReplicaLost):  # raised again where a follower is forked when needed
                return

    def _join(self) -> None:
        self._hurry.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _end_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            ZygoteProcess.get().end([one.pid for one in waiting])
        for one in waiting:
            one.close(pipes=True)
