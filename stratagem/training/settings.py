"""Choices that travel with a strategy into every replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stratagem.codecs.wire_choice import Wire
from stratagem.rules.updates import Updates
from stratagem.state.partition import Partitioner
from stratagem.training.cross_device import CrossDeviceOps


@dataclass(frozen=True)
class Served:
    """How parameters are kept by servers."""

    updates: Updates
    partitioner: Partitioner | None
    workers: int
    servers: int
    #: how many other servers hold each shard, too
    backups: int = 0


@dataclass(frozen=True)
class Settings:
    """What is reduced how, once the replicas are up."""

    #: as the user gave it: None (the usual one), "auto" (measure), or an operation
    op: CrossDeviceOps | str | None = None
    #: the type in which gradients travel, or the compression
    wire: Wire = None
    #: normalise over the global batch, not over each replica's share
    sync_batchnorm: bool = False
    #: set when servers keep the parameters
    served: Served | None = None
    #: whether replicas may leave and join
    elastic: bool = False
    #: makes the committer of a strategy that does not all-reduce: a subclass of GradientExchange
    committer: Callable[..., Any] | None = None

    @property
    def rounding(self) -> str | None:
        """`wire` as the name of a type; servers take no other."""
        return self.wire if isinstance(self.wire, str) else None
