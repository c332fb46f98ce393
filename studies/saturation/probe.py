"""What a shaped link gives: a tensor there, a tensor back, with and without TLS.

    python studies/saturation/probe.py

The constants of terms.py come from here: how much of a link is left for tensors (goodput), what
a word there and back takes (latency), and what TLS adds.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
os.environ["OMP_NUM_THREADS"] = "1"
from hosts import Hosts  # noqa: E402
from processes import Process, start  # noqa: E402

from stratagem.wire.tcp import Connection, Listener, connect  # noqa: E402

SECRET, PORT = b"of a study", 2222
SIZES = {100e6: 1 << 20, 300e6: 3 << 20, 1000e6: 8 << 20}
ROUNDS = 9
#: what is sent and what comes back
WAYS = {"word": (False, False), "push": (True, False), "pull": (False, True)}


def serve(address: str, tls: bool) -> None:
    """Take tensors and give some, until the input ends."""

    def welcome(connection: Connection) -> None:
        while (frame := connection.receive()) is not None:
            tensor = torch.zeros(frame.size, dtype=torch.uint8)
            connection.read_into([tensor] if frame.size else [])
            wanted = frame.header["give"]
            connection.send({}, [torch.zeros(wanted, dtype=torch.uint8)] if wanted else [])

    with Listener(address, SECRET, "probe", welcome, tls=tls):
        print("READY", flush=True)
        sys.stdin.read()


def ask(address: str, tls: bool, size: int) -> None:
    """Seconds of a word, a push and a pull, each there and back."""
    connection = connect(address, SECRET, limit=10, tls=tls)
    tensor = torch.zeros(size, dtype=torch.uint8)

    def once(push: bool, pull: bool) -> float:
        begun = time.perf_counter()
        connection.send({"give": size if pull else 0}, [tensor] if push else [])
        frame = connection.receive()
        assert frame is not None
        connection.read_into([tensor] if frame.size else [])
        return time.perf_counter() - begun

    found = {name: [once(*way) for _ in range(ROUNDS)] for name, way in WAYS.items()}
    print("FOUND " + json.dumps(found), flush=True)
    sys.stdin.read()


def await_line(process: Process, word: str) -> str:
    """The rest of the first line that begins with this word."""
    while not process.ended:
        for line in process.lines():
            if line.startswith(word):
                return line.removeprefix(word)
            process.said.append(line)
    raise RuntimeError(f"{process.name} has ended:\n" + "\n".join(process.said))


def measure(bits: float, tls: bool) -> dict[str, Any]:
    """One worker and one server."""
    size = SIZES[bits]
    running: list[Process] = []
    with Hosts(2) as hosts:
        hosts.shape(bits)
        address = f"{hosts.address(0)}:{PORT}"
        try:
            running.append(start("server", hosts.names[0], {}, lambda: serve(address, tls)))
            await_line(running[0], "READY")
            running.append(start("worker", hosts.names[1], {}, lambda: ask(address, tls, size)))
            found = json.loads(await_line(running[1], "FOUND "))
        finally:
            for process in reversed(running):
                os.close(process.to)
                process.to = -1
                process.wait(time.monotonic() + 5)
    # with the first of each the connection is still getting faster
    middle = {name: statistics.median(times[2:]) for name, times in found.items()}
    goodput = {
        f"{name}_goodput": round(size * 8 / (middle[name] - middle["word"]) / bits, 3)
        for name in ("push", "pull")
    }
    word = round(middle["word"] * 1e3, 2)
    return {"link_bits": bits, "tls": tls, "bytes": size, "word_ms": word, **goodput}


def main() -> None:
    for bits in SIZES:
        for tls in (False, True):
            print(json.dumps(measure(bits, tls)), flush=True)


if __name__ == "__main__":
    main()
