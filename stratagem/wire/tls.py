"""TLS between tasks that share a secret, from which the certificate is derived.

No certificate has to be distributed. Both ends derive the same Ed25519 key from the job's secret,
make the same certificate from it, byte for byte, show it, and accept no other. TLS 1.3 only; names
are not checked, as the key itself is known.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hmac
import os
import select
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence

from stratagem.cluster.handshake import Ended, peer_name
from stratagem.errors import HandshakeError
from stratagem.wire.channel import Channel, wait

_LINUX = sys.platform == "linux"
_LABEL = b"stratagem wire certificate 2"
_RECORD = 16 << 10  # bytes of a full TLS record


@functools.lru_cache(maxsize=8)
def _identity(secret: bytes) -> tuple[bytes, bytes]:
    """Return a job's key and certificate in one PEM, and the certificate as DER."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    # Not the secret itself, from which proofs are made.
    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, _LABEL, "sha256"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stratagem job")])
    # Constant numbers and dates: every task must make the same certificate, whatever its clock.
    # The job's secret ends with the job.
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(1970, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31, 23, 59, 59))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    pem = private + certificate.public_bytes(serialization.Encoding.PEM)
    return pem, certificate.public_bytes(serialization.Encoding.DER)


@functools.lru_cache(maxsize=16)
def context(secret: bytes, server: bool) -> ssl.SSLContext:
    """Return the TLS context of clients or servers, made once (in a tenth of a second)."""
    pem, der = _identity(secret)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=der)
    with _private_file(pem) as path:
        made.load_cert_chain(path)
    if server:
        made.num_tickets = 0  # no session is resumed, and only sent data arrives
    return made


@contextlib.contextmanager
def _private_file(content: bytes) -> Iterator[str]:
    """A file for load_cert_chain, which reads only files; in memory on Linux."""
    if _LINUX:
        fd = os.memfd_create("stratagem", os.MFD_CLOEXEC)
        path = f"/proc/self/fd/{fd}"
    else:
        fd, path = tempfile.mkstemp(prefix="stratagem-")  # 0600
    try:
        os.write(fd, content)
        yield path
    finally:
        os.close(fd)
        if not _LINUX:
            os.unlink(path)


def wrap(sock: socket.socket, secret: bytes, *, server: bool) -> ssl.SSLSocket:
    """Wrap a connected socket, which is detached; `shake_hands` comes next."""
    return context(secret, server).wrap_socket(
        sock, server_side=server, do_handshake_on_connect=False
    )


def shake_hands(sock: ssl.SSLSocket, secret: bytes, *, limit: float) -> None:
    """Do the TLS handshake within `limit` seconds; after a HandshakeError the caller closes."""
    try:
        sock.settimeout(max(0.001, limit))  # for the whole handshake, not for each message
        sock.do_handshake()
        shown = sock.getpeercert(binary_form=True) or b""
    except (OSError, ValueError) as problem:
        if isinstance(problem, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError):
            raise Ended(
                f"{peer_name(sock)} ended the connection during the TLS handshake: its process was "
                "ended, most likely. Its own log says why."
            ) from problem
        why = problem.reason if isinstance(problem, ssl.SSLError) and problem.reason else problem
        raise HandshakeError(
            f"{peer_name(sock)} did not complete the TLS handshake ({why}): is something between "
            "this machine and that one changing what they send?"
        ) from problem
    if not hmac.compare_digest(shown, _identity(secret)[1]):
        raise HandshakeError(f"{peer_name(sock)} shows a certificate of another job")


class TlsChannel(Channel):
    """An encrypted stream.

    OpenSSL allows one thread at a time on a connection, and a blocking read would lock out senders.
    So the socket is non-blocking: each call of OpenSSL (a record, 16 KiB) is made under a lock, and
    waiting is done outside of it.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        super().__init__(sock)
        self._sock = sock
        self._engine = threading.Lock()

    def send(self, pieces: Sequence[memoryview]) -> None:
        """Send small pieces together, and large ones without a copy."""
        small = bytearray()
        for piece in pieces:
            if len(small) + len(piece) <= _RECORD:
                small += piece
                continue
            self._send(memoryview(small))
            small = bytearray()
            if len(piece) <= _RECORD:
                small += piece
            else:
                self._send(piece)
        self._send(memoryview(small))

    def _send(self, data: memoryview) -> None:
        sent = 0
        while sent < len(data):
            try:
                with self._engine:
                    sent += self._sock.send(data[sent:])
                continue
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except ssl.SSLWantReadError:
                event = select.POLLIN
            wait(self._sock, event)

    def receive(self, pieces: Sequence[memoryview]) -> int:
        total = 0
        for piece in pieces:
            count = self._receive(piece)
            total += count
            if count < len(piece):
                break
        return total

    def _receive(self, piece: memoryview) -> int:
        got = 0
        while got < len(piece):
            try:
                with self._engine:
                    count = self._sock.recv_into(piece[got:])
                if not count:
                    break
                got += count
                continue
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            wait(self._sock, event)
        return got

    def readable(self, seconds: float) -> bool:
        """Whether a byte arrives within that time, or is decrypted already."""
        with self._engine:
            if self._sock.pending():
                return True
        return wait(self._sock, select.POLLIN, seconds)
