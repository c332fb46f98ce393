"""Hosts on one machine: a network namespace each, all on one switch, every cable shaped.

    host 0 --e0 [tbf]-- p0 \\
    host 1 --e0 [tbf]-- p1  switch (a bridge in a namespace of its own)
    host 2 --e0 [tbf]-- p2 /

A cable has one token bucket a direction: at the host for what it sends, at the switch's port for
what it receives. Nothing is changed outside of these namespaces, and they go when `Hosts` closes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from itertools import pairwise
from types import TracebackType
from typing import Self

_SUBNET = "10.77.32"
#: seconds of the line that a bucket lets pass at once after a pause
_BURST = 1e-3
_FRAME, _LARGEST = 1514, 65536
#: bytes that a port of the switch keeps before it drops
_QUEUE = 1 << 20
#: of the ways to share a link, the one that every kernel lets a namespace choose
_CONGESTION = "reno"


class Unshaped(RuntimeError):
    """This machine cannot make such hosts."""


def why_not() -> str | None:
    """What is missing to make hosts here; None if nothing is."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` here (iproute2)"
    return None


class Hosts:
    """`count` hosts and the switch between them, until `close`."""

    def __init__(self, count: int) -> None:
        missing = why_not()
        if missing is not None:
            raise Unshaped(f"{missing}.")
        self.names = [f"saturation-{os.getpid()}-{i}" for i in range(count)]
        self._switch = f"saturation-{os.getpid()}-switch"
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")
        for i, name in enumerate(self.names):
            _run("ip", "netns", "add", name)
            _run(
                "ip",
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
            _run("ip", "-n", self._switch, "link", "set", f"p{i}", "master", "switch", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(i)}/24", "dev", "e0")
            for device in ("e0", "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
            _run(
                "ip",
                "netns",
                "exec",
                name,
                "sysctl",
                "-qw",
                f"net.ipv4.tcp_congestion_control={_CONGESTION}",
            )

    def address(self, host: int) -> str:
        return f"{_SUBNET}.{host + 1}"

    def shape(self, bits: float) -> None:
        """Every cable carries so many bits a second, each way."""
        burst = int(max(2 * _FRAME, bits / 8 * _BURST))
        whole = str(max(2 * _FRAME, min(burst, _LARGEST)))  # no packet that a bucket must cut up
        for i, name in enumerate(self.names):
            for where, device in ((name, "e0"), (self._switch, f"p{i}")):
                _run("ip", "-n", where, "link", "set", device, "gso_max_size", whole)
                _run(
                    "tc",
                    "-n",
                    where,
                    "qdisc",
                    "replace",
                    "dev",
                    device,
                    "root",
                    "tbf",
                    "rate",
                    f"{bits:.0f}bit",
                    "burst",
                    str(burst),
                    "limit",
                    str(_QUEUE),
                )

    def drops(self) -> int:
        """Packets that the buckets have dropped so far."""
        found = 0
        for where in (*self.names, self._switch):
            told = _run("tc", "-n", where, "-s", "qdisc", "show").split()
            found += sum(
                int(count.strip(",")) for word, count in pairwise(told) if word == "(dropped"
            )
        return found

    def inside(self, host: int, *command: str) -> list[str]:
        """The command line that runs a command on a host."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def close(self) -> None:
        """Take everything away; may be called again."""
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unshaped(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout
