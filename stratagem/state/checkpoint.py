"""Plain files: weights as safetensors, what is needed to go on beside them.

    model.safetensors      the module's state dict; loads with safetensors and torch alone
    model.state.pt         optimizer state, progress, and what modules keep beside tensors
                           (get_extra_state); torch.load(..., weights_only=True)

Both are written beside their final name and then moved there: a reader never sees half a file. A
number that both have (safetensors' metadata, "pair" of the state) tells that they belong together.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stratagem.errors import UsageError

_PLAIN = (bool, int, float, complex, str, bytes)


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
    tensors, others = _state(module)
    saved = _plain_numbers(optimizer.state_dict()) if optimizer is not None else None
    pair = secrets.token_hex(8)
    extra = {"optimizer": saved, **progress, "pair": pair}
    if optimizer is not None:
        extra["optimizer_type"] = type(optimizer).__name__
    if others:
        extra["extra_state"] = others
    with (
        _whole(state, lambda target: torch.save(extra, target)),
        _whole(weights, lambda target: save_file(tensors, str(target), {"pair": pair})),
    ):
        pass  # both are moved when both are written
    return weights


def _plain_numbers(tree: Any) -> Any:
    """The same with Python's numbers for numpy's, which torch reads by code from the file only."""
    if isinstance(tree, np.generic):
        return tree.item()
    if type(tree) is dict:
        return {key: _plain_numbers(value) for key, value in tree.items()}
    return type(tree)(map(_plain_numbers, tree)) if type(tree) in (list, tuple) else tree


def _state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and what modules keep beside them (get_extra_state).

    Every tensor is in memory of its own, one row after the other: tied weights, views of one block
    and weights of another layout (channels_last, w.t()) are saved whole.
    """
    tensors: dict[str, Tensor] = {}
    others: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            _check_plain(name, value)
            others[name] = value
        elif is_lazy(value):
            raise UsageError(
                f"{name!r} has no shape yet (a lazy module); run one batch through the model "
                "before it is saved."
            )
        else:
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors, others


def _check_plain(name: str, tree: object) -> None:
    """Refuse what could only be read again by running code from the file."""
    if type(tree) in (list, tuple, dict):
        parts: Any = [*tree, *tree.values()] if isinstance(tree, dict) else tree
        for part in parts:
            _check_plain(name, part)
    elif tree is not None and not isinstance(tree, Tensor) and type(tree) not in _PLAIN:
        raise UsageError(
            f"{name!r} holds a {type(tree).__name__}, which cannot be saved; have get_extra_state "
            "return plain values only: numbers, text, tensors, and lists, tuples or dicts of them."
        )


@contextmanager
def _whole(path: Path, write: Callable[[Path], object]) -> Iterator[None]:
    """Write a file beside its name, and move it there at the end."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.touch()
        rights = part.stat().st_mode  # those of any new file here; safetensors makes its own 0600
        write(part)
        if part.stat().st_mode != rights:
            part.chmod(stat.S_IMODE(rights))
        yield
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load(
    path: str | os.PathLike[str], module: nn.Module, optimizer: Optimizer | None,
    *, patience: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Read weights, and the optimizer's state if both sides have one; returns the progress.

    `patience`: how many seconds to wait where somebody else has just written one of two files.
    """
    weights, state = paths(path)
    if not weights.is_file():
        raise UsageError(f"there is no saved model at {weights}.")
    until = time.monotonic() + patience
    while (pair := _read_pair(weights, state)) is None:
        if time.monotonic() >= until:
            raise UsageError(
                f"{weights.name} and {state.name} were not saved together: whoever saved them last "
                f"was ended between the two. Take both from one copy, or move {state.name} away to "
                "load the weights alone."
            )
        time.sleep(0.05)
    tensors, extra = pair
    found = {**tensors, **extra.pop("extra_state", {})}
    if not state.is_file():
        _check_complete(module, found, state)
    kind, saved = extra.pop("optimizer_type", None), extra.pop("optimizer", None)
    if optimizer is not None and saved is not None:
        _check_optimizer(optimizer, kind, state)
    module.load_state_dict(found)
    if optimizer is not None and saved is not None:
        optimizer.load_state_dict(saved)
    return extra


def _read_pair(weights: Path, state: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Both files; None if they are of two savings. Those of older versions, or of others, have no
    number."""
    extra: dict[str, Any] = {}
    if state.is_file():
        extra = torch.load(state, map_location="cpu", weights_only=True)
    pair = extra.pop("pair", None)
    with safe_open(str(weights), framework="pt") as file:
        mine = (file.metadata() or {}).get("pair")
        if mine is not None and pair is not None and mine != pair:
            return None
        return {name: file.get_tensor(name) for name in file.keys()}, extra  # noqa: SIM118


def _check_optimizer(optimizer: Optimizer, kind: str | None, state: Path) -> None:
    """Another optimizer would take over settings that mean nothing to it, or something else. Files
    of older versions do not say whose state they have."""
    own = type(optimizer).__name__
    if kind not in (None, own):
        raise UsageError(
            f"{state.name} holds the state of {kind}, and the model is compiled with {own}; "
            f"compile it with {kind}, or load before compile, which reads the weights alone."
        )


def _check_complete(module: nn.Module, found: dict[str, Any], state: Path) -> None:
    """Without the state's file there are weights, and none of what modules keep beside them."""
    for name in module.state_dict():
        if name.rpartition(".")[2] == "_extra_state" and name not in found:
            raise UsageError(
                f"{name!r} is kept in {state.name}, which is not there; put it beside the weights."
            )
