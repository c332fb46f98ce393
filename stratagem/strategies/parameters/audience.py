"""The evaluator: takes no part in the training, and wants to know when it is over.

    Audience    its connection to the job
    Box         its team: one replica, which is nobody's chief
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from stratagem.cluster.handshake import job_secret
from stratagem.cluster.spec import Place
from stratagem.strategies.agreement import Patience
from stratagem.strategies.parameters.reach import reach
from stratagem.strategies.replica import Replica
from stratagem.strategies.settings import Settings
from stratagem.strategies.team import Team


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


@dataclass(eq=False)
class Onlooker(Replica):
    """The evaluator's replica: whoever asks before writing a checkpoint is told not to."""

    @property
    def is_chief(self) -> bool:
        return False


class Box(Team):
    """One device that evaluates."""

    def __init__(self, device: str, name: str, patience: Patience) -> None:
        super().__init__((device,), Settings(), None, patience)
        self._name = name

    def _start(self) -> Replica:
        alone = super()._start()
        replica = Onlooker(
            0, 1, alone.device, self._name, alone.collective, alone.membership, alone.connect,
            ops=alone.ops,
        )  # fmt: skip
        self._become(replica)
        return replica
