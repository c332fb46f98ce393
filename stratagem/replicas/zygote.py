"""A process that imports torch once and then forks followers in milliseconds.

It is started by `subprocess`, so `__main__` is never imported again: scripts need no guard, and
notebooks and standard input work. It has a session of its own, so Ctrl-C reaches only the process
at the keyboard. When that process ends, in whatever way, the zygote's socket closes, and it ends
with all its followers.

`Zygote` is the process itself, `ZygoteProcess` is its owner's handle. Requests are JSON over a
socketpair; a fork request carries the follower's descriptors.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

from stratagem.errors import ReplicaLost
from stratagem.replicas import pipe_frames
from stratagem.wire.freed_memory import keep_freed_memory

log = logging.getLogger("stratagem")

_PR_SET_PDEATHSIG = 1


def main() -> None:
    channel, owner = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[4:]:
        die_with_parent(owner)  # imports take seconds, in which the socket is not read
    keep_freed_memory()
    _import(sys.argv[2].split(","))
    Zygote(channel, owner).serve()


def _import(names: list[str]) -> None:
    """Import modules, whose objects the garbage collector never visits, here or in followers.

    Visiting costs a seventh of the time of importing torch, and in a follower it would copy every
    page that it shares with other processes.
    """
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


class Zygote:
    """The forking loop; `children` are the followers whose end the owner has not asked for.

    They are reaped only then, so until then their process ids are not reused.
    """

    def __init__(self, channel: socket.socket, owner: int) -> None:
        self.channel = channel
        self.owner = owner
        self.children: set[int] = set()

    def serve(self) -> None:
        while True:
            ready, _, _ = select.select([self.channel], [], [], 0.5)
            data, fds = pipe_frames.receive_with_fds(self.channel, 5) if ready else (b"", [])
            # The owner's other children may hold its end of the socket open: check its pid, too.
            if data is None or os.getppid() != self.owner:
                self._leave()
            if not ready:
                continue
            request = json.loads(data)
            if "import" in request:
                _import([request["import"]])
            elif "fork" in request:
                os.environ.update(_keras_settings(request["fork"]["environ"]))
                _import(request["modules"])
                self._reply(request, {"pid": self._fork(request["fork"], fds)})
            else:
                self._kill(request["end"])
                self._reply(request, {"status": self._reaped(request["end"])})

    def _reply(self, request: dict[str, Any], answer: dict[str, Any]) -> None:
        answer["number"] = request["number"]
        try:
            pipe_frames.send(self.channel, json.dumps(answer).encode())
        except (BrokenPipeError, ConnectionResetError):
            self._leave()  # the owner has ended without waiting for it

    def _fork(self, setting: dict[str, Any], fds: list[int]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self.children.add(pid)
            for fd in fds:
                os.close(fd)
            return pid
        self.channel.close()
        follower = importlib.import_module("stratagem.replicas.follower")
        die_with_parent(parent)
        follower.main(setting, *fds)
        os._exit(0)

    def _reaped(self, pids: list[int]) -> dict[str, int | None]:
        """Return the exit statuses of children that have ended (None: not known)."""
        status: dict[str, int | None] = {}
        for pid in pids:
            done, code = os.waitpid(pid, os.WNOHANG) if pid in self.children else (pid, None)
            if done:
                self.children.discard(pid)
                status[str(pid)] = None if code is None else os.waitstatus_to_exitcode(code)
        return status

    def _leave(self) -> NoReturn:
        """End with all children, since the owner is gone."""
        self._kill(list(self.children))
        for pid in self.children:  # all of them before the first wait
            os.waitpid(pid, 0)
        os._exit(0)

    def _kill(self, pids: list[int]) -> None:
        """Kill children by SIGKILL, which ends stopped ones, too."""
        for pid in pids:
            if pid in self.children:
                os.kill(pid, signal.SIGKILL)


def _keras_settings(environ: dict[str, str]) -> dict[str, str]:
    """Return the variables that Keras reads when it is imported."""
    return {name: value for name, value in environ.items() if name.startswith("KERAS_")}


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent is gone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


# --- the owner's side ---------------------------------------------------------------------------


_START = """
import sys
sys.path[:] = {path!r}
from stratagem.replicas.zygote import main
main()
"""


#: imported while the user builds a model; making any optimizer imports torch._dynamo (1.6 s)
_ALWAYS = ["torch", "torch._dynamo", "stratagem.replicas.follower"]
#: slow imports that followers need, too, if their owner has made them
_SLOW = ("stratagem", "torchmetrics", "keras")
_LOOK = 0.002  # seconds between two checks whether processes have ended
_REAPED = 5.0  # seconds until a process whose socket has closed is known to be dead


def _worth_sharing() -> list[str]:
    """Return the modules that the zygote should import, so that followers need not."""
    keras = "keras" in sys.modules and not _has_cuda()
    return sorted(
        name
        for name in sys.modules
        if name.partition(".")[0] in _SLOW
        and (name.startswith("stratagem.") or "." not in name)
        and (keras or "keras" not in name)  # modules of this package that import Keras, too
    )


def _has_cuda() -> bool:
    """Whether there are GPUs: importing Keras initialises them, and a fork could not use them."""
    kinds = sys.modules.get("stratagem.wire.device_kinds")
    return kinds is not None and kinds.KINDS["cuda"].count() > 0


def _path() -> list[str]:
    """Return sys.path as text: users add Path objects, too."""
    return [str(each) for each in sys.path]


class ZygoteProcess:
    """The handle of this process's zygote, which all its strategies share."""

    _instance: ZygoteProcess | None = None
    _guard = threading.Lock()

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # The kernel's signal comes when the thread ends that started a process: only the first
        # lives as long as this process.
        main_thread = threading.current_thread() is threading.main_thread()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START.format(path=_path()),
                str(theirs.fileno()),
                ",".join([*_ALWAYS, *(name for name in _worth_sharing() if name in _SLOW[1:])]),
                str(os.getpid()),
                *(["die with parent"] if main_thread else []),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._channel = ours
        self._lock = threading.Lock()
        self._asked = 0
        self._owner = os.getpid()

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    def get(cls) -> ZygoteProcess:
        """Start the zygote if it does not run; return while it still imports."""
        with cls._guard:
            self = cls._instance
            alive = self is not None and self._owner == os.getpid() and self._process.poll() is None
            if not alive:
                cls._instance = cls()
            assert cls._instance is not None
            return cls._instance

    @classmethod
    def prepare(cls, module: str) -> None:
        """Have the zygote import what followers will need, while the caller does so itself."""
        with cls._guard:
            self = cls._instance
        if self is not None and self._owner == os.getpid():
            with self._lock, contextlib.suppress(OSError):  # its end is noticed at the next fork
                pipe_frames.send_with_fds(
                    self._channel, json.dumps({"import": module}).encode(), []
                )

    @staticmethod
    def setting() -> dict[str, Any]:
        """Return the settings that followers inherit from this process."""
        environ, argv = dict(os.environ), list(sys.argv)
        return {"cwd": os.getcwd(), "environ": environ, "path": _path(), "argv": argv}

    def fork(self, setting: dict[str, Any], fds: list[int]) -> int:
        request = {"fork": setting, "modules": _worth_sharing()}
        return int(self._ask(request, fds)["pid"])

    def ended(self) -> int | None:
        """Return the exit status of the zygote; None while it runs.

        Its socket closes before its followers are killed: whoever sees one of them dead knows.
        An answer may still be unread, or a follower that was just forked have the socket, too.
        """
        try:
            if self._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return self._process.poll()
        except BlockingIOError:
            return self._process.poll()
        except ConnectionResetError:
            log.debug("the zygote has hung up with something unread")
        return self._process.wait(_REAPED)

    def why_gone(self, names: list[str]) -> ReplicaLost | ChildProcessError:
        """Return the error for followers that cannot be forked, since the zygote has ended."""
        status = self._process.wait(_REAPED)
        if status >= 0:
            return ChildProcessError(
                "the helper process that starts replicas has ended; its own message stands above "
                "this one. Most often the package cannot be imported by a fresh interpreter."
            )
        return self.lost(names, status)

    def lost(self, names: list[str], status: int) -> ReplicaLost:
        """Return the error for followers that have ended with the zygote, or did not start."""
        how, hint = how_it_ended(status)
        return ReplicaLost(
            f"{', '.join(names)} ended because the helper process (pid {self.pid}) that starts the "
            f"others {how}. {hint} The strategy can be used again.",
            names[0],
        )

    def end(self, pids: list[int]) -> dict[int, int | None]:
        """Kill processes that still run; return all exit statuses (negative: a signal's number).

        The kernel takes a while for each; meanwhile the zygote may fork for others.
        """
        status: dict[int, int | None] = {}
        with contextlib.suppress(ZygoteGone):  # and its followers with it
            while left := [pid for pid in pids if pid not in status]:
                answer = self._ask({"end": left}, [])["status"]
                status |= {int(pid): how for pid, how in answer.items()}
                if len(status) < len(pids):
                    time.sleep(_LOOK)
        return status

    def _ask(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        with self._lock:
            self._asked += 1
            number = self._asked
            request = {**request, "number": number}
            try:
                pipe_frames.send_with_fds(self._channel, json.dumps(request).encode(), fds)
            except ConnectionError as problem:
                raise ZygoteGone from problem
            while True:
                data = pipe_frames.receive(self._channel)
                if data is None:
                    raise ZygoteGone
                answer: dict[str, Any] = json.loads(data)
                if answer["number"] == number:  # not of a request that Ctrl-C has interrupted
                    return answer


class ZygoteGone(Exception):
    """The zygote has closed its socket."""


def how_it_ended(status: int | None) -> tuple[str, str]:
    """Describe an exit status (negative: a signal's number; None: unknown), with a remedy."""
    output = "Its last lines of output stand above."
    if status is None or status >= 0:
        return "ended" if status is None else f"ended with exit code {status}", output
    if status == -signal.SIGKILL:
        output = (
            "If nobody did that on purpose, the machine ran out of memory (see `dmesg`): use "
            "fewer replicas or a smaller batch."
        )
    return f"was killed by {signal.Signals(-status).name}", output
