"""`fit`, as every process of a strategy runs it."""

from __future__ import annotations

from stratagem.frontends import replica_fit, server_fit
from stratagem.frontends.fit_job import Fit


def fit(job: Fit) -> None:
    """Train; the module of every replica, or worker, ends with the same values."""
    (replica_fit if job.settings.served is None else server_fit).fit(job)
