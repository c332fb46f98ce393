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
import select
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stratagem.cluster.cores import cores
from stratagem.cluster.dial import is_loopback
from stratagem.cluster.handshake import SECRET_VARIABLE, job_secret
from stratagem.cluster.spec import Place
from stratagem.errors import ReplicaError, ReplicaLost, ReplicaStalled, UsageError
from stratagem.replicas.dice import Dice
from stratagem.replicas.pool import Pool, ZygoteProcess
from stratagem.rules.stats import Stats
from stratagem.strategies.agreement import Patience
from stratagem.strategies.parameters.children import Children, patiently
from stratagem.strategies.parameters.inside import (
    become,
    present,
    replica_of,
    run,
    run_in_group,
    serve,
    sit_down,
)
from stratagem.strategies.parameters.lines import Address
from stratagem.strategies.parameters.local_cluster import LocalCluster
from stratagem.strategies.parameters.trouble import failed
from stratagem.strategies.parameters.worker import Worker
from stratagem.strategies.replica import (
    Replica,
    be,
    be_no_more,
    called_replica,
    set_called,
    turn,
)
from stratagem.strategies.settings import Settings
from stratagem.strategies.team import Team, forked
from stratagem.wire.tcp import local_address

log = logging.getLogger("stratagem")

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
        self._children: Children | None = None
        self._lock = threading.RLock()
        self._owner = os.getpid()
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
            self._refuse_if_forked()
            if self._replica is None:
                try:
                    self._replica = self._start()
                except BaseException:
                    self._end()
                    raise
            return self._replica

    def _refuse_if_forked(self) -> None:
        """What was started belongs to the process that did so; what was not, to this one."""
        if os.getpid() == self._owner:
            return
        if self._replica is not None:
            raise forked("workers")
        self._owner = os.getpid()

    def _start(self) -> Replica:
        address = self._address()
        chief = self.place is None or self.place.is_chief
        self.worker = Worker(
            self.index, self.name, chief, address, self.patience, self._look_at_servers
        )
        if self.place is not None:
            become(self.worker)
        if self.cluster is not None:
            self._children = Children(self.worker, self._hire, self.patience.arrive)
            self._children.hire(range(1, self.cluster.workers))
        replica = replica_of(self.index, self.size, self.devices[0], self.name)
        if self.place is not None:
            be(replica)
        return replica

    def _address(self) -> Address:
        if self.cluster is None:
            assert self.place is not None
            spec = self.place.spec
            self._warn_of_no_secret(spec.jobs["ps"])
            secret = job_secret(os.environ, spec.to_json())
            return Address(spec.jobs["ps"], secret)
        servers = tuple(local_address() for _ in range(self.cluster.ps))
        address = Address(servers, secrets.token_bytes(32))
        for i in range(self.cluster.ps):
            pool = Pool([f"ps {i}"])
            self._servers.append(pool)
            told = (i, address, self.patience, self.parameter_device, cores() // self.cluster.ps)
            pool.submit(serve, [told], patiently)
        return address

    def _warn_of_no_secret(self, servers: Sequence[str]) -> None:
        """On the chief, where a person looks."""
        assert self.place is not None
        known = os.environ.get(SECRET_VARIABLE) or all(map(is_loopback, servers))
        if self.place.is_chief and not known:
            log.warning(
                "%s is not set: whoever reaches %s and knows this cluster can join the job. Set it "
                "to the same random text on every task.", SECRET_VARIABLE, ", ".join(servers),
            )  # fmt: skip

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
            sit_down,
            [(index, self.size, device, self.worker.lines.address, self.patience, self._threads())],
            patiently,
        )
        return pool

    def _threads(self) -> int:
        """Threads a worker, so that those of one machine do not fight; 0 leaves torch alone."""
        if self.cluster is None or not all(d.startswith("cpu") for d in self.devices):
            return 0
        return max(1, cores() // self.cluster.workers)

    # --- running ----------------------------------------------------------------------------

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...],
        sent: tuple[Any, ...] | None = None,
    ) -> list[Any]:  # fmt: skip
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
                assert self.worker is not None
                return self._call(self.worker, function, args, args if sent is None else sent)
            except BaseException as error:
                better = self._fall(error)
                if better is error:
                    raise
                raise better from error
            finally:
                set_called(before)
                become(worker)
                torch.set_num_threads(threads)

    def _call(
        self, worker: Worker, function: Callable[..., Any], args: tuple[Any, ...],
        sent: tuple[Any, ...],
    ) -> list[Any]:  # fmt: skip
        worker.fits = self.fits = max(worker.fits, self.fits)  # a loop may have been prepared
        prepared = worker.prepared
        children = self._children
        if children is not None:
            told = (function, sent, self.fits, torch.get_default_dtype(), Dice.of_caller())
            children.begin((run, told, {}))
            if children.members and self._threads():
                torch.set_num_threads(self._threads())
        try:
            if self._group is None:
                here = [function(*args)]
            else:
                here = self._call_group(self._group, worker.is_chief, function, args, sent)
            if worker.prepared is not prepared:  # in there
                worker.settle()
            self._last = worker.stats()
        finally:
            trained, self.fits = worker.fits > self.fits, worker.fits
            if children is not None:
                children.leave_alone()
        return [*here, *(children.collect(trained=trained) if children is not None else ())]

    def _call_group(
        self, group: Team, chief: bool, function: Callable[..., Any], args: tuple[Any, ...],
        sent: tuple[Any, ...],
    ) -> list[Any]:  # fmt: skip
        """On all devices of this worker, which work together."""
        before = set_called(None)
        try:
            return group.call(run_in_group, (chief, function, args), (chief, function, sent))
        finally:
            set_called(before)

    # --- coming apart -----------------------------------------------------------------------

    def _fall(self, error: BaseException) -> BaseException:
        """End everything after a failure; the next call starts afresh. Returns what to raise."""
        if self.worker is not None:
            self.worker.fall()
        better = error
        seen = None if self._children is None else self._children.error
        if isinstance(error, ReplicaError) and seen is not None:
            better = seen
        if self.cluster is not None:
            self._end()
        elif not isinstance(error, Exception) or self._lost_a_device(error):
            self._left = True  # Ctrl-C, sys.exit: one who goes, not one who fails
        elif not isinstance(error, ReplicaError):
            self.report("".join(traceback.format_exception(error)))
        return better

    def _lost_a_device(self, error: BaseException) -> bool:
        """Whether a device of this worker has died: it goes, as a worker of one device would."""
        if self._group is None or not isinstance(error, ReplicaLost | ReplicaStalled):
            return False
        return error.who.startswith("replica ")

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
        if self._children is not None:
            self._children.end()
        for pool in self._servers:
            pool.end()
        if self._group is not None:
            self._group.close()
        if worker is not None:
            worker.close(goodbye=self.cluster is None and not self._left)
        if present() is worker:
            become(None)
        self._children, self._servers = None, []
        if self._replica is not None and self.place is not None:
            be_no_more(self._replica)
        self._replica = None
        self.fits = 0

    def close(self) -> None:
        if os.getpid() == self._owner:
            with self._lock:
                if self.worker is not None and self.worker.lines.fell:
                    self.worker.fall()  # the error has been raised where it happened
                elif self.worker is not None:
                    self.worker.settle()
                self._end()


def _size(place: Place | None) -> int:
    return 1 if place is None else place.size
