"""Choices that travel with a strategy into every replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stratagem.codecs.wire_choice import Wire
from stratagem.rules.cadence import Sync
from stratagem.rules.updates import Updates
from stratagem.state.partition import Partitioner
from stratagem.training.cross_device import CrossDeviceOps


@dataclass(frozen=True)
class Served:
    """The settings of servers that keep the parameters."""

    updates: Updates
    partitioner: Partitioner | None
    workers: int
    servers: int
    #: how many other servers hold a copy of each shard
    backups: int = 0


@dataclass(frozen=True)
class Pipeline:
    """How a model is split by layers over the devices."""

    #: microbatches of a batch; None measures and takes the fastest number
    microbatches: int | None = None
    #: a name of rules/schedules.py
    schedule: str = "1f1b"
    #: names of the layers with which stages begin, from the second on; None measures
    split: tuple[str, ...] | None = None
    #: "microbatch": BatchNorm normalises over microbatches, unlike one device
    batch_norm: str | None = None
    #: bytes that a stage may take for what is known before it runs
    memory: float | None = None
    #: parts of the model on each device: several with an interleaved schedule
    parts: int = 1
    #: chunks of time into which stacks of recurrent layers are cut, instead of rows; 0 tries some
    columns: int | None = None
    #: parallel pipelines, each with a share of every batch
    data: int = 1
    #: whether pieces by rows are tried beside chunks of time
    by_rows: bool = False


@dataclass(frozen=True)
class TensorParallel:
    """How layers are divided over the devices."""

    #: "columns", "rows" or "replicate" by the names of layers; others are divided by their kind
    plan: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Settings:
    """How the replicas of a strategy train."""

    #: the user's choice of an all-reduce: None (the default), "auto" (measure), or an operation
    op: CrossDeviceOps | str | None = None
    #: the type in which gradients are sent, or the compression
    wire: Wire = None
    #: normalise over the global batch, not over each replica's share
    sync_batchnorm: bool = False
    #: set when servers keep the parameters
    served: Served | None = None
    #: whether replicas may leave and join
    elastic: bool = False
    #: whether parameters, gradients and the optimizer's state are divided over the replicas
    sharded: bool = False
    #: makes the committer of a strategy that does not all-reduce: a subclass of GradientExchange
    committer: Callable[..., Any] | None = None
    #: when replicas meet, if not in every step; `committer` is set then, too
    sync: Sync | None = None
    #: set when the model is split by layers
    pipeline: Pipeline | None = None
    #: set when every layer is divided
    tensor: TensorParallel | None = None

    @property
    def one_copy(self) -> bool:
        """Whether all devices together have one copy of the model, and each sees all rows."""
        return self.pipeline is not None or self.tensor is not None

    @property
    def one_pipeline(self) -> bool:
        """Whether all devices are the stages of one pipeline."""
        return self.pipeline is not None and self.pipeline.data == 1

    @property
    def whole_batches(self) -> bool:
        """Whether a training step has all rows of a batch in one piece, so that a model may mix
        them; an evaluation divides them all the same."""
        pipeline = self.pipeline
        one_piece = pipeline is not None and pipeline.microbatches == pipeline.data == 1
        return one_piece or self.tensor is not None
