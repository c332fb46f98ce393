"""Meetings of the models of custom loops, whose replicas may have gone apart (`sync=`); and
`torch.save` there, which all of them may call."""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from typing import Any

import torch

from stratagem.training.lossy_wire import Keeper
from stratagem.training.replica import Replica, current_replica

log = logging.getLogger("stratagem")

#: by replica: what has its models meet, in the same order on all replicas
_apart: weakref.WeakKeyDictionary[Replica, list[Keeper]] = weakref.WeakKeyDictionary()
_told: weakref.WeakSet[Replica] = weakref.WeakSet()


def add(replica: Replica, keeper: Keeper) -> None:
    """Add a prepared model."""
    _apart.setdefault(replica, []).append(keeper)


def remove(keeper: Keeper) -> None:
    """Remove a model that is prepared no more."""
    for keepers in _apart.values():
        if keeper in keepers:
            keepers.remove(keeper)


def forget(replica: Replica) -> None:
    """Forget the models of earlier calls of strategy.run."""
    _apart.pop(replica, None)
    _told.discard(replica)


def meet(replica: Replica) -> None:
    """Bring replicas together, whatever models they have prepared. Collective."""
    for keeper in _apart.get(replica, ()):
        keeper.meet()


def check_ended(replica: Replica) -> None:
    """A call is over: all must have sent the same. Collective where something may be under way."""
    for keeper in _apart.get(replica, ()):
        keeper.check_ended()


def tell_apart(replica: Replica, when: str) -> None:
    """Warn once that weights are read which only one replica has."""
    keepers = _apart.get(replica, ())
    made = next((keeper.made_with for keeper in keepers if keeper.apart), None)
    if made is not None and replica.is_chief and replica not in _told:
        _told.add(replica)
        log.warning(
            "%s while replicas are apart (%s), each with weights of its own: the loader was not "
            "read to its end. Call strategy.meet() on every replica first.",
            when,
            made,
        )


# --- `torch.save`, which every replica may call with the same path at once ------------------------
#
# Each replica writes a file of its own and renames it, so whoever comes last leaves a whole file.


_plain = torch.save


def save_whole_files() -> None:
    """Have `torch.save` write whole files from now on."""
    torch.save = _save


def _save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
    if not isinstance(f, str | os.PathLike) or _is_special(f):
        return _plain(obj, f, *args, **options)
    tell_apart(current_replica(), f"torch.save writes {os.fspath(f)}")
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
