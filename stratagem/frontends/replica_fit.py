"""`fit` on replicas that all-reduce: every one of them runs the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratagem.data.streams import mixed
from stratagem.errors import ReplicaError, UsageError
from stratagem.figures.meter import loading
from stratagem.frontends import replica_progress
from stratagem.frontends.adapter import Training
from stratagem.frontends.apart import Apart
from stratagem.frontends.callback_changes import heed, news, share_attributes
from stratagem.frontends.divided import Divided
from stratagem.frontends.epoch_sums import LossSum
from stratagem.frontends.fit_job import Fit, Segments
from stratagem.frontends.fit_journal import FitJournal
from stratagem.frontends.loop import FitLoop
from stratagem.frontends.row_check import RowCheck
from stratagem.frontends.sources import Portion
from stratagem.frontends.staged import Staged
from stratagem.frontends.step_choice import choose
from stratagem.frontends.steps import OneDevice, Sliced
from stratagem.state.change_tracker import requires_grad
from stratagem.state.optimizer_recipe import group_settings
from stratagem.state.shared_state import warm_up
from stratagem.training import lossy_wire, setup
from stratagem.training.replica import Replica, alone, current_replica
from stratagem.training.setup import align, align_loss, move, own_streams
from stratagem.training.step_figures import figures_of
from stratagem.wire.tree import broadcast_tree, gather_tree


def fit(job: Fit) -> None:
    """Train; the module and the optimizer of every replica end alike."""
    replica = current_replica()
    if job.succession is not None and replica.is_chief:
        job.succession.take_over(job)
    move(job.module, job.optimizer, replica.device)
    job.recipe.metrics.to(replica.device)
    if job.journal is None or not job.journal.restarts:
        lossy_wire.begin_anew()
    turn = job.generation + (job.journal.restarts << 10 if job.journal is not None else 0)
    replica.collective.hold()
    take_state(job, replica, turn)
    # a later fit begins where the data's numbers are, and the model must not draw the same again
    seed = mixed(torch.initial_seed(), -1, turn) if turn else None
    with own_streams(replica, seed):
        side = ReplicaSide(job, replica)
        try:
            FitLoop(job, side).train()
            replica.collective.tell()  # where there was no batch to train on
            side.step.close()
        except BaseException as error:
            if job.journal is not None and isinstance(error, ReplicaError):
                side.break_off(job.journal)
            side.step.leave()
            raise
        finally:
            if job.journal is not None and not job.by_itself:
                job.journal.termination.close()  # a follower; else whoever calls fit does so
        if not job.terminated:
            _end(job, side)


def take_state(job: Fit, replica: Replica, turn: int) -> None:
    """The chief's weights, optimizer, attributes and seeds, on every replica. Collective."""
    in_place = job.settings.one_pipeline and replica.collective.shares_memory
    align(job.module, replica, values=not in_place)  # or stages find them in shared memory
    align_loss(job.recipe.loss, replica)
    if job.journal is not None and replica.count > 1:
        share_attributes(job.module, replica)
    grown = None if job.journal is None else job.journal.grown
    setup.align_state(job.optimizer, replica, grown=grown)
    replica.release_call()
    setup.roll_own_dice(replica, turn)
    job.source.agree(replica)
    replica.collective.tell()


def _end(job: Fit, side: ReplicaSide) -> None:
    """Call `on_train_end`; successors wait, since a chief that dies in it leaves it to them."""
    if job.once("train_end"):
        job.callbacks.call("train_end")
    if job.succession is None or side.replica.count == 1:
        return
    try:
        broadcast_tree(side.replica.collective, None)
    except ReplicaError:
        assert job.journal is not None
        side.break_off(job.journal)
        raise


class ReplicaSide:
    """The loop's `FitSide` on one replica; every method is collective.

    Every replica makes the same collective calls in the same order; this order is part of the
    protocol. When a training begins, broadcasts of the chief are held back (`hold`) until its state
    is complete (`tell`), and `offer` says what a standby adopts: after the step is made, before the
    first step is taken. In `take` a replica first breaks off if the membership has changed
    (`_break_if_changed`), while nothing of the update has been computed; then the journal keeps
    what the update will overwrite; then comes the step, and only a finished step is written into
    the journal. `listen` breaks off before the chief says what callbacks changed, not after.
    """

    segments: Segments | None = None

    def __init__(self, job: Fit, replica: Replica) -> None:
        self.job, self.replica, self.tester = job, replica, replica
        self.is_chief = replica.is_chief
        self._check = RowCheck(job.module, job.recipe, replica, "fit")
        self._prepare()
        self.tally, self._epoch = LossSum(), 0
        #: in a standby: whether it has done a step that does not count
        self._rehearsed = False
        job.callbacks.changes.alone = replica.count == 1
        if job.journal is not None and job.journal.restarts:
            job.callbacks.changes.mark()  # all have what the chief has, also if it was alone
        replica.collective.hold()
        try:
            self._follow_the_chief()
        except BaseException:
            self.step.leave()
            raise

    def _follow_the_chief(self) -> None:
        """Take the chief's needs: other workers may have other callbacks, or none."""
        job, replica = self.job, self.replica
        tried = job.journal is not None and job.journal.restarts > 0
        mine = [job.between_steps, job.around_tests, job.between_tests, job.saves, tried]
        listening = map(bool, broadcast_tree(replica.collective, mine))
        job.between_steps, job.around_tests, job.between_tests, job.saves, tried = listening
        self._check.open = self._check.open and not tried and not job.settings.whole_batches

    def _prepare(self) -> None:
        job, replica = self.job, self.replica
        form: Callable[..., OneDevice] = choose
        if replica.count > 1 and job.settings.one_copy:
            form = Divided if job.settings.tensor else Staged
        self._passes_on = False
        training = Training(job.module, job.optimizer, job.recipe, job.settings)
        self.step: OneDevice = form(training, replica)
        changes = job.callbacks.changes
        self.step.followed = lambda: changes.followed
        self.step.keeps = replica.is_chief or job.succession is not None
        if job.journal is not None:
            self.step.take_in = job.journal.watch(job.recipe.metrics)
            self.step.before_commit = partial(job.journal.gather, replica)
            if isinstance(self.step, Apart):
                self.step.keep_journal(job.journal)
        self._trained = requires_grad(job.module)
        common = isinstance(self.step, Sliced | Staged | Divided)
        if isinstance(self.step, Staged) and self.step.grid.has_rows:
            common = False  # each row has its own copy
        job.callbacks.changes.in_common = common and replica.collective.shares_memory
        state = partial(replica_progress.of, job, self.step)
        adopt = partial(replica_progress.adopt, job, self.step)
        can_follow = replica_progress.possible(job, self.step)
        replica.collective.offer(state if can_follow else None, adopt)
        watched = self.is_chief and job.journal is not None
        self._traces = replica_progress.StepTraces(job) if watched else None

    def begin(self, epoch: int) -> None:
        self.job.module.train()
        self.job.recipe.metrics.reset()
        self.tally, self._epoch = LossSum(), epoch

    def work(self, number: int, epoch: int) -> Iterator[tuple[Portion, bool]]:
        """Portions, and whether each is the epoch's last."""
        self.replica.collective.tell()
        self._thaw()
        self.step.tally = self.tally
        job, source = self.job, self.job.source
        drawn, limit = source.journal.seen, self.job.steps_per_epoch
        # without a sure end, the last batch is known when there is none behind it
        ahead = job.recipe.accumulate > 1 and not source.certain
        steps = min(source.steps, limit) if source.steps and limit else source.steps or limit
        waiting: Portion | None = None
        if drawn and drawn == limit:
            source.leave(self.replica.ordering)
        read = source.whole if job.settings.one_copy else source.portions
        portions = loading(read(self.replica, epoch))
        self._passes_on = job.succession is not None and self.replica.count > 1
        for portion in islice(portions, limit and limit - drawn):
            drawn += 1
            if not ahead:
                yield portion, drawn == steps
                continue
            if waiting is not None:
                yield waiting, False
            waiting = portion
        if waiting is not None:
            yield waiting, True
        source.check_enough(drawn, limit, epoch)

    def _thaw(self) -> None:
        """Make the step anew if a callback has frozen or unfrozen parameters."""
        if requires_grad(self.job.module) != self._trained and self.replica.count > 1:
            scaler, before = self.step.scaler, self.step.keeper
            kept = {} if before is None else lossy_wire.handed_on(before)
            self.step.close()
            setup.align_state(self.job.optimizer, self.replica)
            self._prepare()
            if self.step.keeper is not None and kept:
                self.step.keeper.load(gather_tree(self.replica.collective, kept))
            self.step.scaler = scaler  # it goes on with the scale that it has found
            self.job.callbacks.changes.mark()

    def take(self, work: tuple[Portion, bool]) -> None:
        portion, last = work
        if not self.replica.collective.live and not self._rehearsed:
            self._rehearsed = True
            self._check.rehearse(portion)
            warm_up(self.job.optimizer)
        if self._check.open:
            self._check.before(portion, self.step.bring_home)
        journal = self.job.journal
        if journal is None:
            self.step.take(portion, last)
            self._check.after()
            if self.step.settled:
                self.step.sync()
            figures_of(self.replica).step(portion.examples)
            return
        _break_if_changed(self)  # a replica that is alone would not notice in a collective
        if self._passes_on and self.job.succession is not None:
            self.job.succession.tell_pass(self.job, self.replica, self._data_progress())
            self._passes_on = False
        if self.step.settled:
            several = self.job.recipe.accumulate > 1
            journal.before_update(self.job.module, self.tally if several else None)
            self.step.keep()
        journal.before_batch()
        if self._traces is not None:
            self._traces.before()
        done_here = self.replica.collective.step(partial(self.step.take, portion, last))
        self._check.after()
        if self._traces is not None and self._traces.left():
            self.replica.collective.offer(None, lambda told: None)  # a standby cannot join any more
        if self.step.settled:
            journal.updated(self.job.recipe.metrics, self.replica)
            lossy_wire.updated_alone()
            self.step.sync()
        if done_here:
            figures_of(self.replica).step(portion.examples)

    def _data_progress(self) -> dict[str, Any] | None:
        chief = self.replica.is_chief
        return replica_progress.data_progress(self.job, self.replica) if chief else None

    def break_off(self, journal: FitJournal) -> None:
        """Undo the unfinished update and keep what the next try of this training goes on from."""
        job, replica, begun = self.job, self.replica, self.job.source.journal.begun
        found = journal.interrupt(job.recipe.metrics, self.tally, begun)
        trouble = replica.membership.trouble
        journal.grown = trouble is not None and trouble.kind == "joined"
        if self._traces is not None:
            self._traces.undo()
        lossy_wire.break_off(self.step.keeper)
        heir = job.succession if job.by_itself else None
        if found is not None and (replica.is_chief or heir is not None):
            scaler = None if self.step.scaler is None else self.step.scaler.state_dict()
            data = self._data_progress() or (heir.data(job) if heir is not None else {})
            job.resumed = {**found, **data, "scaler": scaler}

    def arrive(self) -> None:
        """Bring the weights home, where callbacks may read them between batches."""
        self.step.bring_home()

    refresh = arrive

    def after_batch(self) -> bool:
        return False  # replicas listen before the next batch, or at the end of the epoch

    def stop(self, work: Any) -> None:
        """Do nothing: all replicas have heard of the stop in `listen`."""

    def note(self, epoch: int, logs: dict[str, Any]) -> None:
        """Do nothing: every replica computes the same logs."""

    def end_epoch(self, started: float) -> dict[str, Any]:
        job, replica, tally = self.job, self.replica, self.tally
        self.step.bring_home()
        if job.between_steps:
            self.listen()  # what the last batch's callbacks changed
        self.step.meet()
        logs: dict[str, Any] = {"loss": tally.mean()}
        if tally.broken is not None:  # on all replicas alike
            first = tally.own.first()
            mine = replica.name if first is not None and first <= tally.broken else ""
            owners = [name for name in gather_tree(replica.collective, mine) if name]
            if replica.is_chief:
                job.tell_of_broken(logs["loss"], self._epoch, tally.broken, owners)
        if job.journal is None:
            logs |= job.recipe.metrics.compute(replica)
        elif job.by_itself:  # where replicas may leave, each has the counts of all
            logs |= job.recipe.metrics.compute(alone(replica))
        seconds = max(time.perf_counter() - started, 1e-9)
        logs["examples_per_second"] = tally.examples / seconds
        setup.average_buffers(job.module, replica)
        return logs

    def agree(self, mine: Any, *, chiefs: bool = False) -> list[Any]:
        if chiefs:
            return [broadcast_tree(self.replica.collective, mine)]
        found: list[Any] = gather_tree(self.replica.collective, mine)
        return found

    @property
    def settled(self) -> bool:
        return self.step.settled

    def progress(self) -> dict[str, Any] | None:
        self.step.bring_home()
        self.step.meet()
        return replica_progress.gathered(self.job, self.replica, self.step, self.tally)

    def go_on(self, saved: dict[str, Any] | None) -> None:
        replica_progress.go_on(self.job, self.replica, self.step, self.tally, saved)

    def listen(self, *, between: bool = False) -> bool:
        job, replica, step = self.job, self.replica, self.step
        if replica.count == 1:
            for group in job.optimizer.param_groups:
                group.update(_settings(group))
            return job.callbacks.stop
        if job.settings.sync is None:
            _break_if_changed(self)
        mine, changes = None, job.callbacks.changes
        if replica.is_chief:
            changes.check_layout()
            changes.check_state()
            written = bool(changes.written())
            if written:
                step.take_back()
            mine = {
                "stop": job.callbacks.stop,
                "groups": [_settings(group) for group in job.optimizer.param_groups],
                **news(job, written=written),
            }
            if job.succession is not None:
                mine["will"] = job.succession.will(job, None if between else self._data_progress())
        told = broadcast_tree(replica.collective, mine)
        for group, settings in zip(job.optimizer.param_groups, told["groups"], strict=True):
            group.update(settings)
        step.follow_settings()
        if told["weights"] is not None:
            _refuse_apart(step)
        if job.succession is not None and not replica.is_chief:
            job.succession.hear(told["will"])
        heed(job, replica, told)
        return bool(told["stop"])


def _break_if_changed(side: ReplicaSide) -> None:
    """Break off if replicas have left or joined. With `sync=` that waits until the next meeting:
    between two meetings replicas hold updates that the others do not have."""
    keeper = side.step.keeper
    if side.job.journal is not None and (keeper is None or not keeper.apart):
        side.replica.membership.raise_if_trouble()


def _refuse_apart(step: OneDevice) -> None:
    """Refuse to broadcast the chief's weights while replicas hold updates of their own."""
    if step.keeper is not None and step.keeper.apart:
        raise UsageError(
            f"a callback wrote weights between two meetings ({step.keeper.made_with}), "
            "and the updates of the other replicas since the last one would be lost; write "
            "them at the end of an epoch, or leave sync out."
        )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    plain = {
        key: value.item() if isinstance(value, np.generic) else value
        for key, value in group_settings(group).items()
    }
    return {
        key: value
        for key, value in plain.items()
        if isinstance(value, bool | int | float | Tensor | tuple | list)
    }
