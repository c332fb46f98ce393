"""One worker at work on a Keras model: tickets in, gradients out, nothing updated here.

The model's own `train_step` is played on the rows of a ticket. Where it hands its gradients to the
optimizer, they go to the servers instead, which decide whether they count; if they do not, what
the metrics have counted on these rows is taken back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stratagem.data.shard import count_rows
from stratagem.errors import NotDistributable
from stratagem.frontends.keras import environment
from stratagem.frontends.keras.group import Group, begin
from stratagem.frontends.keras.parts import Part
from stratagem.frontends.keras.performer import Performer
from stratagem.frontends.keras.results import from_chief
from stratagem.frontends.keras.session import Dismissed, KerasSession
from stratagem.frontends.keras.step_logs import flat
from stratagem.rules.push import Ticket
from stratagem.state import keras_recipe
from stratagem.strategies.parameters.apart import in_group
from stratagem.strategies.parameters.session import Late
from stratagem.strategies.parameters.worker import EpochOver, FitOver, Work, Worker
from stratagem.strategies.replica import Replica
from stratagem.strategies.settings import Settings


class Hand(Performer):
    """Bound to one model for one training."""

    def __init__(
        self, model: Any, session: KerasSession, replica: Replica, group: Group | None = None
    ) -> None:
        self.session, self.group = session, group
        self.worker = session.worker
        part = Part(replica) if group is None else group.part
        super().__init__(model, session.params, replica, part)
        if group is not None:
            session.cancels = False  # the other devices would wait for the first
            group.exchange.after = session.added_up
        #: what the last step returned
        self.logs: Any = None
        self._epoch = 0
        self._ticket: Ticket | None = None
        self._kept = False
        self.begin()

    def close(self) -> None:
        super().close()
        if self.group is not None:
            self.group.close()

    def begin(self) -> None:
        """Nothing of what is counted from now on has been reported."""
        self.worked, self.tracked = 0, False
        self._sums: dict[str, list[float]] = {}
        self._base = [v.value.detach().clone() for v in self._tracked()]

    def follow(self) -> Any:
        """Work until the chief ends the training; returns what it tells."""
        self.model.train()
        while True:
            work = self.worker.next()
            if isinstance(work, FitOver):
                self.session.end()
                return self.session.take_last(work)
            if isinstance(work, EpochOver):
                self.worker.report(self.report())
                self.begin()
            else:
                self.do(work)

    # --- one ticket -----------------------------------------------------------------------------

    def do(self, work: Work) -> None:
        """Compute on the rows of a ticket, and hand in."""
        if work.epoch != self._epoch:
            if self.worked and not self.worker.is_chief:  # it was absent when the last one ended
                self._tell("forget")
                type(self.model).reset_metrics(self.model)
                self.begin()
            self._epoch = work.epoch
        data, total = work.payload["rows"], int(work.payload["total"])
        if not self.worker.is_chief:
            self.follow_changes(work.payload.get("news"))
        examples = count_rows(data)
        self._ticket, self._kept = work.ticket, False
        counted = self.counted()
        self._tell("work", work.payload)
        try:
            with self._step(examples, total):
                logs = self.perform(data)
        except Late:
            self.worker.abandon(work.ticket)
        finally:
            self.session.forget_gradients()
        self._tell("kept", self._kept)
        if not self._kept:
            self.take_back(counted)
            return
        self.logs = logs
        self.worked += 1
        if self.custom and isinstance(logs, dict):
            self._add_up(logs, examples)

    def _tell(self, *words: Any) -> None:
        """The other devices of this worker."""
        if self.group is not None:
            self.group.tell(*words)

    def _step(self, examples: int, total: int) -> AbstractContextManager[None]:
        if self.group is not None:
            return self.group.step(examples, total)
        self.part.begin(examples, total)
        return nullcontext()

    def _add_up(self, logs: dict[str, Any], examples: int) -> None:
        """For the mean of what steps returned; a worker alone has a last one, as one device."""
        noted = self.sources.note(logs)
        numbers = {log: noted.get(log, 0.0) for log in flat(logs)}
        if self.group is not None:
            numbers = self.group.weighted(numbers)
        if self.session.plan.workers == 1:
            self._sums = {}
        for log, number in numbers.items():
            total, weight = self._sums.get(log, (0.0, 0.0))
            self._sums[log] = [total + number * examples, weight + examples]

    def _hand_over(self, given: dict[int, Any]) -> None:
        assert self._ticket is not None
        for i, param in enumerate(self.session.params):
            self._give(i, param, given.get(id(param)))
        weight = self.part.weight(self.model)
        loss = self._loss if self._loss is not None else 0.0
        if self.group is not None:
            loss = self.group.weighted({"loss": loss})["loss"]
        self._kept = self.worker.push(self._ticket, weight, loss, self.part.examples)

    def _give(self, index: int, param: Any, grad: Any) -> None:
        """See to it that this gradient is what the servers get."""
        made = self.session.made[index]
        if grad is not None and (id(grad), grad._version) == made:
            return  # as backward made it, and it is there already
        if not self.part.whole and grad is not None:
            raise NotDistributable(
                "train_step changed the gradients before it handed them to the optimizer, and "
                "this worker has a part of the batch only; let the optimizer clip them "
                "(global_clipnorm=...), or use Asynchronous(), whose workers get whole batches."
            )
        param.grad = None if grad is None else grad.detach()
        self.session.worker.memory.take(index)

    def _heard_loss(self) -> None:
        self.tracked = not self.custom
        if not self.custom and self.group is None:  # backward comes next, and just once
            self.worker.begin_backward(listens=self.session.cancels)

    # --- what was counted -------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What was counted since the last report; other workers than the chief hand it over."""
        if self.group is not None:
            self.group.tell("report")
            self.group.drain(self)
        report: dict[str, Any] = {
            "worker": self.worker.index, "tracked": self.tracked, "logs": self._sums,
            "sources": self.sources.known, "counts": None, "kept": None,
        }  # fmt: skip
        if not self.worked:
            return report
        report["kept"] = [t.detach() for t in environment.kept(self.model) if _real(t)]
        if not self.worker.is_chief:
            report["counts"] = self.hand_over_counts()
        return report

    @torch.no_grad()
    def merge(self, reports: list[Any], loss: float, examples: int) -> None:
        """As the chief: add what the others have counted to what was counted here."""
        for report in reports:
            self.add_counts(report["counts"] or {})
        if any(report["tracked"] for report in reports):
            for variable, base, new in zip(
                self._tracked(), self._base, (loss, float(examples)), strict=True
            ):
                variable.value.copy_(base + new)

    def _tracked(self) -> list[Any]:
        return [] if self._tracker is None else list(self._tracker.variables)


def begin_group(model: Any, replica: Replica, session: KerasSession) -> Group | None:
    """With the other devices of this worker, if it has any."""
    if not in_group(replica):
        return None
    return begin(model, replica, {**session.told, "worker": session.worker.index})


def attend(worker: Worker, model: Any, settings: Settings, replica: Replica) -> Any:
    """As another worker than the chief: take part until it ends the training; its result."""
    try:
        session = KerasSession(worker, model, settings, replica.device)
    except Dismissed as nothing:
        return from_chief(nothing.told["result"], model)
    if session.over is not None:
        last = session.take_last(session.over) or {}
    else:
        hand = Hand(model, session, replica, begin_group(model, replica, session))
        try:
            last = hand.follow() or {}
        finally:
            hand.close()
    if "states" in last:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        keras_recipe.restore(model.optimizer, model.trainable_variables, last["states"])
    return from_chief(last.get("result"), model)


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point()
