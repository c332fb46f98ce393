"""What one step of a model costs on this machine, and when each part of its gradient is ready.

forward   |==========|
backward             |==[b0]====[b1]========[b2]|      buckets, as they become full
optimizer                                       |===|
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from stratagem.errors import UsageError
from stratagem.plan.lossy import CodecTime
from stratagem.rules.layer_split import LayerCost

Shape = tuple[int, ...]
#: with fewer steps, or fewer late steps, the frequency of late steps cannot be estimated
_FEW = 10


@dataclass(frozen=True)
class SparseTable:
    """A variable whose gradient is sparse: rows, their bytes, and how many a batch touches."""

    rows: int
    row_bytes: int
    touched: float

    def sent(self, workers: int = 1, travelling: float = 1.0) -> float:
        """Bytes of the rows that `workers` workers touch, with the indices of the rows."""
        return self.touched_by(workers) * (self.row_bytes * travelling + 8)

    def touched_by(self, batches: float) -> float:
        """The expected number of rows that so many batches touch together."""
        missed = math.log1p(-min(self.touched / self.rows, 1 - 1e-12))
        return -self.rows * math.expm1(batches * missed)


@dataclass(frozen=True)
class GradientPart:
    """The bytes of a part of the gradient, and when it is ready: seconds after backward began."""

    size: int
    ready: float


def merged(gradients: Sequence[GradientPart]) -> tuple[GradientPart, ...]:
    """Merge adjacent parts, so that a deep model has 32 at most."""
    group = -(-len(gradients) // 32) if gradients else 1
    parts = [gradients[i : i + group] for i in range(0, len(gradients), group)]
    return tuple(GradientPart(sum(b.size for b in part), part[-1].ready) for part in parts)


@dataclass(frozen=True)
class LayerTable:
    """The cost of each layer for a microbatch: one of `pieces` equal parts of the batch."""

    pieces: int
    costs: tuple[LayerCost, ...]

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        return cls(int(plain["pieces"]), tuple(LayerCost(**each) for each in plain["costs"]))


@dataclass(frozen=True)
class StageTime:
    """Seconds of the whole model as one stage, in one of several processes.

    `forward` and `backward` are those of a microbatch; `late` is deferred to the end of a
    batch. All processes compute at once, or one of them `alone`.
    """

    processes: int
    pieces: int
    forward: float
    backward: float
    late: float = 0.0
    alone: bool = False


@dataclass(frozen=True)
class Footprint:
    """Bytes that one device holds; parameters include buffers."""

    parameters: int
    gradients: int
    states: int
    activations: int

    @property
    def fixed(self) -> int:
        return self.parameters + self.gradients + self.states


@dataclass(frozen=True)
class Profile:
    """One replica's step on `batch` examples; times in seconds."""

    name: str
    batch: int
    forward: float
    backward: float
    optimizer: float
    #: in the order of backward; the last one is sent when backward has ended
    buckets: tuple[GradientPart, ...]
    #: shapes of the dense variables, for dividing them over servers
    shapes: tuple[Shape, ...] = ()
    sparse: tuple[SparseTable, ...] = ()
    #: measured forward and backward passes, for their spread; the mean is forward + backward
    samples: tuple[float, ...] = ()
    device: str = "cpu"
    threads: int = 1
    #: torch's default, if the plan is made with fewer threads, which are faster
    usual_threads: int | None = None
    #: forward and backward with one thread, where `threads` is more
    single_thread: float | None = None
    #: the optimizer with one thread, likewise
    single_optimizer: float | None = None
    #: (n, forward and backward) of the slowest of n replicas that compute at once on this machine
    crowd: tuple[tuple[int, float], ...] = ()
    itemsize: int = 4
    #: as `buckets`, but for each dense variable: workers push each as soon as it is ready
    gradients: tuple[GradientPart, ...] = ()
    #: one server's update of all dense variables with this optimizer, if measured
    server: float | None = None
    #: why servers do not support this optimizer
    unserved: str = ""
    #: micro-batches of a step
    accumulated: int = 1
    #: notes for the reader of the figures
    notes: tuple[str, ...] = ()
    #: whether the script has a loop of its own
    own_loop: bool = False
    #: the memory of one device, if measured
    footprint: Footprint | None = None
    #: layer costs for the whole batch, a half and a quarter of it, if the model can be split
    layers: tuple[LayerTable, ...] = ()
    #: all these layers together in the stages' own code
    stage_times: tuple[StageTime, ...] = ()
    #: one operation of a stage with nothing to compute: messages; 0 if not measured
    operation: float = 0.0
    #: why the model has no pipeline, and why its state is not sharded
    unpiped: str = ""
    unsharded: str = ""
    #: whether its state is sharded on the CPUs of one machine only
    sharded_here: bool = False
    #: whether mirrored CPU replicas of one machine have one set of parameters, and update parts
    one_set: bool = True
    #: seconds of each compression that works with the optimizer, if asked for
    codecs: tuple[CodecTime, ...] = ()

    def __post_init__(self) -> None:
        times = [self.forward, self.backward, self.optimizer, self.server or 0.0, *self.samples]
        if self.batch < 1 or self.threads < 1 or not all(0 <= t < math.inf for t in times):
            raise UsageError(
                f"the profile of {self.name!r} has a batch, a thread count or a time that cannot "
                "be; measure it again."
            )

    @property
    def stream(self) -> tuple[GradientPart, ...]:
        """The gradient parts as workers push them to servers."""
        return self.gradients or self.buckets

    @property
    def dense_bytes(self) -> int:
        return sum(bucket.size for bucket in self.buckets)

    @property
    def sparse_bytes(self) -> float:
        """Bytes that are sent for the sparse gradients of one batch."""
        return sum(table.sent() for table in self.sparse)

    def travels(self, workers: int = 1, travelling: float = 1.0) -> float:
        """Bytes of a gradient, or of the values that so many workers' gradients have changed."""
        return self.dense_bytes * travelling + sum(
            table.sent(workers, travelling) for table in self.sparse
        )

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def spread(self) -> tuple[float, ...]:
        """Samples relative to their mean, in order, so that they fit any speed."""
        mean = math.fsum(self.samples) / len(self.samples) if self.samples else 0.0
        return tuple(s / mean for s in sorted(self.samples)) if mean > 0 else (1.0,)

    @property
    def unrest(self) -> float:
        """The 90th percentile of the steps relative to their median: 1 on an idle machine."""
        spread = self.spread
        return spread[int(0.9 * (len(spread) - 1))] / spread[len(spread) // 2]

    @property
    def late(self) -> int:
        """The number of steps that took at least 1.5 times the median."""
        spread = self.spread
        return sum(each >= 1.5 * spread[len(spread) // 2] for each in spread)

    @property
    def restless(self) -> bool:
        """Whether steps vary too much to trust stragglers, or too few were measured to tell.

        A few late steps decide how long the last of many replicas takes, and the next measurement
        may have none.
        """
        few = len(self.samples) < _FEW or 0 < self.late < _FEW
        return bool(self.samples) and (few or self.unrest > 1.3)

    def with_threads(self, threads: int) -> float:
        """Seconds of forward and backward with so many threads: a serial and a parallel part."""
        return self._threaded(self.compute, self.single_thread, threads)

    def optimizer_with(self, threads: int) -> float:
        """Seconds of the optimizer with so many threads."""
        return self._threaded(self.optimizer, self.single_optimizer, threads)

    def _threaded(self, many: float, one: float | None, threads: int) -> float:
        if one is None or self.threads == 1 or threads == self.threads:
            return many
        shared = min(max((one - many) / (1 - 1 / self.threads), 0.0), one)
        return one - shared + shared / max(1, min(threads, self.threads))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        given = dict(plain)
        known = {field.name for field in fields(cls)}
        try:
            if given.keys() - known:
                raise ValueError(f"unknown: {', '.join(sorted(given.keys() - known))}")
            for name in ("buckets", "gradients"):
                given[name] = tuple(GradientPart(**each) for each in given.get(name, ()))
            given["sparse"] = tuple(SparseTable(**each) for each in given.get("sparse", ()))
            given["shapes"] = tuple(tuple(shape) for shape in given.get("shapes", ()))
            for name in ("samples", "notes"):
                given[name] = tuple(given.get(name, ()))
            given["layers"] = tuple(LayerTable.from_json(each) for each in given.get("layers", ()))
            given["stage_times"] = tuple(StageTime(**t) for t in given.get("stage_times", ()))
            given["codecs"] = tuple(CodecTime(**each) for each in given.get("codecs", ()))
            if given.get("footprint") is not None:
                given["footprint"] = Footprint(**given["footprint"])
            given["crowd"] = tuple((int(n), float(t)) for n, t in given.get("crowd", ()))
            if not given["buckets"] and not given["sparse"]:
                raise ValueError("it has no gradient")
            return cls(**given)
        except (KeyError, TypeError, ValueError) as flaw:
            raise UsageError(f"this is no profile of a model ({flaw}); measure it again.") from None
