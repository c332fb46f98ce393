"""The processes behind parameter servers, seen from one client.

    a cluster of its own             a cluster in the environment
    this process  = worker 0         this process  = one worker of the cluster
    children      = other workers    servers and other workers run elsewhere
                    and servers

A worker that dies does not end the others. Children are replaced at once: the new one gets the
same call and takes part from there.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stratagem.cluster.handshake import job_secret
from stratagem.cluster.membership import Membership
from stratagem.cluster.spec import Place
from stratagem.errors import ReplicaError, ReplicaFailed, ReplicaLost, UsageError
from stratagem.replicas import follower, graph_pickle
from stratagem.replicas.pool import Pool, ZygoteProcess
from stratagem.rules.stats import Stats
from stratagem.strategies.agreement import Patience
from stratagem.strategies.devices import place as device_of
from stratagem.strategies.parameters.apart import Apart
from stratagem.strategies.parameters.server import Server
from stratagem.strategies.parameters.worker import Address, Worker
from stratagem.strategies.replica import Replica, be, be_no_more, called_replica, set_called
from stratagem.wire.tcp import local_address

log = logging.getLogger("stratagem")

_REPLACEMENTS = 100  # in one call; beyond that something is wrong with the machine
#: the worker that this process is
_present: Worker | None = None


def current_worker() -> Worker:
    """The worker that this process is."""
    if _present is None:
        raise UsageError("this process is no worker of a strategy with parameter servers.")
    return _present


def _be(worker: Worker | None) -> Worker | None:
    """This process is `worker` from now on; returns what it was before."""
    global _present
    before, _present = _present, worker
    return before


@dataclass(frozen=True)
class LocalCluster:
    """A cluster on this machine: this process is its first worker and starts the rest."""

    workers: int = 2
    ps: int = 1

    def __post_init__(self) -> None:
        if self.workers < 1 or self.ps < 1:
            raise UsageError(
                f"LocalCluster(workers={self.workers}, ps={self.ps}): there must be at least one "
                "of each; LocalCluster(workers=4, ps=2), for example."
            )


@dataclass
class _Hand:
    """A child that works: the process, and whether its answer is still to come."""

    index: int
    name: str
    pool: Pool
    seated: bool = False
    waiting: bool = False
    value: Any = None


class Crew:
    """The workers and servers of one strategy."""

    def __init__(
        self, devices: Sequence[str], place: Place | None, cluster: LocalCluster | None,
        patience: Patience, *, parameter_device: str = "cpu:0",
    ) -> None:  # fmt: skip
        self.devices = tuple(devices)
        self.place, self.cluster, self.patience = place, cluster, patience
        self.parameter_device = parameter_device
        self.size = cluster.workers if cluster is not None else _size(place)
        self.worker: Worker | None = None
        self.fits = 0
        self._replica: Replica | None = None
        self._servers: list[Pool] = []
        self._hands: list[_Hand] = []
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._error: BaseException | None = None
        self._replaced = 0
        self._parcel = b""
        self._segments: list[Any] = []
        self._last: Stats | None = None
        if cluster is not None:
            ZygoteProcess.get()  # imports torch while the caller builds a model
        else:
            self.start()

    @property
    def index(self) -> int:
        """The number of the worker that this process is."""
        return 0 if self.place is None else self.place.rank

    @property
    def name(self) -> str:
        return "worker 0" if self.place is None else str(self.place.task)

    # --- coming together --------------------------------------------------------------------

    def start(self) -> Replica:
        with self._lock:
            if self._replica is None:
                try:
                    self._replica = self._start()
                except BaseException:
                    self._end()
                    raise
            return self._replica

    def _start(self) -> Replica:
        address = self._address()
        chief = self.place is None or self.place.is_chief
        self.worker = Worker(self.index, self.name, chief, address, self.patience)
        if self.place is not None:
            _be(self.worker)
        if self.cluster is not None:
            for i in range(1, self.cluster.workers):
                self._hands.append(_Hand(i, f"worker {i}", self._hire(i)))
        replica = _replica(self.index, self.size, self.devices[0], self.name)
        if self.place is not None:
            be(replica)
        return replica

    def _address(self) -> Address:
        if self.cluster is None:
            assert self.place is not None
            spec = self.place.spec
            secret = job_secret(os.environ, spec.to_json())
            return Address(spec.jobs["ps"], secret)
        servers = tuple(local_address() for _ in range(self.cluster.ps))
        address = Address(servers, secrets.token_bytes(32))
        for i in range(self.cluster.ps):
            pool = Pool([f"ps {i}"])
            self._servers.append(pool)
            pool.submit(_serve, [(i, address, self.patience, self.parameter_device)], _patiently)
        return address

    def _hire(self, index: int) -> Pool:
        """Start a child and have it take its place; its answer is not waited for."""
        assert self.worker is not None
        pool = Pool([f"worker {index}"])
        device = self.devices[index % len(self.devices)]
        pool.submit(
            _sit_down,
            [(index, self.size, device, self.worker.address, self.patience, self._threads())],
            _patiently,
        )
        return pool

    def _threads(self) -> int:
        """Threads a worker, so that those of one machine do not fight; 0 leaves torch alone."""
        if self.cluster is None or not all(d.startswith("cpu") for d in self.devices):
            return 0
        usable = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        )
        return max(1, (usable or 1) // self.cluster.workers)

    # --- running ----------------------------------------------------------------------------

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...],
        sent: tuple[Any, ...] | None = None,
    ) -> list[Any]:  # fmt: skip
        with self._lock:
            if called_replica() is not None:
                raise UsageError(
                    "this code already runs on every worker; strategy.run and fit cannot be "
                    "nested inside it. Use sg.current_replica() there."
                )
            replica = self.start()
            before, worker = set_called(replica), _be(self.worker)
            threads = torch.get_num_threads()
            try:
                return self._call(function, args, args if sent is None else sent)
            except BaseException as error:
                better = self._fall(error)
                if better is error:
                    raise
                raise better from error
            finally:
                set_called(before)
                _be(worker)
                torch.set_num_threads(threads)

    def _call(
        self, function: Callable[..., Any], args: tuple[Any, ...], sent: tuple[Any, ...]
    ) -> list[Any]:
        assert self.worker is not None
        self.worker.fits = self.fits
        done = threading.Event()
        overseer: threading.Thread | None = None
        if self._hands:
            call = (function, sent, self.fits, torch.get_default_dtype())
            self._parcel, self._segments = graph_pickle.dumps((_run, call, {}))
            self._error, self._replaced = None, 0
            for hand in self._hands:
                self._hand_over(hand)
            overseer = threading.Thread(
                target=self._oversee, args=(done,), name="stratagem-crew", daemon=True
            )
            overseer.start()
            if self._threads():
                torch.set_num_threads(self._threads())
        try:
            mine = function(*args)
            self.worker.settle()
            self._last = self.worker.stats()
        finally:
            self.fits = self.worker.fits
            done.set()
            if overseer is not None:
                overseer.join()
        self._collect()
        return [mine, *(hand.value for hand in self._hands)]

    def _hand_over(self, hand: _Hand) -> None:
        hand.waiting, hand.value = True, None
        one = hand.pool.followers[0]
        if not hand.seated:
            first = one.answer(self.patience.arrive, _patiently)
            if first is None:
                raise ReplicaLost(f"{hand.name} has ended while it started.", hand.name)
            if first.failed:
                raise _failure(hand.name, first) from first.error
            hand.seated = True
        one.send(self._parcel, _patiently)

    def _oversee(self, done: threading.Event) -> None:
        """Beside the call: replace children that die, remember what failed."""
        while not done.is_set() and self._error is None:
            try:
                self._look(0.1)
            except BaseException as error:
                self._error = error
                if self.worker is not None:
                    self.worker.interrupt(error)

    def _look(self, seconds: float, *, replace: bool = True) -> None:
        waiting = {h.pool.followers[0].control: h for h in self._hands if h.waiting}
        ready, _, _ = select.select(list(waiting), [], [], seconds)
        for sock in ready:
            hand = waiting[sock]
            answer = hand.pool.followers[0].answer(0.0, _patiently)
            if answer is None:
                hand.waiting = False
                if replace:
                    self._replace(hand)
                continue
            hand.waiting, hand.value = False, answer.value
            if answer.failed:
                raise _failure(hand.name, answer) from answer.error

    def _replace(self, hand: _Hand) -> None:
        self._replaced += 1
        if self._replaced > _REPLACEMENTS:
            raise ReplicaLost(
                f"{hand.name} ended again and again ({self._replaced} replacements); its last "
                "lines of output stand above. Is the machine out of memory?", hand.name,
            )  # fmt: skip
        log.warning("%s has ended; another takes its place", hand.name)
        hand.pool.end()
        hand.pool, hand.seated = self._hire(hand.index), False
        self._hand_over(hand)

    def _collect(self) -> None:
        while any(hand.waiting for hand in self._hands):
            self._look(0.1, replace=False)
        if self._error is not None:
            raise self._error
        self._segments = []
        for hand in self._hands:
            hand.pool.drain()

    # --- coming apart -----------------------------------------------------------------------

    def _fall(self, error: BaseException) -> BaseException:
        """End everything after a failure; the next call starts afresh. Returns what to raise."""
        if not isinstance(error, ReplicaError):
            self.report("".join(traceback.format_exception(error)))
        better = error
        if isinstance(error, ReplicaError) and self._error is not None:
            better = self._error
        if self.cluster is not None:
            self._end()
        return better

    def stats(self) -> Stats:
        """The books of the training that is under way, or was last."""
        with self._lock:
            found = self.worker.stats() if self.worker is not None else None
            return found or self._last or Stats()

    def report(self, detail: str) -> None:
        if os.getpid() == self._owner and self.worker is not None:
            try:
                self.worker.report_failure(detail)
            except (OSError, ReplicaError) as problem:
                log.info("the lead did not hear of the failure: %s", problem)

    def _end(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.close()
        if _present is worker:
            _be(None)
        for hand in self._hands:
            hand.pool.end()
        for pool in self._servers:
            pool.end()
        self._hands, self._servers = [], []
        if self._replica is not None and self.place is not None:
            be_no_more(self._replica)
        self._replica = None
        self.fits = 0

    def close(self) -> None:
        if os.getpid() == self._owner:
            with self._lock:
                if self.worker is not None:
                    self.worker.settle()
                self._end()


def _size(place: Place | None) -> int:
    return 1 if place is None else place.size


def _patiently() -> None:
    """A child that lives is waited for."""


def _replica(index: int, size: int, device: str, name: str) -> Replica:
    return Replica(
        index, size, device_of(device), name, Apart(index, size), Membership.alone(), local_index=0
    )


def _failure(name: str, answer: follower.Answer) -> BaseException:
    if isinstance(answer.error, ReplicaError):
        return answer.error  # it only passes on what happened to another
    return ReplicaFailed(
        f"{name} raised an exception; the others were stopped. Its traceback:\n\n{answer.text}",
        name,
    )


def _serve(index: int, address: Address, patience: Patience, device: str) -> None:
    """In a child: be a server until the job ends."""
    logging.basicConfig(format="%(message)s")
    torch.set_num_threads(1)
    Server(index, address.servers, address.secret, patience, device_of(device)).serve()


def _sit_down(
    index: int, size: int, device: str, address: Address, patience: Patience, threads: int
) -> None:
    """In a child: be a worker from now on."""
    desk = follower.desk
    assert desk is not None
    logging.basicConfig(format="%(message)s")
    name = f"worker {index}"
    if threads:
        torch.set_num_threads(threads)
    worker = Worker(index, name, False, address, patience)
    _be(worker)
    desk.on_failure = worker.report_failure
    set_called(_replica(index, size, device, name))


def _run(function: Callable[..., Any], args: tuple[Any, ...], fits: int, dtype: torch.dtype) -> Any:
    """In a child: what the client runs."""
    torch.set_default_dtype(dtype)
    worker = current_worker()
    worker.fits = fits
    result = function(*args)
    worker.settle()
    return result
