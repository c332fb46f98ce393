"""The server's side of the greeting over a blocking socket, as the acceptor does it."""

from __future__ import annotations

import socket

from stratagem.cluster.handshake import Proof, WrongSecret, no_answer, peer_name
from stratagem.errors import HandshakeError


def demand_proof(sock: socket.socket, secret: bytes, limit: float = 20.0) -> None:
    """Let a client prove the secret; HandshakeError if it does not."""
    before, peer = sock.gettimeout(), peer_name(sock)
    sock.settimeout(limit)
    proof = Proof(secret, peer)
    try:
        while not proof.holds:
            piece = sock.recv(proof.wants)
            if not piece:
                raise ConnectionResetError("it hung up")
            sock.sendall(proof.feed(piece))
    except HandshakeError as problem:
        if isinstance(problem, WrongSecret):
            sock.sendall(Proof.refusal)
        raise
    except OSError as problem:
        raise no_answer(peer, problem, 0, 72) from problem
    finally:
        sock.settimeout(before)
