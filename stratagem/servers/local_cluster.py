"""A cluster that a process starts by itself: its servers and the other workers.

All workers run a call at the same time, the caller's process as worker 0. A worker that dies in a
call is replaced at once: the new one gets the same call, and takes part from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Any

from stratagem.arguments import by_name
from stratagem.cluster.environment import cores
from stratagem.cluster.failure import failed, pass_on
from stratagem.cluster.sockets import readable
from stratagem.errors import ReplicaError, ReplicaLost, StratagemError, UsageError
from stratagem.replicas import follower, graph_pickle
from stratagem.replicas.pool import Follower, Pool
from stratagem.servers.client import Client
from stratagem.servers.connections import Address
from stratagem.servers.task_main import serve
from stratagem.training.agreement import Patience

log = logging.getLogger("stratagem")

_TOGETHER = 10.0  # seconds that a call waits for children that are still starting
_LET_GO = 10.0  # seconds for children to leave a call that has ended
_IN_VAIN = 20  # replacements in a row that pushed no gradient


@dataclass
class LocalWorker:
    """A worker's process, and the state of its present call."""

    index: int
    name: str
    pool: Pool
    #: when it was started
    started: float = field(default_factory=time.monotonic)
    #: whether it has connected to the servers
    connected: bool = False
    #: whether it has got the present call
    called: bool = False
    #: whether its answer is due
    waiting: bool = False
    value: Any = None
    #: replacements since its last known push, and how many pushes it had then
    in_vain: int = 0
    received: int = 0

    @property
    def one(self) -> Follower:
        return self.pool.followers[0]


class _Called(Exception):
    """Ends the overseeing thread when the call is over."""


class LocalWorkers:
    """All other workers, which run one call after the other."""

    def __init__(
        self,
        worker: Client,
        start: Callable[[int, Pool | None], Pool],
        arrive: float,
        restart_dead: Callable[[], None] | None = None,
    ) -> None:
        """worker        the client of this process
        start         starts a worker in a new child, or in the given one
        arrive        seconds after which a worker that has not come is replaced
        restart_dead  called repeatedly during a call: restarts dead servers
        """
        self._worker, self._start, self._arrive = worker, start, arrive
        self._restart_dead = restart_dead
        self.members: list[LocalWorker] = []
        #: why the present call cannot go on
        self.error: BaseException | None = None
        self._done = threading.Event()
        self._model_pickle = b""
        self._segments: list[Any] = []
        self._watcher: threading.Thread | None = None

    def start_all(self, indices: range) -> None:
        """Start these workers, without waiting for them."""
        for i in indices:
            self.members.append(LocalWorker(i, f"worker {i}", self._start(i, None)))

    def begin(self, call: tuple[Any, ...]) -> None:
        """Have all workers run this call, while the caller runs its own part."""
        self.error, self._done = None, threading.Event()
        if not self.members and self._restart_dead is None:
            return
        self._model_pickle, self._segments = graph_pickle.dumps(call)
        for child in self.members:
            child.called, child.waiting, child.value = False, True, None
            child.in_vain = child.received = 0
        self._wait_for_all()
        self._watcher = threading.Thread(
            target=self._watch_children, name="stratagem-children", daemon=True
        )
        self._watcher.start()

    def leave_alone(self) -> None:
        """Stop watching the workers: the caller's own part is done."""
        self._done.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def collect(self, *, trained: bool) -> list[Any]:
        """Wait for the answers and return them; after a training, replace silent workers, too."""
        if self.error is not None:
            raise self.error
        while any(child.waiting for child in self.members):
            self._look(patiently, spare_the_silent=not trained)
        self._segments, self._model_pickle = [], b""
        for child in self.members:
            child.pool.drain()
        return [child.value for child in self.members]

    def move(self, worker: Client) -> None:
        """Have all workers connect to the servers again, as this process has.

        Workers that do not leave the ended call are replaced.
        """
        self._worker, until = worker, time.monotonic() + _LET_GO
        for child in self.members:
            before, free = child.pool, child.connected
            if free and child.called and child.waiting:
                free = child.one.answer(max(0.0, until - time.monotonic()), patiently) is not None
            try:
                child.pool = self._start(child.index, child.pool if free else None)
            except ChildProcessError:  # it has ended since
                free, child.pool = False, self._start(child.index, None)
            child.started, child.connected, child.called = time.monotonic(), False, False
            child.waiting = False
            if not free:
                before.end()

    def end(self) -> None:
        for child in self.members:
            child.pool.end()

    # --- beside the call --------------------------------------------------------------------

    def _wait_for_all(self) -> None:
        """Wait a while for all workers to begin together; a slow one begins later."""
        until = time.monotonic() + _TOGETHER
        while time.monotonic() < until and not all(child.called for child in self.members):
            self._look(patiently)

    def _watch_children(self) -> None:
        """Send the call to the children, replace those that die, and note failures."""
        while not self._done.is_set() and self.error is None:
            try:
                self._look(self._until_done)
            except _Called:
                return
            except BaseException as error:
                self.error = error
                self._worker.lines.interrupt(error)

    def _until_done(self) -> None:
        if self._done.is_set():
            raise _Called

    def _look(self, watch: Callable[[], None], *, spare_the_silent: bool = True) -> None:
        """Wait up to a tenth of a second for answers or deaths of children."""
        if self._restart_dead is not None:
            self._restart_dead()
        for child in self.members:
            if child.waiting and child.connected and not child.called:
                self._hand_over(child, watch)
        waiting = {child.one.control: child for child in self.members if child.waiting}
        for sock in readable(waiting, 0.1):
            self._hear(waiting[sock], watch)
        known = self._worker.lines.heartbeat
        given_up = known.given_up | (set() if spare_the_silent else known.silent)
        for child in self.members:
            if child.waiting and child.name in given_up:
                self._replace(child, "does not answer any more")
            elif not child.connected and time.monotonic() - child.started > self._arrive:
                self._replace(child, "has not come")  # unknown to the coordinator yet

    def _hand_over(self, child: LocalWorker, watch: Callable[[], None]) -> None:
        try:
            child.one.send(self._model_pickle, watch)
            child.called = True
        except ConnectionError:
            self._replace(child, "has ended")
        except _Called:
            self._replace(child, "did not take its work")  # it has half of it
            raise

    def _hear(self, child: LocalWorker, watch: Callable[[], None]) -> None:
        answer = child.one.answer(0.0, watch)
        if answer is None or _was_dropped(child, answer):
            self._replace(child, "has ended")
        elif answer.failed:
            child.waiting = False
            raise _failure(child.name, answer)
        elif child.connected:
            child.waiting, child.value = False, answer.value
        else:
            child.connected = True

    def _replace(self, child: LocalWorker, why: str) -> None:
        if (orphaned := child.pool.orphaned()) is not None:
            raise orphaned  # and the servers have ended, too
        received = self._received(child)
        child.in_vain = child.in_vain + 1 if received == child.received else 0
        child.received = received
        if child.in_vain > _IN_VAIN:
            raise ReplicaLost(
                f"{child.name} ended again and again: {_IN_VAIN} replacements in a row have not "
                "handed in a single gradient. The last lines of their output stand above; is the "
                "machine out of memory?",
                child.name,
            )
        log.warning("%s %s; another takes its place", child.name, why)
        child.pool.end()
        self._worker.lines.heartbeat.given_up.discard(child.name)
        self._worker.lines.heartbeat.silent.discard(child.name)
        child.connected = child.called = False
        child.pool, child.started = self._start(child.index, None), time.monotonic()

    def _received(self, child: LocalWorker) -> int:
        """Return how many gradients this worker number has pushed so far."""
        try:
            stats = self._worker.stats()
        except (OSError, ReplicaError) as problem:
            log.info("the coordinator does not show its books: %s", problem)
            return child.received
        return stats.by_worker.get(child.index, {}).get("received", 0) if stats else 0


def patiently() -> None:
    """Do nothing: wait for a child as long as it lives."""


def _failure(name: str, answer: follower.CallResult) -> BaseException:
    if isinstance(answer.error, StratagemError):
        return pass_on(answer.error, name)
    error = failed(name, answer.text)
    error.__cause__ = answer.error
    return error


def _was_dropped(child: LocalWorker, answer: follower.CallResult) -> bool:
    """Return whether a child's answer says that the job goes on without it."""
    return isinstance(answer.error, ReplicaError) and answer.error.who == child.name


_ELSEWHERE = {
    "servers": "it is ps",
    "num_ps": "it is ps",
    "num_workers": "it is workers",
    "worker": "it is workers",
    "evaluator": "only a cluster in the environment has one: "
    "stratagem run --workers 2 --ps 1 --evaluator train.py",
    "devices": "devices are the strategy's: sg.ParameterServerStrategy(cluster, devices=[...])",
}


@dataclass(frozen=True, init=False)
class LocalCluster:
    """A cluster on this machine: this process is its first worker and starts the rest."""

    workers: int = 2
    ps: int = 1

    @partial(by_name, elsewhere=_ELSEWHERE)
    def __init__(self, workers: int = 2, ps: int = 1) -> None:
        object.__setattr__(self, "workers", workers)
        object.__setattr__(self, "ps", ps)
        try:
            enough = index(workers) > 0 and index(ps) > 0
        except TypeError:
            enough = False
        if not enough:
            raise UsageError(
                f"LocalCluster(workers={workers!r}, ps={ps!r}): both are whole numbers, at least "
                "one of each; LocalCluster(workers=4, ps=2), for example."
            )


class LocalServers:
    """One child process for each server."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []

    def start(self, address: Address, patience: Patience, device: str) -> None:
        self._arguments = address, patience, device, cores() // len(address.servers)
        for i in range(len(address.servers)):
            self.pools.append(Pool([f"ps {i}"]))
            self._serve(i)

    def _serve(self, i: int) -> None:
        self.pools[i].submit(serve, [(i, *self._arguments)], patiently)

    def _ended(self) -> list[int]:
        """Return the servers that have ended, or failed: they answer nothing else."""
        controls = [pool.followers[0].control for pool in self.pools]
        return [controls.index(sock) for sock in readable(controls, 0)]

    def look(self) -> None:
        """Raise if a server ended before it came up."""
        for i in self._ended():
            answer = self.pools[i].followers[0].answer(0.0)
            if answer is not None and answer.failed:
                raise failed(f"ps {i}", answer.text) from answer.error
            raise ReplicaLost(
                f"ps {i} has ended while it started; its output stands above.", f"ps {i}"
            )

    def restart_dead(self) -> None:
        """Restart dead servers, but not the first; other servers send them their shards."""
        for i in self._ended():
            pool = self.pools[i]
            if i > 0 and pool.followers[0].answer(0.0) is None and pool.orphaned() is None:
                self._start_again(i)

    def restart(self) -> None:
        """Restart every server that has ended."""
        for i in self._ended():
            if (orphaned := self.pools[i].orphaned()) is not None:
                raise orphaned
            self._start_again(i)

    def _start_again(self, i: int) -> None:
        log.warning("ps %d has ended; another takes its place", i)
        self.pools[i].end()
        self.pools[i] = Pool([f"ps {i}"])
        self._serve(i)

    def end(self) -> None:
        for pool in self.pools:
            pool.end()
        self.pools = []
