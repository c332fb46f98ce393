"""Checkpoints as plain files: weights in safetensors, and the state to go on from.

    model.safetensors      the module's state dict; loads with safetensors and torch alone
    model.state.pt         optimizer state, progress, and modules' extra state (get_extra_state);
                           torch.load(..., weights_only=True)

Both are replaced together (state/file_pair.py): a process that ends while it saves leaves the old
checkpoint or the new one. A number in both (safetensors' metadata, "pair" of the state) shows that
they belong together.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.serialization import get_unsafe_globals_in_checkpoint

from stratagem.errors import UsageError
from stratagem.figures.recorder import event
from stratagem.state.file_pair import FilePair, told

log = logging.getLogger("stratagem")

_WHOLE_COPY = "Put a whole copy in its place"
_STATE_REMEDY = f"{_WHOLE_COPY}, or move it away to load the weights alone"
_ROUNDS = 5  # interrupted reads, before saves are kept out
_PLAIN_TYPES = (bool, int, float, complex, str, bytes)


def paths(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Return the weights file and the state file for a name with or without its suffix."""
    weights = Path(path)
    if weights.suffix != ".safetensors":
        weights = weights.with_name(weights.name + ".safetensors")
    return weights, weights.with_name(weights.name.removesuffix(".safetensors") + ".state.pt")


def _pair(path: str | os.PathLike[str]) -> FilePair:
    return FilePair(*paths(path), _number)


def save(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | None,
    progress: dict[str, Any],
) -> Path:
    """Write both files; return the path of the weights."""
    files = _pair(path)
    files.weights.parent.mkdir(parents=True, exist_ok=True)
    taken = snapshot(module, optimizer, progress)
    left = "What was saved there before is as it was."
    with told(files.weights.parent, f"{files.weights} could not be saved", left):
        files.replace(taken.write)
    event("save", str(files.weights))
    return files.weights


@dataclass(frozen=True)
class CheckpointCopy:
    """The content of one checkpoint: the module's tensors, and everything else."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]

    def write(self, weights: Path, state: Path, number: str) -> None:
        """Write both files, with the number that pairs them."""
        with state.open("wb") as out:  # a full disk is an error of Python's file, not of torch
            torch.save({**self.state, "pair": number}, out)
        if unreadable := get_unsafe_globals_in_checkpoint(state):
            raise UsageError(
                f"the training's state holds {', '.join(unreadable)}, which cannot be read again "
                "without running code from the file; keep numbers, text, tensors, and lists, "
                "tuples or dicts of them in the history, the optimizer and the callbacks."
            )
        save_file(self.tensors, str(weights), {"pair": number})


def snapshot(
    module: nn.Module, optimizer: Optimizer | None, progress: dict[str, Any], *, copy: bool = False
) -> CheckpointCopy:
    """Return the content of a checkpoint; with `copy`, later training does not change it."""
    tensors, others = _state(module)
    saved = _plain(optimizer.state_dict(), copy) if optimizer is not None else None
    state = {"optimizer": saved, **_plain(progress, copy=False)}
    if optimizer is not None:
        state["optimizer_type"] = type(optimizer).__name__
    if others:
        state["extra_state"] = _plain(others, copy)
    return CheckpointCopy(tensors, state)


def _plain(tree: Any, copy: bool) -> Any:
    """Replace numpy's numbers and arrays by Python's numbers and tensors: torch would need code
    from the file to read them."""
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biufc":
        return torch.from_numpy(np.array(tree))
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True) if copy else tree
    if type(tree) is dict:
        return {key: _plain(value, copy) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_plain(value, copy) for value in tree)
    return tree


def _state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a module's tensors and extra state (get_extra_state).

    Every tensor is a contiguous copy: tied weights, views of one block and other memory formats
    (channels_last, w.t()) are saved whole.
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
    """Refuse values that could only be read again by running code from the file."""
    if type(tree) in (list, tuple, dict):
        parts: Any = [*tree, *tree.values()] if isinstance(tree, dict) else tree
        for part in parts:
            _check_plain(name, part)
    elif tree is not None and not isinstance(tree, Tensor) and type(tree) not in _PLAIN_TYPES:
        raise UsageError(
            f"{name!r} holds a {type(tree).__name__}, which cannot be saved; have get_extra_state "
            "return plain values only: numbers, text, tensors, and lists, tuples or dicts of them."
        )


def load(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | None,
    *,
    patience: float = 0.0,
) -> dict[str, Any]:
    """Read weights, and the optimizer's state if both sides have one; return the progress.

    `patience`: seconds to wait where another machine's files arrive one by one.
    """
    files = _pair(path)
    if not files.weights.is_file():
        raise UsageError(f"there is no saved model at {files.weights}.")
    tensors, extra = _read(files, patience)
    found = {**tensors, **extra.pop("extra_state", {})}
    if not extra:
        _check_complete(module, found, files.state)
    kind, saved = extra.pop("optimizer_type", None), extra.pop("optimizer", None)
    if optimizer is not None and saved is not None:
        _check_optimizer(optimizer, kind, files.state)
        _load_optimizer(optimizer, saved, files.state)  # first: if it fails, weights are unchanged
    module.load_state_dict(found)
    return extra


def _read(files: FilePair, patience: float) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read both files of one save, even while others replace them."""
    until, rounds = time.monotonic() + patience, 0
    while True:
        with nullcontext() if rounds < _ROUNDS else files.undisturbed():
            found = _read_once(files)
        if found is None:
            rounds += 1
            if rounds == _ROUNDS:
                log.info("%s is replaced while it is read; keeping others out", files.weights)
            continue
        number, tensors, extra = found
        if extra.pop("pair", number) == number:  # a state of other programs has none
            return tensors, extra
        if time.monotonic() >= until:
            raise UsageError(
                f"{files.weights.name} and {files.state.name} were not saved together. Take both "
                f"from one copy (where they were saved there may be a folder *.part-{number} with "
                f"this state), or move {files.state.name} away to load the weights alone."
            )
        time.sleep(0.05)


def _read_once(
    files: FilePair,
) -> tuple[str | None, dict[str, Tensor], dict[str, Any]] | None:
    """Read the weights' number and both files; None if they were replaced meanwhile."""
    number, damage = _number(files.weights), None
    try:
        tensors, extra = _read_weights(files.weights), _read_state(files, number)
    except FileNotFoundError:
        return None  # the state was renamed just now
    except UsageError as problem:
        damage = problem
    if _number(files.weights) != number:
        return None  # perhaps of two saves: safetensors opens a path twice
    if damage is not None:
        raise damage
    return number, tensors, extra


def _read_weights(path: Path) -> dict[str, Tensor]:
    with _named(path, _WHOLE_COPY):
        return load_file(path)


def _read_state(files: FilePair, number: str | None) -> dict[str, Any]:
    path = files.state_of(number)
    if path == files.state and not path.is_file():
        return {}
    with _named(path, _STATE_REMEDY):
        extra: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        parts = [extra, extra.get("extra_state") or {}, extra.get("optimizer") or {}]
        if not all(
            isinstance(part, dict) and all(isinstance(key, str) for key in part) for part in parts
        ):
            raise TypeError("not what save writes")
    return extra


def _number(path: Path) -> str | None:
    """Return the number of the save that wrote these weights; None for other programs'."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return (file.metadata() or {}).get("pair")
    except SafetensorError:
        return None


@contextmanager
def _named(path: Path, remedy: str) -> Iterator[None]:
    """Name a file that cannot be read. Torch's message is left out: it advises weights_only=False,
    which runs code from the file."""
    try:
        yield
    except (FileNotFoundError, PermissionError, UsageError):
        raise
    except Exception as problem:  # a damaged file can raise anything
        log.debug("%s cannot be read", path, exc_info=problem)
        raise UsageError(
            f"{path} is damaged, or is no file that `save` wrote; nothing in it was run. {remedy}."
        ) from None


def _check_optimizer(optimizer: Optimizer, kind: str | None, state: Path) -> None:
    """Refuse the state of another class of optimizer. Files of older versions do not name one."""
    own = type(optimizer).__name__
    if kind not in (None, own):
        raise UsageError(
            f"{state.name} holds the state of {kind}, and the model is compiled with {own}; "
            f"compile it with {kind}, or load before compile, which reads the weights alone."
        )


def _load_optimizer(optimizer: Optimizer, saved: dict[str, Any], state: Path) -> None:
    with _named(state, _STATE_REMEDY):
        try:
            optimizer.load_state_dict(saved)
        except ValueError as problem:  # torch's error for parameter groups of another size
            raise UsageError(
                f"{state} does not fit the model's optimizer ({problem}): it was saved with other "
                "parameters, or other groups of them. Load before compile reads the weights alone, "
                "and says what differs in them."
            ) from None


def _check_complete(module: nn.Module, found: dict[str, Any], state: Path) -> None:
    """Refuse to load without the state file a module that keeps extra state there."""
    for name in module.state_dict():
        if name.rpartition(".")[2] == "_extra_state" and name not in found:
            raise UsageError(
                f"{name!r} is kept in {state.name}, which is not there; put it beside the weights."
            )
