"""`fit` with parameter servers.

chief            runs the loop and the callbacks, deals tickets, and works on some of them
other workers    take tickets, compute and push gradients until the chief ends the training
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable
from stratagem.figures.meter import METER
from stratagem.frontends.fit_job import Fit, Segments
from stratagem.frontends.loop import FitLoop
from stratagem.frontends.replica_progress import gathered_from_workers, go_on_with_servers
from stratagem.frontends.row_check import RowCheck
from stratagem.frontends.server_steps import BatchScheduler, Grouped, Pushed, assist, lead
from stratagem.rules.stats import (
    Details,
    EpochStats,
    enter_details,
    numbered_details,
    portable_details,
)
from stratagem.servers.client import Assignment, EpochOver, FitOver
from stratagem.servers.session import Session
from stratagem.servers.task_main import current_worker, in_group
from stratagem.servers.training_plan import Clip
from stratagem.state.change_tracker import KeptState
from stratagem.training.replica import Replica, alone, current_replica
from stratagem.training.termination import Termination


def fit(job: Fit) -> None:
    """Train; every worker's module ends with the same values."""
    replica = current_replica()
    grouped = in_group(replica)
    if grouped and not replica.leads:
        assist(job, replica)
        return
    job.module.to(replica.device)
    job.recipe.metrics.to(replica.device)
    served = job.settings.served
    assert served is not None
    session = Session(
        current_worker(),
        job.module,
        job.optimizer,
        served,
        wire=job.settings.wire,
        clip=Clip(job.recipe.clip_norm, job.recipe.clip_value),
        told=job.source.seed,
        look=("fit", job.look()) if job.by_itself else None,
        resumes=job.goes_back,
    )
    if session.over is not None:
        _take_history(job, session, session.over)
        return
    job.source.seed = session.told
    # if the first device cancelled a ticket, the other ones would wait for it in a collective
    session.cancels = session.cancels and not grouped
    step = lead(job, session, replica) if grouped else Pushed(job, session, replica)
    if session.worker.is_chief:
        _lead(ChiefSide(job, session, replica, step))
    else:
        with Termination() as termination:
            WorkerSide(job, session, replica, step).follow()
        job.terminated = job.terminated or (job.saves and termination.asked)
    step.close()


def _lead(side: ChiefSide) -> None:
    """Run the loop as the chief, and end the training of all workers."""
    job = side.job
    model = job.callbacks.model
    model.bring_home = side.bring_home
    try:
        FitLoop(job, side).train()
        side.end()
    finally:
        model.bring_home = None
        side.state.end()
    if not job.terminated:
        job.callbacks.call("train_end")


def _take_history(job: Fit, session: Session, over: FitOver) -> None:
    """Take over the history that the chief sent at the end of the training."""
    history, job.terminated = session.take_last(over) or ([], False)
    model = job.callbacks.model
    if history and model is not None:  # only a worker that runs the script has a history
        for epoch, logs, details in history:
            enter_details(model.history.history, numbered_details(details))
            job.callbacks.call("epoch_end", epoch, logs)


class WorkerSide:
    """The loop of a worker: computes gradients for tickets until the epoch or the fit is over."""

    def __init__(
        self, job: Fit, session: Session, replica: Replica, step: Pushed | Grouped
    ) -> None:
        self.job, self.session, self.replica, self.step = job, session, replica, step
        self.worker = session.worker
        self.scheduler = BatchScheduler(job.source, session.plan.parts)
        grouped = isinstance(step, Grouped)
        self._check = RowCheck(job.module, job.recipe, replica, "fit")
        several = session.plan.parts > 1 or grouped
        self._check.open = job.recipe.check and several and self.worker.is_chief
        #: how many gradients of this epoch the servers accepted
        self._counted = 0
        #: the current epoch, and the last one whose averaged statistics have arrived
        self._epoch, self._settled = 0, -1
        self._begin()

    def _begin(self) -> None:
        """Begin an epoch or a segment of one."""
        self.job.module.train()
        self.step.begin()
        self._counted = 0

    def follow(self) -> None:
        """As a worker other than the chief: work until the chief ends the fit."""
        while True:
            work = self.worker.next(wait=False)
            if isinstance(work, FitOver):
                self.session.end()
                _take_history(self.job, self.session, work)
                return
            if isinstance(work, EpochOver):
                self._report(void=work.void)
                self._take_statistics(work.epoch)
                self._begin()
            else:
                self.take(work)

    def take(self, work: Assignment) -> None:
        """Compute and push the gradient of one ticket."""
        if work.epoch != self._epoch:
            if self._epoch and not self.worker.is_chief:
                self._begin()  # this worker was absent at the end of the last epoch
            self._epoch = work.epoch
            if not self.worker.is_chief and work.epoch > self._settled + 1:
                self._take_statistics(work.epoch - 1)
        self.step.count()
        with METER.loading():
            portion = self.scheduler.portion(work, self.job.epochs.start)
        self.worker.arrive()
        if self._check.open:
            self._check.alone(portion)
        self._counted += self.step.push(work, portion)
        self._check.after()

    def _report(self, *, void: bool = False) -> None:
        """Report this worker's counts of the epoch; `void`: the last gradient was dropped."""
        self._counted -= void
        self.step.count(void=void)
        grouped = isinstance(self.step, Grouped)
        # counts from a checkpoint are reported even if the chief gets no ticket
        counted = self._counted or grouped or self.job.recipe.metrics.counted
        states = self.step.states() if counted else []
        floats = self.session.statistics.here()
        residuals = self.session.residuals.here() if self.job.saves else {}
        broken = None if self.step.broken is None else [self.step.broken + 1, self.replica.name]
        self.worker.report([states, floats if self._counted else None, residuals, broken])

    def _take_statistics(self, epoch: int) -> None:
        self._settled = epoch
        self.session.statistics.receive(epoch)
        self.step.spread()


class ChiefSide(WorkerSide):
    """The `FitSide` of the chief, which also works like the other workers.

    In an epoch the chief deals tickets and works on some of them (`work`, `take`), then gathers all
    workers' reports (`end_epoch`). With checkpoints, an epoch has several segments, and each ends
    with gathered reports (`_gather`), so that no ticket is out when a checkpoint is written.
    """

    settled = False  # checkpoints are made between two segments

    def __init__(
        self, job: Fit, session: Session, replica: Replica, step: Pushed | Grouped
    ) -> None:
        super().__init__(job, session, replica, step)
        self.tester, self.is_chief = alone(replica), True
        #: of the epoch's finished segments: the sums of losses and examples, and the workers'
        #: metric counts
        self.loss_sum: list[Any] = [0.0, 0]
        self._states: list[Any] = []
        #: the residuals of compression that each worker keeps for later pushes
        self._residuals: list[Any] = []
        self.segments = Segments()
        self.tally = RunningLoss(self.worker, lambda: self.loss_sum)
        self.state = KeptState(job.optimizer, session.params)
        self._history: list[Any] = []
        self._stats, self._details = EpochStats(), Details()
        #: the version of the weights in the module; None after further updates
        self._home: int | None = None
        self._at = 0
        #: whether other processes have copies of the model, which callbacks here do not change
        self._several = session.plan.workers > 1 or isinstance(step, Grouped)
        #: whether a callback has written buffers or frozen parameters
        self._beside = False

    def end(self) -> None:
        """End the training of all workers."""
        self.session.end([self._history, self.job.terminated])

    def bring_home(self) -> int:
        """Read one version of the whole state into the user's objects, while workers continue."""
        if self._home is not None:
            return self._home  # no update since
        version = self.session.read_state()
        self.job.callbacks.changes.mark()
        self.state.mark()
        return version

    def begin(self, epoch: int) -> None:
        self._home, self._at = None, epoch
        self.loss_sum, self._states = [0.0, 0], []
        self._begin()

    def work(self, number: int, epoch: int) -> Iterator[Assignment]:
        job, scheduler = self.job, self.scheduler
        if job.saves:
            yield from self._segments(epoch)
        else:
            self._send_beside()
            scheduler.open(self.worker, number, job.steps_per_epoch)
            while isinstance(work := self.worker.next(scheduler.fill, wait=False), Assignment):
                yield work
        if not job.terminated:
            job.source.check_enough(scheduler.dealt, job.steps_per_epoch, epoch)

    def _segments(self, epoch: int) -> Iterator[Assignment]:
        """Deal an epoch in segments, with a checkpoint between two of them.

        At that point every dealt batch is in the weights, and every worker has reported.
        """
        scheduler, segments = self.scheduler, self.segments
        scheduler.open_epoch(epoch, self.job.steps_per_epoch)
        while not scheduler.dry:
            self._send_beside()
            segments.count += 1
            scheduler.open_segment(self.worker, segments.count, segments.ends)
            while isinstance(work := self.worker.next(scheduler.fill, wait=False), Assignment):
                yield work
            segments.dealt = scheduler.dealt
            if not scheduler.dry:
                self._gather()
                self._begin()
                self.worker.refresh()
                if segments.rest(epoch, segments.dealt):
                    return

    def _send_beside(self) -> None:
        self.session.statistics.send(everything=self._beside)
        self.step.spread()
        self._beside = False

    def _gather(self) -> None:
        """Gather the reports of all workers, and average the running statistics."""
        self._report()
        reports, total, examples = self.worker.gather()
        self.loss_sum[0] += total
        self.loss_sum[1] += examples
        self._states += [state for each in reports for state in each[0]]
        self._residuals = [each[2] for each in reports]
        if not math.isfinite(total):
            found = sorted(each[3] for each in reports if each[3] is not None)
            step = found[0][0] if found else None
            owners = [name for at, name in found if at == step]
            self.job.tell_of_broken(total, self._at, step, owners)
        self.session.statistics.average([each[1] for each in reports if each[1] is not None])
        self.step.spread()

    def arrive(self) -> None:
        self.worker.arrive()
        self.job.callbacks.changes.mark()  # values that arrived are not a callback's change

    def refresh(self) -> None:
        self.worker.refresh()  # otherwise, a callback that writes weights undoes the update

    def after_batch(self) -> bool:
        self._follow_weights(between=True)  # settings are sent after this batch is applied
        return self.job.callbacks.stop

    def stop(self, work: Assignment | None) -> None:
        """Deal no more tickets, and finish those that are out."""
        if work is not None:
            self.worker.abandon(work.ticket)
        self.worker.put_back()
        self.worker.ask("enough")
        while isinstance(left := self.worker.next(wait=False), Assignment):
            self.take(left)

    def end_epoch(self, started: float) -> dict[str, Any]:
        seconds = time.perf_counter() - started
        self._gather()
        total, examples = self.loss_sum
        logs = {"loss": total / examples if examples else math.nan}
        logs |= self.job.recipe.metrics.merged(self._states)
        logs["examples_per_second"] = examples / max(seconds, 1e-9)
        counted, self._details = self._stats.turn(self.worker.stats())
        if self.job.wants_state:
            self._home = self.bring_home()
        else:
            self.worker.refresh()
        return logs | counted

    def note(self, epoch: int, logs: dict[str, Any]) -> None:
        enter_details(self.job.callbacks.model.history.history, self._details)
        self._history.append([epoch, logs, portable_details(self._details)])

    def agree(self, mine: Any, *, chiefs: bool = False) -> list[Any]:
        return [mine]

    def progress(self) -> dict[str, Any]:
        self.bring_home()
        counted = self._states or [self.job.recipe.metrics.progress()]
        gathered = gathered_from_workers(self.job, counted, self.loss_sum)
        return gathered | {"residuals": self._residuals}

    def go_on(self, saved: dict[str, Any] | None) -> None:
        assert saved is not None
        self.loss_sum = go_on_with_servers(self.job, self.replica, saved)
        replicas = [each.get("residuals", {}) for each in saved["replicas"]]
        self.session.residuals.go_on(saved.get("residuals") or replicas)
        self._follow_beside(between=False)
        self.job.callbacks.changes.mark()

    def listen(self, *, between: bool = False) -> bool:
        """Send optimizer settings and weights that callbacks changed to the servers."""
        self.worker.set_settings(self.session.settings())
        self._follow_weights(between=between)
        return self.job.callbacks.stop

    def _follow_beside(self, between: bool) -> None:
        """Send buffers and frozen parameters to the other workers when the next epoch begins."""
        if between and self.session.plan.workers > 1:
            raise NotDistributable(
                "a callback wrote into buffers or frozen parameters between two batches, and the "
                "other workers would go on with the old ones; write them in on_epoch_end, or use "
                "sg.MirroredStrategy."
            )
        self._beside = True
        if between:
            self.step.spread()

    def _follow_weights(self, *, between: bool = False) -> None:
        changes = self.job.callbacks.changes
        changes.check_layout()
        if self._several and (what := changes.unfollowable()):
            raise NotDistributable(sentence("servers", "attributes set by callbacks", what=what))
        written = {id(tensor) for tensor in changes.written()}
        params = [i for i, p in enumerate(self.session.params) if id(p) in written]
        state = self.state.changes()
        if any(id(tensor) in written for tensor in self.session.beside):
            self._follow_beside(between)
        if written or state:
            if between and self.session.plan.parts > 1:
                raise NotDistributable(sentence("servers", "weights written by callbacks"))
            self.session.worker.memory.take_back()
            self.worker.assign(self.session.params, params)
        if state:
            self.session.send_state(state)
            self.state.mark()
        changes.mark()


class RunningLoss:
    """The loss for batch callbacks, requested from the coordinator only when it is read."""

    def __init__(self, worker: Any, before: Callable[[], list[Any]]) -> None:
        """`before`: the sums of losses and examples of the epoch's earlier segments."""
        self._worker, self._before = worker, before

    @property
    def examples(self) -> int:
        return int(self._worker.ask("so far")[0]["examples"]) + int(self._before()[1])

    def mean(self) -> float:
        (total, count), (told, _) = self._before(), self._worker.ask("so far")
        examples = told["examples"] + count
        return (told["loss"] + total) / examples if examples else math.nan
