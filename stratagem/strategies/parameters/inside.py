"""What runs in the processes behind parameter servers: a server, or a worker and its calls."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from stratagem.cluster.membership import Membership
from stratagem.errors import ReplicaError, UsageError
from stratagem.replicas import follower
from stratagem.replicas.dice import Dice
from stratagem.strategies.agreement import Patience
from stratagem.strategies.devices import place as device_of
from stratagem.strategies.parameters.apart import Apart
from stratagem.strategies.parameters.lines import Address
from stratagem.strategies.parameters.server import Server
from stratagem.strategies.parameters.together import end_assistance
from stratagem.strategies.parameters.worker import Worker
from stratagem.strategies.replica import Replica, current_replica, set_called

log = logging.getLogger("stratagem")

#: the worker that this process is
_present: Worker | None = None


def current_worker() -> Worker:
    """The worker that this process is."""
    if _present is None:
        raise UsageError("this process is no worker of a strategy with parameter servers.")
    return _present


def present() -> Worker | None:
    """The same, or nobody."""
    return _present


def become(worker: Worker | None) -> Worker | None:
    """This process is `worker` from now on; returns what it was before."""
    global _present
    before, _present = _present, worker
    return before


def replica_of(index: int, size: int, device: str, name: str) -> Replica:
    return Replica(
        index, size, device_of(device), name, Apart(index, size), Membership.alone(), local_index=0
    )


def serve(index: int, address: Address, patience: Patience, device: str, cores: int) -> None:
    """In a child: be a server until the job ends. What it has to say the chief says."""
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.ERROR)
    Server(index, address.servers, address.secret, patience, device_of(device), cores).serve()


def sit_down(
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
    become(worker)
    desk.on_failure = partial(_report, worker)
    set_called(replica_of(index, size, device, name))


def _report(worker: Worker, text: str) -> None:
    """In a child: tell the others why it stops, if they do not know better."""
    try:
        worker.report_failure(text)
    except (OSError, ReplicaError) as problem:
        log.info("the lead did not hear of the failure: %s", problem)


def run_in_group(chief: bool, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """On each device of a worker."""
    current_replica().with_chief = chief
    worker = _present
    before = None if worker is None else worker.prepared
    try:
        result = function(*args)
    except Exception as error:
        if worker is not None and not isinstance(error, ReplicaError):
            _report(worker, "".join(traceback.format_exception(error)))  # before all is cleared up
        raise
    if worker is None:
        end_assistance()
    elif worker.prepared is not before:
        worker.settle()
    return result


def run(
    function: Callable[..., Any], args: tuple[Any, ...], fits: int, dtype: torch.dtype, dice: Dice
) -> Any:
    """In a child: what the client runs."""
    torch.set_default_dtype(dtype)
    worker = current_worker()
    dice.throw(worker.index)
    worker.fits = fits
    result = function(*args)
    worker.settle()
    return result
