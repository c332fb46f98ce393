"""One connection served without blocking: what is still to be written, what was read in part."""

from __future__ import annotations

import socket

from stratagem.cluster.handshake import NoteReader


class Link:
    """The connection to one rank."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.rank = rank
        self.sock = sock
        self.pending = bytearray()
        self.notes = NoteReader()
        self.broken = False

    def queue(self, data: bytes) -> None:
        """Take bytes to be written."""
        if not self.broken:
            self.pending += data

    def write(self) -> None:
        """Send what the kernel takes at once."""
        try:
            while self.pending:
                del self.pending[: self.sock.send(self.pending)]
        except BlockingIOError:
            pass  # the rest when there is room again
        except OSError:
            # The peer is gone, but its last words may still wait to be read: reading, which
            # comes to the same end, is what reports it.
            self.broken = True
            self.pending.clear()
