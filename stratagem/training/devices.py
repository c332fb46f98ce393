"""Device names, in the book's and torch's spellings, checked against this machine; GPU memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from stratagem.errors import DeviceError, UsageError
from stratagem.wire.device_kinds import KINDS, kind_of

_NAME = re.compile(
    r"^(?:/?job:[^/]+)?(?:/?replica:\d+)?(?:/?task:\d+)?/?(?:device:)?"
    r"(?P<kind>[a-z]+)(?::(?P<index>\d+))?$",
    re.IGNORECASE,
)
_SPELLED = {"gpu": "cuda"}
#: kinds of devices that a strategy takes by itself, if there are any
_USUAL = ("cuda", "mps")


def present() -> list[str]:
    """The devices that a strategy takes by itself: every GPU, else the CPU."""
    for kind in _USUAL:
        if count := KINDS[kind].count():
            return [f"{kind}:{i}" for i in range(count)]
    return ["cpu:0"]


def canonical(name: str | torch.device) -> str:
    """`"/gpu:0"`, `"GPU:0"`, `"/device:GPU:0"` and `torch.device("cuda", 0)` are all `cuda:0`."""
    match = _NAME.match(str(name).strip())
    said = match["kind"].lower() if match else ""
    kind = _SPELLED.get(said, said)
    if match is None or kind not in KINDS:
        raise DeviceError(
            f"{str(name)!r} is not a device; present here: {_listing()}. "
            'Write "/gpu:0", "cuda:0", "tpu:0" or "cpu:0".'
        )
    return f"{kind}:{int(match['index'] or 0)}"


def resolve(names: Iterable[str | torch.device] | str | None) -> tuple[str, ...]:
    """Return the named devices, each present and none twice; None means all that are present."""
    if names is None:
        return tuple(present())
    if isinstance(names, str | torch.device):
        names = [names]
    if not isinstance(names, Iterable):
        raise DeviceError(
            f"devices={names!r} is no list of devices; name each, as in "
            f'["cuda:0", "cuda:1"] or ["cpu:0", "cpu:1"]; present here: {_listing()}.'
        )
    devices = [canonical(name) for name in names]
    if not devices:
        raise DeviceError(f"the list of devices is empty; present here: {_listing()}.")
    for device in devices:
        if not _is_present(device):
            raise DeviceError(
                f"there is no {device} on this machine; present here: {_listing()}. "
                "Leave the list out to use them all."
            )
        if devices.count(device) > 1:
            raise DeviceError(
                f"{device} is named twice in {devices}; every replica needs a device of its own "
                '(CPU replicas are told apart as "cpu:0", "cpu:1", ...).'
            )
    return tuple(devices)


def place(device: str) -> torch.device:
    """The torch device behind a name; CPU replicas share the one CPU."""
    return kind_of(device).place(int(device.partition(":")[2]))


def identity(device: str) -> str:
    """Identify the device behind a name: two tasks may call different GPUs `cuda:0`."""
    return kind_of(device).identity(place(device), device)


def _is_present(device: str) -> bool:
    return kind_of(device).has(int(device.partition(":")[2]))


def _listing() -> str:
    names = [name for name in present() if not name.startswith("cpu")]
    return ", ".join([*names, "cpu:0, cpu:1, ... (as many CPU replicas as you like)"])


# --- GPU memory: a limit per task, and advice when memory runs out --------------------------------
#
# Several tasks may share one GPU (`stratagem run --replicas 2 --gpu-memory 45%`); each then keeps
# to its part, and a task that needs more fails by itself instead of starving the others.


VARIABLE = "STRATAGEM_GPU_MEMORY"
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B)?", re.IGNORECASE)


_SPLIT = 'PipelineStrategy(["{kind}:0", "{kind}:1"]), which splits the model itself.'
_ON_GPUS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation; "


def fraction(limit: str, total: int) -> float:
    """Return the fraction of `total` bytes that "8GiB", "50%" or "0.5" allows."""
    match = _AMOUNT.fullmatch(limit.strip())
    if match is None:
        raise UsageError(
            f"{VARIABLE}={limit!r} is not an amount of memory; write 8GiB, 50% or 0.5."
        )
    number, unit = float(match[1]), (match[2] or "").upper()
    if unit == "%":
        part = number / 100
    elif unit:
        base = 1024 if "I" in unit else 1000
        part = number * base ** ("KMGT".index(unit[0]) + 1) / total
    else:
        part = number
    if not 0 < part <= 1:
        raise UsageError(
            f"{VARIABLE}={limit!r} is {part:.0%} of this GPU's {total / 2**30:.1f} GiB; it must be "
            "more than nothing and at most all of it."
        )
    return part


def limit_memory(device: torch.device) -> None:
    """Keep this process to its part of the GPU, if a part was set."""
    limit = os.environ.get(VARIABLE)
    if limit:
        kind_of(device).limit_memory(device, lambda total: fraction(limit, total))


@contextmanager
def explain_out_of_memory(devices: Sequence[str]) -> Iterator[None]:
    """Add remedies to torch's error when memory runs out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_shortage(error):
            raise
        limit = os.environ.get(VARIABLE)
        gpu = isinstance(error, torch.OutOfMemoryError)
        error.add_note(
            f"Out of memory on {', '.join(devices)}. What helps, cheapest first: a smaller "
            "batch_size with compile(accumulate=...), so that the update stays the same; "
            'compile(precision="bfloat16"); more replicas, each with a smaller share; '
            + (_ON_GPUS if gpu else "")
            + _SPLIT.format(kind="cuda" if gpu else "cpu")
            + (f" This task may use {limit} of the GPU (--gpu-memory)." if limit else "")
        )
        raise


def _is_shortage(error: BaseException) -> bool:
    """Whether memory ran out; for the CPU torch says so only in the message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
