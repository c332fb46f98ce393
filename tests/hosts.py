"""Hosts on one machine, for tests that mean machines.

    with Hosts(2) as hosts:
        hosts.start(0, sys.executable, "train.py", TF_CONFIG=...)
        hosts.start(1, ...)

A host has a hostname, a network namespace with one address on a common switch, a boot id and a
process namespace of its own: its processes take no other host for their own machine, see none of
its processes, and can map none of its memory. Two plain network namespaces would be one machine to
the library, and gradients would go through shared memory instead of the network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

ROOT = Path(__file__).parents[1]
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
_SUBNET = "10.77.31"
#: the first process of a host: it lasts until the host is switched off
_BOOT = (
    'hostname "$2" && mount --bind "$1" /proc/sys/kernel/random/boot_id && echo up && '
    "exec sleep infinity"
)


def needs_hosts(test: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a test that makes hosts; it is skipped, and says so, where they cannot be made."""
    able = os.geteuid() == 0 and all(map(shutil.which, _TOOLS))
    why = "hosts need root, iproute2 and util-linux"
    return pytest.mark.root(pytest.mark.skipif(not able, reason=why)(test))


class Hosts:
    """`count` hosts, switched on until `close`; host i has the address `address(i)`."""

    def __init__(self, count: int) -> None:
        self._names = [f"stratagem-{os.getpid()}-{i}" for i in range(count)]
        self._switch = f"stratagem-{os.getpid()}-switch"
        self._first: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._started: list[subprocess.Popen[str]] = []
        self._sweeper = self._leave_a_sweeper()
        try:
            self._connect()
            for name in self._names:
                self._boot(name)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._names)

    def _leave_a_sweeper(self) -> subprocess.Popen[bytes]:
        """Namespaces have names, and so outlive whoever made them: a process removes them when
        this one has ended, however it did."""
        spaces = " ".join((*self._names, self._switch))
        return subprocess.Popen(
            [
                "sh",
                "-c",
                f'cat; for i in {spaces}; do ip netns del $i; done; rm -rf "$0"',
                self._folder.name,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _connect(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for i, name in enumerate(self._names):
            _ip("netns", "add", name)
            _ip(
                "-n",
                name,
                "link",
                "add",
                "e0",
                "type",
                "veth",
                "peer",
                "name",
                f"p{i}",
                "netns",
                self._switch,
            )
            _ip("-n", self._switch, "link", "set", f"p{i}", "master", "switch", "up")
            _ip("-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "e0")
            for device in ("e0", "lo"):
                _ip("-n", name, "link", "set", device, "up")

    def _boot(self, name: str) -> None:
        boot_id = Path(self._folder.name) / name
        boot_id.write_text(f"{uuid.uuid4()}\n")
        first = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "KILL",  # however the tests end
                "ip",
                "netns",
                "exec",
                name,
                "unshare",
                "--mount",
                "--uts",
                "--pid",
                "--fork",
                "--mount-proc",
                "--kill-child",
                "sh",
                "-c",
                _BOOT,
                "sh",
                str(boot_id),
                f"host{self._names.index(name)}",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._first.append(first)
        assert first.stdout is not None
        if first.stdout.readline() != "up\n":
            first.kill()
            pytest.skip(f"no host can be made here: {first.communicate()[1].strip()}")

    def address(self, host: int) -> str:
        return f"{_SUBNET}.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """The beginning of a command line that runs a command on a host.

        The command is killed together with the process that it is the command line of.
        """
        outer = self._first[host].pid
        children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
        spaces = ["--mount", "--uts", "--net", "--pid"]
        return ["nsenter", "--target", children[0], *spaces, "setpriv", "--pdeathsig", "KILL"]

    def shape(self, host: int, rate: str, burst: str = "256kb") -> None:
        """Limit a host's link, both ways, to "200mbit" say; after a rest, so much goes at once."""
        for space, device in ((self._names[host], "e0"), (self._switch, f"p{host}")):
            limit = ["rate", rate, "burst", burst, "latency", "50ms"]
            _ip("netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)

    def cut(self, host: int) -> None:
        """Pull a host's cable: what is sent to it or by it is lost, and nobody is told."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "down")

    def heal(self, host: int) -> None:
        """Put the cable back."""
        _ip("-n", self._switch, "link", "set", f"p{host}", "up")

    def start(self, host: int, *command: object, **environ: str) -> subprocess.Popen[str]:
        """Start a command on a host, with a pipe to it and one for all its output."""
        started = subprocess.Popen(
            [*self.inside(host), *map(str, command)],
            text=True,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        )
        self._started.append(started)
        return started

    def close(self) -> None:
        """Switch all hosts off, and end what runs on them."""
        for process in (*self._started, *self._first):
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._sweeper.communicate()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip()}")
