"""What is trained, where its pieces lie and under which rule: the same on every task of a job."""

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
    """How the gradient of an update is cut down, whatever it was added up from."""

    norm: float | None = None
    value: float | None = None
    #: what is added to a norm before the limit is divided by it: torch's way; Keras adds nothing
    margin: float = 1e-6


@dataclass(frozen=True)
class TrainingPlan:
    """One fit: made by the chief, told to the servers, taken over by the workers."""

    shapes: tuple[tuple[int, ...], ...]
    type: str
    pieces: tuple[Piece, ...]
    recipe: OptimizerRecipe
    updates: Updates
    #: how many workers are expected
    workers: int
    servers: int
    clip: Clip = Clip()
    #: how gradients and values travel over sockets: the name of a type; or how gradients do alone
    wire: Wire = None
    #: from which every worker makes its own random numbers
    seed: int = 0
    #: how many other servers hold each shard, too
    backups: int = 0
    #: whether the training goes back to a checkpoint where a server is lost
    resumes: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return _TYPES[self.type]

    @cached_property
    def codec(self) -> Codec:
        """How values travel over sockets, and gradients that are not compressed."""
        return codec_for(None if isinstance(self.wire, Compression) else self.wire, self.dtype)

    @property
    def compression(self) -> Compression | None:
        """What gradients are compressed by."""
        return self.wire if isinstance(self.wire, Compression) else None

    @property
    def parts(self) -> int:
        """How many workers share one batch."""
        if isinstance(self.updates, Synchronous):
            return max(1, self.workers - self.updates.spares)
        return 1

    @property
    def at_once(self) -> int:
        """To how many workers a server sends values at a time."""
        return sends_at_once(
            self.workers, self.servers, in_step=isinstance(self.updates, Synchronous)
        )

    @property
    def compares(self) -> bool:
        """Whether a gradient is held against the values that it was computed with."""
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
    """Whether a training that has failed so goes back to its last checkpoint.

    `returning`: whether one is awaited, or here, that does so, and may not have brought a plan yet.
    """
    resumes = returning if plan is None else plan.resumes
    return resumes and is_server_lost(failure)


def holders_of(shard: int, servers: int, backups: int) -> list[int]:
    """The servers that hold a shard: its own, then the next ones in the ring.

    The coordinator's own shard is held by nobody else: the job ends with the coordinator.
    """
    return [(shard + i) % servers for i in range(backups + 1)] if shard else [0]


def sends_at_once(workers: int, servers: int, *, in_step: bool) -> int:
    """To how many workers each of the servers sends values at a time.

    A worker reads from all servers at once, so it takes as many workers as servers to fill a
    server's line. Those who are in step wait for the last: no few are to come after all others.
    """
    servers = max(1, servers)
    return math.ceil(workers / max(1, workers // servers)) if in_step else servers


@dataclass(frozen=True)
class Extent:
    """One piece, as elements lo..hi of all variables laid out one after the other."""

    piece: Piece
    lo: int
    hi: int
    #: the same elements within their own variable
    start: int


class WorkerLayout:
    """Where each server's pieces lie in a worker's memory."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], pieces: Sequence[Piece], servers: int
    ) -> None:
        self.shapes = shapes
        self.sizes = [math.prod(shape) for shape in shapes]
        self.starts = [sum(self.sizes[:i]) for i in range(len(shapes))]
        self.count = sum(self.sizes)
        #: by server, the last variable first: that is how backward makes gradients
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
        """Where the server's gradients begin in a worker's outbox."""
        return sum(self.loads[:server])
