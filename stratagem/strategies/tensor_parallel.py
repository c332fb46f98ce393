"""The tensor-parallel strategy: every layer divided over the devices, all of them on all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from stratagem.arguments import by_name
from stratagem.errors import UsageError
from stratagem.strategies.pipeline import refuse_elsewhere
from stratagem.strategies.strategy import Strategy
from stratagem.training import devices as device_names
from stratagem.training.agreement import Patience
from stratagem.training.replica_group import ReplicaGroup
from stratagem.training.settings import Settings, TensorParallel
from stratagem.training.tensor_plan import WAYS

_ELSEWHERE = {
    "elastic": "every process has parts of layers that no other has, so none can leave or join; "
    "use fit(checkpoint=, resume=True)",
    "parallelize_plan": "it is plan=",
    "cluster": "layers are divided over processes of one machine",
}


class TensorParallelStrategy(Strategy):
    """Linear, embedding, attention and convolution layers divided over devices, with the result of
    one device.

    Args:
        devices: as in `["cpu:0", "cpu:1"]`: processes of this machine. None: two of them.
        plan: "auto" divides every layer that can be divided, by its kind: one layer by columns, and
            the next by rows. A dict chooses for layers by name: "columns" (by outputs; attention by
            heads), "rows" (by inputs) or "replicate".
        patience: how long to wait for a process.
    """

    @partial(by_name, elsewhere=_ELSEWHERE)
    def __init__(
        self,
        devices: Sequence[str | torch.device] | None = None,
        plan: Mapping[str, str] | str = "auto",
        *,
        patience: Patience | None = None,
    ) -> None:
        found = device_names.resolve(["cpu:0", "cpu:1"] if devices is None else devices)
        refuse_elsewhere(found, "layers are divided over")
        settings = Settings(tensor=TensorParallel(_asked(plan)))
        patience = patience or Patience(answer=5.0)
        super().__init__(ReplicaGroup(found, settings, None, patience), settings)


def _asked(plan: Mapping[str, str] | str) -> tuple[tuple[str, str], ...]:
    if isinstance(plan, str):
        if plan != "auto":
            raise UsageError(f'plan={plan!r}; give "auto", or a dict of names of layers.')
        return ()
    for name, how in plan.items():
        if how not in WAYS:
            raise UsageError(
                f"plan has {how!r} for {name!r}; choose one of {', '.join(map(repr, WAYS))}."
            )
    return tuple(plan.items())
