"""Which GPUs are here, which task gets which, and how much of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from stratagem.cluster.spec import Task

_PROC = Path("/proc/driver/nvidia/gpus")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]i?b)", re.IGNORECASE | re.ASCII)
_SHARE = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?(%?)", re.ASCII)


def visible(environ: Mapping[str, str]) -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [str(number) for number in range(_count())]
    names = [name.strip() for name in chosen.split(",")]
    # As in CUDA: an entry that names no device hides those after it.
    bad = (i for i, name in enumerate(names) if not name or name.startswith("-"))
    return names[: next(bad, len(names))]


def _count() -> int:
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        try:
            found = subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            found = None
        if found is not None and found.returncode == 0:
            return sum(line.startswith("GPU ") for line in found.stdout.splitlines())
    return len(list(_PROC.iterdir())) if _PROC.is_dir() else 0


def assign(
    tasks: Sequence[Task], gpus: Sequence[str], *, one_each: bool
) -> dict[Task, tuple[str, ...]]:
    """Deal the GPUs out: one to each worker, or all of them in contiguous blocks.

    Where there are fewer than workers, several share one. The evaluator takes the next one in
    turn; a parameter server takes none.
    """
    workers = [task for task in tasks if task.type in ("chief", "worker")]
    size = len(workers)
    dealt: dict[Task, tuple[str, ...]] = dict.fromkeys(tasks, ())
    for rank, task in enumerate([*workers, *(t for t in tasks if t.type == "evaluator")]):
        if gpus and (one_each or len(gpus) < size or rank == size):
            dealt[task] = (gpus[rank % len(gpus)],)
        elif gpus:
            dealt[task] = tuple(gpus[rank * len(gpus) // size : (rank + 1) * len(gpus) // size])
    return dealt


def memory_limit(text: str) -> str:
    """A limit as "8GiB", "50%" or "0.5", in one spelling; ValueError if it is anything else."""
    text = text.strip()
    if (size := _SIZE.fullmatch(text)) and float(size[1]) > 0:
        unit = size[2].upper().replace("I", "i")
        return f"{size[1]}{unit}"
    share = _SHARE.fullmatch(text)
    if share and 0 < float(share[1]) <= (100 if share[2] else 1):
        return f"{share[1]}{share[2]}"
    raise ValueError(f"{text!r} is not an amount of GPU memory; write 8GiB, 50% or 0.5")
