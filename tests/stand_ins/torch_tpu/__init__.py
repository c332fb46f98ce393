"""A stand-in for torch_tpu: TPUs that are the CPU, by as many as STAND_IN_TPUS says.

It notes who claims one, with which variables, in the file STAND_IN_CLAIMS; and refuses what the
real one would: a claim before the launch variables are set.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import torch

from stratagem.wire.device_kinds import KINDS, LAUNCH_VARIABLES, TpuKind


class _OnTheCpu(TpuKind):
    """Claims as on a TPU, computes on the CPU."""

    backend = "gloo"

    def place(self, index: int) -> torch.device:
        return torch.device("cpu", index)

    def seat(self, device: torch.device, rank: int, size: int) -> Any:
        return _seat(super().seat(device, rank, size))


class _seat:
    def __init__(self, real: Any) -> None:
        self.real = real

    def __enter__(self) -> torch.device:
        claimed = self.real.__enter__()
        assert claimed.type == "tpu"
        return torch.device("cpu")

    def __exit__(self, *error: Any) -> Any:
        return self.real.__exit__(*error)


def _current_device() -> int:
    told = {name: os.environ.get(name) for name in (*LAUNCH_VARIABLES, "RANK", "WORLD_SIZE")}
    missing = [name for name, value in told.items() if value is None]
    if missing:
        raise RuntimeError(f"the TPU is claimed without {missing}")
    told["LOCAL_RANK"] = os.environ["LOCAL_RANK"]
    with open(os.environ["STAND_IN_CLAIMS"], "a") as file:
        file.write(json.dumps({**told, "pid": os.getpid()}) + "\n")
    return int(told["LOCAL_RANK"])


def _set_tpu_launch_env(*, nnodes: int, nproc_per_node: int) -> None:
    if nproc_per_node not in (1, 2, 4, 8):
        raise ValueError(f"No TPU topology found for count: {nproc_per_node}")
    addresses = ",".join(f"localhost:{9000 + i}" for i in range(nnodes * nproc_per_node))
    os.environ.setdefault("TORCH_TPU_SLICEBUILDER_ADDRESSES", addresses)
    os.environ.setdefault("TORCH_TPU_TOPOLOGY", f"{nproc_per_node},1,1")
    os.environ.setdefault("TORCH_TPU_XPROF_SESSION_ID", str(os.getpid()))


KINDS["tpu"] = _OnTheCpu()
if torch._C._get_privateuse1_backend_name() != "tpu":
    torch.utils.rename_privateuse1_backend("tpu")
torch.tpu = SimpleNamespace(  # type: ignore[attr-defined]
    device_count=lambda: int(os.environ["STAND_IN_TPUS"]),
    current_device=_current_device,
    is_available=lambda: False,
    distributed=SimpleNamespace(set_tpu_launch_env=_set_tpu_launch_env),
)
