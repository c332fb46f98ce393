"""The configuration of a training to predict: strategy, placement, servers, spares and wire."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from stratagem.errors import UsageError
from stratagem.plan.lossy import LOSSY
from stratagem.rules.cadence import DiLoCo
from stratagem.rules.schedules import SCHEDULES

MIRRORED = "MirroredStrategy"
MULTI_WORKER = "MultiWorkerMirroredStrategy"
CENTRAL = "CentralStorageStrategy"
SERVERS = "ParameterServerStrategy"
SHARDED = "ShardedStrategy"
PIPELINE = "PipelineStrategy"
MESH = "Mesh"
STRATEGIES = (MIRRORED, MULTI_WORKER, CENTRAL, SERVERS, SHARDED, PIPELINE, MESH)
#: by schedule, the number of parts of the model on each device of a pipeline
PARTS = {name: 2 if name == "interleaved" else 1 for name in SCHEDULES}
_WIRES = (None, "float32", "bfloat16", *LOSSY)


@dataclass(frozen=True)
class Configuration:
    """One way to distribute a training over `hosts` hosts with `per_host` replicas each.

    With several hosts, parameter servers are on hosts of their own.

    >>> Configuration("MultiWorkerMirroredStrategy", hosts=4, per_host=8, wire="bfloat16")
    >>> Configuration("ParameterServerStrategy", hosts=4, servers=2, spares=1)
    """

    strategy: str = MIRRORED
    hosts: int = 1
    per_host: int = 1
    servers: int = 0
    spares: int = 0
    wire: str | None = None
    asynchronous: bool = False
    #: gradients are added up inside each host first
    hierarchical: bool = False
    #: microbatches of a batch, for pipelines, whose devices are stages
    microbatches: int = 0
    schedule: str = ""
    #: data-parallel pipelines of a mesh
    rows: int = 1
    #: steps between two meetings of the replicas (`sync=`)
    every: int = 1
    #: parts of the model that are synchronized in turn, during some updates (`sg.DiLoCo`)
    fragments: int = 1
    overlap: int | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UsageError(f"{self.strategy!r} is none of {', '.join(STRATEGIES)}.")
        if self.hosts < 1 or self.per_host < 1:
            raise UsageError(f"{self.hosts} hosts of {self.per_host}: there must be a replica.")
        if self.wire not in _WIRES:
            raise UsageError(
                f'wire={self.wire!r} is not planned for; use None, "bfloat16", or one of '
                f"{', '.join(LOSSY)}."
            )
        if self.every < 1 or (self.inexact and self.strategy != MULTI_WORKER):
            raise UsageError(
                "compressions, and meetings every so many steps, are planned for "
                "MultiWorkerMirroredStrategy; every is 1 or more."
            )
        _ = self.sync  # refuses fragments and updates that do not fit
        if self.served and self.strategy == SERVERS and self.servers < 1:
            raise UsageError("ParameterServerStrategy needs a server: servers=1.")
        if not 0 <= self.spares < self.replicas:
            raise UsageError(f"{self.spares} spares of {self.replicas} replicas leave nobody.")
        if (self.spares or self.asynchronous) and not self.served:
            raise UsageError(f"{self.strategy} waits for all: no spares, nothing asynchronous.")
        if self.staged and (self.microbatches < 1 or self.schedule not in PARTS):
            raise UsageError(
                f"{self.strategy} needs microbatches and a schedule: "
                'microbatches=4, schedule="1f1b".'
            )
        if self.rows < 1 or self.replicas % self.rows or (self.rows > 1) != (self.strategy == MESH):
            raise UsageError("a mesh has two rows or more, all of one length: rows=2, per_host=4.")
        if self.hosts > 1 and self.strategy in (MIRRORED, CENTRAL):
            raise UsageError(f"{self.strategy} is of one host, not of {self.hosts}.")

    @property
    def served(self) -> bool:
        """Whether the parameters are in one place: on servers, or in central storage."""
        return self.strategy in (SERVERS, CENTRAL)

    @property
    def staged(self) -> bool:
        """Whether each device has some of the layers."""
        return self.strategy in (PIPELINE, MESH)

    @property
    def depth(self) -> int:
        """The number of stages of a pipeline."""
        return self.replicas // self.rows

    @property
    def lossy(self) -> bool:
        """Whether gradients are compressed with loss."""
        return self.wire in LOSSY

    @property
    def inexact(self) -> bool:
        """Whether weights differ from one device's, by compression or by fewer meetings."""
        return self.lossy or self.every > 1

    @property
    def sync(self) -> DiLoCo:
        """The `sync=` argument, if replicas do not meet every step."""
        return DiLoCo(self.every, fragments=self.fragments, overlap=self.overlap)

    @property
    def meeting(self) -> str:
        """The `sync=` argument as text."""
        parts = f", fragments={self.fragments}" if self.fragments > 1 else ""
        return f"sg.DiLoCo({self.every}{parts})"

    @property
    def parts(self) -> int:
        """The number of parts of the model on each device."""
        return PARTS.get(self.schedule, 1)

    @property
    def replicas(self) -> int:
        return self.hosts * self.per_host

    @property
    def counted(self) -> int:
        """The number of replicas whose gradients make an update."""
        return self.replicas - self.spares

    @property
    def travelling(self) -> float:
        """The bytes that are sent, as a fraction of those in fp32."""
        return 0.5 if self.wire == "bfloat16" else 1.0

    @property
    def kind(self) -> tuple[str, bool, bool, bool, bool]:
        """The key of families of one table row: any number of servers, any exact wire."""
        free, spares = self.asynchronous, bool(self.spares)
        return self.strategy, free, spares, self.hierarchical, self.inexact

    @property
    def family(self) -> str:
        """The key of configurations that differ only in the number of replicas."""
        words = [self.strategy.removesuffix("Strategy")]
        if self.hierarchical:
            words.append("hierarchical")
        if self.strategy == SERVERS:
            words.append(f"{self.servers} server{'s' * (self.servers > 1)}")
        if self.schedule:
            words.append(self.schedule)
        if self.rows > 1:
            words.append(f"{self.rows} rows")
        if self.asynchronous:
            words.append("asynchronous")
        if self.spares:
            words.append("spares")
        if self.wire == "bfloat16":
            words.append("bf16")
        if self.lossy and self.wire is not None:
            words.append(self.wire)
        if self.every > 1:
            words.append(f"every {self.every} steps")
        if self.fragments > 1:
            words.append(f"{self.fragments} fragments")
        return ", ".join(words)

    @property
    def placement(self) -> str:
        if self.hosts == 1:
            return f"{self.per_host} on one host" if self.per_host > 1 else "one device"
        return f"{self.hosts} hosts of {self.per_host}"

    def __str__(self) -> str:
        return f"{self.family}{self.pieces}, {self.placement}"

    @property
    def pieces(self) -> str:
        """The number of microbatches, in words."""
        return f", {self.microbatches} microbatches" if self.microbatches else ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
