"""A follower: waits for calls from the process that owns it, runs them, answers."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from stratagem.errors import UsageError
from stratagem.replicas import graph_pickle, pipe_frames
from stratagem.replicas.life_lock import LifeLock
from stratagem.tracebacks import described, for_other_tasks


@dataclass
class FollowerState:
    """The state of a follower between calls: its membership socket, and what calls put there."""

    sock: socket.socket
    things: dict[str, Any] = field(default_factory=dict)
    #: called with what the other tasks are told of a failing call, before the caller is answered
    on_failure: Callable[[str, str], None] | None = None


#: prefix of a call that is only prepared for, neither run nor answered; no pickle begins so
PRELOAD = b"preload:"
#: set in a follower's process, None everywhere else
state: FollowerState | None = None


@dataclass
class CallResult:
    """The result of a call: a value, or an exception (None if it cannot be pickled) and text."""

    value: Any = None
    failed: bool = False
    error: BaseException | None = None
    text: str = ""


def main(
    setting: dict[str, Any],
    control_fd: int,
    member_fd: int,
    output_fd: int,
    errors_fd: int,
    life_fd: int | None = None,
) -> None:
    global state
    if life_fd is not None:
        LifeLock(life_fd).hold()
    os.dup2(output_fd, 1)
    os.dup2(errors_fd, 2)
    os.close(output_fd)
    os.close(errors_fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir(setting["cwd"])
    os.environ.clear()
    os.environ.update(setting["environ"])
    sys.path[:] = setting["path"]
    sys.argv[:] = setting["argv"]
    sys.modules["__main__"] = ModuleType("__main__")  # for names of the script, not of the zygote
    control = socket.socket(fileno=control_fd)
    state = FollowerState(socket.socket(fileno=member_fd))
    if sys.platform != "linux":
        _die_with_socket(state.sock)
    while (data := pipe_frames.receive(control)) is not None:
        if data.startswith(PRELOAD):
            graph_pickle.preload(data[len(PRELOAD) :])
            continue
        try:
            pipe_frames.send(control, _answer(data))
        except ConnectionError:
            return  # the owner has dropped this follower, and does not wait for the answer


def _answer(data: bytes) -> bytes:
    assert state is not None
    try:
        function, args, kwargs = graph_pickle.loads_call(data)
        del data
        answer = _packed(function(*args, **kwargs))
    except BaseException as error:
        text = described(error)
        if state.on_failure is not None:
            state.on_failure(*for_other_tasks(error))
        answer = graph_pickle.dumps_answer(
            CallResult(failed=True, error=_portable(error), text=text)
        )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return answer


def _packed(value: Any) -> bytes:
    try:
        return graph_pickle.dumps_answer(CallResult(value))
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        raise UsageError(
            f"the result, a {type(value).__name__}, cannot be sent back: {error}. Return tensors, "
            "numbers, text, or lists and dicts of them."
        ) from error


def _portable(error: BaseException) -> BaseException | None:
    """Return the exception if it can be pickled and unpickled, else None."""
    try:
        graph_pickle.loads(graph_pickle.dumps_answer(error))
    except Exception as problem:
        sys.stderr.write(f"(the exception itself cannot be pickled: {problem})\n")
        return None
    return error


def _die_with_socket(sock: socket.socket) -> None:
    """End when the owner's socket closes, where the kernel has no parent-death signal."""

    def watch() -> None:
        while True:
            try:
                if not sock.recv(1, socket.MSG_PEEK):
                    os._exit(1)
            except BlockingIOError:
                pass  # no data, and the socket is open
            threading.Event().wait(0.5)

    threading.Thread(target=watch, daemon=True).start()
