"""The mesh strategy: data parallelism over rows of pipelines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from stratagem.arguments import by_name
from stratagem.cluster.environment import detect
from stratagem.cluster.spec import Place
from stratagem.errors import UsageError
from stratagem.strategies.pipeline import ELSEWHERE, PipelineStrategy, stage_devices
from stratagem.training.agreement import Patience
from stratagem.training.cross_device import CrossDeviceOps


class Mesh(PipelineStrategy):
    """Rows of pipelines, with the result of one device: each row takes a share of every batch.

    Args:
        data: rows; each has a copy of the model.
        stage: stages of a row.
        devices: `data * stage` of them, row by row; None: processes of this machine, or the tasks
            of the cluster in the environment, in their order.
        microbatches: pieces of a row's share of a batch, or "auto".
        schedule, split, batch_norm, memory, cross_device_ops, cluster, patience, insecure: as
            in `PipelineStrategy`.
    """

    @partial(by_name, elsewhere=ELSEWHERE)
    def __init__(
        self,
        data: int,
        stage: int,
        devices: Sequence[str | torch.device] | None = None,
        *,
        microbatches: int | str = "auto",
        schedule: str = "1f1b",
        split: Sequence[str] | str = "auto",
        batch_norm: str | None = None,
        memory: float | None = None,
        cross_device_ops: CrossDeviceOps | str | None = None,
        cluster: Place | None = None,
        patience: Patience | None = None,
        insecure: bool = False,
    ) -> None:
        for name, count, other in (("data", data, "Pipeline"), ("stage", stage, "Mirrored")):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise UsageError(f"{name}={count!r}; give a number of at least 1.")
            if count == 1:
                raise UsageError(f"a mesh with {name}=1 is a {other}Strategy; use that.")
        place = cluster if cluster is not None else detect(os.environ)
        if devices is None and (place is None or len(place.spec.training_tasks()) == 1):
            devices = [f"cpu:{i}" for i in range(data * stage)]
        found, total = stage_devices(devices, place)
        if total != data * stage:
            there = f"{total // len(found)} tasks with {len(found)} each"
            raise UsageError(
                f"a mesh of {data} rows of {stage} stages needs {data * stage} devices, and there "
                f"are {total if total == len(found) else there}; name so many, or start so many "
                "tasks."
            )
        options: dict[str, Any] = {"batch_norm": batch_norm, "memory": memory, "patience": patience}
        options |= {"cross_device_ops": cross_device_ops, "cluster": place, "insecure": insecure}
        super().__init__(devices, microbatches, schedule, split, data=data, **options)
