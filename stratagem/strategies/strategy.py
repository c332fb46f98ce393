"""The strategy API: what every strategy can do, whatever it is made of."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stratagem import tracebacks
from stratagem.cluster.membership import Membership
from stratagem.errors import NotDistributable, UsageError
from stratagem.state.checkpoint_folder import Checkpoints
from stratagem.strategies.task_group import TaskGroup
from stratagem.training import dry_run, hints, meetings
from stratagem.training.agreement import Patience
from stratagem.training.custom_loop import begin_loop
from stratagem.training.devices import place
from stratagem.training.loop_calls import backward_counted, mean_of_batch, rows_of_share
from stratagem.training.loop_checkpoints import check_loader, resumable
from stratagem.training.loop_journal import LoopJournal, journal_of
from stratagem.training.prepare import Prepared, prepare, prepare_loader
from stratagem.training.replica import (
    Replica,
    as_tensor,
    called_replica,
    combine,
    current_call,
    current_replica,
    set_called,
    user_code,
)
from stratagem.training.replica_group import ReplicaGroup
from stratagem.training.settings import Settings
from stratagem.wire.collective import Alone

if TYPE_CHECKING:
    from stratagem.servers.evaluator_task import EvaluatorLink

#: a folder of checkpoints, or a plan for them
Resume = str | os.PathLike[str] | Checkpoints | None

#: those that are open, and whether models made in them are checked
_scopes: list[tuple[Strategy, bool]] = []
#: front ends that must know when a scope opens; each returns what to hold open meanwhile
_front_ends: list[Callable[[Strategy], AbstractContextManager[Any]]] = []


def on_scope(enter: Callable[[Strategy], AbstractContextManager[Any]]) -> None:
    """Have `enter` called, and its context held, whenever a scope is open."""
    _front_ends.append(enter)


_open: weakref.WeakSet[Strategy] = weakref.WeakSet()
#: those of a cluster: the others wait for a goodbye, also where nobody holds the strategy any more
_members: list[Strategy] = []


class Strategy:
    """Where replicas run and how their gradients meet; the named strategies are presets."""

    #: whether servers keep the parameters, and workers go their own ways
    served = False
    #: set in the evaluator's task, which takes no part in the training: tells when that is over
    audience: EvaluatorLink | None = None

    def __init__(self, replica_group: TaskGroup, settings: Settings) -> None:
        self.replica_group = replica_group
        self.settings = settings
        tracebacks.install()
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
        """How many replicas train together, over all workers; the stages of a pipeline are one, and
        so are processes that divide layers."""
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
        return self.replica_group.place is None or self.replica_group.place.is_chief

    @contextmanager
    def scope(self, *, check: bool = True) -> Iterator[Strategy]:
        """Models made inside belong to this strategy.

        Args:
            check: before the first step of a call, try on a few rows that shares of a batch add up
                to what one device makes of it; False takes that on trust.
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
        journal = LoopJournal()
        try:
            return self.replica_group.call(
                _with_fresh_share, (fn, args, journal), (fn, args), journal.again
            )
        finally:
            journal.close()

    @overload
    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Any = None,
        *,
        loss_reduction: str | None = None,
        resume: Resume = None,
    ) -> Prepared: ...

    @overload
    def prepare(self, loader: DataLoader[Any], /, *, loss_reduction: str | None = None) -> Any: ...

    def prepare(
        self,
        model: nn.Module | DataLoader[Any],
        optimizer: Optimizer | None = None,
        loader: Any = None,
        *,
        loss_reduction: str | None = None,
        resume: Resume = None,
    ) -> Any:
        """Distribute a custom loop: `model, optimizer, loader = strategy.prepare(...)`.

        Call it in code that every replica runs: a function given to `strategy.run`, or a script
        under `stratagem run` or torchrun. After `loss.backward()` every gradient is the one that
        a single device would have computed on the global batch.

        Without a loader it is `model, optimizer, _ = strategy.prepare(model, optimizer)`;
        `loader = strategy.prepare(loader)` deals out shares of a loader by itself.

        What a loss is divided by is read from its graph. `loss_reduction="mean"` or `"sum"` says
        that it is a mean, or a sum, over rows where that cannot be read.

        `resume="run/"`, or `sg.Checkpoints("run/", every=500)`: the loop keeps checkpoints there,
        and goes on from the last of them. It is then `for epoch in loader.epochs(10):`.
        """
        if self.settings.pipeline is not None:
            raise NotDistributable(
                "a pipeline runs microbatches forward and backward by itself, which a loop of your "
                "own does not leave to it; use sg.Model(...).fit, or prepare with a "
                "MirroredStrategy."
            )
        if self.settings.tensor is not None:
            raise NotDistributable(
                "layers are divided when a model is traced with its first batch, which a loop of "
                "your own does not leave to it; use sg.Model(...).fit, or prepare with a "
                "MirroredStrategy."
            )
        if self.settings.sharded and resume is not None:
            raise NotDistributable(
                "resume=... keeps what every replica has, and replicas of ShardedStrategy have "
                "parts of an optimizer's state; use sg.Model(...).fit(checkpoint=..., resume=True)."
            )
        replica = self.replica()
        elastic = self.settings.elastic and not dry_run.wanted()
        dry_run.deal(self.num_replicas_in_sync)
        if not isinstance(model, nn.Module):
            if resume is not None:
                raise UsageError(
                    "resume=... is for the loader that a model is trained on: "
                    "strategy.prepare(model, optimizer, loader, resume=...)."
                )
            return prepare_loader(replica, model)
        if optimizer is None or not hasattr(optimizer, "param_groups"):
            raise UsageError(
                "prepare was given a model without its optimizer; call prepare(model, optimizer, "
                "loader) to train; to evaluate, prepare(loader) deals out a loader by itself."
            )
        if elastic:
            self._let_begin_again(loader)
        found = prepare(replica, self.settings, model, optimizer, loader, loss_reduction)
        if resume is None and not elastic:
            return found
        plan = Checkpoints(resume) if isinstance(resume, str | os.PathLike) else resume
        plan = None if dry_run.wanted() else plan
        return resumable(found, loader, replica, plan, elastic=elastic)

    def _let_begin_again(self, loader: Any) -> None:
        """A loop is prepared that is begun again when replicas leave or join."""
        replica = current_call()
        if replica is None:
            raise UsageError(
                "with elastic=True a loop is begun again, where it was, when a replica dies or "
                "joins; put it into a function, and call strategy.run(train)."
            )
        check_loader(loader)
        journal = journal_of(replica)
        if journal is not None:
            journal.open()

    def backward(self, loss: Tensor, *, count: float | Tensor, retain_graph: bool = False) -> None:
        """In place of `loss.backward()`: `loss` is a sum over this replica's rows by `count`.

        Afterwards every gradient is that of the sum over all rows, divided by the sum of all
        counts.

        >>> kept = (targets != padding).sum()
        >>> strategy.backward(losses_by_token[targets != padding].mean(), count=kept)
        """
        backward_counted(self.replica(), loss, count, retain_graph)

    def rows(self, batch: Any) -> Any:
        """This replica's rows of a global batch: a tensor, or tuples, lists and dicts of tensors.

        In a custom loop without a loader; the gradient then counts with the share of the rows.
        """
        return rows_of_share(self.replica(), batch)

    def mean(self, value: Tensor | float, *, count: float | Tensor | None = None) -> float:
        """A loss, or another mean over this replica's rows, as it is over the whole batch.

        What a loss is divided by is read as in `backward`; a number that was taken out of its graph
        (`.item()`) is taken for a mean over rows, unless `count` says what it is divided by here.
        """
        return mean_of_batch(self.replica(), value, count)

    def meet(self) -> None:
        """Bring replicas together that `sync=` lets go apart, on all of them: after a `break`."""
        meetings.meet(self.replica())

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on the chief, and on nobody else."""
        if self.is_chief:
            print(*values, **options)

    def replica(self) -> Replica:
        """The replica that the calling code is."""
        inside = called_replica()
        if inside is not None:
            return inside
        if dry_run.wanted():
            return _alone(self)
        if len(self.replica_group.devices) > 1:
            raise UsageError(
                f"this strategy has {len(self.replica_group.devices)} replicas in this process, "
                "and your loop runs on one of them only. Put the loop into a function and call "
                "strategy.run(train); or name no devices, and start the script with "
                f"`stratagem run --replicas {len(self.replica_group.devices)} train.py`."
            )
        return self.replica_group.start()

    def reduce(self, op: str, value: Any, axis: int | None = None) -> Tensor:
        """Combine values of all replicas: `op` is "sum", "mean", "max" or "min".

        `value` is what `run` returned, or, inside a replica, its own tensor. With `axis` the
        reduction also goes along that axis, every row counted once.
        """
        return combine(self._all(value), op, axis)

    def gather(self, value: Any, axis: int = 0) -> Tensor:
        """Values of all replicas, one behind the other along `axis`."""
        return torch.cat(self._all(value), dim=axis)

    def _all(self, value: Any) -> list[Tensor]:
        inside = called_replica()
        if inside is not None:
            return inside.all_gather(value)
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) != len(self.replica_group.devices):
            raise UsageError(
                f"{len(values)} values for {len(self.replica_group.devices)} replicas; give what "
                "strategy.run returned."
            )
        tensors = [as_tensor(v) for v in values]
        if self.replica_group.size == len(tensors):
            return tensors
        gathered: list[Tensor] = self.replica_group.call(_gather_here, (tensors,))[0]
        return gathered

    def close(self) -> None:
        """End the replicas that this strategy started. It can be used again afterwards."""
        hints.tell_unsummed(current_replica())
        self.replica_group.close()

    def __reduce__(self) -> Any:
        """What a replica gets when its code mentions the strategy: the same verbs, no team."""
        return _inside, (self.replica_group.devices, self.settings)


def _inside(devices: tuple[str, ...], settings: Settings) -> Strategy:
    return Strategy(replica_group_inside(devices, settings), settings)


def replica_group_inside(devices: tuple[str, ...], settings: Settings) -> ReplicaGroup:
    """What code on a replica has for a team: it starts nothing."""
    return ReplicaGroup(devices, settings, None, Patience(), inside=True)


def _with_fresh_share(
    fn: Callable[..., Any], args: Sequence[Any], journal: LoopJournal | None = None
) -> Any:
    replica = current_replica()
    if journal is not None:
        journal.begin(replica)
    replica.share.forget(replica.count)
    begin_loop(replica)
    meetings.forget(replica)
    try:
        with user_code():
            result = fn(*args)
        meetings.tell_apart(replica, "strategy.run has ended")
        return result
    except Exception as error:
        hints.explain(error)
        raise
    finally:
        hints.tell_unsummed(replica)


def _gather_here(tensors: list[Tensor]) -> list[Tensor]:
    replica = current_replica()
    return replica.all_gather(tensors[replica.local_index])


def here(strategy: Strategy, function: Callable[[Any], Any], job: Any) -> Any:
    """Run `function` in this process alone, on the first of the strategy's devices."""
    before = set_called(_alone(strategy))
    try:
        return function(job)
    finally:
        set_called(before)


def _alone(strategy: Strategy) -> Replica:
    device = place(strategy.replica_group.devices[0])
    return Replica(0, 1, device, "this process", Alone(), Membership.alone())


def get_strategy() -> Strategy | None:
    """The strategy whose scope is open, or None."""
    return _scopes[-1][0] if _scopes else None


def checks_rows() -> bool:
    """Whether models made here and now are checked."""
    return all(check for _, check in _scopes)


@atexit.register
def _leave() -> None:
    """At the end of the script: a goodbye, or, after an uncaught error, the reason."""
    error = getattr(sys, "last_value", None)
    for strategy in list(_open):
        if error is not None:
            strategy.replica_group.report(tracebacks.described(error))
        strategy.close()
