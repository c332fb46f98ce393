"""The machines to plan for: hosts, what computes in each, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any, Self

from stratagem.errors import UsageError
from stratagem.plan.calibration import Calibration
from stratagem.plan.units import rate, say_rate, say_seconds, seconds

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
    #: gradient that a server's optimizer takes in
    update: float = 2e9
    #: processors of a host, which CPU replicas share
    cores: int = 1

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
        for name in _RATES:
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(
                    f"{name} is {getattr(self, name)!r} bytes a second; it must be more than 0."
                )
        for name in _TIMES:
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)!r} s; it must be 0 or more.")

    @classmethod
    def of(
        cls, *, link: str | float | None = None, latency: str | float | None = None,
        local: str | float | None = None, local_latency: str | float | None = None,
        base: Self | None = None, **counts: int,
    ) -> Self:  # fmt: skip
        """From what people write; what is not given is taken from `base`."""
        given: dict[str, Any] = dict(counts)
        for name, value in (("link", link), ("local", local)):
            if value is not None:
                given[name] = rate(value, f"--{name}") if isinstance(value, str) else value
        for name, value in (("latency", latency), ("local_latency", local_latency)):
            if value is not None:
                given[name] = seconds(value) if isinstance(value, str) else value
        return replace(base or cls(), **given)

    def from_check(self, latency: float, up: float, down: float) -> Self:
        """With the link that `stratagem check` saw: there and back in seconds, bytes a second.

        It counts what arrives, `link` all that is sent: headers are added here, as predictions take
        them away again.
        """
        return replace(self, latency=latency / 2, link=min(up, down) / Calibration().goodput)

    @property
    def size(self) -> int:
        """How many devices there are."""
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
