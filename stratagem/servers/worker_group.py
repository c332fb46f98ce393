"""The processes behind parameter servers, seen from one client.

    a cluster of its own             a cluster in the environment
    this process  = worker 0         this process  = one worker of the cluster
    children      = other workers    servers and other workers run elsewhere
                    and servers

A worker that dies does not end the others.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stratagem.cluster.environment import cores
from stratagem.cluster.failure import is_server_lost
from stratagem.cluster.handshake import secret_for
from stratagem.cluster.spec import Place
from stratagem.data.streams import RngStates
from stratagem.errors import ReplicaError, ReplicaLost, ReplicaStalled, UsageError
from stratagem.replicas.pool import Pool
from stratagem.replicas.zygote import ZygoteProcess
from stratagem.rules.stats import Stats
from stratagem.servers.client import Client
from stratagem.servers.connections import Address
from stratagem.servers.local_cluster import LocalCluster, LocalServers, LocalWorkers, patiently
from stratagem.servers.task_main import (
    become,
    become_worker,
    explain,
    present,
    replica_of,
    report_failure,
    run,
    run_in_group,
    run_users,
)
from stratagem.tracebacks import explainers, for_other_tasks, install
from stratagem.training.agreement import Patience
from stratagem.training.elastic import Again
from stratagem.training.group_followers import forked
from stratagem.training.replica import Replica, be, be_no_more, called_replica, set_called, turn
from stratagem.training.replica_group import ReplicaGroup, Sent
from stratagem.training.settings import Settings
from stratagem.wire.tcp import local_address

log = logging.getLogger("stratagem")

_RETRY = 0.1  # seconds between two tries to connect to servers again


class WorkerGroup:
    """The workers and servers of one strategy."""

    def __init__(
        self,
        devices: Sequence[str],
        place: Place | None,
        cluster: LocalCluster | None,
        patience: Patience,
        *,
        parameter_device: str = "cpu:0",
        insecure: bool = False,
        backups: int = 0,
    ) -> None:
        install()
        if explain not in explainers:
            explainers.append(explain)
        self.devices = tuple(devices)
        self.place, self.cluster, self.patience = place, cluster, patience
        self.parameter_device, self._insecure = parameter_device, insecure
        self._backups = backups
        self.leads: bool | None = None
        self.size = cluster.workers if cluster is not None else place.size if place else 1
        self.worker: Client | None = None
        self.fits = 0
        self._replica: Replica | None = None
        self._servers = LocalServers()
        self._children: LocalWorkers | None = None
        self._lock = threading.RLock()
        self._owner = os.getpid()
        #: the statistics of the last call, or the error that it ended with
        self._last: Stats | BaseException | None = None
        self._left = False
        #: the devices of one worker of a cluster, where it has several
        self._group: ReplicaGroup | None = None
        if cluster is None and len(self.devices) > 1:
            self._group = ReplicaGroup(self.devices, Settings(), None, patience)
        if cluster is not None:
            ZygoteProcess.get()  # imports torch while the caller builds a model
        else:
            self.start()

    @property
    def index(self) -> int:
        """This process' worker number."""
        return 0 if self.place is None else self.place.rank

    @property
    def name(self) -> str:
        return "worker 0" if self.place is None else str(self.place.task)

    @property
    def server_pids(self) -> list[int]:
        """The processes of the local servers."""
        return [pid for pool in self._servers.pools for pid in pool.pids]

    # --- coming together --------------------------------------------------------------------

    def start(self) -> Replica:
        with self._lock:
            self._refuse_if_forked()
            if self._replica is None:
                try:
                    self._replica = self._start()
                except BaseException:
                    self._end()
                    raise
            return self._replica

    def _refuse_if_forked(self) -> None:
        """Refuse a forked process: servers and workers belong to the process that started them."""
        if os.getpid() == self._owner:
            return
        if self._replica is not None:
            raise forked("workers")
        self._owner = os.getpid()

    def _start(self) -> Replica:
        self.worker = self._meet(self._address(), self._servers.look)
        if self.place is not None:
            become(self.worker)
        if self.cluster is not None:
            self._children = LocalWorkers(
                self.worker,
                self._start_worker,
                self.patience.arrive,
                self._servers.restart_dead if self._backups else None,
            )
            self._children.start_all(range(1, self.cluster.workers))
        replica = replica_of(self.index, self.size, self.devices[0], self.name)
        if self.place is not None:
            be(replica)
        return replica

    def _meet(self, address: Address, watch: Callable[[], None], *, again: bool = False) -> Client:
        me = self.index, self.name, self.place is None or self.place.is_chief
        worker = Client(*me, address, self.patience, watch, returns=again)
        if self.cluster is not None:
            weakref.finalize(self, _hang_up_silently, worker).atexit = False
        return worker

    def _address(self) -> Address:
        if self.cluster is None:
            assert self.place is not None
            spec = self.place.spec
            servers = spec.jobs["ps"]
            return Address(servers, secret_for(spec, servers, insecure=self._insecure))
        servers = tuple(local_address() for _ in range(self.cluster.ps))
        address = Address(servers, secrets.token_bytes(32))
        self._servers.start(address, self.patience, self.parameter_device)
        return address

    def _start_worker(self, index: int, pool: Pool | None) -> Pool:
        """Have a child (`pool`, or a new one) become a worker, without waiting for its answer."""
        assert self.worker is not None
        pool = pool or Pool([f"worker {index}"])
        device = self.devices[index % len(self.devices)]
        pool.submit(
            become_worker,
            [(index, self.size, device, self.worker.lines.address, self.patience, self._threads())],
            patiently,
        )
        return pool

    def _threads(self) -> int:
        """Return the threads of a worker, which share the cores; 0 leaves torch's number."""
        if self.cluster is None or not all(d.startswith("cpu") for d in self.devices):
            return 0
        return max(1, cores() // self.cluster.workers)

    # --- running ----------------------------------------------------------------------------

    def call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        sent: Sent = None,
        again: Again | None = None,
    ) -> list[Any]:
        with self._lock, turn():
            if called_replica() is not None:
                raise UsageError(
                    "this code already runs on every worker; strategy.run and fit cannot be "
                    "nested inside it. Use sg.current_replica() there."
                )
            replica = self.start()
            before, worker = set_called(replica), become(self.worker)
            threads = torch.get_num_threads()
            try:
                return self._call_again(function, args, sent, again)
            except BaseException as error:
                better = self._clear_up(error)
                if better is error:
                    raise
                raise better from error
            finally:
                set_called(before)
                become(self.worker if self.place is not None else worker)
                torch.set_num_threads(threads)

    def _call_again(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        sent: Sent,
        again: Again | None,
    ) -> list[Any]:
        """Call; if a server is lost, connect to the servers again and repeat the call."""
        while True:
            assert self.worker is not None
            told = sent() if callable(sent) else sent
            fits = max(self.worker.fits, self.fits)
            try:
                return self._call(self.worker, function, args, args if told is None else told)
            except (ReplicaLost, ReplicaStalled) as error:
                why = _blamed(error, self._children, self._servers)
                if again is None or self._group is not None or not is_server_lost(why):
                    raise
                _leave_servers(self.worker, why)
                again.go_back(why)
                self._reconnect(fits)

    def _call(
        self,
        worker: Client,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        sent: tuple[Any, ...],
    ) -> list[Any]:
        worker.fits = self.fits = max(worker.fits, self.fits)  # a prepared loop counts, too
        prepared = worker.prepared
        children = self._children
        if children is not None:
            told = (function, sent, self.fits, torch.get_default_dtype(), RngStates.of_caller())
            children.begin((run, told, {}))
            if children.members and self._threads():
                torch.set_num_threads(self._threads())
        try:
            if self._group is None:
                here = [run_users(function, args)]
            else:
                here = _call_group(self._group, worker.is_chief, function, args, sent)
            if worker.prepared is not prepared:  # in there
                worker.settle()
            self._last = worker.stats()
        finally:
            trained, self.fits = worker.fits > self.fits, worker.fits
            if children is not None:
                children.leave_alone()
        return [*here, *(children.collect(trained=trained) if children is not None else ())]

    # --- coming apart -----------------------------------------------------------------------

    def _clear_up(self, error: BaseException) -> BaseException:
        """End everything after a failure, so that the next call starts afresh; return the cause."""
        if self.worker is not None:
            self.worker.give_model_back()
        better = _blamed(error, self._children, self._servers)
        if self.cluster is not None:
            self._end()
            self._last = better
        elif not isinstance(error, Exception) or _lost_a_device(self._group, error):
            self._left = True  # Ctrl-C, sys.exit: leaving, not failing
        elif not isinstance(error, ReplicaError):
            self.report(error)
        return better

    # --- servers that were lost ---------------------------------------------------------------

    def _reconnect(self, fits: int) -> None:
        """Connect to all servers again; local ones that died are restarted."""
        assert self.worker is not None
        address, until = self.worker.lines.address, time.monotonic() + self.patience.arrive
        while True:
            try:
                self.worker = self._meet(address, self._servers.restart, again=True)
                break
            except (ReplicaLost, OSError):  # one of them has ended since
                if time.monotonic() > until:
                    raise
                time.sleep(_RETRY)
        become(self.worker)
        self.worker.fits = self.fits = fits
        if self._children is not None:
            self._children.move(self.worker)

    def stats(self) -> Stats:
        """The statistics of the current or last training; any thread may ask."""
        worker, last = self.worker, self._last
        if worker is not None:
            return worker.stats() or (last if isinstance(last, Stats) else Stats())
        if isinstance(last, BaseException):
            raise UsageError(
                "ask for the statistics while the servers run, in a callback: the last call ended "
                f"in an error ({type(last).__name__}), and its servers with it."
            ) from last
        return last or Stats()

    def report(self, error: BaseException) -> None:
        if os.getpid() == self._owner and self.worker is not None and not self._left:
            report_failure(self.worker, *for_other_tasks(error))

    def _end(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None and self.cluster is not None:
            worker.lines.heartbeat.leave(wait=False)
        if self._children is not None:
            self._children.end()
        self._servers.end()
        if self._group is not None:
            self._group.close()
        if worker is not None:
            worker.close(goodbye=self.cluster is None and not self._left)
        if present() is worker:
            become(None)
        self._children = None
        if self._replica is not None and self.place is not None:
            be_no_more(self._replica)
        self._replica = None
        self.fits = 0

    def close(self) -> None:
        if os.getpid() == self._owner:
            with self._lock:
                if self.worker is not None and self.worker.lines.has_raised:
                    self.worker.give_model_back()  # the error has been raised where it happened
                elif self.worker is not None:
                    self.worker.settle()
                self._end()


def _hang_up_silently(worker: Client) -> None:
    """End the servers of a strategy that was dropped without `close`, silently."""
    worker.lines.heartbeat.leave(wait=False)
    worker.lines.hang_up()


def _blamed(
    error: BaseException, children: LocalWorkers | None, servers: LocalServers
) -> BaseException:
    """Return the cause of an error, as far as a process here has seen it."""
    seen = None if children is None else children.error
    better = seen if isinstance(error, ReplicaError) and seen is not None else error
    if isinstance(better, ReplicaError | OSError) and servers.pools:
        better = servers.pools[0].orphaned() or better
    return better


def _leave_servers(worker: Client, why: BaseException) -> None:
    """Leave the remaining servers, which start over; give the model back to the user."""
    assert isinstance(why, ReplicaError)
    worker.lines.heartbeat.announce(why)  # it may be known here alone
    worker.give_model_back()
    worker.close(goodbye=False)


def _lost_a_device(group: ReplicaGroup | None, error: BaseException) -> bool:
    """Return whether a device of this worker has died, and the worker with it."""
    if group is None or not isinstance(error, ReplicaLost | ReplicaStalled):
        return False
    return error.who.startswith("replica ")


def _call_group(
    group: ReplicaGroup,
    chief: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    sent: tuple[Any, ...],
) -> list[Any]:
    """Run on all devices of this worker."""
    before = set_called(None)
    try:
        return group.call(run_in_group, (chief, function, args), (chief, function, sent))
    finally:
        set_called(before)
