"""A cluster that a process starts by itself."""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.errors import UsageError


@dataclass(frozen=True)
class LocalCluster:
    """A cluster on this machine: this process is its first worker and starts the rest."""

    workers: int = 2
    ps: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1 or self.ps < 1:
            raise UsageError(
                f"LocalCluster(workers={self.workers}, ps={self.ps}): there must be at least one "
                "of each; LocalCluster(workers=4, ps=2), for example."
            )
