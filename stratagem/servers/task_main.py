"""Entry points of the processes: a server, or a worker and its calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from stratagem.cluster.membership import Membership
from stratagem.data.streams import RngStates
from stratagem.errors import NotDistributable, ReplicaError, UsageError
from stratagem.replicas import follower
from stratagem.servers.client import Client
from stratagem.servers.connections import Address
from stratagem.servers.loop_device_group import end_assistance
from stratagem.servers.server import Server
from stratagem.servers.training_plan import goes_back
from stratagem.tracebacks import for_other_tasks
from stratagem.training.agreement import Patience
from stratagem.training.devices import place as device_of
from stratagem.training.replica import Replica, current_replica, set_called
from stratagem.wire.collective import Collective

log = logging.getLogger("stratagem")


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotDistributable(
        "workers of a strategy with parameter servers do not wait for each other, so they cannot "
        "add up or gather values together; return them from strategy.run and combine them there, "
        "or use MirroredStrategy."
    )


class NoCollective(Collective):
    """The collective of workers with servers, which refuses every use."""

    overlaps = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    buffer = all_reduce = gather_bytes = broadcast_bytes = broadcast = barrier = _refuse


def in_group(replica: Replica) -> bool:
    """Return whether the replica is one of several devices of one worker."""
    return replica.count > 1 and not isinstance(replica.collective, NoCollective)


EMPTY_PASS = (
    "loop over the prepared loader with `for`, or call next(it, None): a next() has ended this "
    "worker's loop with StopIteration. Where the other workers have done the last batches, even a "
    "new pass over the loader has none."
)

#: the worker that this process is
_present: Client | None = None


def current_worker() -> Client:
    """Return the worker that this process is."""
    if _present is None:
        raise UsageError("this process is no worker of a strategy with parameter servers.")
    return _present


def present() -> Client | None:
    """Return the worker that this process is, or None."""
    return _present


def become(worker: Client | None) -> Client | None:
    """Make this process `worker`; return the worker that it was before."""
    global _present
    before, _present = _present, worker
    return before


def replica_of(index: int, size: int, device: str, name: str) -> Replica:
    return Replica(
        index,
        size,
        device_of(device),
        name,
        NoCollective(index, size),
        Membership.alone(),
        local_index=0,
    )


def serve_to_the_end(make: Callable[[], Server]) -> None:
    """Serve until the job is done, starting over where another server was lost.

    If the only holder of a shard is lost, a job that keeps checkpoints (`TrainingPlan.resumes`)
    goes back to the last one: the lost process is restarted, the other servers drop everything and
    start over in their processes, and the chief sends the checkpoint's values. So no gradient can
    count twice.
    """
    returning = False
    while True:
        server = make()
        server.returning = returning
        try:
            server.serve()
            return
        except ReplicaError as failure:
            if not goes_back(server.shard.plan, failure, returning=server.returning):
                raise
            returning = True  # until a plan says otherwise: another server may be lost first
            log.warning("%s serves anew: the job goes back to its last checkpoint", server.name)


def serve(index: int, address: Address, patience: Patience, device: str, cores: int) -> None:
    """In a child: run a server until the job ends; the chief reports its errors."""
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.ERROR)
    place = index, address.servers, address.secret, patience, device_of(device), cores
    serve_to_the_end(lambda: Server(*place))


def become_worker(
    index: int, size: int, device: str, address: Address, patience: Patience, threads: int
) -> None:
    """In a child: become a worker."""
    child = follower.state
    assert child is not None
    logging.basicConfig(format="%(message)s")
    name = f"worker {index}"
    if threads:
        torch.set_num_threads(threads)
    if (before := present()) is not None:  # its servers are gone
        before.give_model_back()
        before.close(goodbye=False)
    worker = Client(index, name, False, address, patience)
    become(worker)
    child.on_failure = partial(report_failure, worker)
    set_called(replica_of(index, size, device, name))


def report_failure(worker: Client, text: str, refusal: str) -> None:
    """Tell the other tasks why this worker stops, unless they know the cause."""
    try:
        worker.finish_stream()
        worker.ask("failed", text=text, refusal=refusal)
    except (OSError, ReplicaError) as problem:
        log.info("the coordinator did not hear of the failure: %s", problem)


def run_users(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a user's function, whose `next` may have found that others did the last batches."""
    try:
        return function(*args)
    except StopIteration as end:
        raise UsageError(EMPTY_PASS) from end


def explain(error: BaseException) -> None:
    """Add a note to a StopIteration that ends a worker's script."""
    if isinstance(error, StopIteration) and _present is not None:
        error.add_note(EMPTY_PASS)


def run_in_group(chief: bool, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a function on each device of a worker."""
    current_replica().with_chief = chief
    worker = _present
    before = None if worker is None else worker.prepared
    try:
        result = run_users(function, args)
    except Exception as error:
        if worker is not None and not isinstance(error, ReplicaError):
            report_failure(worker, *for_other_tasks(error))  # before all is cleared up
        raise
    if worker is None:
        end_assistance()
    elif worker.prepared is not before:
        worker.settle()
    return result


def run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    fits: int,
    dtype: torch.dtype,
    rng_states: RngStates,
) -> Any:
    """In a child: run the function that the chief runs."""
    torch.set_default_dtype(dtype)
    worker = current_worker()
    rng_states.seed(worker.index)
    worker.fits = fits
    result = run_users(function, args)
    worker.settle()
    return result
