"""Frames, the messages between processes of a job: a head, a small JSON object, and bytes.

    magic 4 | version 2 | zero 2 | header length 4 | body length 8 | header (JSON) | body

Numbers are big-endian. Both lengths are checked against their limits before memory is allocated. A
note is a frame without a body. A body carries no types or shapes: these are in the header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from stratagem.errors import UsageError

VERSION = 1
HEADER_LIMIT = 4 << 20
BODY_LIMIT = 64 << 30

_MAGIC = b"SGWF"
HEAD = struct.Struct("!4sHHIQ")
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class Malformed(ValueError):
    """The bytes are no frame of this protocol; the caller adds the sender's name."""


def encode(header: Mapping[str, Any], size: int = 0, limit: int = HEADER_LIMIT) -> bytes:
    """Encode the head and the header of a frame whose body has `size` bytes."""
    try:
        text = _to_json(header).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise UsageError(
            f"a header must be plain JSON ({problem}); tensors go into the body"
        ) from problem
    if not text.startswith(b"{"):
        raise UsageError(f"a header must be a mapping, not a {type(header).__name__}")
    if len(text) > limit:
        raise UsageError(
            f"a header of {len(text)} bytes is over the limit of {limit}: send what is large as a "
            "tensor, in the body of a frame"
        )
    if size > BODY_LIMIT:
        raise UsageError(f"a body of {size} bytes is over the limit of {BODY_LIMIT}: send parts")
    return HEAD.pack(_MAGIC, VERSION, 0, len(text), size) + text


def decode_head(
    head: bytes | bytearray, header_limit: int = HEADER_LIMIT, body_limit: int = BODY_LIMIT
) -> tuple[int, int]:
    """Decode the lengths of header and body; Malformed if invalid or over a limit."""
    magic, version, zero, header, body = HEAD.unpack(head)
    if magic != _MAGIC or zero != 0:
        raise Malformed("it sent something that is no frame")
    if version != VERSION:
        raise Malformed(
            f"it sends version {version} of the frames, this task reads version {VERSION}; "
            "install the same stratagem on every task"
        )
    if header > header_limit:
        raise Malformed(f"it announced a header of {header} bytes; {header_limit} is the limit")
    if body > body_limit:
        raise Malformed(f"it announced a body of {body} bytes; {body_limit} is the limit")
    return header, body


def decode_header(text: bytes | bytearray) -> dict[str, Any]:
    """Decode the JSON object; Malformed if it is none."""
    try:
        header = json.loads(str(text, "utf-8"))
    except (ValueError, RecursionError) as problem:
        # Only the type: the parser's message may quote what was sent.
        raise Malformed(f"its header is not JSON ({type(problem).__name__})") from None
    if not isinstance(header, dict):
        raise Malformed(f"its header is a {type(header).__name__}, not an object")
    return header


class FrameReader:
    """Cuts a stream into frames.

    Read into `room`, which never extends past the frame, and call `filled`; or `feed` bytes that
    were read elsewhere.
    """

    def __init__(self, header_limit: int = HEADER_LIMIT, body_limit: int = BODY_LIMIT) -> None:
        self._limits = header_limit, body_limit
        self._begin()

    def _begin(self) -> None:
        self._header: dict[str, Any] | None = None
        self._size = -1
        self._expect(HEAD.size)

    def _expect(self, size: int) -> None:
        self._data = bytearray(size)
        self.room = memoryview(self._data)

    def filled(self, count: int) -> tuple[dict[str, Any], bytes] | None:
        """Take `count` bytes that were read into `room`; returns a completed frame, if any."""
        self.room = self.room[count:]
        if self.room:
            return None
        if self._size < 0:
            header, self._size = decode_head(self._data, *self._limits)
            self._expect(header)
            return self.filled(0)
        if self._header is None:
            self._header = decode_header(self._data)
            self._expect(self._size)
            return self.filled(0)
        found = self._header, bytes(self._data)
        self._begin()
        return found

    def feed(self, piece: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield the frames that this piece completes."""
        left = memoryview(piece)
        while left:
            count = min(len(left), len(self.room))
            self.room[:count] = left[:count]
            left = left[count:]
            frame = self.filled(count)
            if frame is not None:
                yield frame
