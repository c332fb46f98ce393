"""The files of a sweep's trial, in the folder that STRATAGEM_TRIAL names: metrics and a model.

    metrics.jsonl      {"epoch": 3, "loss": 0.41, "val_accuracy": 0.93}, one line per epoch
    model.safetensors, or model.keras; written when `fit` ends

Nothing is written if the variable is not set. A script without `fit` appends such lines itself.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: the environment variable with the folder of a trial
VARIABLE = "STRATAGEM_TRIAL"
METRICS = "metrics.jsonl"
#: the stem of a model's files
MODEL = "model"


def model_path(ending: str) -> Path | None:
    """Return the path for the trained model, if this process is a trial."""
    folder = os.environ.get(VARIABLE)
    return Path(folder, MODEL + ending) if folder else None


def record_epoch(epoch: int, logs: Mapping[str, Any]) -> None:
    """Append an epoch's line; numbers that are not finite become null."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    values = {name: _plain(value) for name, value in logs.items()}
    known = {name: _finite(n) for name, n in values.items() if isinstance(n, int | float)}
    line = json.dumps({"epoch": epoch + 1, **known}, allow_nan=False) + "\n"
    with open(Path(folder, METRICS), "ab", buffering=0) as file:
        file.write(line.encode())  # one call: readers see whole lines


def read_epochs(folder: Path) -> list[dict[str, float | None]]:
    """Return the lines so far without an unfinished last one; ValueError if one is malformed."""
    try:
        data = (folder / METRICS).read_bytes()
    except FileNotFoundError:
        return []
    return [_numbers(line) for line in data.split(b"\n")[:-1] if line.strip()]


def _numbers(line: bytes) -> dict[str, float | None]:
    try:
        found = json.loads(line)
        return {name: _finite(value) for name, value in found.items()}
    except (ValueError, TypeError, AttributeError):
        text = line[:80].decode(errors="replace")
        raise ValueError(f"{METRICS} has a line that is no JSON of numbers: {text}") from None


def _plain(value: Any) -> Any:
    """Convert a number of numpy's, or a tensor of one element, to a Python number."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
