"""What is said while tasks of a cluster wait for each other."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from stratagem.cluster.patience import Patience, listing
from stratagem.cluster.trouble import Member
from stratagem.errors import ReplicaMissing

log = logging.getLogger("stratagem")

FIRST = (2.0, 5.0)


def say_missing(missing: Sequence[Member], patience: Patience) -> None:
    """Log who is being waited for, when it is time to."""
    if missing and patience.due():
        log.warning("waiting for %s, %.0f s", _places(missing), patience.waited)


def missing_error(missing: Sequence[Member], waited: float, why: str = "") -> ReplicaMissing:
    """Return the error that ends the wait."""
    seen = f" (last: {why})" if why else ""
    return ReplicaMissing(
        f"{_places(missing)} never came, in {waited:.0f} s{seen}. Start it there with the same "
        "cluster; if it runs, a firewall may be between: `stratagem check` on each machine says "
        "which port is shut.",
        missing[0].name,
    )


def _places(members: Sequence[Member]) -> str:
    return listing([f"{member.name} at {member.where}" for member in members])
