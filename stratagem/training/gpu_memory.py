"""GPU memory: a limit per task, and advice when memory runs out.

Several tasks may share one GPU (`stratagem run --replicas 2 --gpu-memory 45%`); each then keeps to
its part, and one that needs more fails by itself instead of starving the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from stratagem.errors import UsageError
from stratagem.wire.device_kinds import kind_of

VARIABLE = "STRATAGEM_GPU_MEMORY"
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(%|[KMGT]i?B)?", re.IGNORECASE)


_ON_GPUS = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation."
_ON_CPUS = 'PipelineStrategy(["cpu:0", "cpu:1"]), which splits the model itself.'


def fraction(limit: str, total: int) -> float:
    """The part of `total` bytes that "8GiB", "50%" or "0.5" allows."""
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
    """Add what to try to torch's own message."""
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
            + (_ON_GPUS if gpu else _ON_CPUS)
            + (f" This task may use {limit} of the GPU (--gpu-memory)." if limit else "")
        )
        raise


def _is_shortage(error: BaseException) -> bool:
    """Whether there was no memory; of the CPU's torch says so in words only."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)
