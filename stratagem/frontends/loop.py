"""The loop of `fit`, for replicas that all-reduce and for servers alike."""

from __future__ import annotations

import time

from stratagem.figures.recorder import epoch_event
from stratagem.figures.trial_record import record_epoch
from stratagem.frontends.evaluation import evaluate_here
from stratagem.frontends.fit_checkpoints import FitCheckpoints
from stratagem.frontends.fit_job import Fit, FitSide
from stratagem.frontends.sources import Source
from stratagem.training.hints import explain


class FitLoop:
    """One training, epoch by epoch: every replica runs the loop; with servers the chief alone.

    Callbacks run on the chief. `side.listen()` follows each place where they may have changed
    something, and comes before the next collective call, which must see the change on all replicas.
    """

    def __init__(self, job: Fit, side: FitSide) -> None:
        self.job, self.side = job, side

    def train(self) -> None:
        with FitCheckpoints(self.job, self.side) as checkpoints:
            if self.job.once("train_begin"):
                self.job.callbacks.call("train_begin")
            checkpoints.begin()
            self.side.listen()
            for number, epoch in enumerate(checkpoints.epochs(), 1):
                if self._epoch(number, epoch, checkpoints):
                    break
            checkpoints.finish()

    def _epoch(self, number: int, epoch: int, checkpoints: FitCheckpoints) -> bool:
        """One pass over the data; returns whether to stop."""
        job, side = self.job, self.side
        side.begin(epoch)
        if job.once("epoch_begin", epoch):
            job.callbacks.call("epoch_begin", epoch)
        side.listen()
        first = checkpoints.enter(epoch)
        journal = job.journal
        if journal is not None:
            journal.enter(epoch, first, job.source.journal.begun)
        if job.succession is not None and job.succession.owes:
            job.succession.owes = False
            if job.once("batch_end", epoch, first - 1):
                job.callbacks.call("train_batch_end", first - 1, tally=side.tally)
        started = time.perf_counter()
        for batch, work in enumerate(side.work(number, epoch), first):
            if self._batch_begin(epoch, batch):
                side.stop(work)
                break
            try:
                side.take(work)
            except Exception as error:
                explain(error)
                raise
            if self._batch_end(epoch, batch):
                side.stop(None)
                break
            checkpoints.after_batch(epoch, batch)
            if job.terminated:
                break
        if job.terminated:
            return True
        stop = self._end_epoch(epoch, started)
        checkpoints.after_epoch(epoch, stop)
        if journal is not None:
            journal.leave()
            journal.stopped = stop
        return job.terminated or stop

    def _end_epoch(self, epoch: int, started: float) -> bool:
        """Logs, validation and callbacks of an epoch; returns whether to stop."""
        job, side, journal = self.job, self.side, self.job.journal
        logs = side.end_epoch(started) if journal is None or journal.logs is None else journal.logs
        if journal is not None:
            journal.logs = logs
        if job.validation is not None and epoch in job.validated:
            logs |= self._validate(job.validation, epoch)
        side.note(epoch, logs)
        if job.once("epoch_end", epoch):
            if side.tester.is_chief:
                epoch_event(epoch, logs)
                record_epoch(epoch, logs)
            job.callbacks.call("epoch_end", epoch, logs)
        return side.listen()

    def _batch_begin(self, epoch: int, batch: int) -> bool:
        """Callbacks before a batch; returns whether to stop."""
        if self.job.between_steps:
            self.side.arrive()
        if self.job.once("batch_begin", epoch, batch):
            self.job.callbacks.call("train_batch_begin", batch)
        return self.job.between_steps and self.side.listen(between=True)

    def _batch_end(self, epoch: int, batch: int) -> bool:
        if self.job.between_steps:
            self.side.refresh()
        if self.job.once("batch_end", epoch, batch):
            self.job.callbacks.call("train_batch_end", batch, tally=self.side.tally)
        return self.job.between_steps and self.side.after_batch()

    def _validate(self, source: Source, epoch: int) -> dict[str, float]:
        job, side = self.job, self.side
        if job.around_tests:
            if job.once("test_begin", epoch):
                job.callbacks.call("test_begin")
            side.listen()
        results: dict[str, float] = {}

        def evaluate() -> None:
            results.update(evaluate_here(job.test(source), side.tester, side.listen))

        side.tester.collective.step(evaluate)
        if job.around_tests:
            if job.once("test_end", epoch):
                job.callbacks.call("test_end", results)
            side.listen()
        return {f"val_{name}": value for name, value in results.items()}
