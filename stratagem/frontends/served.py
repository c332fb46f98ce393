"""`fit` with parameter servers, as every worker runs it.

    chief            deals the epoch's batches, works like the others, and looks after callbacks
    other workers    take tickets, compute, hand in, until the chief says that the training is over
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.frontends import alike, books, traits
from stratagem.frontends.deals import Dealer, dealer
from stratagem.frontends.evaluation import evaluate_here
from stratagem.frontends.feeds import LoaderFeed, Portion, check_enough
from stratagem.frontends.group import Leader, assist
from stratagem.frontends.loop import Fit
from stratagem.frontends.loss_buffers import Unwritten
from stratagem.frontends.proof import Proof
from stratagem.frontends.solo import Solo
from stratagem.strategies.at_home import AtHome
from stratagem.strategies.parameters.apart import in_group
from stratagem.strategies.parameters.inside import current_worker
from stratagem.strategies.parameters.plan import Clip
from stratagem.strategies.parameters.session import Late, Session
from stratagem.strategies.parameters.source import say_who_reads
from stratagem.strategies.parameters.watch import State
from stratagem.strategies.parameters.worker import EpochOver, FitOver, Work
from stratagem.strategies.replica import Replica, alone, current_replica


def fit(job: Fit) -> None:
    """Train; every worker's module ends with the same values."""
    replica = current_replica()
    traits.adopt(job.module, job.recipe.loss, job.names)
    grouped = in_group(replica)
    if grouped and not replica.leads:
        assist(job, replica)
        return
    job.module.to(replica.device)
    job.recipe.metrics.to(replica.device)
    served = job.settings.served
    assert served is not None
    session = Session(
        current_worker(), job.module, job.optimizer, served, wire=job.settings.wire,
        clip=Clip(job.recipe.clip_norm, job.recipe.clip_value),
        told=job.feed.dice(), look=("fit", alike.look("fit", job)) if job.by_itself else None,
    )  # fmt: skip
    if session.over is not None:
        _believe(job, session, session.over)
        return
    job.feed.take_dice(session.told)
    session.cancels = session.cancels and not grouped  # its devices would wait for the first
    group = Leader(job, session.params, replica) if grouped else None
    hand = Hand(job, session, replica, group)
    if session.worker.is_chief:
        Chief(job, hand).lead()
    else:
        hand.follow()
    if group is not None:
        group.end()


def check(job: Fit) -> None:
    """Refuse what servers cannot do, before anybody is asked to."""
    if job.recipe.accumulate > 1:
        raise NotDistributable(
            "accumulate cannot go with parameter servers, which decide themselves how many "
            "gradients make an update; use Asynchronous(buffer=...) or a larger batch_size."
        )
    if job.recipe.autocast is torch.float16:
        raise NotDistributable(
            'precision="float16" scales gradients in a way that servers do not follow; use '
            '"bfloat16".'
        )


def _believe(job: Fit, session: Session, over: FitOver) -> None:
    """Take over what the chief said of the training that is over."""
    history = session.take_last(over)
    model = job.callbacks.model
    if history and model is not None:  # a client of its own; a child has no history to keep
        for epoch, logs, details in history:
            books.enter(model.history.history, books.numbered(details))
            job.callbacks.epoch_end(epoch, logs)


class Hand:
    """One worker at work."""

    def __init__(
        self, job: Fit, session: Session, replica: Replica, group: Leader | None = None
    ) -> None:
        self.job, self.session, self.replica, self.group = job, session, replica, group
        self.worker = session.worker
        self.dealer: Dealer = dealer(job.feed, session.plan.parts)
        self._solo = Solo(job.module, job.optimizer, job.recipe, replica)
        homes = () if job.recipe.jit_compile else self.worker.memory.homes()
        self._at_home = AtHome(job.module, homes)
        several = session.plan.parts > 1 and group is None  # a group looks after that itself
        self._proof = Proof(job.recipe.loss, replica) if several else None
        self._unwritten: Unwritten | None = None
        if session.plan.workers > 1 or group is not None:
            self._unwritten = Unwritten(job.recipe.loss)
        self.handed_in = 0
        #: the epoch that is worked on, and the last one of which the mean statistics are here
        self._epoch, self._settled = 0, -1
        #: what came of the last batch: metrics take it in when it is sure to count
        self._last: tuple[Any, Any, bool] | None = None
        self.begin()

    def begin(self) -> None:
        """An epoch begins."""
        self.job.module.train()
        self.job.recipe.metrics.reset()
        self.handed_in, self._last = 0, None

    def follow(self) -> None:
        """Work until the chief ends it."""
        while True:
            work = self.worker.next(wait=False)
            if isinstance(work, FitOver):
                self.session.end()
                _believe(self.job, self.session, work)
                return
            if isinstance(work, EpochOver):
                self.report(void=work.void)
                self._take_statistics(work.epoch)
                self.begin()
            else:
                self.do(work)

    def do(self, work: Work) -> bool:
        """One ticket; whether its gradient counted."""
        if work.epoch != self._epoch:
            if self._epoch and not self.worker.is_chief:
                self.begin()  # it was absent when the last one ended
            self._epoch = work.epoch
            if not self.worker.is_chief and work.epoch > self._settled + 1:
                self._take_statistics(work.epoch - 1)
        self._count()
        portion = self.dealer.portion(work, self.job.epochs.start, self.replica.device)
        self.worker.arrive()
        if self.group is not None:
            return self._do_together(self.group, work, portion)
        try:
            loss, weight, output, y = self._gradients(portion)
            self._look_at_loss()
        except Late:
            self.session.forget_gradients()
            self.worker.abandon(work.ticket)
            return False
        kept = self.worker.push(
            work.ticket, weight, float(loss), portion.examples, self._settings()
        )
        self.session.forget_gradients()
        if kept:
            self.handed_in += 1
            self._last = (output, y, portion.examples < portion.total)
        return kept

    def _look_at_loss(self) -> None:
        """After the first batch."""
        unwritten, self._unwritten = self._unwritten, None
        if unwritten is not None:
            unwritten.check()

    def _count(self) -> None:
        last, self._last = self._last, None
        if last is not None and self.job.recipe.metrics:
            output, y, part = last
            self.job.recipe.metrics.update(output, y, part=part)

    def _do_together(self, group: Leader, work: Work, portion: Portion) -> bool:
        loss, weight = group.gradients(work, portion)
        self._look_at_loss()
        self.worker.memory.take_all()
        kept = self.worker.push(
            work.ticket, weight, float(loss), portion.examples, self._settings()
        )
        group.settle(kept)
        self.handed_in += kept
        return kept

    def _settings(self) -> list[dict[str, Any]] | None:
        """Only the chief's callbacks may change them."""
        return self.session.settings() if self.worker.is_chief else None

    def _gradients(self, portion: Portion) -> tuple[Tensor, float, Any, Any]:
        solo, recipe = self._solo, self.job.recipe
        with solo.autocast():
            with self._at_home.forward():
                output, y, sample_weight = solo.forward(portion)
            if portion.examples == portion.total:  # a whole batch: as on one device
                loss, weight = recipe.loss.mean(output, y, sample_weight), float(portion.examples)
            else:
                loss, weight = self._part(portion, output, y, sample_weight)
        if self.session.cancels and self.worker.is_late:
            raise Late
        self.worker.begin_backward(listens=self.session.cancels)
        with self._at_home.backward():
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), weight, output, y

    def _part(
        self, portion: Portion, output: Any, y: Any, sample_weight: Tensor | None
    ) -> tuple[Tensor, float]:
        """A part's loss, and what it weighs among the parts of its batch."""
        numerator, denominator = self.job.recipe.loss.terms(
            output, y, sample_weight, portion.examples
        )
        if self._proof is not None and self._proof.open:
            self._proof.settle(portion, output, y, numerator)
        if denominator is None:  # a sum over rows grows with the batch
            return numerator * (portion.total / portion.examples), float(portion.examples)
        weight = float(denominator)
        return (numerator / weight if weight else numerator * 0.0), weight

    def report(self, *, void: bool = False) -> None:
        """What this worker has counted in the epoch that is over; `void`: but for the last."""
        metrics = self.job.recipe.metrics
        if void:
            self._last, self.handed_in = None, self.handed_in - 1
        self._count()
        if self.group is not None:
            counted = self.group.states()
        else:
            counted = [metrics.state()] if self.handed_in else []
        floats = self.session.statistics()
        self.worker.report([counted, floats if self.handed_in else None])

    def _take_statistics(self, epoch: int) -> None:
        self._settled = epoch
        self.session.take_statistics(epoch)
        self.spread_statistics()

    def spread_statistics(self) -> None:
        """The other devices of this worker go on from the same."""
        if self.group is not None:
            self.group.spread()


class Chief:
    """The chief's loop around its own work."""

    def __init__(self, job: Fit, hand: Hand) -> None:
        self.job, self.hand, self.worker, self.session = job, hand, hand.worker, hand.session
        self._told: list[Any] = []
        self._books = books.Books()
        #: the version that was brought home after an epoch
        self._home: int | None = None
        self._state = State(job.optimizer, hand.session.params)
        #: whether others have models of their own, which do not see what callbacks change here
        self._several = hand.session.plan.workers > 1 or hand.group is not None
        if self._several:
            job.callbacks.changes.feed = job.feed
        #: whether a callback has written into what is not trained, frozen parameters say
        self._beside = False

    def lead(self) -> None:
        job = self.job
        if isinstance(job.feed, LoaderFeed) and job.feed.loader is not None:
            say_who_reads(job.feed.loader)
        model = job.callbacks.model
        model.bring_home = self._bring_home
        try:
            job.callbacks.train_begin()
            self._follow_callbacks()
            for number, epoch in enumerate(job.epochs, 1):
                if self._epoch(number, epoch):
                    break
            self.session.end(self._told)
        finally:
            model.bring_home = None
            self._state.end()
        job.callbacks.train_end()

    def _bring_home(self) -> int:
        """One version of everything into the user's own objects, while the others go on."""
        if self._home is not None:
            return self._home  # nobody has trained since
        version = self.session.read_state()
        self.job.callbacks.changes.settle()
        self._state.mark()
        return version

    def _epoch(self, number: int, epoch: int) -> bool:
        """One pass over the data; returns whether to stop."""
        job, hand = self.job, self.hand
        self._home = None
        hand.begin()
        job.callbacks.epoch_begin(epoch)
        self._follow_callbacks()
        self.session.send_statistics(everything=self._beside)
        hand.spread_statistics()
        self._beside = False
        started = time.perf_counter()
        hand.dealer.open(self.worker, number, epoch, job.steps_per_epoch)
        batch = 0
        while isinstance(work := self.worker.next(hand.dealer.fill, wait=False), Work):
            if self._batch_begin(batch):
                self.worker.abandon(work.ticket)
                self._stop()
                break
            hand.do(work)
            if self._batch_end(batch):
                self._stop()
                break
            batch += 1
        else:
            check_enough(job.feed, hand.dealer.dealt, job.steps_per_epoch, epoch)
        logs = self._logs(time.perf_counter() - started)
        counted, details = self._books.turn(self.worker.stats())
        logs |= counted
        if job.wants_state:
            self._home = self._bring_home()
        else:
            self.worker.refresh()
        if job.validation is not None and epoch in job.validated:
            logs |= self._validate()
        books.enter(job.callbacks.model.history.history, details)
        job.callbacks.epoch_end(epoch, logs)
        self._told.append([epoch, logs, books.portable(details)])
        self._follow_callbacks()
        return job.callbacks.stop

    def _batch_begin(self, batch: int) -> bool:
        """Callbacks before a batch; returns whether to stop."""
        callbacks, between = self.job.callbacks, self.job.between_steps
        if between:
            self.worker.arrive()
            callbacks.changes.settle()  # what came is no change of theirs
        callbacks.batch_begin(batch)
        if between:
            self.worker.set_settings(self.session.settings())
            self._follow_weights(between=True)
        return between and callbacks.stop

    def _batch_end(self, batch: int) -> bool:
        """The same after it."""
        callbacks, between = self.job.callbacks, self.job.between_steps
        if between:
            self.worker.refresh()  # or what callbacks write would undo the update
        callbacks.batch_end(batch, Running(self.worker))
        if between:
            self._follow_weights(between=True)  # settings once this batch is applied
        return between and callbacks.stop

    def _stop(self) -> None:
        """A callback ends the training in mid-epoch: what is in hand is done, and nothing more."""
        self.worker.enough()
        while isinstance(work := self.worker.next(wait=False), Work):
            self.hand.do(work)

    def _logs(self, seconds: float) -> dict[str, Any]:
        hand, metrics = self.hand, self.job.recipe.metrics
        hand.report()
        reports, total, examples = self.worker.gather()
        counted = [state for report in reports for state in report[0]]
        logs = {"loss": total / examples if examples else math.nan}
        logs |= metrics.merged(counted)
        logs["examples_per_second"] = examples / max(seconds, 1e-9)
        self.session.share_statistics([report[1] for report in reports if report[1] is not None])
        hand.spread_statistics()
        return logs

    def _validate(self) -> dict[str, float]:
        job = self.job
        assert job.validation is not None
        if job.around_tests:
            job.callbacks.test_begin()
            self._follow_weights()
        results = evaluate_here(
            job.test(job.validation), alone(self.hand.replica), self._follow_weights
        )
        if job.around_tests:
            job.callbacks.test_end(results)
            self._follow_weights()
        return {f"val_{name}": value for name, value in results.items()}

    def _follow_callbacks(self) -> None:
        """Tell the servers what callbacks changed: settings, or the weights themselves."""
        self.worker.set_settings(self.session.settings())
        self._follow_weights()

    def _follow_beside(self, between: bool) -> None:
        """What is not trained goes to the others when the next epoch begins."""
        if between and self.session.plan.workers > 1:
            raise NotDistributable(
                "a callback wrote into buffers or frozen parameters between two batches, and the "
                "other workers would go on with the old ones; write them in on_epoch_end, or use "
                "sg.MirroredStrategy."
            )
        self._beside = True
        if between:
            self.hand.spread_statistics()

    def _refuse(self, what: str) -> None:
        raise NotDistributable(
            f"a callback changed {what!r} of model, loss or data, and workers of servers do not "
            "follow such changes; make it between two fits, or use sg.MirroredStrategy."
        )

    def _follow_weights(self, *, between: bool = False) -> None:
        changes = self.job.callbacks.changes
        changes.check_data()
        if self._several and (changed := changes.new_traits()):
            self._refuse(traits.say(changed[0]))
        if self._several and changes.loss_changed():
            self._refuse("parameters of the loss")
        written = {id(tensor) for tensor in changes.written()}
        params = [i for i, p in enumerate(self.session.params) if id(p) in written]
        state = self._state.changes()
        if any(id(tensor) in written for tensor in self.session.beside):
            self._follow_beside(between)
        if written or state:
            if between and self.session.plan.parts > 1:
                raise NotDistributable(
                    "a callback changed weights, or the optimizer's state, between two batches, "
                    "and in step with servers the others have gone on with the old ones by then; "
                    "change them in on_epoch_end, or use sg.MirroredStrategy."
                )
            self.session.worker.memory.take_back()
            self.worker.assign(self.session.params, params)
        if state:
            self.session.send_state(state)
            self._state.mark()
        changes.settle()


class Running:
    """What batch callbacks see of the loss in mid-epoch: asked for only if somebody looks."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    @property
    def examples(self) -> int:
        return int(self._worker.so_far()[1])

    def mean(self) -> float:
        total, examples = self._worker.so_far()
        return total / examples if examples else math.nan
