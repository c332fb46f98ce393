"""The evaluator task, which takes no part in the training and learns when it is over."""

from __future__ import annotations

from stratagem.cluster.failure import Member
from stratagem.cluster.handshake import secret_for
from stratagem.cluster.spec import Place
from stratagem.training.agreement import Patience
from stratagem.training.replica import Replica
from stratagem.training.replica_group import ReplicaGroup
from stratagem.training.settings import Settings
from stratagem.wire.tcp import connect_all


class EvaluatorLink:
    """A connection to the coordinator that lasts as long as the job."""

    def __init__(self, place: Place, patience: Patience, *, insecure: bool = False) -> None:
        spec = place.spec
        secret = secret_for(spec, spec.jobs["ps"], insecure=insecure)
        hello = {"hello": "evaluator", "name": str(place.task)}
        self._target = [Member("ps 0", spec.jobs["ps"][0])], secret, hello, patience.arrive
        (self._connection,) = connect_all(*self._target, answers=False)

    def over(self) -> bool:
        """Return whether the job has ended; going back to a checkpoint is no end."""
        while self._connection.readable():
            try:
                frame = self._connection.receive()
            except OSError:
                return True
            if frame is None or "again" not in frame.header:
                return True
            self._connection.close()
            (self._connection,) = connect_all(*self._target, answers=False)
        return False

    def close(self) -> None:
        self._connection.close()


class EvaluatorDevice(ReplicaGroup):
    """One device that evaluates; it is not the chief and writes no checkpoint."""

    def __init__(self, device: str, name: str, patience: Patience) -> None:
        super().__init__((device,), Settings(), None, patience)
        self._name = name

    def _start(self) -> Replica:
        replica = super()._start()
        replica.name, replica.with_chief = self._name, False
        self._become(replica)
        return replica
