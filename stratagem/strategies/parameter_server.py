"""Parameters kept by servers; workers fetch values and hand in gradients, by the rule chosen."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

from stratagem.cluster import blame
from stratagem.cluster.environment import detect
from stratagem.cluster.handshake import job_secret
from stratagem.cluster.spec import Place
from stratagem.codecs.reducer import wire_type
from stratagem.errors import ClusterError, ReplicaError, UsageError
from stratagem.rules.updates import Asynchronous, Updates
from stratagem.state.partition import Partitioner
from stratagem.strategies import devices
from stratagem.strategies.agreement import Patience
from stratagem.strategies.parameters.audience import Audience, Box
from stratagem.strategies.parameters.crew import Crew
from stratagem.strategies.parameters.local_cluster import LocalCluster
from stratagem.strategies.parameters.server import Server
from stratagem.strategies.served import ServedStrategy, check_spares
from stratagem.strategies.settings import Served, Settings


class ParameterServerStrategy(ServedStrategy):
    """Centralised parameters: on servers of a cluster, or of one that this process starts.

    Args:
        cluster: a `LocalCluster(workers=, ps=)` on this machine, or a `Place` to use instead of
            the one in the environment; by default the environment's, else a local cluster.
        updates: `Asynchronous(...)`, the default, or `Synchronous(spares=)`.
        partitioner: how variables are cut into pieces for the servers.
        wire: "bfloat16" halves the bytes that travel between machines, both ways.
        devices: those of the workers; by default every GPU, else the CPU.
        patience: how long to wait for tasks.

    In a ps task of a cluster the strategy serves until the job is done, then ends the script. In
    the evaluator task `fit` evaluates every checkpoint that the chief writes.
    """

    def __init__(
        self,
        cluster: LocalCluster | Place | None = None,
        *,
        updates: Updates | None = None,
        partitioner: Partitioner | None = None,
        wire: str | None = None,
        devices: Sequence[str | torch.device] | str | None = None,
        patience: Patience | None = None,
    ) -> None:
        wire_type(wire)
        updates = Asynchronous() if updates is None else updates
        patience = patience or Patience()
        place = cluster if isinstance(cluster, Place) else None
        if cluster is None:
            place = detect(os.environ)
        local = cluster if isinstance(cluster, LocalCluster) else None
        if place is None and local is None:
            local = LocalCluster()
        if place is not None:
            _check_place(place)
            if place.task.type == "ps":
                try:
                    serve(place, patience)
                except ReplicaError as error:
                    blame.because(error)
                    sys.exit(1)  # it has been said why
                sys.exit(0)
            if place.task.type == "evaluator":
                box = Box(_devices(devices, place, None)[0], str(place.task), patience)
                super().__init__(box, Settings())
                self.audience = Audience(place, patience)
                box.start()
                return
        crew = Crew(_devices(devices, place, local), place, local, patience)
        check_spares(updates, crew.size)
        served = Served(updates, partitioner, crew.size, _servers(place, local))
        settings = Settings(wire=wire, served=served)
        super().__init__(crew, settings)


def serve(place: Place, patience: Patience | None = None) -> None:
    """Be the ps task of this place until the job ends."""
    spec = place.spec
    secret = job_secret(os.environ, spec.to_json())
    Server(place.task.index, spec.jobs["ps"], secret, patience or Patience()).serve()


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
    names: Sequence[str | torch.device] | str | None, place: Place | None,
    local: LocalCluster | None,
) -> tuple[str, ...]:  # fmt: skip
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
