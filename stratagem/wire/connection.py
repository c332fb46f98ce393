"""A connection to one peer of the job, over which frames travel."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from stratagem.cluster.framing import HEAD, Malformed, decode_head, decode_header, encode
from stratagem.errors import StratagemError, UsageError
from stratagem.wire.channel import Channel, wait
from stratagem.wire.send_queue import SendQueue

log = logging.getLogger("stratagem")

_SCRAP = 1 << 20  # bytes of a skipped body that are read at a time
_ORDINARY_ENDS = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


class WireError(StratagemError, ConnectionError):
    """A connection failed, or carried invalid data; it is closed."""


@dataclass(frozen=True)
class Frame:
    """A received header, and the size of the body, which is still to be read."""

    header: dict[str, Any]
    size: int

    def room(self, size: int) -> Tensor:
        """Allocate memory for a part of the body, which cannot be larger than the body."""
        if not 0 <= size <= self.size:
            raise WireError(f"a part of {size} bytes was announced in a body of {self.size}")
        return torch.empty(size, dtype=torch.uint8)


class _ClosedHere(WireError):
    """This side closed the connection."""


class _Use:
    """Keeps the descriptor open while a thread uses the connection."""

    __slots__ = ("_connection", "_in_frame")

    def __init__(self, connection: Connection, in_frame: bool) -> None:
        self._connection, self._in_frame = connection, in_frame

    def __enter__(self) -> None:
        self._connection._enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if problem is not None:
                self._connection._broke(problem, self._in_frame)
        finally:
            self._connection._leave()


class Connection(AbstractContextManager["Connection"]):
    """Frames to and from one peer.

    Any thread may send; one thread receives: `receive`, then the body with `read_into`, `read`
    or `skip`. A WireError from any of them is final: the connection is closed. Any thread may call
    `close`, which wakes waiting threads. It does not wait until the peer has read what was sent; to
    be sure of that, wait for an answer.
    """

    def __init__(self, channel: Channel, peer: str) -> None:
        #: the peer's name for messages; may be set to a better one
        self.peer = peer
        #: the identity of the peer's host, once known
        self.host = ""
        self._channel = channel
        self._sending = threading.Lock()
        self._gate = threading.Lock()
        self._users = 0
        self._closed = False
        self._left = 0  # bytes of body not yet read
        self._inside, self._between = _Use(self, True), _Use(self, False)

    def send(self, header: Mapping[str, Any], body: Sequence[Tensor] = ()) -> None:
        """Send a frame: a JSON object and contiguous CPU tensors, one after the other.

        Blocks while the peer does not read; `close` ends that.
        """
        pieces = bytes_of(body) if body else []
        start = encode(header, sum(map(len, pieces)))
        if self._channel.closed:  # before any lock, which no thread would release in a forked child
            raise self._closed_here()
        with self._sending, self._between:
            self._channel.send([memoryview(start), *pieces])

    def send_in_turn(
        self, turns: SendQueue, header: Mapping[str, Any], body: Sequence[Tensor] = ()
    ) -> None:
        """Send a frame; a large body waits for its turn among other large ones."""
        with turns.turn(self._channel.line, sum(tensor.nbytes for tensor in body)):
            self.send(header, body)

    def stream(self, header: Mapping[str, Any], size: int, parts: Iterable[Tensor]) -> None:
        """Send a frame whose body of `size` bytes in total is produced part by part.

        Other senders wait meanwhile, so the parts must come to an end, or the caller must close the
        connection.
        """
        start = encode(header, size)
        if self._channel.closed:
            raise self._closed_here()
        with self._sending, self._between:
            self._channel.send([memoryview(start)])
            for part in parts:
                pieces = bytes_of([part])
                size -= sum(map(len, pieces))
                self._channel.send(list(pieces))
        if size:
            self.close()
            raise UsageError(f"a frame's parts differ from its size by {size} bytes")

    def offer(self, header: Mapping[str, Any]) -> bool:
        """Send a small frame unless that would block; returns whether it was sent.

        It would block while another frame is being sent, or if the peer does not read.
        """
        start = encode(header, 0)
        if self._channel.closed:
            raise self._closed_here()
        if not self._sending.acquire(blocking=False):
            return False
        try:
            with self._between:
                if not wait(self._channel.line, select.POLLOUT, 0.0):
                    return False
                self._channel.send([memoryview(start)])
                return True
        finally:
            self._sending.release()

    def receive(self) -> Frame | None:
        """Wait for a frame; None if the peer, or this side, closed between two frames."""
        if self._left:
            raise UsageError(
                f"the body of the last frame from {self.peer} ({self._left} bytes) was not read: "
                "read_into, read or skip it before the next receive"
            )
        if self._channel.closed:
            return None
        head = bytearray(HEAD.size)
        try:
            with self._between:
                count = self._channel.receive([memoryview(head)])
        except _ClosedHere:
            return None
        if not count:
            self.close()
            return None
        if count < HEAD.size:
            self._truncated(count, HEAD.size)
        try:
            size, left = decode_head(head)
            text = bytearray(size)
            self._fill([memoryview(text)], size)
            header = decode_header(text)
        except Malformed as problem:
            self._refuse(str(problem))
        self._left = left
        return Frame(header, left)

    def read_into(self, tensors: Sequence[Tensor], *, more: bool = False) -> None:
        """Read the body straight into these tensors; its size must be theirs.

        With `more` they take its beginning, and the rest is read later.
        """
        pieces = bytes_of(tensors)
        wanted = sum(map(len, pieces))
        if wanted > self._left or (wanted < self._left and not more):
            self._refuse(f"it sent a body of {self._left} bytes where {wanted} belong")
        self._fill(pieces, wanted)
        self._left -= wanted

    def read(self, limit: int) -> Tensor:
        """Read the body as bytes; WireError if they are more than `limit`."""
        self._hold_to(limit)
        body = torch.empty(self._left, dtype=torch.uint8)
        self._fill(bytes_of([body]), self._left)
        self._left = 0
        return body

    def skip(self, limit: int) -> None:
        """Discard the body; WireError if it has more than `limit` bytes."""
        self._hold_to(limit)
        scrap = memoryview(bytearray(min(self._left, _SCRAP)))
        while self._left:
            size = min(self._left, _SCRAP)
            self._fill([scrap[:size]], size)
            self._left -= size

    def readable(self, seconds: float = 0.0) -> bool:
        """Whether a frame begins, or the stream ends, within that time."""
        if self._channel.closed:
            return True
        try:
            with self._between:
                return self._channel.readable(seconds)
        except _ClosedHere:
            return True

    def close(self) -> None:
        """Hang up, and wake every thread that sends or receives; may be called again."""
        if self._channel.closed:
            return
        with self._gate:
            if self._closed:
                return
            self._closed = True
            self._users += 1
        self._channel.hang_up()
        self._leave()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hold_to(self, limit: int) -> None:
        if self._left > limit:
            self._refuse(f"it sent a body of {self._left} bytes; {limit} is the limit here")

    def _fill(self, pieces: Sequence[memoryview], wanted: int) -> None:
        """Receive bytes inside a frame, where the stream must not end."""
        if not wanted:
            return
        if self._channel.closed:
            raise self._closed_here()
        with self._inside:
            count = self._channel.receive(pieces)
        if count < wanted:
            self._truncated(count, wanted)

    def _enter(self) -> None:
        with self._gate:
            if self._closed:
                raise self._closed_here()
            self._users += 1

    def _broke(self, problem: BaseException, inside: bool) -> None:
        """Turn an error of the channel into a WireError, and close the connection."""
        if not isinstance(problem, OSError):
            self.close()  # interrupted in a frame: where the next one begins is unknown
            return
        if self._closed:
            raise self._closed_here() from problem
        tampered = isinstance(problem, ssl.SSLError) and not isinstance(problem, _ORDINARY_ENDS)
        why = f"its connection ended ({problem.strerror or problem})"
        if inside or tampered:
            self._refuse(why)
        self.close()
        raise WireError(f"{self.peer}: {why}") from problem

    def _leave(self) -> None:
        with self._gate:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            self._channel.close()

    def _truncated(self, count: int, wanted: int) -> NoReturn:
        if self._closed:
            raise self._closed_here()
        self._refuse(f"it hung up in the middle of a frame, after {count} of {wanted} bytes")

    def _refuse(self, why: str) -> NoReturn:
        """Log a refusal once, hang up, and raise."""
        log.warning("refused what %s sent: %s; its connection is closed", self.peer, why)
        self._left = 0
        self.close()
        raise WireError(f"{self.peer}: {why}")

    def _closed_here(self) -> _ClosedHere:
        return _ClosedHere(f"the connection to {self.peer} was closed by this side")


def detach(connection: Connection) -> socket.socket:
    """Hand over the socket, between two frames; the caller then owns it."""
    with connection._gate:
        connection._closed = True
    return connection._channel.line


def bytes_of(tensors: Sequence[Tensor]) -> list[memoryview]:
    """Return the memory of contiguous CPU tensors of any dtype, without copies or empty ones."""
    return [_memory(tensor) for tensor in tensors if _checked(tensor).numel()]


def _checked(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise UsageError(f"the wire carries CPU tensors; this one is on {tensor.device}: .cpu()")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UsageError("the wire carries plain dense tensors; send the parts of this one")
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        raise UsageError(
            f"the memory of this tensor of shape {tuple(tensor.shape)} does not hold its values "
            "in order: .contiguous(), after .resolve_conj().resolve_neg() where it is complex"
        )
    return tensor


def _memory(tensor: Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
