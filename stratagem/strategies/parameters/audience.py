"""The evaluator: takes no part in the training, and wants to know when it is over."""

from __future__ import annotations

import os

from stratagem.cluster.handshake import job_secret
from stratagem.cluster.spec import Place
from stratagem.strategies.agreement import Patience
from stratagem.strategies.parameters.reach import reach


class Audience:
    """A connection to the lead that lasts as long as the job."""

    def __init__(self, place: Place, patience: Patience) -> None:
        spec = place.spec
        (self._connection,) = reach(
            [("ps 0", spec.jobs["ps"][0])], job_secret(os.environ, spec.to_json()),
            {"hello": "audience", "name": str(place.task)}, patience.arrive,
        )  # fmt: skip

    def over(self) -> bool:
        """Whether the job has ended."""
        return self._connection.readable()

    def close(self) -> None:
        self._connection.close()
