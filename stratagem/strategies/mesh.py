"""The mesh: rows of pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from stratagem.arguments import by_name
from stratagem.errors import UsageError
from stratagem.strategies.pipeline import ELSEWHERE, PipelineStrategy
from stratagem.training.agreement import Patience


class Mesh(PipelineStrategy):
    """Rows of pipelines, with the result of one device: each row takes a share of every batch.

    Args:
        data: rows; each has a copy of the model.
        stage: stages of a row.
        devices: `data * stage` of them, row by row; None: processes of this machine.
        microbatches: pieces of a row's share of a batch, or "auto".
        schedule, split, batch_norm, memory, patience: as of `PipelineStrategy`.
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
        patience: Patience | None = None,
    ) -> None:
        for name, count, other in (("data", data, "Pipeline"), ("stage", stage, "Mirrored")):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise UsageError(f"{name}={count!r}; give a number of at least 1.")
            if count == 1:
                raise UsageError(f"a mesh with {name}=1 is a {other}Strategy; use that.")
        if devices is None:
            devices = [f"cpu:{i}" for i in range(data * stage)]
        if isinstance(devices, str) or len(devices) != data * stage:
            raise UsageError(
                f"a mesh of {data} rows of {stage} stages needs {data * stage} devices, and "
                f"devices={devices!r}; name so many, or leave them out."
            )
        options: dict[str, Any] = {"batch_norm": batch_norm, "memory": memory, "patience": patience}
        super().__init__(devices, microbatches, schedule, split, data=data, **options)
