"""A process that imports torch once and then forks followers in milliseconds.

It is started by `subprocess`, so `__main__` is never imported again: scripts need no guard, and
notebooks and standard input work. It lives in a session of its own, so Ctrl-C reaches only the
process at the keyboard. When that process ends, however it ends, the zygote's socket closes and
it takes every follower with it.

Requests are JSON over a socketpair; a fork request carries the follower's four descriptors.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from stratagem.replicas import frames

_PR_SET_PDEATHSIG = 1


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in sys.argv[2].split(","):
        importlib.import_module(name)
    Zygote(channel).serve()


class Zygote:
    """The forking loop; `children` maps a process id to its exit status, None while it runs."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.owner = os.getppid()
        self.children: dict[int, int | None] = {}

    def serve(self) -> None:
        while True:
            ready, _, _ = select.select([self.channel], [], [], 0.5)
            self._reap()
            data, fds = frames.receive_with_fds(self.channel, 4) if ready else (b"", [])
            # The owner's own children may hold its end of the socket open: look for it, too.
            if data is None or os.getppid() != self.owner:
                self._end(list(self.children))
                os._exit(0)
            if not ready:
                continue
            request = json.loads(data)
            if "import" in request:
                importlib.import_module(request["import"])
            elif "fork" in request:
                os.environ.update(_keras_settings(request["fork"]["environ"]))
                for name in request["modules"]:
                    importlib.import_module(name)
                self._reply(request, {"pid": self._fork(request["fork"], fds)})
            else:
                self._end(request["end"])
                status = {str(pid): self.children.pop(pid, None) for pid in request["end"]}
                self._reply(request, {"status": status})

    def _reply(self, request: dict[str, Any], answer: dict[str, Any]) -> None:
        answer["number"] = request["number"]
        frames.send(self.channel, json.dumps(answer).encode())

    def _fork(self, setting: dict[str, Any], fds: list[int]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self.children[pid] = None
            for fd in fds:
                os.close(fd)
            return pid
        self.channel.close()
        follower = importlib.import_module("stratagem.replicas.follower")
        die_with_parent(parent)
        follower.main(setting, *fds)
        os._exit(0)

    def _reap(self) -> None:
        for pid, status in self.children.items():
            if status is None:
                done, code = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.children[pid] = os.waitstatus_to_exitcode(code)

    def _end(self, pids: list[int]) -> None:
        """Kill and reap; SIGKILL also ends a stopped process."""
        for pid in pids:
            if pid in self.children and self.children[pid] is None:
                os.kill(pid, signal.SIGKILL)
                _, code = os.waitpid(pid, 0)
                self.children[pid] = os.waitstatus_to_exitcode(code)


def _keras_settings(environ: dict[str, str]) -> dict[str, str]:
    """Keras reads its backend from the environment when it is imported."""
    return {name: value for name, value in environ.items() if name.startswith("KERAS_")}


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent is gone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
