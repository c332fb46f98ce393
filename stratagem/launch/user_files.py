"""Files of the user's that commands read: arrays, and functions."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any

from stratagem.errors import UsageError


def arrays(file: Path) -> tuple[Any, Any]:
    """The arrays x and y of an .npz file."""
    import numpy as np

    try:
        with np.load(file, allow_pickle=False) as found:
            return found["x"], found["y"]
    except (OSError, ValueError, KeyError, AttributeError, zipfile.BadZipFile) as problem:
        raise UsageError(
            f"{file} is no file of arrays x and y ({problem}); write it by "
            "numpy.savez(file, x=..., y=...)"
        ) from None


def function(where: str) -> Any:
    """The function that `--build FILE.py:NAME` names."""
    file, _, name = where.rpartition(":")
    if not Path(file).is_file():
        raise UsageError(f"--build {where}: there is no file {file!r}; as in --build net.py:build")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise UsageError(f"--build {where}: {file} has no {name!r}")
    return getattr(module, name)
