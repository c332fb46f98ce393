"""The replicas of one strategy, seen from one process: their start, their calls, their end.

A process leads the replicas on its own devices: it is the first of them itself and starts the
others (replicas/). With a cluster in the environment, several such processes meet (cluster/) and
all their replicas form one group.

    process of worker 0          process of worker 1
    ├── replica 0  (itself)      ├── replica 2  (itself)
    └── replica 1  (follower)    └── replica 3  (follower)
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from stratagem import tracebacks
from stratagem.cluster.generations import Generations
from stratagem.cluster.membership import Failure, Membership
from stratagem.cluster.spec import Place
from stratagem.data.streams import RngStates
from stratagem.errors import ReplicaError, ReplicaLost, ReplicaMissing, ReplicaStalled, UsageError
from stratagem.figures.recorder import event
from stratagem.replicas.pool import Pool, Spares
from stratagem.replicas.zygote import ZygoteProcess
from stratagem.training.agreement import AgreeingProcess, Patience, agree
from stratagem.training.elastic import Again, Tries
from stratagem.training.group_followers import (
    Cause,
    Endings,
    collected,
    explained,
    forked,
    join_group,
    open_local,
    record_fault,
    run_call,
    watch_lives,
)
from stratagem.training.placement import connect_replica
from stratagem.training.replica import (
    Replica,
    be,
    be_no_more,
    called_replica,
    current_call,
    set_called,
    turn,
)
from stratagem.training.settings import Settings
from stratagem.training.standbys import Standbys
from stratagem.wire.device_kinds import kind_of
from stratagem.wire.segment import Segment

log = logging.getLogger("stratagem")

#: the arguments of followers: those of the caller (None), others, or a function that makes them
Sent = tuple[Any, ...] | Callable[[], tuple[Any, ...]] | None


class ReplicaGroup:
    """Starts replicas when they are first needed, runs calls on them, ends them."""

    def __init__(
        self,
        devices: Sequence[str],
        settings: Settings,
        place: Place | None,
        patience: Patience,
        *,
        inside: bool = False,
        insecure: bool = False,
        min_replicas: int | None = None,
    ) -> None:
        """`min_replicas`: replicas may die and join, as long as so many processes are left."""
        tracebacks.install()  # Ctrl-C may come while this waits for the other tasks
        self.devices = tuple(devices)
        self.place = place
        self.patience = patience
        self._process = AgreeingProcess(self.devices, settings, place, patience, insecure)
        self.replica: Replica | None = None
        #: the replica that this process is, if it has no followers; until close, failed or not
        self._self: Replica | None = None
        self._pool: Pool | None = None
        self._cluster: Membership | None = None
        self._local: Membership | None = None
        self._least = min_replicas
        #: replace followers that die
        self._spares = Spares()
        self._endings = Endings()
        self._standbys: Standbys | None = None
        self._generations: Generations | None = None
        #: how many calls could be begun again, so that tasks may join in them
        self._calls = 0
        self._hurry: Callable[[], bool] = lambda: False
        #: the chief's block of shared memory, kept until every replica has mapped it
        self._control: Segment | None = None
        self._threads = 0
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self.size = len(self.devices)
        self.leads: bool | None = None
        hosts = 1 if place is None else len(place.spec.training_tasks())
        for kind in {device.partition(":")[0] for device in self.devices}:
            kind_of(kind).prepare(len(self.devices), hosts)
        if len(self.devices) > 1 and not inside:
            ZygoteProcess.get()  # imports torch while the caller builds a model
        if place is not None:
            self._cluster = self._join()
            if self._cluster is not None:
                self.start()

    # --- starting ---------------------------------------------------------------------------

    def start(self) -> Replica:
        """Start every replica that is not running. Collective in a cluster."""
        with self._lock:
            self._refuse_if_forked()
            if self.replica is None:
                try:
                    self.replica = self._start()
                except BaseException as error:
                    known = explained(error, self._cluster if self.outlives_the_chief else None)
                    if not isinstance(known, ReplicaError):
                        self.report(error)
                    if self._least is None or not isinstance(known, ReplicaError):
                        self.close()
                    raise
                if self.place is not None and len(self.devices) == 1:
                    self._become(self.replica)
            return self.replica

    def _refuse_if_forked(self) -> None:
        """Refuse a forked process: replicas belong to the process that started them."""
        if os.getpid() == self._owner:
            return
        if self._cluster is not None and self.size > 1:
            raise forked("replicas")
        self._owner = os.getpid()

    def _become(self, replica: Replica | None) -> None:
        if self._self is not None:
            be_no_more(self._self)
        if replica is not None:
            be(replica)
        self._self = replica

    def _start(self) -> Replica:
        if self._cluster is None:
            self._cluster = self._join()
        if self._cluster is None:
            raise UsageError(
                "the job runs already, and a task that comes later takes part in it in fit, "
                "evaluate, predict and strategy.run only, where it can begin with the others."
            )
        self._cluster.raise_if_over()
        placement, self._control = agree(self._process, self._cluster)
        self._threads = placement.threads
        others = range(placement.rank + 1, placement.rank + len(self.devices))
        membership = self._cluster
        if others:
            names = [placement.names[rank] for rank in others]
            self._pool = Pool(names, () if self._least is None else self._spares.take(names))
            give_up = self.patience.answer
            own = self._pool, placement, self.devices, self._cluster, give_up
            membership = self._local = open_local(*own)
            self._pool.submit(
                join_group,
                [(placement.of(rank), membership.members, give_up) for rank in others],
                membership.raise_if_trouble,
            )
        membership.on_trouble(record_fault)
        replica = connect_replica(placement, membership)
        if placement.segment is not None:
            replica.barrier()  # until all replicas have mapped it
        if self._pool is not None:
            collected(self._pool, membership.raise_if_trouble)
            watch_lives(membership, self._pool)
            if self._least is not None:
                self._spares.prepare(len(others))
                self._standbys = Standbys.of(replica, placement, self._pool, give_up)
        self.size = placement.size
        return replica

    def _join(self) -> Membership | None:
        """Meet the other tasks of the cluster; None if they have begun without this task."""
        if self._least is None:
            return self._process.join()
        if self._generations is None:
            self._generations = self._process.generations(self._least)
        if self._generations is None:
            return self._process.join()
        return self._led(self._generations.first())

    @property
    def outlives_the_chief(self) -> bool:
        """Whether another task takes the chief's place when it dies."""
        return self._generations is not None and self._generations.outlives_the_chief

    def _led(self, cluster: Membership | None) -> Membership | None:
        """Note whether this process is the chief of a generation."""
        if self.outlives_the_chief:
            self.leads = cluster is not None and cluster.rank == 0
        return cluster

    # --- running ----------------------------------------------------------------------------

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        sent: Sent = None,
        again: Again | None = None,
    ) -> list[Any]:
        """Run `function` on every replica of this process; `sent` is what followers get instead."""
        with self._lock, turn():
            if called_replica() is not None:
                raise UsageError(
                    "this code already runs on every replica; strategy.run and fit cannot be "
                    "nested inside it. Use sg.current_replica() there."
                )
            self._refuse_if_forked()  # before anything that ends followers when it fails
            tries, name = Tries(None if self._least is None else again), self._named(again)
            begin = partial(self._begin, function, args, sent, again)
            if again is not None:
                again.regroup = partial(self._regroup_within, tries, name, begin)
                self._hurry = again.hurry
            done = again is not None and tries.elastic and not again.whole
            before, threads = current_call(), torch.get_num_threads()
            while True:
                try:
                    begin()
                    mine = function(*args)
                    if self._standbys is not None:
                        self._standbys.rest()
                    return self._collect(mine, done=done)
                except BaseException as error:
                    self._go_on(error, tries, name)
                finally:
                    if self._generations is not None:
                        self._generations.open(None)
                    set_called(before)
                    torch.set_num_threads(threads)

    def _begin(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        sent: Sent,
        again: Again | None,
    ) -> None:
        """Have the followers run the call, which this process runs next."""
        replica = self.start()
        if again is not None and again.done() is not None:
            again.let_join()
        set_called(replica)
        theirs = sent() if callable(sent) else args if sent is None else sent
        if self._standbys is not None and again is not None and again.followed:
            self._standbys.begin()
        if self._pool is not None:
            call = (function, theirs, torch.get_default_dtype(), RngStates.of_caller())
            watch = replica.membership.raise_if_gone
            self._pool.submit(run_call, [call] * len(self._pool.followers), watch)
            if self._least is not None and self._pool.call is not None:
                self._spares.preload(self._pool.call)
            if self._standbys is None:  # standbys read the call, too, whenever they start
                replica.release_call = self._pool.release
        if self._threads:
            torch.set_num_threads(self._threads)

    def _go_on(self, error: BaseException, tries: Tries, name: str) -> None:
        """Form the group again after a failure; raise the failure if the job ends by it."""
        error = explained(error, self._cluster if self.outlives_the_chief else None)
        trouble, cause = self._trouble(), self._cause_of(error)
        if tries.left(cause.error(), trouble, chief_may_die=self.outlives_the_chief):
            self._end(cause, "The others go on.")
            self._regroup(cause.error(), name)
            return
        better = cause.error(self._end())
        if better is error:
            raise error
        raise better from better.__cause__ or error

    def _regroup_within(
        self, tries: Tries, name: str, begin: Callable[[], None], error: BaseException
    ) -> None:
        """As the first replica, form the group again in mid-call; other replicas begin anew."""
        while True:
            self._go_on(error, tries, name)
            try:
                begin()
            except ReplicaError as another:
                error = another
            else:
                return

    def _trouble(self) -> Failure | None:
        """Return the failure of a member, here or elsewhere."""
        known = (each.trouble for each in (self._local, self._cluster) if each is not None)
        return next((trouble for trouble in known if trouble is not None), None)

    def _named(self, again: Again | None) -> str:
        """Return the name of a call that tasks can join; empty for any other call."""
        if again is None or self._generations is None:
            return ""
        self._calls += 1
        name = f"call {self._calls}"
        if self._cluster is None:
            self._cluster = self._led(self._generations.join(name))
        again.let_join = partial(self._generations.open, name)
        return name

    def _regroup(self, error: BaseException, name: str) -> None:
        """Form the group again of the members still here and those that wait to join."""
        if self._generations is None or self._cluster is None:
            event("join", "it is started again", about=getattr(error, "who", ""))
            return  # the next call starts them: they are this process's own
        before = set(self._cluster.members)
        try:
            found = self._generations.next(self._cluster, name, self._hurry)
        except ReplicaMissing as missing:
            raise error from missing
        if found.rank == 0 != self._cluster.rank:
            log.warning("%s is the chief now", found.members[0])
        self._cluster = self._led(found)
        for member in set(found.members) - before:
            event("join", f"{member} joins the job", about=member.name)

    def _collect(self, mine: Any, *, done: bool) -> list[Any]:
        """Collect results. `done`: this process's own result is enough."""
        if self._pool is None or self.replica is None:
            return [mine]
        try:
            return [mine, *collected(self._pool, self.replica.membership.raise_if_gone)]
        except (ReplicaLost, ReplicaStalled) as error:
            if not done:
                raise
            self._end(self._cause_of(error), "It had done its part.")
            return [mine]
        finally:
            self._endings.wait()

    # --- ending -----------------------------------------------------------------------------

    def _cause_of(self, error: BaseException) -> Cause:
        """Report a failure to the cluster, before the group ends; return its cause."""
        if self._cluster is not None and len(self._cluster.members) > 1:
            if not isinstance(error, ReplicaError):
                self.report(error)
        elif self._generations is None:
            self._cluster = None
        return Cause(error, self._local, self._pool)

    def report(self, error: BaseException) -> None:
        """Tell the other tasks of the cluster why this one ends."""
        if os.getpid() == self._owner and self._cluster is not None:
            self._cluster.report_failure(*tracebacks.for_other_tasks(error))

    def _end(self, cause: Cause | None = None, then: str = "") -> dict[int, int | None]:
        """End what this process has started; with a cause in the background, and log `then`."""
        status: dict[int, int | None] = {}
        if self._standbys is not None:
            self._standbys.rest()
            self._standbys = None
        if cause is not None:
            self._endings.begin(self._pool, cause, then)
        else:
            status = {} if self._pool is None else self._pool.end()
            self._endings.wait()
        self._pool = None
        if self.replica is not None:
            self.replica.collective.close()
            self.replica = None
        if self._local is not None:
            self._local.leave(wait=cause is None)
            self._local = None
        self._control = None
        return status

    def close(self) -> None:
        """End the replicas that this process started, and leave the cluster."""
        if os.getpid() != self._owner:
            return  # a forked child (a DataLoader's worker) must not touch its parent's replicas
        with self._lock:
            if self._generations is not None:
                self._generations.close()
                self._generations = None
            if self._cluster is not None:
                self._cluster.leave()  # first, or peers take the followers' end for a death
                self._cluster = None
            self._end()
            self._spares.end()
            self._spares = Spares()
            self._become(None)
