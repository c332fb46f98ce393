"""One worker at work on a Keras model: tickets in, gradients out, nothing updated here.

The model's own `train_step` is played on the rows of a ticket. Where it hands its gradients to the
optimizer, they go to the servers instead, which decide whether they count; if they do not, what
the metrics have counted on these rows is taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from stratagem.data.shard import count_rows
from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.keras import attributes, environment, user_metrics
from stratagem.frontends.keras.denominators import made_exact, whole_activity
from stratagem.frontends.keras.parts import Part
from stratagem.frontends.keras.results import from_chief
from stratagem.frontends.keras.session import Dismissed, KerasSession
from stratagem.frontends.keras.step_logs import Sources, flat, has_own
from stratagem.rules.push import Ticket
from stratagem.state import keras_recipe
from stratagem.strategies.parameters.session import Late
from stratagem.strategies.parameters.worker import EpochOver, FitOver, Work, Worker
from stratagem.strategies.prepare import to_device
from stratagem.strategies.replica import Replica
from stratagem.strategies.settings import Settings


class Hand:
    """Bound to one model for one training."""

    def __init__(self, model: Any, session: KerasSession, replica: Replica) -> None:
        self.model, self.session, self.replica = model, session, replica
        self.worker = session.worker
        self.part = Part(replica)
        #: whether what a step returns is the user's own, which may be any numbers
        self.custom = has_own(model, "train_step")
        self.sources = Sources(model)
        #: what the last step returned
        self.logs: Any = None
        self._edition = self._epoch = 0
        self._ticket: Ticket | None = None
        self._kept: bool | None = None
        self._loss: float | None = None
        self._tracker = getattr(model, "_loss_tracker", None)
        self.begin()
        user_metrics.watch(model)
        model.optimizer.__dict__["apply"] = self._hand_in
        if self._tracker is not None:
            self._tracker.__dict__["update_state"] = self._listening(self._tracker)

    def close(self) -> None:
        """The optimizer is the user's own again."""
        self.model.optimizer.__dict__.pop("apply", None)
        if self._tracker is not None:
            self._tracker.__dict__.pop("update_state", None)

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
                type(self.model).reset_metrics(self.model)
                self.begin()
            self._epoch = work.epoch
        data, total = work.payload["rows"], int(work.payload["total"])
        self._follow_changes(work.payload.get("news"))
        examples = count_rows(data)
        self.part.begin(examples, total)
        self._ticket, self._kept, self._loss = work.ticket, None, None
        counted = [(v.value, v.value.detach().clone()) for v in self.model.metrics_variables]
        try:
            logs = self._play(data)
        except Late:
            self.worker.abandon(work.ticket)
            self._kept = False
        finally:
            self._ticket = None
            self.session.forget_gradients()
        if self._kept is None:
            raise NotDistributable(
                "train_step did not hand its gradients to self.optimizer.apply, so nothing came "
                "to the servers; call loss.backward(), then self.optimizer.apply(gradients, "
                "self.trainable_variables)."
            )
        if not self._kept:
            self._take_back(counted)
            return
        self.logs = logs
        self.worked += 1
        if self.custom and isinstance(logs, dict):
            self._add_up(logs, examples)

    def _add_up(self, logs: dict[str, Any], examples: int) -> None:
        """For the mean of what steps returned; a worker alone has a last one, as one device."""
        numbers = self.sources.note(logs)
        if self.session.plan.workers == 1:
            self._sums = {}
        for log in flat(logs):
            total, weight = self._sums.get(log, (0.0, 0.0))
            self._sums[log] = [total + numbers.get(log, 0.0) * examples, weight + examples]

    def _play(self, data: Any) -> Any:
        device = self.replica.device
        here = data if device.type == "cpu" else to_device(data, device)
        step: Callable[..., Any] = type(self.model).train_step.__get__(self.model)
        written = self._written()
        with self.sources.listening() if self.custom else nullcontext():
            if self.part.whole:
                logs = step(here)
            else:
                with made_exact(self.part), whole_activity(self.model, self.part):
                    logs = step(here)
        if self._written() != written:
            raise NotDistributable(
                "train_step wrote to weights that are trained, and the servers do not see that; "
                "have the optimizer do it (kernel_constraint=..., weight_decay=...), or a callback."
            )
        return logs

    def _written(self) -> list[int]:
        return [param._version for param in self.session.params]

    @torch.no_grad()
    def _take_back(self, counted: list[tuple[Tensor, Tensor]]) -> None:
        before = {id(now): then for now, then in counted}
        for variable in self.model.metrics_variables:
            if id(variable.value) in before:
                variable.value.copy_(before[id(variable.value)])
            else:
                variable.value.zero_()

    def _hand_in(self, grads: Any, trainable_variables: Any = None) -> None:
        """In the place of the optimizer's `apply`."""
        optimizer, session = self.model.optimizer, self.session
        if self._ticket is None or self._kept is not None:
            raise UsageError(
                "optimizer.apply was called outside of train_step, or twice in it; with parameter "
                "servers each batch makes one gradient, of a batch that this worker was dealt."
            )
        variables = optimizer._trainable_variables if trainable_variables is None else (
            trainable_variables
        )
        given = {id(v.value): g for v, g in zip(variables, grads, strict=True)}
        for i, param in enumerate(session.params):
            self._give(i, param, given.get(id(param)))
        weight = self.part.weight(self.model)
        loss = self._loss if self._loss is not None else 0.0
        self._kept = self.worker.push(self._ticket, weight, loss, self.part.share.examples)

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

    def _listening(self, tracker: Any) -> Callable[..., Any]:
        def update_state(values: Any, sample_weight: Any = None) -> Any:
            if self._ticket is not None:
                self._loss = float(torch.as_tensor(values).detach())
                self.tracked = not self.custom
                if not self.custom:  # backward comes next, and just once
                    self.worker.begin_backward(listens=self.session.cancels)
            return type(tracker).update_state(tracker, values, sample_weight=sample_weight)

        return update_state

    # --- what was counted -------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What was counted since the last report; other workers than the chief hand it over."""
        report: dict[str, Any] = {
            "worker": self.worker.index, "tracked": self.tracked, "logs": self._sums,
            "sources": self.sources.known, "counts": None, "kept": None,
        }  # fmt: skip
        if not self.worked:
            return report
        report["kept"] = [t.detach() for t in environment.kept(self.model) if _real(t)]
        if not self.worker.is_chief:
            report["counts"] = self._counts()
        return report

    def _counts(self) -> dict[str, list[Tensor]]:
        """What the metrics hold, but for the loss if the lead keeps the books of it."""
        metrics = self._metrics()
        before = {name: [v.value.detach().clone() for v in m.variables]
                  for name, m in metrics.items()}  # fmt: skip
        type(self.model).reset_metrics(self.model)
        return {
            name: [then - v.value.detach() for then, v in
                   zip(before[name], metric.variables, strict=True)]
            for name, metric in metrics.items()
        }  # fmt: skip

    def _metrics(self) -> dict[str, Any]:
        """Those whose counts travel, under a name that is the same on all workers.

        Keras' own step gives its loss to the tracker, by rows, before it hands in, so that the lead
        knows it. Another step may give it later, or weigh it otherwise.
        """
        found: dict[str, Any] = {}
        for metric in self.model.metrics:
            if metric is not self._tracker or self.custom:
                same = sum(name.partition("/")[2] == metric.name for name in found)
                found[f"{same}/{metric.name}"] = metric
        return found

    @torch.no_grad()
    def merge(self, reports: list[Any], loss: float, examples: int) -> None:
        """As the chief: add what the others have counted to what was counted here."""
        metrics = self._metrics()
        for report in reports:
            for name, counts in (report["counts"] or {}).items():
                if counts:  # one that was never given anything may have no variables yet
                    for variable, part in zip(metrics[name].variables, counts, strict=True):
                        variable.value.add_(part.to(variable.value.device))
        if any(report["tracked"] for report in reports):
            for variable, base, new in zip(
                self._tracked(), self._base, (loss, float(examples)), strict=True
            ):
                variable.value.copy_(base + new)

    def _tracked(self) -> list[Any]:
        return [] if self._tracker is None else list(self._tracker.variables)

    # --- what the chief has changed ---------------------------------------------------------------

    @torch.no_grad()
    def _follow_changes(self, news: Any) -> None:
        if news is None or self.worker.is_chief or news["edition"] <= self._edition:
            return
        self._edition = news["edition"]
        attributes.follow(self.model, news["attributes"])
        for index, value in news["weights"]:
            self.session.beside[index].copy_(value)


def attend(worker: Worker, model: Any, settings: Settings, replica: Replica) -> Any:
    """As another worker than the chief: take part until it ends the training; its result."""
    try:
        session = KerasSession(worker, model, settings, replica.device)
    except Dismissed as nothing:
        return from_chief(nothing.told["result"], model)
    if session.over is not None:
        last = session.take_last(session.over) or {}
    else:
        hand = Hand(model, session, replica)
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
