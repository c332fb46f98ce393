"""The plan of a fit: parameters, pieces, optimizer and rule, the same on every task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from typing import Any

import torch

from stratagem.cluster.failure import is_server_lost
from stratagem.codecs.codec import Codec, codec_for
from stratagem.codecs.compression import Compression
from stratagem.codecs.wire_choice import Wire, wire_from_json, wire_to_json
from stratagem.rules import updates as rule
from stratagem.rules.updates import Synchronous, Updates
from stratagem.state.optimizer_recipe import OptimizerRecipe
from stratagem.state.partition import Piece

_TYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Clip:
    """How the gradient of an update is clipped."""

    norm: float | None = None
    value: float | None = None
    #: added to a norm before the limit is divided by it, as torch does; Keras adds nothing
    margin: float = 1e-6


@dataclass(frozen=True)
class TrainingPlan:
    """The plan of one fit; the chief makes it, servers and workers get it."""

    shapes: tuple[tuple[int, ...], ...]
    type: str
    pieces: tuple[Piece, ...]
    recipe: OptimizerRecipe
    updates: Updates
    #: how many workers are expected
    workers: int
    servers: int
    clip: Clip = Clip()
    #: how gradients and values travel over sockets (a type), or gradients alone (compression)
    wire: Wire = None
    #: from which every worker derives its own seed
    seed: int = 0
    #: how many other servers hold a copy of each shard
    backups: int = 0
    #: whether the training goes back to a checkpoint if a server is lost
    resumes: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return _TYPES[self.type]

    @cached_property
    def codec(self) -> Codec:
        """The codec of values, and of gradients that are not compressed."""
        return codec_for(None if isinstance(self.wire, Compression) else self.wire, self.dtype)

    @property
    def compression(self) -> Compression | None:
        """The compression of gradients, if any."""
        return self.wire if isinstance(self.wire, Compression) else None

    @property
    def parts(self) -> int:
        """How many workers share one batch."""
        if isinstance(self.updates, Synchronous):
            return max(1, self.workers - self.updates.spares)
        return 1

    @property
    def in_step(self) -> bool:
        """Whether a step ends with the values that it made: each worker has a part of each batch,
        or whole batches alone."""
        return self.workers == 1 or (self.shares_batches and self.parts == self.workers)

    @property
    def shares_batches(self) -> bool:
        """Whether a batch is dealt in parts; with spares not every worker has one of each."""
        return isinstance(self.updates, Synchronous)

    @property
    def at_once(self) -> int:
        """To how many workers a server sends values at the same time."""
        return sends_at_once(
            self.workers, self.servers, in_step=isinstance(self.updates, Synchronous)
        )

    @property
    def compares(self) -> bool:
        """Whether a policy compares the values with those that a gradient was computed with."""
        return any(policy.needs_then for policy in getattr(self.updates, "staleness", ()))

    @cached_property
    def layout(self) -> WorkerLayout:
        return WorkerLayout(self.shapes, self.pieces, self.servers)

    def to_json(self) -> dict[str, Any]:
        return {
            "shapes": [list(shape) for shape in self.shapes],
            "type": self.type,
            "pieces": [astuple(piece) for piece in self.pieces],
            "recipe": self.recipe.to_json(),
            "updates": self.updates.to_json(),
            "workers": self.workers,
            "servers": self.servers,
            "clip": asdict(self.clip),
            "wire": wire_to_json(self.wire),
            "seed": self.seed,
            "backups": self.backups,
            "resumes": self.resumes,
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> TrainingPlan:
        return cls(
            tuple(tuple(int(n) for n in shape) for shape in told["shapes"]),
            str(told["type"]),
            tuple(Piece(*piece) for piece in told["pieces"]),
            OptimizerRecipe.from_json(told["recipe"]),
            rule.from_json(told["updates"]),
            int(told["workers"]),
            int(told["servers"]),
            Clip(**told["clip"]),
            wire_from_json(told["wire"]),
            int(told["seed"]),
            int(told["backups"]),
            bool(told["resumes"]),
        )


def goes_back(plan: TrainingPlan | None, failure: BaseException | None, *, returning: bool) -> bool:
    """Return whether a training with this failure goes back to its last checkpoint.

    `returning`: the answer while there is no plan yet.
    """
    resumes = returning if plan is None else plan.resumes
    return resumes and is_server_lost(failure)


def holders_of(shard: int, servers: int, backups: int) -> list[int]:
    """Return the servers that hold a shard: its own, then the next ones in the ring.

    Only the coordinator holds its shard: the job ends with the coordinator.
    """
    return [(shard + i) % servers for i in range(backups + 1)] if shard else [0]


def sends_at_once(workers: int, servers: int, *, in_step: bool) -> int:
    """Return to how many workers each server sends values at the same time.

    A worker reads from all servers at once, so as many workers as servers fill a server's link. In
    step the number is rounded up, so that no few workers come last: all wait for these.
    """
    servers = max(1, servers)
    return math.ceil(workers / max(1, workers // servers)) if in_step else servers


@dataclass(frozen=True)
class Extent:
    """One piece, as elements lo..hi of all variables one after the other."""

    piece: Piece
    lo: int
    hi: int
    #: where it begins in its own variable
    start: int


class WorkerLayout:
    """Offsets of each server's pieces in a worker's memory."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], pieces: Sequence[Piece], servers: int
    ) -> None:
        self.shapes = shapes
        self.sizes = [math.prod(shape) for shape in shapes]
        self.starts = [sum(self.sizes[:i]) for i in range(len(shapes))]
        self.count = sum(self.sizes)
        #: by server, the last variable first, as backward makes gradients
        self.extents: list[list[Extent]] = [[] for _ in range(servers)]
        for piece in reversed(pieces):
            self.extents[piece.server].append(self._extent(piece))
        self.loads = [sum(e.hi - e.lo for e in part) for part in self.extents]

    def _extent(self, piece: Piece) -> Extent:
        shape = self.shapes[piece.variable]
        row = math.prod(shape[1:])
        first = self.starts[piece.variable]
        return Extent(piece, first + piece.start * row, first + piece.stop * row, piece.start * row)

    def offset(self, server: int) -> int:
        """Return where the server's gradients begin in a worker's outbox."""
        return sum(self.loads[:server])
