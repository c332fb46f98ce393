"""A cluster that a process starts by itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import index

from stratagem.arguments import by_name
from stratagem.errors import UsageError

_ELSEWHERE = {
    "servers": "it is ps",
    "num_ps": "it is ps",
    "num_workers": "it is workers",
    "worker": "it is workers",
    "evaluator": "only a cluster in the environment has one: "
    "stratagem run --workers 2 --ps 1 --evaluator train.py",
    "devices": "devices are the strategy's: sg.ParameterServerStrategy(cluster, devices=[...])",
}


@dataclass(frozen=True, init=False)
class LocalCluster:
    """A cluster on this machine: this process is its first worker and starts the rest."""

    workers: int = 2
    ps: int = 1

    @partial(by_name, elsewhere=_ELSEWHERE)
    def __init__(self, workers: int = 2, ps: int = 1) -> None:
        object.__setattr__(self, "workers", workers)
        object.__setattr__(self, "ps", ps)
        try:
            enough = index(workers) > 0 and index(ps) > 0
        except TypeError:
            enough = False
        if not enough:
            raise UsageError(
                f"LocalCluster(workers={workers!r}, ps={ps!r}): both are whole numbers, at least "
                "one of each; LocalCluster(workers=4, ps=2), for example."
            )
