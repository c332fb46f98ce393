"""The places where parameters can live: how each strategy is made, once for all of its cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import stratagem as sg
from tests.support import cpus


@dataclass(frozen=True)
class Placement:
    """One row of the table."""

    make: Callable[[], sg.Strategy]
    #: processes that compute
    count: int
    #: its rows in stratagem/capabilities.py
    kinds: tuple[str, ...]
    #: what is divided over the processes: "rows" of batches, "layers", or "parts" of each layer
    divides: str = "rows"
    #: which cases `make test` runs: "all", every third ("some"), or "none"
    quick: str = "some"
    #: CPU replicas of one machine update slices of float32 parameters, and whole ones of others
    dtype: torch.dtype = torch.float64
    #: whether the loop is a ticket loop, in which nothing but the model is known to all
    tickets: bool = False


def _served() -> sg.Strategy:
    cluster = sg.LocalCluster(workers=2, ps=1)
    return sg.ParameterServerStrategy(cluster, updates=sg.Synchronous())


PLACEMENTS = {
    "mirrored 2": Placement(
        lambda: sg.MirroredStrategy(cpus(2), sync_batchnorm=True),
        2,
        ("replicas",),
        quick="all",
        dtype=torch.float32,
    ),
    "mirrored 3": Placement(
        lambda: sg.MirroredStrategy(cpus(3), cross_device_ops="ring", sync_batchnorm=True),
        3,
        ("replicas",),
        quick="all",
    ),
    "servers 2": Placement(_served, 2, ("servers",), quick="all", tickets=True),
    "central 2": Placement(
        lambda: sg.CentralStorageStrategy(cpus(2)), 2, ("replicas",), dtype=torch.float32
    ),
    "averaged 2": Placement(
        lambda: sg.MirroredStrategy(cpus(2), sync=sg.LocalSteps(1)), 2, ("averaged", "replicas")
    ),
    "elastic 2": Placement(
        lambda: sg.MirroredStrategy(cpus(2), elastic=True, sync_batchnorm=True),
        2,
        ("elastic", "replicas"),
    ),
    "sharded 2": Placement(
        lambda: sg.ShardedStrategy(cpus(2), sync_batchnorm=True),
        2,
        ("sharded", "replicas"),
        dtype=torch.float32,
    ),
    "stages 2": Placement(
        lambda: sg.PipelineStrategy(cpus(2), microbatches=2), 2, ("stages", "one copy"), "layers"
    ),
    "divided 2": Placement(
        lambda: sg.TensorParallelStrategy(cpus(2)), 2, ("divided", "one copy"), "parts"
    ),
    "mesh 2x2": Placement(
        lambda: sg.Mesh(2, 2, microbatches=2), 4, ("mesh", "stages", "one copy"), "layers", "none"
    ),
}
