"""Device names: the book's spellings and torch's, checked against what is here."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from stratagem.errors import DeviceError

_NAME = re.compile(
    r"^(?:/?job:[^/]+)?(?:/?replica:\d+)?(?:/?task:\d+)?/?(?:device:)?"
    r"(?P<kind>[a-z]+)(?::(?P<index>\d+))?$",
    re.IGNORECASE,
)
_KINDS = {"gpu": "cuda", "cuda": "cuda", "cpu": "cpu", "mps": "mps"}


def present() -> list[str]:
    """The devices that a strategy takes by itself: every GPU, else the CPU."""
    if torch.cuda.is_available():
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        return ["mps:0"]
    return ["cpu:0"]


def canonical(name: str | torch.device) -> str:
    """`"/gpu:0"`, `"GPU:0"`, `"/device:GPU:0"` and `torch.device("cuda", 0)` are all `cuda:0`."""
    match = _NAME.match(str(name).strip())
    kind = _KINDS.get(match["kind"].lower()) if match else None
    if match is None or kind is None:
        raise DeviceError(
            f"{str(name)!r} is not a device; present here: {_listing()}. "
            'Write "/gpu:0", "cuda:0" or "cpu:0".'
        )
    return f"{kind}:{int(match['index'] or 0)}"


def resolve(names: Iterable[str | torch.device] | str | None) -> tuple[str, ...]:
    """The devices asked for, each present and none twice; None means all that are here."""
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
    return torch.device("cpu") if device.startswith("cpu") else torch.device(device)


def identity(device: str) -> str:
    """What is behind a name on this host: two tasks may both call different GPUs `cuda:0`."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_properties(place(device)).uuid)
    return device


def _is_present(device: str) -> bool:
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return True
    if kind == "mps":
        return torch.backends.mps.is_available() and index == "0"
    return torch.cuda.is_available() and int(index) < torch.cuda.device_count()


def _listing() -> str:
    names = [name for name in present() if not name.startswith("cpu")]
    return ", ".join([*names, "cpu:0, cpu:1, ... (as many CPU replicas as you like)"])
