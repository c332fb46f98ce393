"""Running out of GPU memory: a limit per task, and advice when it happens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def explain_out_of_memory(devices: Sequence[str]) -> Iterator[None]:
    """Add what to try to torch's own message."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(
            f"Out of memory on {', '.join(devices)}. What helps, cheapest first: a smaller "
            "batch_size with compile(accumulate=...) so that the update stays the same; "
            'compile(precision="bfloat16"); more replicas, each with a smaller share; '
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation."
            + _limit_note()
        )
        raise


def _limit_note() -> str:
    limit = os.environ.get("STRATAGEM_GPU_MEMORY")
    if not limit:
        return ""
    return f" This task is limited to {limit} of the GPU (stratagem run --gpu-memory)."
