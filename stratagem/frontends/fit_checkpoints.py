"""Checkpoints of a `fit` under way: when they are made, and how a training goes on from one.

A training that goes on runs `on_train_begin` and, in mid-epoch, `on_epoch_begin` of its callbacks
once more, since they may open files or set a sampler's epoch. Then everything is put to what was
saved: whatever these have done to the weights, to settings or to themselves.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from stratagem.data.passes import batch_size_of
from stratagem.frontends.callback_states import CallbackStates
from stratagem.frontends.fit_job import Fit, FitSide
from stratagem.state import checkpoint
from stratagem.state.checkpoint_folder import (
    CheckpointFolder,
    CheckpointWriter,
    load_newest,
)
from stratagem.state.optimizer_recipe import group_settings
from stratagem.training.checkpoint_agreement import CheckpointAgreement

log = logging.getLogger("stratagem")


def load(model: Any, job: Fit, *, resume: bool = True) -> dict[str, Any] | None:
    """As the chief: put model, optimizer and the order of the data to the newest checkpoint; return
    the rest of it, None without one."""
    if not resume or job.checkpoints is None:
        return None
    size = batch_size_of(job.source)
    found = load_newest(job.checkpoints, model.module, model.optimizer, "fit", size)
    if found is not None and found["seed"] is not None:
        job.source.seed = int(found["seed"])
    return found


class FitCheckpoints:
    """The checkpoints of one training, on every process that runs the loop."""

    def __init__(self, job: Fit, side: FitSide) -> None:
        self.job, self.side = job, side
        self._resumed = job.resumed
        self._position = _position(job)
        if job.saves or job.journal is not None:
            self._position = side.agree(self._position, chiefs=True)[0]
        self._is_chief = side.is_chief
        self.step = self._position["step"]
        plan = job.checkpoints if job.saves and self._is_chief else None
        termination = None if job.journal is None else job.journal.termination
        self._agreement = CheckpointAgreement(plan, self.step, side.agree, termination)
        #: with servers: the number of batches of all epochs before this one
        self._before = self.step - self._position["batch"]
        self._last: tuple[int, bool, bool] | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._settings: list[dict[str, Any]] = []

    def __enter__(self) -> FitCheckpoints:
        job, plan = self.job, self.job.checkpoints
        if self._resumed is not None and self._resumed["callbacks"] is not None:
            self._keep()
        if not job.saves:
            return self
        self._agreement.termination.open()
        if self._is_chief:
            assert plan is not None
            self._writer = CheckpointWriter(CheckpointFolder(plan.path, plan.keep))
            self._writer.open(successor=job.journal is not None)
            schedule = self._agreement.schedule
            assert schedule is not None
            if job.last_saved is None:
                job.last_saved = (self.step, time.monotonic())
            schedule.saved(*job.last_saved)
            if (segments := self.side.segments) is not None:
                # each look costs a moment in which workers wait
                schedule.pace = plan.seconds or math.inf
                self._agreement.next = schedule.next()
                segments.ends, segments.rest = self._ends, self._rest
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.job.saves:
            return
        if self.job.journal is None:  # else the call may go on, and the signal comes meanwhile
            self._agreement.termination.__exit__(kind, error, trace)
        if self._is_chief:
            try:
                self._writer.close()
            except Exception:  # must not replace the user's own exception
                if error is None:
                    raise
                log.exception("besides, the last checkpoint was not written")

    # --- going on -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Note the state of the callbacks once they have begun, before the first `listen`."""
        job = self.job
        kept = job.saves or job.succession is not None
        if job.callback_states is None:  # once, also where the training is begun again
            job.callback_states = CallbackStates(job.callbacks.callbacks if kept else ())
        self._states = job.callback_states

    def epochs(self) -> Iterable[int]:
        """The epochs that are left; called after the first `listen`."""
        job = self.job
        position, epochs = self._position, self.job.epochs
        if not position["resumes"]:
            if job.journal is not None and epochs:  # a new chief goes on from here
                job.journal.enter(epochs.start, 0, job.source.journal.begun)
            if job.goes_back:  # where a server may be lost before the first epoch is over
                self._save(epochs.start, 0, stopped=False)
            return epochs
        if not position["batch"]:
            self._go_on()
        return range(0) if position["stopped"] else range(position["epoch"], epochs.stop)

    def enter(self, epoch: int) -> int:
        """Enter an epoch, after its callbacks have begun; returns the number of its first batch."""
        position = self._position
        if not position["resumes"] or epoch != position["epoch"] or not position["batch"]:
            return 0
        self._go_on()
        return int(position["batch"])

    def _keep(self) -> None:
        """On the chief: keep what was loaded, which callbacks may change as they begin."""
        module, groups = self.job.module, self.job.optimizer.param_groups
        tensors = [*module.parameters(), *module.buffers()]
        self._kept = [(t, t.detach().to("cpu", copy=True)) for t in tensors]
        self._settings = [group_settings(group) for group in groups]

    def _go_on(self) -> None:
        """Restore the saved state on all replicas. Collective."""
        resumed = self._resumed
        if resumed is not None and resumed["callbacks"] is not None:
            with torch.no_grad():
                for tensor, value in self._kept:
                    if not torch.equal(tensor.detach().cpu(), value):
                        tensor.copy_(value)
            groups = self.job.optimizer.param_groups
            for group, settings in zip(groups, self._settings, strict=True):
                group.update(settings)
            self._states.load(resumed["callbacks"])
            self._kept = []
        self.side.listen()
        self.side.go_on(resumed)

    # --- saving -------------------------------------------------------------------------------

    def after_batch(self, epoch: int, batch: int) -> None:
        """After a batch: save if a checkpoint is due, and end the training after SIGTERM."""
        if self.side.segments is not None:
            return
        self.step += 1
        if not self.job.saves or self.step < self._agreement.next:
            return
        if self.side.settled:
            self._look(epoch, batch + 1)
        else:
            self._agreement.next = self.step + 1

    def _ends(self, dealt: int) -> bool:
        """Whether dealing pauses after this batch, so that a checkpoint can be saved."""
        agreement = self._agreement
        return agreement.termination.asked or self._before + dealt >= agreement.next

    def _rest(self, epoch: int, batch: int) -> bool:
        """After a segment: save if a checkpoint is due; returns whether to end."""
        self.step = self._before + batch
        self._look(epoch, batch)
        return self.job.terminated

    def _look(self, epoch: int, batch: int) -> None:
        if self._due() or self.job.terminated:
            self._save(epoch, batch, stopped=False)

    def after_epoch(self, epoch: int, stopped: bool) -> None:
        """After an epoch, its validation and its callbacks: save if a checkpoint is due."""
        if not self.job.saves:
            return
        if self.side.segments is not None:
            self.step = self._before = self._before + self.side.segments.dealt
        saves = self._due(end_of_epoch=True) or self.job.terminated
        if saves:
            self._save(epoch + 1, 0, stopped=stopped)
        self._last = (epoch + 1, stopped, saves)

    def finish(self) -> None:
        """Save the last checkpoint at the end of the training."""
        if self.job.saves and not self.job.terminated and self._last is not None:
            epoch, stopped, saved = self._last
            if not saved:
                self._save(epoch, 0, stopped=stopped)

    def _due(self, *, end_of_epoch: bool = False) -> bool:
        """Agree whether a checkpoint is due, and whether to end. Collective."""
        due = self._agreement.due(self.step, end_of_epoch=end_of_epoch)
        if due and self._is_chief:
            self.job.last_saved = (self.step, time.monotonic())
        self.job.terminated = self._agreement.terminated
        return due

    def _save(self, epoch: int, batch: int, *, stopped: bool) -> None:
        """Copy the whole state and write it in a thread. Collective."""
        position = {"epoch": epoch, "batch": batch, "step": self.step, "stopped": stopped}
        found = self.side.progress()
        if found is None:
            return
        job = self.job
        progress = {
            "resume": {
                **position,
                **found,
                "pass": job.source.journal.noted(batch),
                "batch_size": batch_size_of(job.source),
                "callbacks": self._states.saved(),
            },
            "history": {name: list(v) for name, v in job.callbacks.model.history.history.items()},
        }
        taken = checkpoint.snapshot(job.module, job.optimizer, progress, copy=True)
        self._writer.save(taken, position)


def _position(job: Fit) -> dict[str, Any]:
    """The position where the training begins; only the chief's counts."""
    names = ("epoch", "batch", "step", "stopped")
    if job.resumed is None:
        return {"resumes": False, **dict.fromkeys(names, 0)}
    return {"resumes": True, **{name: job.resumed[name] for name in names}}
