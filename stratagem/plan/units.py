"""Rates, times and sizes as people write them: "10Gbit", "1.5GB/s", "50us", "100MB".

    rate("10Gbit")      1.25e9 bytes a second      rate("1.5GB/s")    1.5e9
    seconds("50us")     5e-5                       size("100MB")      1e8

Links are sold in decimal bits, memory in decimal bytes; a small b, the word bit or nothing ("10G")
means bits, a capital B bytes.
"""

from __future__ import annotations

import math
import re

from stratagem.errors import UsageError

_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_RATE = re.compile(
    _NUMBER + r"\s*(?:([kmgtKMGT]?)([bB][iI][tT][sS]?|b|B)(?:/s|ps)?|([kmgtKMGT])(?:bE)?)"
)
_SIZE = re.compile(_NUMBER + r"\s*([kKMGT]?)B?")
_TIME = re.compile(_NUMBER + r"\s*(ns|us|µs|μs|ms|s)")
_ZERO = re.compile(r"0+(?:\.0*)?")
_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
#: with the sign for micro, and with the Greek letter
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}


def rate(text: str, what: str = "a link") -> float:
    """Bytes a second."""
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise UsageError(
            f"{text!r} is not the speed of {what}; write 10Gbit, 100Mbit or 1.5GB/s, for example."
        )
    prefix = _PREFIX[(found[2] or found[4] or "").upper()]
    value = float(found[1]) * prefix / (1.0 if found[3] == "B" else 8.0)
    if not 0 < value < math.inf:
        raise UsageError(f"{text!r}: the speed of {what} must be more than 0; write 10Gbit, say.")
    return value


def seconds(text: str, what: str = "a latency") -> float:
    """Seconds; 0 is a time, of whatever unit."""
    if _ZERO.fullmatch(text.strip()):
        return 0.0
    found = _TIME.fullmatch(text.strip())
    value = float(found[1]) * _SECONDS[found[2]] if found else math.inf
    if not value < math.inf:
        raise UsageError(f"{text!r} is not {what}; write 50us, 2ms or 0.1s, for example.")
    return value


def size(text: str, what: str = "a size") -> float:
    """Bytes; 0 is a size."""
    found = _SIZE.fullmatch(text.strip())
    value = float(found[1]) * _PREFIX[found[2]] if found else math.inf
    if not value < math.inf:
        raise UsageError(f"{text!r} is not {what}; write 100MB or 2.5GB, for example.")
    return value


def say_rate(value: float) -> str:
    """As `rate` reads it, in bits."""
    bits = value * 8
    for prefix in ("T", "G", "M", "k"):
        if bits >= _PREFIX[prefix]:
            return f"{_plain(bits / _PREFIX[prefix])}{prefix}bit"
    return f"{_plain(bits)}bit"


def say_seconds(value: float, digits: int = 4) -> str:
    """As `seconds` reads it."""
    for unit in ("s", "ms", "us"):
        if value >= _SECONDS[unit]:
            return f"{_plain(value / _SECONDS[unit], digits)}{unit}"
    return f"{_plain(value * 1e9, digits)}ns"


def say_bytes(value: float) -> str:
    """For people to read."""
    for prefix in ("T", "G", "M", "k"):
        if value >= _PREFIX[prefix]:
            return f"{value / _PREFIX[prefix]:.3g} {prefix}B"
    return f"{value:.0f} B"


def _plain(value: float, digits: int = 4) -> str:
    """Four digits are what a measurement is worth."""
    return f"{value:.{max(digits, len(str(int(value))))}g}"
