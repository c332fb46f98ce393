"""TLS from the job's secret: encrypted, mutual, and no other certificate is accepted."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial

import pytest
import torch

from stratagem.cluster import sockets
from stratagem.cluster.handshake import prove, recv_note, send_note
from stratagem.errors import HandshakeError
from stratagem.wire import tls
from stratagem.wire.connection import Connection, Frame, WireError
from stratagem.wire.tcp import Listener, connect
from tests.cluster.server_proof import demand_proof
from tests.wire.wire_pairs import (
    SECRET,
    Lines,
    Outcome,
    call,
    ended,
    eventually,
    free_address,
    listening,
    noise,
    pair,
    refused,
)

pytestmark = pytest.mark.timeout(60)
OTHER = b"another secret"


def certificate(secret: bytes) -> bytes:
    return tls._identity(secret)[1]


def test_the_certificate_is_the_same_wherever_it_is_made() -> None:
    code = (
        "from stratagem.wire import tls; print(tls._identity(b's' * 32)[1].hex()); import sys; "
        "assert 'torch' not in sys.modules"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert bytes.fromhex(made.stdout) == certificate(SECRET) != certificate(OTHER)


def test_the_settings() -> None:
    for server in (True, False):
        made = tls.context(SECRET, server)
        assert made is tls.context(SECRET, server)
        assert made.minimum_version == ssl.TLSVersion.TLSv1_3
        assert made.verify_mode == ssl.CERT_REQUIRED
        assert [entry["serialNumber"] for entry in made.get_ca_certs()] == ["01"]


def test_the_key_is_left_in_no_file(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls.tempfile, "tempdir", str(tmp_path))
    for linux in (True, False):
        monkeypatch.setattr(tls, "_LINUX", linux and sys.platform == "linux")
        before = os.listdir("/proc/self/fd")
        with tls._private_file(b"key") as path:
            assert os.stat(path).st_mode & 0o077 == 0 or "/fd/" in path
            with open(path, "rb") as file:
                assert file.read() == b"key"
        assert len(os.listdir("/proc/self/fd")) <= len(before)
        assert os.listdir(str(tmp_path)) == []


def test_an_address_of_the_network_is_encrypted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "is_loopback", lambda address: False)
    with pair("tcp") as (server, client):
        assert isinstance(server._channel, tls.TlsChannel)
        assert isinstance(client._channel, tls.TlsChannel)
        assert server._channel._sock.version() == "TLSv1.3"
        client.send({"a": 1})
        assert server.receive() == Frame({"a": 1}, 0)


# A man in the middle, who forwards, reads and may change all bytes


class Relay:
    """Forwards bytes between a client and a server; `change` may alter the client's bytes."""

    def __init__(self, target: str) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        self._target = target
        self.seen = bytearray()
        self.change: Callable[[bytes], bytes] = bytes
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            near, _ = self._door.accept()
            host, port = self._target.split(":")
            far = socket.create_connection((host, int(port)))
            self._sockets += [near, far]
            threading.Thread(target=self._carry, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, False), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, out: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(self.change(data) if out else data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._door.close()
        for sock in self._sockets:
            sock.close()


@contextmanager
def relayed() -> Iterator[tuple[Relay, Connection, Connection]]:
    with (
        listening("tls") as (listener, arrived),
        closing(Relay(listener.address)) as relay,
        call("tls", relay.address) as client,
        arrived.get(timeout=20) as server,
    ):
        yield relay, server, client


def test_nobody_in_between_can_read() -> None:
    with relayed() as (relay, server, client):
        client.send({"marker": "one of a kind"}, [torch.full((100,), 65, dtype=torch.uint8)])
        assert server.receive() == Frame({"marker": "one of a kind"}, 100)
        server.skip(100)
        server.send({"marker": "one of a kind"})
        assert client.receive() is not None
        assert len(relay.seen) > 500
        assert b"one of a kind" not in relay.seen and b"A" * 8 not in relay.seen


def test_what_was_changed_on_the_way_is_refused(lines: Lines) -> None:
    with relayed() as (relay, server, client):
        relay.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        client.send({"a": 1})
        refused(server, server.receive, lines)


# Peers that know the secret of the proof but hold another key


def proven(address: str) -> socket.socket:
    """A client that has proved the secret and is about to start TLS."""
    host, port = address.split(":")
    sock = socket.create_connection((host, int(port)))
    prove(sock, SECRET, limit=20)
    recv_note(sock, 20)
    send_note(sock, {"wire": 1, "tls": True})
    return sock


def bare_context() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    return made


def forged_context() -> ssl.SSLContext:
    made = bare_context()
    with tls._private_file(tls._identity(OTHER)[0]) as path:
        made.load_cert_chain(path)
    return made


def old_context() -> ssl.SSLContext:
    made = bare_context()
    made.maximum_version = ssl.TLSVersion.TLSv1_2
    with tls._private_file(tls._identity(SECRET)[0]) as path:
        made.load_cert_chain(path)
    return made


@pytest.mark.parametrize("make", [bare_context, forged_context, old_context])
def test_a_client_without_the_certificate_is_refused(
    make: Callable[[], ssl.SSLContext], lines: Lines
) -> None:
    with listening("tls") as (listener, arrived):
        with pytest.raises(OSError), make().wrap_socket(proven(listener.address)) as sock:
            if not sock.recv(1):
                raise ConnectionResetError
        eventually(lambda: lines.texts)
        assert len(lines.texts) == 1 and "TLS" in lines.texts[0]
        assert arrived.empty()
        with call("tls", listener.address), arrived.get(timeout=20):
            pass  # the next client is accepted


def test_a_server_without_the_certificate_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = f"127.0.0.1:{door.getsockname()[1]}"
        calling = Outcome(partial(connect, address, SECRET, limit=20, tls=True))
        sock, _ = door.accept()
        demand_proof(sock, SECRET)
        send_note(sock, {"wire": 1, "tls": True})
        recv_note(sock, 20)
        with suppress(OSError), tls.context(OTHER, True).wrap_socket(sock, server_side=True):
            pass
        with pytest.raises(HandshakeError, match="TLS"):
            calling.result()


def test_a_certificate_that_the_key_has_signed_is_not_the_certificate() -> None:
    """It is compared byte for byte: verification alone accepts what the job's key has signed."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = socket.create_connection(door.getsockname())
        far, _ = door.accept()
        server = tls.wrap(far, SECRET, server=True)
        client = tls.wrap(near, SECRET, server=False)
        with server, client:
            shaking = Outcome(partial(tls.shake_hands, server, SECRET, limit=20))
            with pytest.raises(HandshakeError, match="another job"):
                tls.shake_hands(client, OTHER, limit=20)
            shaking.result()


@pytest.mark.parametrize(
    "said", [b"", b"\x16\x03\x01\x02\x00" + b"x" * 600, b"GET / HTTP/1.1\r\n\r\n"]
)
def test_garbage_instead_of_tls_is_refused(said: bytes, lines: Lines) -> None:
    with listening("tls") as (listener, arrived):
        with proven(listener.address) as sock:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(20)
            with suppress(ConnectionError):
                while sock.recv(4096):
                    pass
            eventually(lambda: lines.texts)
        assert len(lines.texts) == 1 and arrived.empty()


def test_a_killed_peer_is_an_end_between_frames_and_an_error_inside() -> None:
    with pair("tls") as (server, client):
        client.close()  # without TLS's goodbye, as a killed process would
        assert server.receive() is None
    with pair("tls") as (server, client):
        client._channel.send([memoryview(b"SGWF")])
        client.close()
        with pytest.raises(WireError, match="after 4 of 20"):
            server.receive()


def test_hanging_up_does_not_forget_the_keys() -> None:
    """A thread that is about to send while another closes must not send in the clear."""
    with pair("tls") as (_, client):
        assert isinstance(client._channel, tls.TlsChannel)
        client._channel.hang_up()
        assert client._channel._sock.version() == "TLSv1.3"


def test_two_directions_and_many_senders_at_once() -> None:
    """Six threads use OpenSSL at once; each frame arrives whole."""
    with pair("tls") as ends:
        body = noise(300_000)

        def take(end: Connection) -> int:
            count = 0
            for _ in range(30):
                assert end.receive() == Frame({"n": 1}, len(body))
                count += torch.equal(end.read(len(body)), body)
            return count

        def give(end: Connection) -> None:
            for _ in range(15):
                end.send({"n": 1}, [body])

        giving = [Outcome(partial(give, end)) for end in ends for _ in range(2)]
        taking = [Outcome(partial(take, end)) for end in ends]
        assert [each.result(20) for each in taking] == [30, 30]
        for each in giving:
            each.result()


def test_a_listener_makes_its_certificate_before_anybody_comes() -> None:
    tls.context.cache_clear()
    tls._identity.cache_clear()
    address = free_address()
    with Listener(address, SECRET, "ps 0", Connection.close, tls=True):
        assert tls.context.cache_info().currsize == 1
        assert ended(connect(address, SECRET, limit=20, tls=True))
