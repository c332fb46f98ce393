"""`torch.save` in a custom loop, where every replica may write to the same path at once.

Each replica writes a file of its own and renames it, so whoever comes last leaves a whole file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from stratagem.training import meetings
from stratagem.training.replica import current_replica

_plain = torch.save


def save_whole_files() -> None:
    """Have `torch.save` write whole files from now on."""
    torch.save = _save


def _save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
    if not isinstance(f, str | os.PathLike) or _is_special(f):
        return _plain(obj, f, *args, **options)
    meetings.tell_apart(current_replica(), f"torch.save writes {os.fspath(f)}")
    path = Path(os.path.realpath(f))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        _plain(obj, part, *args, **options)
        if path.exists():
            os.chmod(part, path.stat().st_mode)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return None


def _is_special(path: str | os.PathLike[str]) -> bool:
    """Whether a path is no plain file but a device, say, which cannot be replaced."""
    return os.path.exists(path) and not os.path.isfile(path)
