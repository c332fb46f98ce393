"""One replica: its place in the group, and its collective operations."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.cluster import exit_cause
from stratagem.cluster.membership import Membership
from stratagem.data.shares import Ordering
from stratagem.data.streams import RandomStreams
from stratagem.errors import UsageError
from stratagem.training.cross_device import CrossDeviceOps, RingAllReduce
from stratagem.wire.collective import Alone, Collective
from stratagem.wire.tree import broadcast_tree, gather_tree

ReduceOp = Literal["sum", "mean", "max", "min"]


@dataclass
class Share:
    """This replica's share of the current global batch, and the weight of its gradient."""

    examples: int
    total: int
    weight: float
    #: whether a batch was cut here, so that these are its rows
    announced: bool = False
    #: with servers: the part of the batch that this worker was dealt
    part: float = 1.0

    def set(self, examples: int, total: int, weight: float | None = None) -> None:
        """Begin a batch; the weight is the share of the examples unless given."""
        self.examples, self.total, self.announced = examples, total, True
        if weight is None:
            weight = examples / total if total else 0.0
        self.weight = weight

    def forget(self, count: int) -> None:
        """Without a batch: each of `count` replicas weighs the same."""
        self.set(1, count)
        self.announced = False


@dataclass
class LoopState:
    """The state of one replica's custom loops."""

    #: reads losses (`custom_loop.py`); None before a model is prepared
    reader: Any = None
    #: with `sync=`: the committers of prepared models, in the same order on all replicas
    keepers: list[Any] = field(default_factory=list)
    #: models prepared without a loader, with their optimizers, in the same order on all replicas
    loaderless: list[tuple[weakref.ref[nn.Module], weakref.ref[Optimizer]]] = field(
        default_factory=list
    )
    #: with elastic=True: how far the call has come (`elastic.py`)
    journal: Any = None
    #: the batches that it has in hand (`batch_shares.py`)
    batches: Any = None
    #: how often the code has combined something with the other replicas
    combined: int = 0
    #: how many batches it has cut by `strategy.rows`
    cuts: int = 0
    #: whether shares of the loader that ended last differed in size
    uneven: bool = False
    #: whether a loader has ended within the loop of another since that yielded its latest batch
    inner_over: bool = False
    #: a loader that was read without a model: rows here, rows in all, and by then: `combined`,
    #: batches fetched, backward passes
    unsummed: tuple[int, int, int, int, int] | None = None
    #: the warnings (`hints.py`, `meetings.py`) that were given
    warned: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Begin a call of `strategy.run`: nothing is prepared."""
        self.reader, self.batches, self.keepers = None, None, []
        self.uneven = self.inner_over = False
        self.cuts = 0
        self.warned.discard("apart")


@dataclass(eq=False)
class Replica:
    """What `sg.current_replica()` returns: inside `strategy.run`, and in a process that is one."""

    index: int
    count: int
    device: torch.device
    name: str
    collective: Collective = field(repr=False)
    membership: Membership = field(repr=False)
    #: opens another collective of all replicas; collective itself
    connect: Callable[[str, CrossDeviceOps], Collective] = field(
        repr=False, default=lambda name, op: Alone()
    )
    #: its number among the replicas of its own process
    local_index: int = 0
    #: the operations that these replicas can run, the main collective's own first
    ops: tuple[CrossDeviceOps, ...] = ()
    #: the fastest collective for each number of elements, once measured
    measured: dict[int, Collective] = field(default_factory=dict, repr=False)
    #: whether its worker is the chief; the devices of any other worker are a group of their own
    with_chief: bool = field(default=True, repr=False)
    share: Share = field(init=False)
    #: on the chief of a fit or an evaluation: random numbers for the data, apart from the model's
    streams: RandomStreams | None = field(default=None, init=False, repr=False)
    #: frees the memory in which a call came to this process's followers, once all have met
    release_call: Callable[[], None] = field(default=lambda: None, repr=False)
    loop: LoopState = field(default_factory=LoopState, init=False, repr=False)
    #: its number among the stages of a pipeline
    stage: int | None = field(default=None, init=False, repr=False)
    #: counts its steps (`step_figures.py`)
    figures: Any = field(default=None, init=False, repr=False)
    _side: Collective | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.share = Share(1, self.count, 1 / self.count)

    def open(self, op: CrossDeviceOps) -> Collective:
        """Return the collective that runs `op`. Collective itself."""
        if op == self.ops[0]:
            return self.collective
        return self.connect(type(op).__name__, op)

    def beside(self) -> Collective:
        """Return a collective whose order is independent of the gradients'. Collective itself."""
        if not self.collective.overlaps:
            return self.collective  # its gradients travel only after backward
        if self._side is None:
            self._side = self.connect("side", RingAllReduce())
        return self._side

    @property
    def leads(self) -> bool:
        """Whether this replica is the first of its group."""
        return self.index == 0

    @property
    def is_chief(self) -> bool:
        """Whether this replica writes checkpoints and logs."""
        return self.leads and self.with_chief

    @property
    def ordering(self) -> Ordering:
        """A context in which random draws are for the order of the data."""
        return nullcontext if self.streams is None else self.streams.for_data

    def all_gather(self, tensor: Tensor | float) -> list[Tensor]:
        """Return every replica's tensor or number, in order; shapes may differ."""
        tensor = as_tensor(tensor)
        self.loop.combined += 1
        parts = gather_tree(self.collective, tensor)
        return [part.to(tensor.device) for part in parts]

    def all_reduce(self, tensor: Tensor | float, op: ReduceOp = "sum") -> Tensor:
        """Return the sum, mean, max or min of all replicas' tensors or numbers."""
        return combine(self.all_gather(tensor), op)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite a tensor with that of the source, and return it."""
        self.collective.broadcast(tensor, source)
        return tensor

    def barrier(self) -> None:
        """Wait for all replicas."""
        self.collective.barrier()


def as_tensor(value: object) -> Tensor:
    """Return a value to be reduced or gathered as a tensor."""
    try:
        return torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            "a call that reduces or gathers takes tensors or numbers, and this is a "
            f"{type(value).__name__} ({error}); call it for each of the values."
        ) from error


def combine(parts: Sequence[Tensor], op: str, axis: int | None = None) -> Tensor:
    """Reduce values of several replicas, across them and, with `axis`, along that axis too.

    The mean over an axis weighs every row alike, however unevenly rows lie on the replicas.
    """
    if op not in ("sum", "mean", "max", "min"):
        raise UsageError(f'reduce op {op!r} is not known; choose "sum", "mean", "max" or "min".')
    if axis is not None:
        rows = torch.cat(list(parts), dim=axis)
        if op == "mean":
            return rows.mean(axis, dtype=_mean_type(rows))
        return rows.sum(axis) if op == "sum" else getattr(rows, f"a{op}")(axis)
    if any(part.shape != parts[0].shape for part in parts):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise UsageError(
            f"the tensors of the replicas have different shapes ({shapes}), so they cannot be "
            "reduced; all_gather takes any, and reduce(..., axis=0) reduces along their rows."
        )
    stacked = torch.stack(list(parts))
    if op == "mean":
        return stacked.mean(0, dtype=_mean_type(stacked))
    return stacked.sum(0) if op == "sum" else getattr(stacked, f"a{op}")(0)


def _mean_type(tensor: Tensor) -> torch.dtype | None:
    """Means of whole numbers are float32."""
    return None if tensor.is_floating_point() or tensor.is_complex() else torch.float32


#: the replica that a call (strategy.run, fit) is running on now
_called: Replica | None = None
#: whether that call runs the user's own code: strategy.run
_runs_user_code = False
#: the replicas that this process is outside of any call, the latest strategy's last
_own: list[weakref.ref[Replica]] = []


def current_replica() -> Replica:
    """The replica that this code runs on; a lone one outside any strategy."""
    found = strategy_replica()
    if found is None:
        found = Replica(0, 1, torch.device("cpu"), "replica 0", Alone(), Membership.alone())
    return found


def strategy_replica() -> Replica | None:
    """The replica that this code runs on; None outside any strategy."""
    if _called is not None:
        return _called
    for each in reversed(_own):
        if (replica := each()) is not None:
            return replica
    return None


def alone(replica: Replica) -> Replica:
    """Return a lone replica on the same device."""
    return Replica(0, 1, replica.device, replica.name, Alone(), Membership.alone())


def called_replica() -> Replica | None:
    """The replica of the present call if it is one of several; None otherwise."""
    return _called if _called is not None and _called.count > 1 else None


def current_call() -> Replica | None:
    """The replica of the present call, be it a lone one; None outside of calls."""
    return _called


_turn = threading.RLock()


def turn() -> AbstractContextManager[object]:
    """Calls of several threads take turns: there is one replica that a call runs on."""
    exit_cause.took_part()
    return _turn


def _new_turn() -> None:
    """Free the turn in a forked child, where the parent's threads do not exist."""
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_new_turn)


def set_called(replica: Replica | None) -> Replica | None:
    """Begin or end a call on `replica`; returns the one before."""
    global _called
    before, _called = _called, replica
    return before


@contextmanager
def user_code() -> Iterator[None]:
    """Mark the block as the function that was given to strategy.run."""
    global _runs_user_code
    before, _runs_user_code = _runs_user_code, True
    try:
        yield
    finally:
        _runs_user_code = before


def replica_of_loop() -> Replica | None:
    """The replica whose training steps the user's code runs; None in `fit`, and outside any
    strategy."""
    if _called is not None:
        return _called if _runs_user_code else None
    return strategy_replica()


def be(replica: Replica) -> None:
    """Make this process `replica`, outside of calls as well."""
    _own.append(weakref.ref(replica))


def be_no_more(replica: Replica) -> None:
    """Take `be` back: this process is the replica that it was before, or a lone one."""
    _own[:] = [each for each in _own if each() not in (None, replica)]


# --- the first member of a group sends commands, and all others run them --------------------------


#: the command that ends a loop
END = "end"


class CommandLoop:
    """A group's channel for commands; every method is collective."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def tell(self, verb: str, *arguments: Any) -> None:
        """As the first member: have all others run a command."""
        broadcast_tree(self._collective, [verb, list(arguments)])

    def hear(self) -> tuple[str, list[Any]]:
        """As any other member: return the next command with its arguments."""
        verb, arguments = broadcast_tree(self._collective)
        return verb, arguments

    def serve(self, verbs: Mapping[str, Callable[..., Any]]) -> list[Any]:
        """As any other member: run commands until `END`; return the arguments of `END`."""
        while True:
            verb, arguments = self.hear()
            if verb == END:
                return arguments
            verbs[verb](*arguments)
