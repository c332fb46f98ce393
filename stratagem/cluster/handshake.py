"""Prove that a peer belongs to the job, then talk to it in small JSON notes.

    client                                  server
    magic, version, nonce c      ->
                                 <-         magic, version, nonce s
    HMAC(secret, "client" c s)   ->
                                 <-         HMAC(secret, "server" c s)

Every message has a fixed size, and nothing of a peer is parsed before its proof holds. The
client proves first, so that a stranger who knocks learns nothing. The role and both nonces are
inside each MAC, so a message sent back to its sender, or kept from another day, proves nothing.
The proof guards the door; it neither encrypts nor signs what follows (wire/tls.py does).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping

from stratagem.errors import HandshakeError, UsageError

SECRET_VARIABLE = "STRATAGEM_SECRET"
NOTE_LIMIT = 1 << 20

_MAGIC = b"STRATGM"
_VERSION = 2
_SALT = b"stratagem secret 2"
_GREETING = _MAGIC + bytes([_VERSION])
_NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size
_LENGTH = struct.Struct("!I")


class Stranger(HandshakeError):
    """What answers there does not speak this protocol, or another version of it."""


class WrongSecret(HandshakeError):
    """The peer speaks the protocol but holds another secret: another job, or a setting missed."""


def job_secret(environ: Mapping[str, str], spec_json: str) -> bytes:
    """Return the secret of this job: made of STRATAGEM_SECRET, or a hash of the cluster.

    The hash only keeps two jobs apart that meet on one port by accident. Whoever knows the
    cluster can compute it: it protects nothing.
    """
    chosen = environ.get(SECRET_VARIABLE, "")
    if chosen:
        return _stretched(os.fsencode(chosen))
    return hashlib.sha256(b"stratagem cluster\0" + _canonical(spec_json)).digest()


@functools.lru_cache(maxsize=8)
def _stretched(chosen: bytes) -> bytes:
    """What a person chose may be short, and proofs of it are seen on the network: trying many
    should cost something (a twentieth of a second each)."""
    return hashlib.scrypt(chosen, salt=_SALT, n=1 << 14, r=8, p=1, maxmem=64 << 20, dklen=32)


def _canonical(spec_json: str) -> bytes:
    """Write the same cluster in the same bytes, whatever order its keys came in."""
    try:
        return json.dumps(json.loads(spec_json), sort_keys=True).encode()
    except ValueError:
        return spec_json.encode()


def prove(sock: socket.socket, secret: bytes, *, server: bool, limit: float) -> None:
    """Prove the secret to the peer and have it prove the same, within `limit` seconds.

    Raises HandshakeError (Stranger, WrongSecret where that is certain); the caller closes.
    """
    with _deadline(sock, limit) as deadline:
        _prove(sock, secret, server, deadline)


def _prove(sock: socket.socket, secret: bytes, server: bool, deadline: float) -> None:
    mine = os.urandom(_NONCE_BYTES)
    if server:
        theirs = _take_greeting(sock, deadline)
        _send(sock, _GREETING + mine, deadline)
        _take_proof(sock, _mac(secret, b"client", theirs, mine), deadline)
        _send(sock, _mac(secret, b"server", theirs, mine), deadline)
        return
    _send(sock, _GREETING + mine, deadline)
    theirs = _take_greeting(sock, deadline)
    if hmac.compare_digest(mine, theirs):
        raise WrongSecret(_refusal(sock, "it only repeats what it is sent"))
    _send(sock, _mac(secret, b"client", mine, theirs), deadline)
    _take_proof(sock, _mac(secret, b"server", mine, theirs), deadline, hung_up="refused our proof")


def _mac(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(secret, _GREETING + role + client_nonce + server_nonce, "sha256")


def _take_greeting(sock: socket.socket, deadline: float) -> bytes:
    """Read the magic first: a stranger's short banner is then recognised without a wait."""
    greeting = _receive(sock, len(_GREETING), deadline)
    if greeting[:-1] != _MAGIC:
        raise Stranger(_refusal(sock, "something else than stratagem answers there"))
    if greeting != _GREETING:
        found = f"it speaks version {greeting[-1]} of the protocol, this task version {_VERSION}"
        raise Stranger(_refusal(sock, found + "; install the same stratagem on every task"))
    return _receive(sock, _NONCE_BYTES, deadline)


def _take_proof(sock: socket.socket, expected: bytes, deadline: float, hung_up: str = "") -> None:
    try:
        proof = _receive(sock, _MAC_BYTES, deadline)
    except HandshakeError as problem:
        # A server that does not believe us hangs up without a word; so the end of the stream
        # here, and only here, is its answer. A timeout is not.
        if hung_up and not isinstance(problem.__cause__, TimeoutError):
            raise WrongSecret(_refusal(sock, f"it {hung_up}")) from problem
        raise
    if not hmac.compare_digest(proof, expected):
        raise WrongSecret(_refusal(sock, "it holds another secret"))


def _refusal(sock: socket.socket, why: str) -> str:
    return (
        f"{peer_name(sock)} did not prove that it belongs to this job: {why}. Set the same "
        f"{SECRET_VARIABLE} on every task and give every task the same cluster."
    )


def peer_name(sock: socket.socket) -> str:
    """Name the other end of a connection for a message."""
    try:
        peer = sock.getpeername()
    except OSError:
        return "a peer that hung up"
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a process on this machine"


def encode_note(note: Mapping[str, object]) -> bytes:
    """Frame a JSON object: its length in 4 bytes, big-endian, and its text."""
    body = json.dumps(note, separators=(",", ":")).encode()
    if len(body) > NOTE_LIMIT:
        raise UsageError(
            f"a note of {len(body)} bytes is over the limit of {NOTE_LIMIT}: notes carry facts "
            "about the job; tensors and data travel over the wire"
        )
    return _LENGTH.pack(len(body)) + body


def decode_note(body: bytes) -> dict[str, object]:
    """Read a JSON object; anything else is a HandshakeError."""
    try:
        note = json.loads(body)
    except (ValueError, RecursionError) as problem:
        raise HandshakeError(f"a peer sent a note that is not JSON: {problem}") from problem
    if not isinstance(note, dict):
        raise HandshakeError(f"a peer sent a {type(note).__name__} where a JSON object belongs")
    return note


def send_note(sock: socket.socket, note: Mapping[str, object], limit: float | None = None) -> None:
    """Send one note; ConnectionError if the peer is gone or takes longer than `limit`."""
    with _deadline(sock, limit) as deadline:
        _send(sock, encode_note(note), deadline)


def recv_note(sock: socket.socket, limit: float | None = None) -> dict[str, object]:
    """Receive exactly one note; HandshakeError or ConnectionError if it is no note."""
    with _deadline(sock, limit) as deadline:
        size = _checked_length(_receive(sock, _LENGTH.size, deadline))
        return decode_note(_receive(sock, size, deadline))


class NoteReader:
    """Cuts a stream that arrives in pieces into notes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[dict[str, object]]:
        """Yield the notes that this piece completes."""
        self._buffer += piece
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _checked_length(self._buffer[: _LENGTH.size])
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield decode_note(body)


def _checked_length(header: bytes | bytearray) -> int:
    """Read a note's length, refusing a long one before any memory is taken for it."""
    size: int = _LENGTH.unpack(header)[0]
    if size > NOTE_LIMIT:
        raise HandshakeError(f"a peer announced a note of {size} bytes; {NOTE_LIMIT} is the limit")
    return size


@contextlib.contextmanager
def _deadline(sock: socket.socket, limit: float | None) -> Iterator[float]:
    """Turn a limit into a time of the clock, and give the socket its own timeout back after."""
    before = sock.gettimeout()
    try:
        yield math.inf if limit is None else time.monotonic() + limit
    finally:
        if sock.fileno() >= 0:
            sock.settimeout(before)


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    try:
        _limit_wait(sock, deadline)
        sock.sendall(data)
    except OSError as problem:
        raise HandshakeError(f"{peer_name(sock)} does not listen to us: {problem}") from problem


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Read exactly `size` bytes; the deadline is for all of them, against a peer that drips."""
    data = bytearray()
    try:
        while len(data) < size:
            _limit_wait(sock, deadline)
            piece = sock.recv(min(size - len(data), 1 << 16))
            if not piece:
                raise ConnectionResetError("it hung up")
            data += piece
    except OSError as problem:
        said = f"after {len(data)} of {size} bytes" if data else "without a word"
        raise HandshakeError(
            f"no answer from {peer_name(sock)} ({problem} {said}): is the same stratagem running "
            "there, and is the machine awake?"
        ) from problem
    return bytes(data)


def _limit_wait(sock: socket.socket, deadline: float) -> None:
    if deadline == math.inf:
        return  # the socket's own timeout holds
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(left)
