"""The followers of one strategy, seen from the process that owns them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from stratagem.replicas import frames, graph_pickle
from stratagem.replicas.follower import Answer
from stratagem.replicas.output import Relay

_START = """
import sys
sys.path[:] = {path!r}
from stratagem.replicas.zygote import main
main()
"""


#: imported while the user builds a model; making any optimizer imports torch._dynamo (1.6 s)
_ALWAYS = ["torch", "torch._dynamo", "stratagem.replicas.follower"]
#: slow imports that followers will need, too, once their owner has them
_SLOW = ("stratagem", "torchmetrics", "keras")


def _worth_sharing() -> list[str]:
    """Modules that the zygote should import once, rather than every follower for itself."""
    return sorted(
        name for name in sys.modules
        if name.partition(".")[0] in _SLOW and (name.startswith("stratagem.") or "." not in name)
        and not (name.partition(".")[0] == "keras" and _has_cuda())
        and ".keras" not in name  # ours that import Keras
    )  # fmt: skip


def _has_cuda() -> bool:
    """Importing Keras looks for GPUs, after which a forked child could not use them."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())


def _path() -> list[str]:
    """Where modules are found, as text: people add Path objects, too."""
    return [str(each) for each in sys.path]


class ZygoteProcess:
    """This process's zygote; all its strategies share one."""

    _instance: ZygoteProcess | None = None
    _guard = threading.Lock()

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(path=_path()), str(theirs.fileno()),
             ",".join([*_ALWAYS, *(name for name in _worth_sharing() if name in _SLOW[1:])])],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._channel = ours
        self._lock = threading.Lock()
        self._asked = 0
        self._owner = os.getpid()

    @classmethod
    def get(cls) -> ZygoteProcess:
        """Start it if it does not run; returns at once, while it still imports."""
        with cls._guard:
            self = cls._instance
            alive = (
                self is not None and self._owner == os.getpid() and self._process.poll() is None
            )
            if not alive:
                cls._instance = cls()
            assert cls._instance is not None
            return cls._instance

    @classmethod
    def prepare(cls, module: str) -> None:
        """Have it import what followers will need, while the caller does so itself."""
        with cls._guard:
            self = cls._instance
        if self is not None and self._owner == os.getpid():
            with self._lock, contextlib.suppress(OSError):  # who forks next sees that it is gone
                frames.send_with_fds(self._channel, json.dumps({"import": module}).encode(), [])

    def fork(self, fds: list[int]) -> int:
        setting = {
            "cwd": os.getcwd(), "environ": dict(os.environ), "path": _path(), "argv": sys.argv,
        }  # fmt: skip
        request = {"fork": setting, "modules": _worth_sharing()}
        return int(self._ask(request, fds)["pid"])

    def end(self, pids: list[int]) -> dict[int, int | None]:
        """Kill those that still run; every exit status (negative: a signal's number)."""
        try:
            answer = self._ask({"end": pids}, [])
        except (ChildProcessError, ConnectionError):
            return {}  # it is gone, and its followers with it
        return {int(pid): status for pid, status in answer["status"].items()}

    def _ask(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        with self._lock:
            self._asked += 1
            number = self._asked
            request = {**request, "number": number}
            frames.send_with_fds(self._channel, json.dumps(request).encode(), fds)
            while True:
                data = frames.receive(self._channel)
                if data is None:
                    raise ChildProcessError(
                        "the helper process that starts replicas has ended; its own message stands "
                        "above this one. Most often the package cannot be imported by a fresh "
                        "interpreter."
                    )
                answer: dict[str, Any] = json.loads(data)
                if answer["number"] == number:  # not that to a question cut short by Ctrl-C
                    return answer


class Follower:
    """One follower: its process id and the sockets that lead to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._failure: Answer | None = None
        self.control, control = socket.socketpair()
        self._inbox = frames.Inbox(self.control)
        self.member, member = socket.socketpair()
        self.output, output = os.pipe()
        self.errors, errors = os.pipe()
        fds = [control.fileno(), member.fileno(), output, errors]
        try:
            self.pid = ZygoteProcess.get().fork(fds)
        finally:
            control.close()
            member.close()
            os.close(output)
            os.close(errors)

    def send(self, data: bytes, watch: Callable[[], None]) -> None:
        """A call; ConnectionError if it is gone."""
        self._failure = None
        frames.send(self.control, data, watch)

    def answer(self, seconds: float, watch: Callable[[], None] | None = None) -> Answer | None:
        """Its answer to the last call, if it comes in time; a failure may be read again.

        Once an answer has begun, `watch` is called while the rest does not come, and may raise;
        without it the rest, too, must come in time.
        """
        if self._failure is not None or not select.select([self.control], [], [], seconds)[0]:
            return self._failure
        until = time.monotonic() + seconds

        def give_up() -> None:
            if time.monotonic() > until:
                raise TimeoutError

        data = None
        with contextlib.suppress(ConnectionError, TimeoutError):
            data = self._inbox.receive(watch or give_up)
        answer: Answer | None = None if data is None else graph_pickle.loads(data)
        if answer is not None and answer.failed:
            self._failure = answer
        return answer

    def close(self) -> None:
        self.control.close()
        self.member.close()


class Pool:
    """Followers that run what they are told, one call at a time."""

    def __init__(self, names: list[str]) -> None:
        self._zygote = ZygoteProcess.get()
        self.followers = [Follower(name) for name in names]
        self._relay = Relay(
            {f.output: (f.name, "stdout") for f in self.followers}
            | {f.errors: (f.name, "stderr") for f in self.followers}
        )
        self._segments: list[Any] = []

    @property
    def pids(self) -> list[int]:
        return [follower.pid for follower in self.followers]

    def submit(
        self, function: Callable[..., Any], arguments: list[tuple[Any, ...]],
        watch: Callable[[], None],
    ) -> None:  # fmt: skip
        """Have follower i run `function(*arguments[i])`; `collect` brings the answers."""
        last: tuple[Any, bytes] | None = None
        for follower, args in zip(self.followers, arguments, strict=True):
            if last is None or last[0] is not args:
                data, segments = graph_pickle.dumps((function, args, {}))
                self._segments += segments
                last = (args, data)
            try:
                follower.send(last[1], watch)
            except ConnectionError:
                _mourn(follower, watch)

    def collect(self, watch: Callable[[], None]) -> list[Answer]:
        """Every follower's answer; `watch` is called while waiting and may raise."""
        answers: dict[int, Answer] = {}
        while len(answers) < len(self.followers):
            waiting = {
                f.control: i for i, f in enumerate(self.followers) if i not in answers
            }
            ready, _, _ = select.select(list(waiting), [], [], 0.05)
            for sock in ready:
                one = self.followers[waiting[sock]]
                answer = one.answer(0.0, watch)
                if answer is None:
                    _mourn(one, watch)
                answers[waiting[sock]] = answer
            if not ready:
                watch()
        self._segments.clear()
        self.drain()
        return [answers[i] for i in range(len(self.followers))]

    def drain(self) -> None:
        """Let everything out that followers have printed so far."""
        self._relay.drain()

    def end(self) -> dict[int, int | None]:
        """Kill all followers; returns how each ended. A second Ctrl-C cannot cut this short."""
        with _unbroken():
            status = self._zygote.end(self.pids) if self.followers else {}
            self._relay.close()
            for follower in self.followers:
                follower.close()
            self._segments.clear()
        return status


def _mourn(one: Follower, watch: Callable[[], None]) -> NoReturn:
    """A closed socket says that somebody died; the membership says who: give it a moment."""
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        watch()
        time.sleep(0.01)
    raise ChildProcessError(f"{one.name} has ended.")


class _unbroken:
    """Keep SIGINT out of a teardown (only the main thread receives signals)."""

    def __enter__(self) -> None:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)
