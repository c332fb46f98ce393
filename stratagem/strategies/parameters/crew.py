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
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from stratagem.cluster.handshake import job_secret
from stratagem.cluster.membership import Membership
from stratagem.cluster.spec import Place
from stratagem.errors import ReplicaError, ReplicaLost, UsageError
from stratagem.replicas import follower, graph_pickle
from stratagem.replicas.pool import Follower, Pool, ZygoteProcess
from stratagem.rules.stats import Stats
from stratagem.strategies.agreement import Patience
from stratagem.strategies.devices import place as device_of
from stratagem.strategies.parameters.apart import Apart
from stratagem.strategies.parameters.server import Server
from stratagem.strategies.parameters.trouble import failed
from stratagem.strategies.parameters.worker import Address, Worker
from stratagem.strategies.replica import Replica, be, be_no_more, called_replica, set_called
from stratagem.strategies.settings import Settings
from stratagem.strategies.team import Team
from stratagem.wire.tcp import local_address

log = logging.getLogger("stratagem")

_TOGETHER = 10.0  # seconds that a call waits for children which are still starting
_IN_VAIN = 20  # replacements in a row that did not hand in a single gradient
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
    """A child that works: the process, and what is still to come of it."""

    index: int
    name: str
    pool: Pool
    #: when it was started
    hired: float = field(default_factory=time.monotonic)
    #: it has said that it is connected
    seated: bool = False
    #: it has been given the call that is under way
    called: bool = False
    #: its answer to that is still to come
    waiting: bool = False
    value: Any = None
    #: replacements since it was last known to have handed something in, and how much it had then
    in_vain: int = 0
    received: int = 0

    @property
    def one(self) -> Follower:
        return self.pool.followers[0]


class _Called(Exception):
    """The call is over; what was being done beside it is done no more."""


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
        self._done = threading.Event()
        self._parcel = b""
        self._segments: list[Any] = []
        self._last: Stats | None = None
        self._left = False
        #: the devices of one worker of a cluster, where it has several
        self._group: Team | None = None
        if cluster is None and len(self.devices) > 1:
            self._group = Team(self.devices, Settings(), None, patience)
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

    @property
    def server_pids(self) -> list[int]:
        """The processes of its own servers."""
        return [pid for pool in self._servers for pid in pool.pids]

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
        self.worker = Worker(
            self.index, self.name, chief, address, self.patience, self._look_at_servers
        )
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

    def _look_at_servers(self) -> None:
        """Servers of our own that have not come up will not."""
        for i, pool in enumerate(self._servers):
            one = pool.followers[0]
            if select.select([one.control], [], [], 0)[0]:
                answer = one.answer(0.0)
                if answer is not None and answer.failed:
                    raise failed(f"ps {i}", answer.text) from answer.error
                raise ReplicaLost(
                    f"ps {i} has ended while it started; its output stands above.", f"ps {i}"
                )

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
                assert self.worker is not None
                return self._call(self.worker, function, args, args if sent is None else sent)
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
        self, worker: Worker, function: Callable[..., Any], args: tuple[Any, ...],
        sent: tuple[Any, ...],
    ) -> list[Any]:  # fmt: skip
        worker.fits = self.fits
        self._error, self._done = None, threading.Event()
        overseer: threading.Thread | None = None
        if self._hands:
            call = (function, sent, self.fits, torch.get_default_dtype())
            self._parcel, self._segments = graph_pickle.dumps((_run, call, {}))
            for hand in self._hands:
                hand.called, hand.waiting, hand.value = False, True, None
                hand.in_vain = hand.received = 0
            self._wait_for_hands()
            overseer = threading.Thread(target=self._oversee, name="stratagem-crew", daemon=True)
            overseer.start()
            if self._threads():
                torch.set_num_threads(self._threads())
        try:
            if self._group is not None:
                return self._call_group(worker, self._group, function, args, sent)
            mine = function(*args)
            worker.settle()
            self._last = worker.stats()
        finally:
            trained, self.fits = worker.fits > self.fits, worker.fits
            self._done.set()
            if overseer is not None:
                overseer.join()
        self._collect(trained)
        return [mine, *(hand.value for hand in self._hands)]

    def _call_group(
        self, worker: Worker, group: Team, function: Callable[..., Any], args: tuple[Any, ...],
        sent: tuple[Any, ...],
    ) -> list[Any]:  # fmt: skip
        """On all devices of this worker, which work together."""
        before = set_called(None)
        try:
            results = group.call(function, args, sent)
            self._last = worker.stats()
            return results
        finally:
            set_called(before)

    def _wait_for_hands(self) -> None:
        """Let everybody begin together; but who takes long comes later."""
        until = time.monotonic() + _TOGETHER
        while time.monotonic() < until and not all(hand.called for hand in self._hands):
            self._look(_patiently)

    def _oversee(self) -> None:
        """Beside the call: hand it to the children, replace those that die, see what failed."""
        while not self._done.is_set() and self._error is None:
            try:
                self._look(self._until_done)
            except _Called:
                return
            except BaseException as error:
                self._error = error
                if self.worker is not None:
                    self.worker.interrupt(error)

    def _collect(self, trained: bool) -> None:
        """Wait for the children's answers: a training has been brought to its end without them."""
        if self._error is not None:
            raise self._error
        while any(hand.waiting for hand in self._hands):
            self._look(_patiently, spare_the_silent=not trained)
        self._segments, self._parcel = [], b""
        for hand in self._hands:
            hand.pool.drain()

    def _until_done(self) -> None:
        if self._done.is_set():
            raise _Called

    def _look(self, watch: Callable[[], None], *, spare_the_silent: bool = True) -> None:
        """Take a tenth of a second to see what the children do."""
        assert self.worker is not None
        for hand in self._hands:
            if hand.waiting and hand.seated and not hand.called:
                self._hand_over(hand, watch)
        waiting = {hand.one.control: hand for hand in self._hands if hand.waiting}
        for sock in select.select(list(waiting), [], [], 0.1)[0]:
            self._hear(waiting[sock], watch)
        given_up = self.worker.given_up | (set() if spare_the_silent else self.worker.silent)
        for hand in self._hands:
            if hand.waiting and hand.name in given_up:
                self._replace(hand, "does not answer any more")
            elif not hand.seated and time.monotonic() - hand.hired > self.patience.arrive:
                self._replace(hand, "has not come")  # the lead does not know it yet

    def _hand_over(self, hand: _Hand, watch: Callable[[], None]) -> None:
        try:
            hand.one.send(self._parcel, watch)
            hand.called = True
        except ConnectionError:
            self._replace(hand, "has ended")
        except _Called:
            self._replace(hand, "did not take its work")  # it has half of it
            raise

    def _hear(self, hand: _Hand, watch: Callable[[], None]) -> None:
        answer = hand.one.answer(0.0, watch)
        if answer is None or _was_dropped(hand, answer):
            self._replace(hand, "has ended")
        elif answer.failed:
            hand.waiting = False
            raise _failure(hand.name, answer) from answer.error
        elif hand.seated:
            hand.waiting, hand.value = False, answer.value
        else:
            hand.seated = True

    def _replace(self, hand: _Hand, why: str) -> None:
        assert self.worker is not None
        received = self._received(hand)
        hand.in_vain = hand.in_vain + 1 if received == hand.received else 0
        hand.received = received
        if hand.in_vain > _IN_VAIN:
            raise ReplicaLost(
                f"{hand.name} ended again and again: {_IN_VAIN} replacements in a row have not "
                "handed in a single gradient. The last lines of their output stand above; is the "
                "machine out of memory?", hand.name,
            )  # fmt: skip
        log.warning("%s %s; another takes its place", hand.name, why)
        hand.pool.end()
        self.worker.given_up.discard(hand.name)
        self.worker.silent.discard(hand.name)
        hand.seated = hand.called = False
        hand.pool, hand.hired = self._hire(hand.index), time.monotonic()

    def _received(self, hand: _Hand) -> int:
        """How many gradients have come from a child's place so far."""
        assert self.worker is not None
        try:
            stats = self.worker.stats()
        except (OSError, ReplicaError) as problem:
            log.info("the lead does not show its books: %s", problem)
            return hand.received
        return stats.by_worker.get(hand.index, {}).get("received", 0) if stats else 0

    # --- coming apart -----------------------------------------------------------------------

    def _fall(self, error: BaseException) -> BaseException:
        """End everything after a failure; the next call starts afresh. Returns what to raise."""
        if self.worker is not None:
            self.worker.fall()
        better = error
        if isinstance(error, ReplicaError) and self._error is not None:
            better = self._error
        if self.cluster is not None:
            self._end()
        elif not isinstance(error, Exception):
            self._left = True  # Ctrl-C, sys.exit: one who goes, not one who fails
        elif not isinstance(error, ReplicaError):
            self.report("".join(traceback.format_exception(error)))
        return better

    def stats(self) -> Stats:
        """The books of the training that is under way, or was last; any thread may ask."""
        worker = self.worker
        found = worker.stats() if worker is not None else None
        return found or self._last or Stats()

    def report(self, detail: str) -> None:
        if os.getpid() == self._owner and self.worker is not None and not self._left:
            try:
                self.worker.report_failure(detail)
            except (OSError, ReplicaError) as problem:
                log.info("the lead did not hear of the failure: %s", problem)

    def _end(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None and self.cluster is not None:
            worker.desert()
        for pool in [*(hand.pool for hand in self._hands), *self._servers]:
            pool.end()
        if self._group is not None:
            self._group.close()
        if worker is not None:
            worker.close(goodbye=self.cluster is None and not self._left)
        if _present is worker:
            _be(None)
        self._hands, self._servers, self._segments, self._parcel = [], [], [], b""
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
    return failed(name, answer.text)


def _was_dropped(hand: _Hand, answer: follower.Answer) -> bool:
    """Whether a child says of itself that the others have gone on without it."""
    return isinstance(answer.error, ReplicaError) and answer.error.who == hand.name


def _serve(index: int, address: Address, patience: Patience, device: str) -> None:
    """In a child: be a server until the job ends. What it has to say the chief says."""
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.ERROR)
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
    desk.on_failure = partial(_report, worker)
    set_called(_replica(index, size, device, name))


def _report(worker: Worker, text: str) -> None:
    """In a child: tell the others why it stops, if they do not know better."""
    try:
        worker.report_failure(text)
    except (OSError, ReplicaError) as problem:
        log.info("the lead did not hear of the failure: %s", problem)


def _run(function: Callable[..., Any], args: tuple[Any, ...], fits: int, dtype: torch.dtype) -> Any:
    """In a child: what the client runs."""
    torch.set_default_dtype(dtype)
    worker = current_worker()
    worker.fits = fits
    result = function(*args)
    worker.settle()
    return result
