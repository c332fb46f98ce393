"""Custom loops with `sync=`: meetings of the prepared models, and `torch.save` on all replicas."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from stratagem.training.replica import Replica, current_replica

log = logging.getLogger("stratagem")


def meet(replica: Replica) -> None:
    """Have all prepared models of a replica meet those of the other replicas. Collective."""
    for keeper in replica.loop.keepers:
        keeper.meet()


def check_ended(replica: Replica) -> None:
    """Check, at the end of a call, that all replicas have sent the same. Collective where
    something may be under way."""
    for keeper in replica.loop.keepers:
        keeper.check_ended()


def warn_apart(replica: Replica, when: str) -> None:
    """Warn once that weights are read while each replica has its own."""
    loop = replica.loop
    made = next((keeper.made_with for keeper in loop.keepers if keeper.apart), None)
    if made is not None and replica.is_chief and "apart" not in loop.warned:
        loop.warned.add("apart")
        log.warning(
            "%s while replicas are apart (%s), each with weights of its own: the loader was not "
            "read to its end. Call strategy.meet() on every replica first.",
            when,
            made,
        )


# --- `torch.save`, which every replica may call with the same path at once ------------------------
#
# Each replica writes a file of its own and renames it, so that the last one leaves a whole file.


_plain = torch.save


def save_whole_files() -> None:
    """Have `torch.save` write whole files from now on."""
    torch.save = _save


def _save(obj: Any, f: Any, *args: Any, **options: Any) -> None:
    if not isinstance(f, str | os.PathLike) or _is_special(f):
        return _plain(obj, f, *args, **options)
    warn_apart(current_replica(), f"torch.save writes {os.fspath(f)}")
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
    """Whether a path is no plain file but, say, a device, which cannot be replaced."""
    return os.path.exists(path) and not os.path.isfile(path)
