"""The only holder of a shard is lost: the job goes back to its last checkpoint.

    ps 1 dies            its process alone is started again
    the other servers    forget everything, and serve anew in the same processes
    workers              meet the servers anew; the chief brings the checkpoint's values

So no server has anything of the time after the checkpoint, and nothing can count twice: everything
since then is computed again. Only for a training that keeps checkpoints (`TrainingPlan.resumes`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from stratagem.errors import ReplicaError
from stratagem.servers.server import Server
from stratagem.servers.training_plan import goes_back

log = logging.getLogger("stratagem")


def serve(make: Callable[[], Server]) -> None:
    """Serve until the job is done, anew where another server was lost; raises why it cannot be."""
    returning = False
    while True:
        server = make()
        server.returning = returning
        try:
            server.serve()
            return
        except ReplicaError as failure:
            if not goes_back(server.shard.plan, failure, returning=server.returning):
                raise
            returning = True  # until a plan says otherwise: one more may be lost before
            log.warning("%s serves anew: the job goes back to its last checkpoint", server.name)
