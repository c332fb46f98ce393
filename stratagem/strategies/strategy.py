"""The base of all strategies: their scope, `run`, and the combination of values."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

from stratagem import tracebacks
from stratagem.cluster import exit_cause
from stratagem.cluster.membership import Membership
from stratagem.cluster.spec import Place
from stratagem.errors import UsageError
from stratagem.strategies.custom_loop_calls import CustomLoopCalls
from stratagem.training import dry_run, hints, meetings
from stratagem.training.agreement import Patience
from stratagem.training.devices import place
from stratagem.training.elastic import Again, LoopJournal
from stratagem.training.gathered_rows import gather_rows
from stratagem.training.led_prepare import led, led_loops
from stratagem.training.replica import (
    Replica,
    as_tensor,
    called_replica,
    combine,
    current_replica,
    set_called,
    user_code,
)
from stratagem.training.replica_group import ReplicaGroup, Sent
from stratagem.training.settings import Settings
from stratagem.wire.collective import Alone
from stratagem.wire.freed_memory import keep_freed_memory, let_go_of_freed_memory

if TYPE_CHECKING:
    from stratagem.servers.evaluator_task import EvaluatorLink

#: the strategies whose scopes are open, and whether models made in them are checked
_scopes: list[tuple[Strategy, bool]] = []
#: functions of front ends, called when a scope opens; each returns a context to hold open
_front_ends: list[Callable[[Strategy], AbstractContextManager[Any]]] = []


def on_scope(enter: Callable[[Strategy], AbstractContextManager[Any]]) -> None:
    """Have `enter` called, and its context held, whenever a scope is open."""
    _front_ends.append(enter)


_open: weakref.WeakSet[Strategy] = weakref.WeakSet()
#: strategies in a cluster, kept alive for the goodbye at the end that other tasks wait for
_members: list[Strategy] = []


class TaskGroup(Protocol):
    """The processes of a strategy, seen from one of them: replicas, or workers of servers."""

    #: the devices of this process and of those that it starts
    devices: tuple[str, ...]
    #: the place of this process in a cluster; None without one
    place: Place | None
    #: how many replicas there are in all
    size: int
    #: whether this process writes checkpoints and logs; None if its place in the cluster decides
    leads: bool | None

    def start(self) -> Replica:
        """Start all workers that are not running; return the replica that this process is."""

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        sent: Sent = None,
        again: Again | None = None,
    ) -> list[Any]:
        """Run `function` on all workers of this process; `sent` replaces `args` on followers.

        With `again` the call can be begun again after replicas have left or joined.
        """

    def report(self, error: BaseException) -> None:
        """Tell the other tasks why this task ends."""

    def close(self) -> None:
        """End the processes that were started here."""


class Strategy(CustomLoopCalls):
    """Where replicas run and how gradients are combined; the named strategies are presets."""

    #: whether servers keep the parameters
    served = False
    #: set in the evaluator's task, which takes no part in the training: knows when that is over
    audience: EvaluatorLink | None = None

    def __new__(cls, *args: Any, **options: Any) -> Self:
        tracebacks.install()  # what `__init__` refuses is shown without our frames, too
        return super().__new__(cls)

    def __init__(self, replica_group: TaskGroup, settings: Settings) -> None:
        self.replica_group = replica_group
        self.settings = settings
        if any(name.startswith("cpu") for name in replica_group.devices):
            keep_freed_memory(self)
        if hints.explain not in tracebacks.explainers:
            tracebacks.explainers.append(hints.explain)
        _open.add(self)
        if replica_group.place is not None:
            _members.append(self)

    def __enter__(self) -> Self:
        """`with sg.MirroredStrategy() as strategy:` closes it at the end; `scope` opens one."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas train together, over all workers; the stages of a pipeline count as one
        replica, and so do processes that divide layers."""
        if self.settings.pipeline is not None:
            return self.settings.pipeline.data
        return 1 if self.settings.one_copy else self.replica_group.size

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of this process."""
        return self.replica_group.devices

    @property
    def is_chief(self) -> bool:
        """Whether this process, or inside `run` this replica, writes checkpoints and logs."""
        inside = called_replica()
        if inside is not None:
            return inside.is_chief
        leads, place = self.replica_group.leads, self.replica_group.place
        return (place is None or place.is_chief) if leads is None else leads

    @contextmanager
    def scope(self, *, check: bool = True) -> Iterator[Strategy]:
        """Have models that are made in this block belong to the strategy.

        Args:
            check: before the first step of a call, try on a few rows whether shares of a batch add
                up to the result of one device; False skips that.
        """
        if _scopes and _scopes[-1][0] is not self:
            raise UsageError(
                "a strategy's scope is open already, and another strategy's cannot be opened "
                "inside it; close the first one (leave its `with` block) before."
            )
        with ExitStack() as held:
            for enter in _front_ends:
                held.enter_context(enter(self))
            _scopes.append((self, check))
            held.callback(_scopes.pop)
            yield self

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(*args)` once on each replica of this process; returns their results in order.

        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.run(lambda: sg.current_replica().index)
        [0, 1]
        """
        if dry_run.wanted():
            return [here(self, lambda _: fn(*args), None)] * len(self.devices)
        if not self.settings.elastic:
            return self.replica_group.call(_with_fresh_share, (fn, args))
        journal = LoopJournal(inherited=self.replica_group.leads is not None)
        try:
            return self.replica_group.call(
                _with_fresh_share, (fn, args, journal), (fn, args), journal.again
            )
        finally:
            journal.close()

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on the chief only."""
        if self.is_chief:
            print(*values, **options)

    def replica(self) -> Replica:
        """The replica that the calling code is."""
        inside = called_replica() or led()
        if inside is not None:
            return inside
        if dry_run.wanted():
            return _alone(place(self.devices[0]))
        if len(self.replica_group.devices) > 1:
            raise UsageError(
                f"this strategy has {len(self.replica_group.devices)} replicas in this process, "
                "and your loop runs on one of them only. Put the loop into a function and call "
                "strategy.run(train); or name no devices, and start the script with "
                f"`stratagem run --replicas {len(self.replica_group.devices)} train.py`."
            )
        exit_cause.took_part()
        return self.replica_group.start()

    def reduce(self, op: str, value: Any, axis: int | None = None) -> Tensor:
        """Combine values of all replicas: `op` is "sum", "mean", "max" or "min".

        `value` is what `run` returned, or, inside a replica, its own tensor. With `axis` the
        reduction also goes along that axis, every row counted once.
        """
        return combine(self._all(value, axis), op, axis)

    def gather(self, value: Any, axis: int = 0) -> Tensor:
        """Concatenate the values of all replicas along `axis`.

        Inside a replica, a row that it borrowed, because its share of the batch is empty, is left
        out. For one value of each replica: `sg.current_replica().all_gather(value)`.
        """
        return torch.cat(self._all(value, axis), dim=axis)

    def _all(self, value: Any, axis: int | None) -> list[Tensor]:
        rows = axis if not isinstance(value, list | tuple) else None
        inside = called_replica() or led()
        if inside is not None:
            return gather_rows(inside, value, rows)
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) != len(self.replica_group.devices):
            raise UsageError(
                f"{len(values)} values for {len(self.replica_group.devices)} replicas; give what "
                "strategy.run returned."
            )
        tensors = [as_tensor(v) for v in values]
        if self.replica_group.size == len(tensors):
            return tensors
        gathered: list[Tensor] = self.replica_group.call(_gather_here, (tensors, rows))[0]
        return gathered

    def barrier(self) -> None:
        """Wait, inside a replica, until all are here: what one of them wrote can then be read."""
        self.replica().barrier()

    def close(self) -> None:
        """End the replicas that this strategy started; it can be used again afterwards."""
        hints.warn_unsummed(current_replica())
        self.replica_group.close()
        let_go_of_freed_memory(self)

    def __reduce__(self) -> Any:
        """Pickle the strategy for a replica's code: the same methods, without a replica group."""
        return _inside, (self.replica_group.devices, self.settings)


def _inside(devices: tuple[str, ...], settings: Settings) -> Strategy:
    return Strategy(replica_group_inside(devices, settings), settings)


def replica_group_inside(devices: tuple[str, ...], settings: Settings) -> ReplicaGroup:
    """Make the replica group of code on a replica, which starts no process."""
    return ReplicaGroup(devices, settings, None, Patience(), inside=True)


def _with_fresh_share(
    fn: Callable[..., Any], args: Sequence[Any], journal: LoopJournal | None = None
) -> Any:
    replica = current_replica()
    if journal is not None:
        journal.begin(replica)
    replica.share.forget(replica.count)
    replica.loop.begin()
    result = None
    try:
        with led_loops(), user_code():
            result = fn(*args)
        meetings.check_ended(replica)
        meetings.warn_apart(replica, "strategy.run has ended")
        return result
    except Exception as error:
        if journal is not None:
            journal.rounds.break_off()
        hints.explain(error)
        raise
    finally:
        hints.warn_unsummed(replica)


def _gather_here(tensors: list[Tensor], axis: int | None) -> list[Tensor]:
    replica = current_replica()
    return gather_rows(replica, tensors[replica.local_index], axis)


def here(strategy: Strategy, function: Callable[[Any], Any], job: Any) -> Any:
    """Run `function` in this process alone, on the first of the strategy's devices."""
    return alone_on(place(strategy.replica_group.devices[0]), function, job)


def alone_on(device: torch.device, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` as on a lone replica on that device."""
    before = set_called(_alone(device))
    try:
        return function(*args)
    finally:
        set_called(before)


def _alone(device: torch.device) -> Replica:
    return Replica(0, 1, device, "this process", Alone(), Membership.alone())


def get_strategy() -> Strategy | None:
    """Return the strategy whose scope is open, or None."""
    return _scopes[-1][0] if _scopes else None


def checks_rows() -> bool:
    """Whether models made here and now are checked."""
    return all(check for _, check in _scopes)


@atexit.register
def _leave() -> None:
    """At the end of the script, close all strategies; after an uncaught error, report it."""
    error = getattr(sys, "last_value", None)
    for strategy in list(_open):
        if error is not None:
            strategy.replica_group.report(error)
        strategy.close()
