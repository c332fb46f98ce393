"""A frame: a fixed head, a small JSON object, and tensors as plain bytes.

    magic 4 | version 2 | zero 2 | header length 4 | body length 8 | header (JSON) | body

Numbers are big-endian. Both lengths are held against their limits before memory is taken for
them. The body carries no types or shapes: the two ends agree on them through the header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import StratagemError, UsageError

VERSION = 1
HEADER_LIMIT = 4 << 20
BODY_LIMIT = 64 << 30

_MAGIC = b"SGWF"
HEAD = struct.Struct("!4sHHIQ")
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class WireError(StratagemError, ConnectionError):
    """A connection ended, or carried what it must not; it is closed."""


class Malformed(ValueError):
    """The bytes are no frame of this protocol; the connection turns this into a WireError."""


@dataclass(frozen=True)
class Frame:
    """A header that arrived, and how many bytes of body follow, not yet read."""

    header: dict[str, Any]
    size: int


def encode(header: Mapping[str, Any], size: int) -> bytes:
    """Write the head and the header of a frame whose body has `size` bytes."""
    try:
        text = _to_json(header).encode()
    except (TypeError, ValueError, RecursionError) as problem:
        raise UsageError(
            f"a header must be plain JSON ({problem}); tensors go into the body"
        ) from problem
    if not text.startswith(b"{"):
        raise UsageError(f"a header must be a mapping, not a {type(header).__name__}")
    if len(text) > HEADER_LIMIT:
        raise UsageError(
            f"a header of {len(text)} bytes is over the limit of {HEADER_LIMIT}: send what is "
            "large as a tensor, in the body"
        )
    if size > BODY_LIMIT:
        raise UsageError(f"a body of {size} bytes is over the limit of {BODY_LIMIT}: send parts")
    return HEAD.pack(_MAGIC, VERSION, 0, len(text), size) + text


def decode_head(head: bytes | bytearray) -> tuple[int, int]:
    """Read the lengths of header and body; Malformed if they are none, or over a limit."""
    magic, version, zero, header, body = HEAD.unpack(head)
    if magic != _MAGIC or zero != 0:
        raise Malformed("it sent something that is no frame")
    if version != VERSION:
        raise Malformed(
            f"it sends version {version} of the frames, this task reads version {VERSION}; "
            "install the same stratagem on every task"
        )
    if header > HEADER_LIMIT:
        raise Malformed(f"it announced a header of {header} bytes; {HEADER_LIMIT} is the limit")
    if body > BODY_LIMIT:
        raise Malformed(f"it announced a body of {body} bytes; {BODY_LIMIT} is the limit")
    return header, body


def decode_header(text: bytes | bytearray) -> dict[str, Any]:
    """Read the JSON object; Malformed if it is none."""
    try:
        header = json.loads(str(text, "utf-8"))
    except (ValueError, RecursionError) as problem:
        # The kind only: a message of the parser may quote what was sent.
        raise Malformed(f"its header is not JSON ({type(problem).__name__})") from None
    if not isinstance(header, dict):
        raise Malformed(f"its header is a {type(header).__name__}, not an object")
    return header


def bytes_of(tensors: Sequence[Tensor]) -> list[memoryview]:
    """The memory of contiguous CPU tensors of any dtype, not copied; empty ones are left out."""
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
