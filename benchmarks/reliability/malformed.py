"""What nobody should have sent, by the thousand: none of it is taken, and nothing breaks.

Each thing is made from a good one by a change that makes it wrong for certain: a byte that is
covered by a checksum or a proof, a length, a type, an end that comes too early.
"""

from __future__ import annotations

import json
import random
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stratagem.cluster.framing import HEAD, Malformed, encode
from stratagem.cluster.handshake import note_reader, recv_note
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import ClusterError, HandshakeError
from stratagem.state import checkpoint
from stratagem.state.checkpoint_folder import CheckpointFolder
from tests.cluster.server_proof import demand_proof

_SECRET = b"a long and random text"
_GREETING = b"STRATGM\x04"


def frame(dice: random.Random) -> bool:
    """Whether a reader of notes, or of one note from a socket, takes one that is none."""
    good = encode(
        {"t": "note", "number": dice.randrange(1 << 30), "text": "x" * dice.randrange(99)}
    )
    head, body = bytearray(good[: HEAD.size]), good[HEAD.size :]
    kind = dice.randrange(5)
    if kind == 0:  # of the magic, the version, or a length's upper half
        head[dice.choice((*range(8), 8, 9, 12))] ^= 1 << dice.randrange(8)
    elif kind == 1:
        body = dice.randbytes(len(body) - 1) + b"\xff"  # no UTF-8
    elif kind == 2:
        text = dice.choice((b"[1]", b'"t"', b"4", b"{]", b"{" * 2000))
        head, body = bytearray(HEAD.pack(b"SGWF", 1, 0, len(text), 0)), text
    elif kind == 3:
        head = bytearray(dice.randbytes(HEAD.size - 1) + b"\1")  # a body, too
    data = bytes(head) + body
    if kind == 4:
        data = data[: dice.randrange(len(data))]  # its end never comes
    taken: list[Any] = []
    with suppress(Malformed):
        taken = list(note_reader().feed(data))
    return bool(taken) or _answers(data, lambda sock: recv_note(sock, limit=5.0))


def greeting(dice: random.Random) -> bool:
    """Whether one that does not know the secret gets through."""
    data = bytearray(_GREETING + dice.randbytes(32 + 32))
    kind = dice.randrange(3)
    if kind == 0:
        data[dice.randrange(len(_GREETING))] ^= 1 << dice.randrange(8)
    elif kind == 1:
        data = data[: dice.randrange(len(data))]
    return _answers(bytes(data), lambda sock: demand_proof(sock, _SECRET, 5.0))


def _answers(data: bytes, listen: Callable[[socket.socket], object]) -> bool:
    """Whether whoever listens takes this from a socket."""
    near, far = socket.socketpair()
    with near, far:
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        try:
            listen(near)
        except (HandshakeError, ConnectionError):
            return False
    return True


def spec(dice: random.Random) -> bool:
    """Whether a cluster that cannot be is taken for one."""
    workers: list[Any] = [f"10.0.0.{i}:2222" for i in range(1, dice.randrange(2, 5))]
    jobs: Any = {"worker": workers, "ps": ["10.0.1.1:2222"]}
    at = dice.randrange(len(workers))
    wrong_address = dice.choice(
        ("", "10.0.0.1", "host:", "host:0", "host:65536", ":1", "host:x", "a b:1", 7, None, [], {})
    )
    kind = dice.randrange(6)
    if kind == 0:
        workers[at] = wrong_address
    elif kind == 1:
        workers.append(workers[at])
    elif kind == 2:
        jobs[dice.choice(("workers", "Worker", "", "gpu"))] = ["10.0.2.1:2222"]
    elif kind == 3:
        jobs["chief"] = ["10.0.2.1:1", "10.0.2.2:1"]
    elif kind == 4:
        jobs = dice.choice(([], 3, "worker", None, {}, {"ps": ["10.0.1.1:2222"]}, {"worker": 3}))
    text = json.dumps(jobs)
    if kind == 5:
        text = text[: dice.randrange(len(text))]
    try:
        ClusterSpec.from_json(text)
    except ClusterError:
        return False
    return True


class Damage:
    """Checkpoints of which a part is not what was written."""

    def __init__(self, where: Path) -> None:
        module = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self._folder = CheckpointFolder(where)
        taken = checkpoint.snapshot(module, optimizer, {"resume": {}}, copy=True)
        self._path = self._folder.write(taken, {"step": 1})
        assert self._folder.flaw(self._path) is None
        self._files = {path: path.read_bytes() for path in self._path.iterdir()}

    def __call__(self, dice: random.Random) -> bool:
        """Whether a damaged one is taken for whole."""
        path = dice.choice(sorted(self._files))
        data = bytearray(self._files[path])
        kind = dice.randrange(3)
        if kind == 0:
            path.write_bytes(data[: dice.randrange(len(data) - 1)])
        elif kind == 1 or path.suffix == ".json":
            path.unlink()
        else:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            path.write_bytes(data)
        taken = self._folder.flaw(self._path) is None
        path.write_bytes(self._files[path])
        return taken


def malformed(count: int) -> list[str]:
    """So many of all kinds; which were taken is raised."""
    with tempfile.TemporaryDirectory() as where:
        kinds = {
            "frame": frame,
            "greeting": greeting,
            "spec": spec,
            "checkpoint": Damage(Path(where)),
        }
        for seed in range(count):
            name = list(kinds)[seed % len(kinds)]
            if kinds[name](random.Random(seed)):
                raise AssertionError(f"a malformed {name} was accepted (seed {seed})")
    what = f"{count:,} malformed frames, greetings, specs and checkpoints"
    return [f"| {what} | no crash, none accepted |"]
