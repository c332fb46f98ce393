"""The machines to plan for: hosts, the devices of each, and the links between them.

Rates, times and sizes are read as people write them: "10Gbit", "1.5GB/s", "50us", "100MB".

    rate("10Gbit")      1.25e9 bytes a second      rate("1.5GB/s")    1.5e9
    seconds("50us")     5e-5                       size("100MB")      1e8

Links are sold in decimal bits, memory in decimal bytes; a small b, the word bit or nothing ("10G")
means bits, a capital B bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any, Self

from stratagem.errors import UsageError
from stratagem.plan.formulas import Calibration

_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_RATE = re.compile(
    _NUMBER + r"\s*(?:([kmgtKMGT]?)([bB][iI][tT][sS]?|b|B)(?:/s|ps)?|([kmgtKMGT])(?:bE)?)"
)
_SIZE = re.compile(_NUMBER + r"\s*([kKMGT]?)B?")
_TIME = re.compile(_NUMBER + r"\s*(ns|us|µs|μs|ms|s)")
_ZERO = re.compile(r"0+(?:\.0*)?")
_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
#: both characters for micro: the sign and the Greek letter
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}


def rate(text: str, what: str = "a link") -> float:
    """Parse a rate into bytes a second."""
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
    """Parse a time into seconds; 0 needs no unit."""
    if _ZERO.fullmatch(text.strip()):
        return 0.0
    found = _TIME.fullmatch(text.strip())
    value = float(found[1]) * _SECONDS[found[2]] if found else math.inf
    if not value < math.inf:
        raise UsageError(f"{text!r} is not {what}; write 50us, 2ms or 0.1s, for example.")
    return value


def size(text: str, what: str = "a size") -> float:
    """Parse a size into bytes."""
    found = _SIZE.fullmatch(text.strip())
    value = float(found[1]) * _PREFIX[found[2]] if found else math.inf
    if not value < math.inf:
        raise UsageError(f"{text!r} is not {what}; write 100MB or 2.5GB, for example.")
    return value


def say_rate(value: float) -> str:
    """Format a rate in bits, as `rate` parses it."""
    bits = value * 8
    for prefix in ("T", "G", "M", "k"):
        if bits >= _PREFIX[prefix]:
            return f"{_plain(bits / _PREFIX[prefix])}{prefix}bit"
    return f"{_plain(bits)}bit"


def say_seconds(value: float, digits: int = 4) -> str:
    """Format a time, as `seconds` parses it."""
    for unit in ("s", "ms", "us"):
        if value >= _SECONDS[unit]:
            return f"{_plain(value / _SECONDS[unit], digits)}{unit}"
    return f"{_plain(value * 1e9, digits)}ns"


def say_bytes(value: float) -> str:
    """Format a size for people."""
    for prefix in ("T", "G", "M", "k"):
        if value >= _PREFIX[prefix]:
            return f"{value / _PREFIX[prefix]:.3g} {prefix}B"
    return f"{value:.0f} B"


def _plain(value: float, digits: int = 4) -> str:
    """Format with four digits: measurements are no more precise."""
    return f"{value:.{max(digits, len(str(int(value))))}g}"


_RATES = ("link", "local", "update")
_TIMES = ("latency", "local_latency")


@dataclass(frozen=True)
class Hardware:
    """Hosts of `per_host` devices each; rates in bytes a second, times in seconds.

    Links are full duplex: a host sends at `link` while it receives at `link`.

    >>> Hardware.of(hosts=4, per_host=8, link="10Gbit", latency="50us")
    """

    hosts: int = 1
    per_host: int = 1
    #: between hosts, each way
    link: float = 1.25e9
    latency: float = 50e-6
    #: inside a host: one replica reading and adding up another's gradients
    local: float = 4e9
    local_latency: float = 20e-6
    #: bytes of gradient that a server's optimizer applies in a second
    update: float = 2e9
    #: processors of a host, which CPU replicas share
    cores: int = 1
    #: bytes that a core sends and receives in a second: copies, and the kernel's work for sockets;
    #: None: unknown, and counted as free
    sockets: float | None = None
    #: bytes of each device; None: unknown, or what follows from the host's
    memory: float | None = None
    #: bytes of a host, which CPU replicas share
    host_memory: float | None = None

    def __post_init__(self) -> None:
        for name in ("hosts", "per_host", "cores"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} is {value!r}; it must be a whole number, 1 or more.")
        for name in (*_RATES, *_TIMES):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise UsageError(
                    f'{name} is {value!r}; it must be a number, or words such as "10Gbit" for a '
                    'rate and "50us" for a time.'
                )
            if name in _RATES and not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {value!r} bytes a second; it must be more than 0.")
            if name in _TIMES and not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {value!r} s; it must be 0 or more.")
        for name in ("memory", "host_memory", "sockets"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name} is {value!r} bytes; it must be more than 0, or None.")

    @classmethod
    def of(
        cls,
        *,
        link: str | float | None = None,
        latency: str | float | None = None,
        local: str | float | None = None,
        local_latency: str | float | None = None,
        base: Self | None = None,
        **counts: int,
    ) -> Self:
        """Make from numbers, or texts such as "10Gbit"; other fields are those of `base`."""
        given: dict[str, Any] = dict(counts)
        for name, value in (("link", link), ("local", local)):
            if value is not None:
                given[name] = rate(value, f"--{name}") if isinstance(value, str) else value
        for name, value in (("latency", latency), ("local_latency", local_latency)):
            if value is not None:
                given[name] = seconds(value) if isinstance(value, str) else value
        return replace(base or cls(), **given)

    def from_check(self, latency: float, up: float, down: float) -> Self:
        """Return this hardware with the link that `stratagem check` measured.

        `latency` is a round trip; `up` and `down` are payload. `link` includes headers, which are
        added here and which predictions subtract again.
        """
        return replace(self, latency=latency / 2, link=min(up, down) / Calibration().goodput)

    def room(self, per_host: int, device: str) -> float | None:
        """Bytes of memory for each of `per_host` devices of a host; None if unknown."""
        if self.memory is not None or device != "cpu" or self.host_memory is None:
            return self.memory
        return self.host_memory / per_host

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.hosts * self.per_host

    def __str__(self) -> str:
        inside = f"{self.hosts} host{'s' * (self.hosts > 1)} of {self.per_host}"
        if self.hosts == 1:
            return inside
        return f"{inside}, {say_rate(self.link)} links, {say_seconds(self.latency)} latency"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        unknown = plain.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise UsageError(f"hardware has no {', '.join(sorted(unknown))}.")
        return cls(**plain)
