"""The handshake that proves that a peer belongs to the job, and small JSON notes after it.

    client                                  server
    magic, version, nonce c      ->
                                 <-         magic, version, nonce s
    HMAC(secret, "client" c s)   ->
                                 <-         HMAC(secret, "server" c s), or 32 zeros: refused

Every message has a fixed size, and nothing of a peer is parsed before its proof holds. The client
proves first, so that a stranger learns nothing. Each MAC covers the role and both nonces, so a
message that is reflected or replayed proves nothing. The proof neither encrypts nor signs what
follows (wire/tls.py does).

A server refuses a client with 32 zeros. A connection that ends before that is no refusal: the
process there ended, or had no place left, and can be tried again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import logging
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping

from stratagem.cluster.framing import (
    HEAD,
    FrameReader,
    Malformed,
    decode_head,
    decode_header,
    encode,
)
from stratagem.cluster.parsing import listing
from stratagem.cluster.sockets import is_loopback
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import ClusterError, HandshakeError

log = logging.getLogger("stratagem")

SECRET_VARIABLE = "STRATAGEM_SECRET"
NOTE_LIMIT = 1 << 20

_MAGIC = b"STRATGM"
_VERSION = 4
_SALT = b"stratagem secret 2"
_GREETING = _MAGIC + bytes([_VERSION])
_NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size
_REFUSAL = bytes(_MAC_BYTES)
_IN_GREETING, _IN_NOTES = "during the greeting", "where a note belongs"


class Stranger(HandshakeError):
    """The peer does not speak this protocol, or another version of it."""


class WrongSecret(HandshakeError):
    """The peer holds another secret: it is of another job, or lacks a setting."""


class Ended(HandshakeError):
    """The peer hung up during the greeting: its process ended, or has no place left."""


def job_secret(environ: Mapping[str, str], spec_json: str) -> bytes:
    """Return the secret of this job: derived from STRATAGEM_SECRET, else a hash of the cluster.

    The hash only keeps apart two jobs that use one port by accident. Anyone who knows the cluster
    can compute it: it protects nothing.
    """
    chosen = environ.get(SECRET_VARIABLE, "")
    if chosen:
        return _stretched(os.fsencode(chosen))
    return hashlib.sha256(b"stratagem cluster\0" + _canonical(spec_json)).digest()


def secret_for(
    spec: ClusterSpec, ports: Iterable[str], *, insecure: bool, option: str = "insecure=True"
) -> bytes:
    """Return the secret of a job that listens at `ports`; ClusterError if it needs a chosen one.

    Without STRATAGEM_SECRET, anyone who knows the cluster can join the job. That is refused if a
    port can be reached from other machines, unless `insecure`; `option` is how users set it.
    """
    abroad = [port for port in ports if not is_loopback(port)]
    if abroad and not os.environ.get(SECRET_VARIABLE):
        open_to = f"whoever reaches {listing(abroad)} and knows this cluster can join the job"
        if not insecure:
            raise ClusterError(
                f"{SECRET_VARIABLE} is not set, and without it {open_to}. Set it to the same long "
                f"random text on every task (openssl rand -hex 32). Where only the job's own tasks "
                f"reach these addresses, {option} does without."
            )
        log.warning("%s is not set: %s", SECRET_VARIABLE, open_to)
    return job_secret(os.environ, spec.to_json())


@functools.lru_cache(maxsize=8)
def _stretched(chosen: bytes) -> bytes:
    """Stretch a chosen secret, which may be short and whose proofs are seen on the network, so
    that each guess costs a twentieth of a second."""
    return hashlib.scrypt(chosen, salt=_SALT, n=1 << 14, r=8, p=1, maxmem=64 << 20, dklen=32)


def _canonical(spec_json: str) -> bytes:
    """Return the same bytes for the same cluster, whatever the order of its keys."""
    try:
        return json.dumps(json.loads(spec_json), sort_keys=True).encode()
    except ValueError:
        return spec_json.encode()


def prove(sock: socket.socket, secret: bytes, *, limit: float) -> None:
    """Prove the secret to a server and check its proof, within `limit` seconds.

    Raises HandshakeError (Stranger or WrongSecret if that is certain); the caller closes.
    """
    with _deadline(sock, limit) as deadline:
        peer, mine = peer_name(sock), os.urandom(_NONCE_BYTES)
        _send(sock, _GREETING + mine, deadline)
        _check_greeting(_receive(sock, len(_GREETING), deadline), peer)
        theirs = _receive(sock, _NONCE_BYTES, deadline)
        if hmac.compare_digest(mine, theirs):
            raise WrongSecret(_refusal(peer, "it only repeats what it is sent"))
        _send(sock, _mac(secret, b"client", mine, theirs), deadline)
        answer = _receive(sock, _MAC_BYTES, deadline)
        if answer == _REFUSAL:
            raise WrongSecret(_refusal(peer, "it refused our proof"))
        if not hmac.compare_digest(answer, _mac(secret, b"server", mine, theirs)):
            raise WrongSecret(_refusal(peer, "it holds another secret"))


class Proof:
    """The server's part of the greeting, without the socket.

    It buffers one message of fixed size at a time. The magic comes first, so that a stranger's
    short banner is recognised at once.
    """

    #: the bytes to send to a client after WrongSecret
    refusal = _REFUSAL

    def __init__(self, secret: bytes, peer: str) -> None:
        self._secret, self._peer = secret, peer
        self._mine = os.urandom(_NONCE_BYTES)
        self._theirs = b""
        self._sizes = [_MAC_BYTES, _NONCE_BYTES, len(_GREETING)]
        self._message = bytearray()

    @property
    def holds(self) -> bool:
        """Whether the client has proved the secret."""
        return not self._sizes

    @property
    def wants(self) -> int:
        """How many bytes may be read now; bytes after the proof belong to the next reader."""
        return self._sizes[-1] - len(self._message) if self._sizes else 0

    def feed(self, piece: bytes) -> bytes:
        """Take at most `wants` bytes; returns the answer. Raises Stranger or WrongSecret."""
        self._message += piece
        if self.wants:
            return b""
        self._sizes.pop()
        message, self._message = bytes(self._message), bytearray()
        if len(self._sizes) == 2:
            _check_greeting(message, self._peer)
            return b""
        if len(self._sizes) == 1:
            self._theirs = message
            return _GREETING + self._mine
        if not hmac.compare_digest(message, self._mac(b"client")):
            raise WrongSecret(_refusal(self._peer, "it holds another secret"))
        return self._mac(b"server")

    def _mac(self, role: bytes) -> bytes:
        return _mac(self._secret, role, self._theirs, self._mine)


def _mac(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(secret, _GREETING + role + client_nonce + server_nonce, "sha256")


def _check_greeting(greeting: bytes, peer: str) -> None:
    if greeting[:-1] != _MAGIC:
        raise Stranger(_refusal(peer, "something else than stratagem answers there"))
    if greeting != _GREETING:
        found = f"it speaks version {greeting[-1]} of the protocol, this task version {_VERSION}"
        raise Stranger(_refusal(peer, found + "; install the same stratagem on every task"))


def _refusal(peer: str, why: str) -> str:
    return (
        f"{peer} did not prove that it belongs to this job: {why}. Set the same "
        f"{SECRET_VARIABLE} on every task and give every task the same cluster."
    )


def peer_name(sock: socket.socket) -> str:
    """Return the peer's address for messages."""
    try:
        peer = sock.getpeername()
    except OSError:
        return "a peer that hung up"
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a process on this machine"


def encode_note(note: Mapping[str, object]) -> bytes:
    """Encode a JSON object as a note."""
    return encode(note, limit=NOTE_LIMIT)


def send_note(sock: socket.socket, note: Mapping[str, object], limit: float | None = None) -> None:
    """Send one note; ConnectionError if the peer is gone or takes longer than `limit`."""
    with _deadline(sock, limit) as deadline:
        _send(sock, encode_note(note), deadline)


def recv_note(sock: socket.socket, limit: float | None = None) -> dict[str, object]:
    """Receive exactly one note; HandshakeError or ConnectionError if it is no note."""
    with _deadline(sock, limit) as deadline:
        try:
            head = _receive(sock, HEAD.size, deadline, _IN_NOTES)
            size, _ = decode_head(head, NOTE_LIMIT, 0)
            return decode_header(_receive(sock, size, deadline, _IN_NOTES))
        except Malformed as problem:
            raise HandshakeError(f"{peer_name(sock)} sent no note: {problem}") from problem


def note_reader() -> FrameReader:
    """Return a reader that cuts a stream into notes."""
    return FrameReader(NOTE_LIMIT, 0)


@contextlib.contextmanager
def _deadline(sock: socket.socket, limit: float | None) -> Iterator[float]:
    """Yield the deadline of a limit, and restore the socket's timeout afterwards."""
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
        kind = Ended if isinstance(problem, ConnectionError) else HandshakeError
        raise kind(f"{peer_name(sock)} does not listen to us: {problem}") from problem


def _receive(sock: socket.socket, size: int, deadline: float, when: str = _IN_GREETING) -> bytes:
    """Read exactly `size` bytes; the deadline holds for all of them together."""
    data = bytearray()
    try:
        while len(data) < size:
            _limit_wait(sock, deadline)
            piece = sock.recv(min(size - len(data), 1 << 16))
            if not piece:
                raise ConnectionResetError("it hung up")
            data += piece
    except OSError as problem:
        raise no_answer(peer_name(sock), problem, len(data), size, when) from problem
    return bytes(data)


def no_answer(
    peer: str, problem: OSError, received: int, wanted: int, when: str = _IN_GREETING
) -> HandshakeError:
    """Return the error for a peer whose message did not come because of `problem`."""
    said = f"after {received} of {wanted} bytes" if received else "without a word"
    if not isinstance(problem, TimeoutError):
        return Ended(
            f"{peer} ended the connection {when}, {said} ({problem}): its process was "
            "ended, or hears too many others. The log there says which."
        )
    return HandshakeError(
        f"no answer from {peer} ({problem} {said}): is the same stratagem running there, and is "
        "the machine awake?"
    )


def _limit_wait(sock: socket.socket, deadline: float) -> None:
    if deadline == math.inf:
        return  # the socket's own timeout holds
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    sock.settimeout(left)
