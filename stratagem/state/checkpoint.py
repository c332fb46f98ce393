"""Plain files: weights as safetensors, what is needed to go on beside them.

    model.safetensors      the module's state dict; loads with safetensors and torch alone
    model.state.pt         optimizer state and progress; torch.load(..., weights_only=True)

Both are written beside their final name and then moved there: a reader never sees half a file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stratagem.errors import UsageError


def paths(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The weights' file and the state's file for a name with or without its ending."""
    weights = Path(path)
    if weights.suffix != ".safetensors":
        weights = weights.with_name(weights.name + ".safetensors")
    return weights, weights.with_name(weights.name.removesuffix(".safetensors") + ".state.pt")


def save(
    path: str | os.PathLike[str], module: nn.Module, optimizer: Optimizer | None,
    progress: dict[str, Any],
) -> Path:  # fmt: skip
    """Write both files; returns the weights' path."""
    weights, state = paths(path)
    weights.parent.mkdir(parents=True, exist_ok=True)
    tensors = _state(module)
    extra = {"optimizer": optimizer.state_dict() if optimizer is not None else None, **progress}
    _whole(state, lambda target: torch.save(extra, target))
    _whole(weights, lambda target: save_file(tensors, str(target)))
    return weights


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Every entry in memory of its own: tied weights and views of one block are saved whole."""
    state = module.state_dict()
    for name, value in state.items():
        if is_lazy(value):
            raise UsageError(
                f"{name!r} has no shape yet (a lazy module); run one batch through the model "
                "before it is saved."
            )
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def _whole(path: Path, write: Callable[[Path], object]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.touch()
        rights = part.stat().st_mode  # those of any new file here; safetensors makes its own 0600
        write(part)
        if part.stat().st_mode != rights:
            part.chmod(stat.S_IMODE(rights))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load(
    path: str | os.PathLike[str], module: nn.Module, optimizer: Optimizer | None
) -> dict[str, Any]:
    """Read weights, and the optimizer's state if both sides have one; returns the progress."""
    weights, state = paths(path)
    if not weights.is_file():
        raise UsageError(f"there is no saved model at {weights}.")
    module.load_state_dict(load_file(str(weights)))
    if not state.is_file():
        return {}
    extra: dict[str, Any] = torch.load(state, map_location="cpu", weights_only=True)
    saved = extra.pop("optimizer", None)
    if optimizer is not None and saved is not None:
        optimizer.load_state_dict(saved)
    return extra
