"""`fit` goes back to its last checkpoint in the processes that are left, where a server is lost."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from stratagem.errors import ReplicaLost, StratagemError
from stratagem.figures.recorder import event
from stratagem.frontends import fit_checkpoints
from stratagem.frontends.fit_job import Fit
from stratagem.state.checkpoint_folder import CheckpointFolder

log = logging.getLogger("stratagem")

#: how often a training goes back to the same checkpoint
IN_VAIN = 10


class ServerRecovery:
    """Puts one job to its last checkpoint, as `resume=True` does in another process."""

    def __init__(self, model: Any, job: Fit) -> None:
        self._model, self._job = model, job
        #: what lay in the folder before, if it is of another training
        self._before = None if job.resumed is not None else self._newest()
        self._last: Path | None = None
        self._in_vain = 0

    def _newest(self) -> Path | None:
        plan = self._job.checkpoints
        return None if plan is None else CheckpointFolder(plan.path, plan.keep).newest()

    def go_back(self, lost: BaseException) -> None:
        """Put all that a training begins with to what was saved; raises where there is nothing."""
        job, model = self._job, self._model
        who = lost.who if isinstance(lost, ReplicaLost) else "a ps"
        if not model.strategy.is_chief:
            log.warning("%s is lost; waiting for it, and for the chief to go back", who)
            return
        found = self._newest()
        if found is None or found == self._before:
            raise lost
        self._in_vain = self._in_vain + 1 if found == self._last else 0
        self._last = found
        if self._in_vain >= IN_VAIN:
            raise lost
        log.warning(
            "%s is lost, and a share of the parameters with it; the training waits until it is "
            "back, and then goes on from %s",
            who,
            found,
        )
        event("fault", str(lost), about=who)
        event("action", f"the training goes back to {found}")
        if job.callback_states is not None:
            job.callback_states.reset()
        job.resumed = fit_checkpoints.load(model, job)
        if job.resumed is None:
            raise StratagemError(f"{found} is there no more; start the job again.") from lost
        job.last_saved, job.terminated, model.stop_training = None, False, False
        job.callbacks.changes.mark()
