"""The peers: one file each, whose `run(job)` does one case in each process and returns what the
first one prints or saves; and this table of what to ask them for."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Ways = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Peer:
    """`ways` are the remedies that its documentation has for a case, if more than one: the table
    shows the best of them. `packages` are printed; the number is the least version."""

    title: str
    packages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ways: Ways = field(default_factory=dict)
    launcher: str = "torchrun"

    def command(self, replicas: int) -> list[str]:
        """What starts so many processes; the script follows."""
        launchers = {
            "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node"],
            "stratagem run": ["stratagem", "run", "--replicas"],
        }
        if self.launcher == "python":
            return [sys.executable]
        return [sys.executable, "-m", *launchers[self.launcher], str(replicas)]

    def ways_of(self, case: str) -> tuple[str, ...]:
        return self.ways.get(case, ("",))


def _ways(uneven: Iterable[str], **other: tuple[str, ...]) -> Ways:
    return {**dict.fromkeys(("short", "few", "odd"), tuple(uneven)), **other}


#: names of ways, which the peers' files ask for
SAMPLER, ITS_SAMPLER, STATEFUL = (
    "DistributedSampler",
    "use_distributed_sampler",
    "StatefulDataLoader",
)
JOIN, PADDED, SPLIT = "Join", "even_batches", "split_batches"
MEAN, ITEMS = "mean", "num_items_in_batch"
DEALT, LOADER = "PyDataset", "DataLoader"
OURS: dict[str, Any] = {"launcher": "stratagem run"}
PEERS = {
    "ddp": Peer("DDP", {"torch": (2, 11), "torchdata": (0, 11)}, _ways((SAMPLER, JOIN))),
    "accelerate_loop": Peer(
        "Accelerate", {"accelerate": (1, 0)}, _ways((PADDED, SPLIT), ignored=(MEAN, ITEMS))
    ),
    "lightning_trainer": Peer(
        "Lightning",
        {"lightning": (2, 0), "torchdata": (0, 11)},
        {"order": (SAMPLER, ITS_SAMPLER), "resumed": (SAMPLER, ITS_SAMPLER, STATEFUL)},
    ),
    "hf_trainer": Peer("HF Trainer", {"transformers": (5, 0)}, _ways((PADDED, SPLIT))),
    "keras_parallel": Peer(
        "Keras DataParallel",
        {"keras": (3, 16)},
        _ways(
            (DEALT, LOADER),
            **dict.fromkeys(("evaluation", "resumed", "order"), (DEALT, LOADER)),
        ),
    ),
    "own_loop": Peer("stratagem, own loop", {"torch": (2, 11)}, **OURS),
    "own_model": Peer("stratagem, `sg.Model`", {"torch": (2, 11)}, **OURS),
    "own_keras": Peer("stratagem, Keras", {"keras": (3, 12)}, **OURS),
}
BY_HAND = Peer("by hand", launcher="python")


def peer(name: str) -> Peer:
    return BY_HAND if name == "by_hand" else PEERS[name]
