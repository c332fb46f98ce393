"""What a job on this machine consists of: command, addresses, each task's environment."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from stratagem.cluster.cores import cores
from stratagem.cluster.handshake import SECRET_VARIABLE
from stratagem.cluster.parsing import MAX_PORT
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.errors import ClusterError, UsageError

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Job:
    """One command for every task of a cluster, and the GPUs of each."""

    spec: ClusterSpec
    command: tuple[str, ...]
    gpus: Mapping[Task, tuple[str, ...]]
    gpu_memory: str | None = None

    def environments(self, base: Mapping[str, str]) -> dict[Task, dict[str, str]]:
        """The environment of every task, a fresh secret in all of them."""
        tasks = self.spec.tasks()
        shared = {
            "OMP_NUM_THREADS": str(max(1, cores() // len(tasks))),
            **base,
            "PYTHONUNBUFFERED": "1",
            SECRET_VARIABLE: secrets.token_hex(32),
        }
        if self.gpu_memory:
            shared["STRATAGEM_GPU_MEMORY"] = self.gpu_memory
        return {task: {**shared, **self._own(task)} for task in tasks}

    def _own(self, task: Task) -> dict[str, str]:
        own = {"TF_CONFIG": self.spec.tf_config(task)}
        if any(self.gpus.values()):
            own["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[task])
        return own


def command(script: Sequence[str], module: Sequence[str] | None) -> tuple[str, ...]:
    """The command line of a script or module, which must be there."""
    if module is not None:
        return sys.executable, "-m", *_checked([*module, *script])
    words = list(script[1:] if script[:1] == ["--"] else script)
    if not words:
        raise UsageError("which script? As in: stratagem run --replicas 2 train.py")
    if words[0].startswith("-"):
        raise UsageError(f"there is no option {words[0]} (see stratagem run --help)")
    if not Path(words[0]).exists():
        raise UsageError(f"there is no script {words[0]!r} in {os.getcwd()}")
    return sys.executable, *words


def _checked(module: list[str]) -> list[str]:
    if not module:
        raise UsageError("-m needs the name of a module; as in: stratagem run -m mypackage.train")
    if not _importable(module[0].partition(".")[0]):
        raise UsageError(
            f"there is no module {module[0]!r}, neither in {os.getcwd()} nor installed"
        )
    return module


def _importable(package: str) -> bool:
    """Whether python -m would find it; only the top name, for looking further imports it."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)


def addresses(roles: Mapping[str, int], base: int | None) -> dict[str, list[str]]:
    """Addresses on this machine for so many tasks of each role."""
    tasks = [Task(role, index) for role, count in roles.items() for index in range(count)]
    if base is not None and base + len(tasks) - 1 > MAX_PORT:
        raise ClusterError(
            f"--port {base}: {len(tasks)} tasks need the ports up to {base + len(tasks) - 1}, and "
            f"{MAX_PORT} is the last"
        )
    found: dict[str, list[str]] = {role: [] for role in roles}
    with ExitStack() as held:  # all at once, so that no port is found twice
        for number, task in enumerate(tasks):
            sock = held.enter_context(socket.socket())
            port = _bind(sock, task, None if base is None else base + number)
            found[task.type].append(f"{_HOST}:{port}")
    return found


def _bind(sock: socket.socket, task: Task, port: int | None) -> int:
    """Bind a free port, or the one that was asked for."""
    if port is None:
        sock.bind((_HOST, 0))
        return int(sock.getsockname()[1])
    # Connections of an earlier job that the kernel has not forgotten yet do no harm.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((_HOST, port))
    except OSError as problem:
        raise ClusterError(
            f"{task} cannot listen at port {port} ({problem.strerror}): choose another --port, or "
            "leave it out and free ports are found"
        ) from None
    return port
