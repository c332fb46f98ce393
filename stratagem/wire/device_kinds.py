"""Device kinds: the calls of torch that are specific to CPU, CUDA, Metal and TPU.

    kind   name     collectives between devices    module
    CPU    cpu:i    Gloo, or shared memory         none; "cpu:0" and "cpu:1" share the one CPU
    GPU    cuda:i   NCCL                           torch.cuda
    Metal  mps:0    Gloo                           torch.mps
    TPU    tpu:i    tpu_dist                       torch_tpu; a process has one and keeps it

No other file calls torch.cuda, torch.mps or torch.tpu (tests/wire/test_device_kinds.py).
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import DeviceError


class DeviceKind:
    """The interface of a device kind; the defaults are those of a device without own features."""

    name = "cpu"
    #: torch's backend for replicas with a device each
    backend = "gloo"
    #: whether work is queued on the device while Python goes on
    queued = False

    def count(self) -> int:
        """Return the number of devices of this host, without claiming one."""
        return 1

    def has(self, index: int) -> bool:
        return index < self.count()

    def place(self, index: int) -> torch.device:
        """Return the torch device of this index."""
        return torch.device(self.name, index)

    def identity(self, device: torch.device, name: str) -> str:
        """Return a name of the physical device, unique on this host."""
        return name

    def prepare(self, here: int, hosts: int) -> None:
        """Prepare this host before `here` replicas start on each of `hosts` hosts."""

    @contextmanager
    def seat(self, device: torch.device, rank: int, size: int) -> Iterator[torch.device]:
        """Claim the device while this process connects to its peers; yields the device it got."""
        self.use(device)
        yield device

    def use(self, device: torch.device) -> None:
        """Make the device this thread's current one."""

    def memory(self, device: torch.device) -> float | None:
        """Return the bytes of the device's own memory, if it has any."""
        return None

    def limit_memory(self, device: torch.device, fraction: Any) -> None:
        """Limit this process to a part of the memory; `fraction` maps the total to the part."""

    def synchronize(self, device: torch.device) -> None:
        """Wait until all work of the device is done."""

    def rng_state(self, device: torch.device) -> Tensor | None:
        """Return the state of the device's own generator, if it has one."""
        return None

    def set_rng_state(self, device: torch.device, state: Tensor) -> None:
        """Set the state of the device's generator."""

    def mark(self) -> Any:
        """Record an event on the device's own clock."""

    def pin(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Pin memory, so that the device copies at full speed; returns the pinned tensors."""
        return []

    def unpin(self, tensors: Sequence[Tensor]) -> None:
        """Unpin tensors that `pin` returned."""


class CpuKind(DeviceKind):
    """The CPU, which any number of replicas share."""

    def has(self, index: int) -> bool:
        return True

    def place(self, index: int) -> torch.device:
        return torch.device("cpu")


class CudaKind(DeviceKind):
    """NVIDIA's (and AMD's) GPUs."""

    name, backend, queued = "cuda", "nccl", True

    def count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def identity(self, device: torch.device, name: str) -> str:
        """Return the UUID, as `cuda:0` may be different GPUs in two tasks."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def use(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        _in_use[:] = [device.index or 0]

    def memory(self, device: torch.device) -> float | None:
        return float(torch.cuda.mem_get_info(device)[1])

    def limit_memory(self, device: torch.device, fraction: Any) -> None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(fraction(total), device)

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def rng_state(self, device: torch.device) -> Tensor | None:
        return torch.cuda.get_rng_state(device)

    def set_rng_state(self, device: torch.device, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, device)

    def mark(self) -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def pin(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return [t for t in tensors if int(runtime.cudaHostRegister(t.data_ptr(), t.nbytes, 0)) == 0]

    def unpin(self, tensors: Sequence[Tensor]) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for tensor in tensors:
            runtime.cudaHostUnregister(tensor.data_ptr())


class MetalKind(DeviceKind):
    """Apple's GPU."""

    name = "mps"

    def count(self) -> int:
        return int(torch.backends.mps.is_available())

    def synchronize(self, device: torch.device) -> None:
        torch.mps.synchronize()


#: variables that must be equal in all of torch_tpu's workers
LAUNCH_VARIABLES = (
    "TORCH_TPU_SLICEBUILDER_ADDRESSES",
    "TORCH_TPU_TOPOLOGY",
    "TORCH_TPU_XPROF_SESSION_ID",
)
_ABSENT = "pip install torch_tpu on a TPU VM (x86_64 Linux, torch 2.11 to 2.15)"


class TpuKind(DeviceKind):
    """Google's TPUs, by torch_tpu. Their first use claims one for the process, by the launch
    variables and the process's rank; `count` and `prepare` claim none."""

    name, backend = "tpu", "tpu_dist"

    def count(self) -> int:
        return int(load_tpu().device_count())

    def prepare(self, here: int, hosts: int) -> None:
        """Have torch_tpu set the launch variables, unless all of them are set already."""
        if all(os.environ.get(name) for name in LAUNCH_VARIABLES):
            return
        try:
            load_tpu().distributed.set_tpu_launch_env(nnodes=hosts, nproc_per_node=here)
        except (ValueError, RuntimeError) as problem:
            raise DeviceError(f"torch_tpu cannot prepare {here} TPUs here: {problem}") from problem
        if missing := [name for name in LAUNCH_VARIABLES if not os.environ.get(name)]:
            raise DeviceError(
                f"torch_tpu has not set {missing[0]}, without which replicas cannot find each "
                "other's TPUs; set it, as torch_tpu's documentation says."
            )

    @contextmanager
    def seat(self, device: torch.device, rank: int, size: int) -> Iterator[torch.device]:
        """Set a launcher's variables meanwhile; if they stayed, later strategies would detect a
        cluster."""
        variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": device.index or 0}
        before = {key: os.environ.get(key) for key in variables}
        os.environ.update({key: str(value) for key, value in variables.items()})
        try:
            yield torch.device("tpu", int(load_tpu().current_device()))
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value

    def synchronize(self, device: torch.device) -> None:
        load_tpu().synchronize()

    def rng_state(self, device: torch.device) -> Tensor | None:
        state: Tensor = load_tpu().get_rng_state()
        return state.cpu()

    def set_rng_state(self, device: torch.device, state: Tensor) -> None:
        load_tpu().set_rng_state(state)


#: the index of the GPU that this process's replica has, if any
_in_use: list[int] = []


def gpu_in_use() -> list[int]:
    """Return the index of this replica's GPU as a list, empty if it has another device."""
    return list(_in_use)


def seed_gpu_in_use(number: int) -> None:
    """Seed the generator of this replica's GPU, if it has one."""
    for index in _in_use:
        torch.cuda.default_generators[index].manual_seed(number)


def load_tpu() -> Any:
    """Return torch.tpu; DeviceError if torch_tpu or a TPU is missing."""
    try:
        importlib.import_module("torch_tpu")
    except ImportError as problem:
        wrong = "" if platform.machine() in ("x86_64", "AMD64") else f" {platform.machine()}"
        raise DeviceError(
            f"TPUs need torch_tpu, which cannot be imported on this{wrong} machine "
            f"({problem}): {_ABSENT}."
        ) from problem
    found = getattr(torch, "tpu", None)
    if found is None:
        raise DeviceError("torch_tpu finds no TPU on this machine: run this on a TPU VM.")
    return found


#: kinds by name
KINDS: dict[str, DeviceKind] = {
    kind.name: kind for kind in (CudaKind(), MetalKind(), CpuKind(), TpuKind())
}


def kind_of(device: torch.device | str) -> DeviceKind:
    """Return the kind of a device, or of a name such as "cuda:0"."""
    name = device.partition(":")[0] if isinstance(device, str) else device.type
    if name == "tpu":
        load_tpu()  # makes the name known to torch
    return KINDS.get(name) or DeviceKind()
