"""The parameter server strategy: workers pull values from servers, and push gradients to them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

import torch

from stratagem.arguments import by_name
from stratagem.cluster import exit_cause
from stratagem.cluster.environment import detect
from stratagem.cluster.handshake import secret_for
from stratagem.cluster.spec import Place
from stratagem.codecs.compression import Compression
from stratagem.codecs.pushed import check_pushed
from stratagem.codecs.wire_choice import Wire, check_wire
from stratagem.errors import ClusterError, ReplicaError, UsageError
from stratagem.rules.updates import Asynchronous, Updates
from stratagem.servers.evaluator_task import EvaluatorDevice, EvaluatorLink
from stratagem.servers.local_cluster import LocalCluster
from stratagem.servers.server import Server
from stratagem.servers.task_main import serve_to_the_end
from stratagem.servers.worker_group import WorkerGroup
from stratagem.state.partition import Partitioner
from stratagem.strategies.pipeline import refuse_cluster
from stratagem.strategies.server_strategy import ServerStrategy, check_backups, check_spares
from stratagem.training import devices
from stratagem.training.agreement import Patience
from stratagem.training.settings import Served, Settings
from stratagem.training.termination import Termination

#: tf.distribute's names of options, and what they are called here
_ELSEWHERE = {
    "cluster_resolver": "the cluster is read from the environment (TF_CONFIG, ...), or given as "
    "cluster=sg.LocalCluster(workers=4, ps=2)",
    "variable_partitioner": "it is partitioner",
}


class ParameterServerStrategy(ServerStrategy):
    """Parameters on servers of a cluster, or of a local one that this process starts.

    Args:
        cluster: a `LocalCluster(workers=, ps=)` on this machine, or a `Place` to use instead of
            the one in the environment; by default the environment's, else a local cluster.
        updates: `Asynchronous(...)`, the default, or `Synchronous(spares=)`.
        partitioner: how variables are cut into pieces for the servers.
        wire: "bfloat16" halves the bytes that travel between machines, both ways. Or a
            compression of what workers push, such as `Int8()` or `TopK(0.01)`: docs/fewer-bytes.md.
        backups: how many other servers hold each shard, too: one of them takes over when a server
            dies. The first server, which decides, has no backup.
        devices: the devices of the workers; by default every GPU, else the CPU.
        patience: how long to wait for tasks.
        insecure: train over a network without STRATAGEM_SECRET; see docs/security.md.

    In a ps task of a cluster the strategy serves until the job is done, then ends the script. In
    the evaluator task `fit` evaluates every checkpoint that the chief writes.
    """

    @partial(by_name, elsewhere=_ELSEWHERE)
    def __init__(
        self,
        cluster: LocalCluster | Place | None = None,
        *,
        updates: Updates | None = None,
        partitioner: Partitioner | None = None,
        wire: Wire = None,
        backups: int = 0,
        devices: Sequence[str | torch.device] | str | None = None,
        patience: Patience | None = None,
        insecure: bool = False,
    ) -> None:
        check_wire(wire)
        if isinstance(wire, Compression):
            check_pushed(wire)
        updates = Asynchronous() if updates is None else updates
        patience = patience or Patience()
        place = cluster if isinstance(cluster, Place) else None
        if cluster is None:
            place = detect(os.environ)
        local = cluster if isinstance(cluster, LocalCluster) else None
        if local is not None:
            refuse_cluster("each task would start servers of its own", "leave LocalCluster out")
        if place is None and local is None:
            local = LocalCluster()
        if place is not None:
            _check_place(place)
            if place.task.type == "ps":
                try:
                    serve(place, patience, insecure=insecure)
                except ReplicaError as error:
                    exit_cause.because(error)
                    sys.exit(1)  # the reason was logged
                sys.exit(0)
            if place.task.type == "evaluator":
                box = EvaluatorDevice(_devices(devices, place, None)[0], str(place.task), patience)
                super().__init__(box, Settings())
                self.audience = EvaluatorLink(place, patience, insecure=insecure)
                box.start()
                return
        check_backups(backups, _servers(place, local), updates)
        worker_group = WorkerGroup(
            _devices(devices, place, local),
            place,
            local,
            patience,
            insecure=insecure,
            backups=backups,
        )
        check_spares(updates, worker_group.size)
        servers = _servers(place, local)
        served = Served(updates, partitioner, worker_group.size, servers, backups)
        settings = Settings(wire=wire, served=served)
        super().__init__(worker_group, settings)


def serve(
    place: Place,
    patience: Patience | None = None,
    *,
    insecure: bool = False,
    option: str = "insecure=True",
) -> None:
    """Run the ps task of this place until the job ends."""
    spec = place.spec
    secret = secret_for(spec, spec.jobs["ps"], insecure=insecure, option=option)
    here = place.task.index, spec.jobs["ps"], secret, patience or Patience()
    termination = Termination()

    def make() -> Server:
        server = Server(*here)
        server.on_chief = termination.open  # workers that save need the servers
        return server

    try:
        serve_to_the_end(make)
    finally:
        termination.close()


def _check_place(place: Place) -> None:
    if not place.spec.jobs.get("ps"):
        raise ClusterError(
            f"the cluster of {place.source} has no ps task, and this strategy keeps the parameters "
            'there; add one: {"worker": ["10.0.0.1:2222"], "ps": ["10.0.0.2:2222"]}, or use '
            "MultiWorkerMirroredStrategy."
        )


def _servers(place: Place | None, local: LocalCluster | None) -> int:
    if place is not None:
        return len(place.spec.jobs["ps"])
    assert local is not None
    return local.ps


def _devices(
    names: Sequence[str | torch.device] | str | None,
    place: Place | None,
    local: LocalCluster | None,
) -> tuple[str, ...]:
    found = devices.resolve(names)
    if local is None:
        if names is None and place is not None and place.local_rank is not None:
            return (found[place.local_rank % len(found)],)
        return found
    if names is not None and len(found) > 1 and len(found) != local.workers:
        raise UsageError(
            f"{len(found)} devices for {local.workers} workers; give one for each worker, or one "
            "for all."
        )
    return tuple(found[i % len(found)] for i in range(local.workers))
