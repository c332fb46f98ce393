"""Parses settings that people and schedulers write, with errors that say what is wrong."""

from __future__ import annotations

import ipaddress
import json
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem.errors import ClusterError

MAX_PORT = 65535
MAX_TASKS = 65535  # so that a garbled count cannot fill the memory with addresses

Fail = Callable[[str], ClusterError]
"""`wrong` with its place and example bound."""

_HOST = re.compile(r"[\w.-]+")
_PORT = re.compile(r"[0-9]{1,5}")
_INTEGER = re.compile(r"\s*-?[0-9]{1,18}\s*", re.ASCII)

# Not repr(): it grows with the value and can run out of stack on nested JSON.
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def quote(value: object) -> str:
    """Return a value for a message, never longer than a line."""
    return _short.repr(value)


def wrong(what: str, where: str, example: str) -> ClusterError:
    """Return the error that says where and what is wrong, with a correct example."""
    return ClusterError(f"{where}: {what}; correct: {example}")


def read_object(text: str, fail: Fail) -> dict[str, Any]:
    """Parse a JSON object in which no name may appear twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise fail(f"{quote(name)} appears twice in one object")
            found[name] = value
        return found

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except ClusterError:
        raise
    except (ValueError, RecursionError) as error:
        raise fail(f"{quote(text)} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise fail(f"{quote(value)} is JSON, but not an object")
    return value


def integer(value: object) -> int | None:
    """Return an integer, also from a string ("1"); None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    return None


def number(
    environ: Mapping[str, str],
    name: str,
    low: int,
    high: int,
    *,
    default: int | None = None,
    why: str = "",
) -> int:
    """Return the variable `name` as an integer in low..high; `why` explains the bounds."""
    text = environ.get(name, "").strip()
    if not text and default is not None:
        return default
    value = integer(text)
    if value is None or not low <= value <= high:
        found = f"{quote(text)} is not" if text else "not set; it must be"
        reason = f" ({why})" if why else ""
        raise wrong(f"{found} a whole number from {low} to {high}{reason}", name, f"{name}={low}")
    return value


def port(environ: Mapping[str, str], default: int) -> int:
    """Return the chief's port: STRATAGEM_PORT, else the default."""
    return number(environ, "STRATAGEM_PORT", 1, MAX_PORT, default=default)


def join(host: str, port: int) -> str:
    """Return host:port, with an IPv6 address in brackets."""
    bare_ipv6 = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if bare_ipv6 else f"{host}:{port}"


def endpoint(address: str) -> tuple[str, int]:
    """Split an address into a normalized host and a port; ValueError says what is wrong."""
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        raise ValueError("has no port")
    bracketed = host.startswith("[") and host.endswith("]")
    if ":" in host and not bracketed:
        raise ValueError("is not host:port (an IPv6 address goes in brackets, [::1]:2222)")
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= MAX_PORT:
        raise ValueError(f"has the port {quote(port)}, which is not a number from 1 to {MAX_PORT}")
    if bracketed:
        return _ipv6(host[1:-1]), int(port)
    if not _HOST.fullmatch(host):
        raise ValueError("has no valid host name before its port")
    return host.lower(), int(port)


def _ipv6(text: str) -> str:
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError:
        raise ValueError("has no IPv6 address between its brackets") from None


def listing(names: Sequence[str], most: int = 8) -> str:
    """Join names for a sentence: "a, b and c"; a long list ends in "and 92 more"."""
    shown = list(names) if len(names) <= most else [*names[:most], f"{len(names) - most} more"]
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"
