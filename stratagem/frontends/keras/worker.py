"""A worker of parameter servers: computes gradients of tickets; the servers update the weights.

`TicketWorker` asks the coordinator for tickets. For each of them `TicketStep` runs the model's own
`train_step` on the ticket's rows:

    _loss_tracker.update_state    replaced: notes the loss; backward begins
    backward                      `KerasSession` puts each finished gradient into the outbox
    optimizer.apply               replaced: commits; the coordinator says whether it counts
    after the step                if it does not, the metrics' counts of it are taken back

Several devices of one worker share every ticket, each with a `TicketStep` of its own: the first is
the worker and tells the others each verb. All call `apply`, which is collective then: gradients
were all-reduced in backward, and the first device pushes the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stratagem.data.shares import count_rows
from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.keras.adapter import KerasAdapter, kept, roll_dice
from stratagem.frontends.keras.callback_needs import from_chief
from stratagem.frontends.keras.model_pickle import FollowerModel
from stratagem.frontends.keras.step_logs import flat, restorer
from stratagem.frontends.keras.worker_session import (
    Dismissed,
    KerasSession,
    adapter_of,
    overlay,
    slots_on_servers,
)
from stratagem.servers.client import Assignment, Client, EpochOver, FitOver
from stratagem.servers.push_committer import GroupedCommitter, PushCommitter
from stratagem.servers.session import Late
from stratagem.servers.task_main import in_group
from stratagem.state import keras_recipe
from stratagem.state.change_tracker import TensorTracker
from stratagem.training import setup
from stratagem.training.committer import Committer
from stratagem.training.exchange import GradientExchange
from stratagem.training.replica import END, CommandLoop, Replica
from stratagem.training.settings import Settings
from stratagem.wire.tree import broadcast_tree


class TicketStep:
    """The training step of one device of a worker, for one training.

    `session` is None on all devices but the first, which alone pushes to the servers.
    """

    def __init__(
        self, adapter: KerasAdapter, told: dict[str, Any], session: KerasSession | None = None
    ) -> None:
        self.adapter, self.session = adapter, session
        self.model, self._part = adapter.model, adapter.part
        self.custom = "train_step" in adapter.sources
        named = [(v.path, v.value) for v in self.model.trainable_variables]
        self.params = [param for _, param in named]
        self.push = None if session is None else PushCommitter(session)
        self._exchange: GradientExchange | None = None
        self._committer: Committer | None = self.push
        if in_group(adapter.replica):
            # between devices gradients are not rounded: the wire's type is for pushes
            reducer = setup.choose_reducer(self.params, adapter.replica, Settings())
            exchange = GradientExchange(named, adapter.replica, reducer, every_backward=True)
            exchange.armed = False
            if session is not None:
                session.cancels = False  # a broken-off backward would leave the devices waiting
                exchange.after = session.added_up
            self._exchange = exchange
            self._committer = GroupedCommitter(exchange, adapter.replica, self.push)
        #: whether a step runs, and whether it has committed
        self._open = self._committed = False
        self._loss: float | None = None
        #: how many updates the optimizer had made before this training
        self._first = int(told.get("iterations", 0))
        #: what `apply` has fetched already, with the values that it made
        self.ahead: Assignment | EpochOver | FitOver | None = None
        self._weights = TensorTracker(self.params)
        #: whether the loss is Keras' own, so that the servers' sum of it is the tracker's value
        self.tracked = False
        #: logs of the last step of a custom `train_step`: means over the rows
        self.numbers: dict[str, float] = {}
        self._counted = False
        self._edition = 0
        self._tracker = getattr(self.model, "_loss_tracker", None)
        overlay(adapter, self._apply)
        if self._tracker is not None:
            self._tracker.__dict__["update_state"] = self._noting_loss(self._tracker)

    def close(self) -> None:
        """Give the optimizer and the loss tracker their own methods back."""
        overlay(self.adapter, None)
        if self._tracker is not None:
            self._tracker.__dict__.pop("update_state", None)
        if self._exchange is not None:
            self._exchange.close()

    def train(self, payload: Any) -> bool:
        """Compute and commit the gradient of a ticket; returns whether it counts."""
        adapter, data = self.adapter, payload["rows"]
        self._follow_changes(payload.get("news"))
        uncount = restorer(lambda: self.model.metrics_variables)
        if self._exchange is not None:
            setup.spread(self.params, adapter.replica)
            self._exchange.armed = True
        self._part.begin(count_rows(data), int(payload["total"]))
        self._open, self._committed, self._counted, self._loss = True, False, False, None
        self._count_updates()
        try:
            self._play(data)
        except Late:
            assert self.push is not None
            self.push.abandon()
        finally:
            self._open = False
            if self._exchange is not None:
                self._exchange.armed = False
            self._forget_gradients()
        if not self._counted:
            uncount()
        elif self.custom and isinstance(adapter.last, dict):
            self._note(adapter.last)
        return self._counted

    def _play(self, data: Any) -> None:
        self._weights.mark()
        with slots_on_servers(self.model.optimizer, self.custom):
            self.adapter.play("train_step", data)
        self._check_weights()
        if not self._committed:
            raise NotDistributable(
                "train_step did not call self.optimizer.apply(gradients, self.trainable_weights), "
                "which servers wait for; to leave out an update on purpose, use a MirroredStrategy."
            )

    def _check_weights(self) -> None:
        if self._weights.changes():
            raise NotDistributable(
                "train_step wrote to weights that are trained, and the servers do not see that; if "
                "they are an averaged copy, set trainable = False on its layers; else have the "
                "optimizer do it (kernel_constraint=..., weight_decay=...), or a callback."
            )

    def _count_updates(self) -> None:
        """Set the optimizer's count, of which schedules are made, to that of the values here."""
        made = 0 if self.session is None else self.session.worker.version
        if self._exchange is not None:
            made = broadcast_tree(self.adapter.replica.collective, made)
        with torch.no_grad():
            self.model.optimizer._iterations.value.fill_(self._first + made)

    def _fetch(self) -> None:
        """After `apply` in a step of the user's own: wait for the values that it made."""
        in_step = self.session is not None and self.session.plan.in_step
        if self._exchange is not None:
            in_step = broadcast_tree(self.adapter.replica.collective, in_step)
        if not in_step:
            return
        if self.session is not None:
            if self.session.plan.workers > 1:
                self.ahead = self.session.worker.next()
            self.session.worker.refresh()
        if self._exchange is not None:
            setup.spread(self.params, self.adapter.replica)
        self._count_updates()
        self._weights.mark()

    def _note(self, logs: dict[str, Any]) -> None:
        noted = self.adapter.sources["train_step"].note(logs)
        numbers = {log: noted.get(log, 0.0) for log in flat(logs)}
        self.numbers = numbers if self._exchange is None else self.adapter.mean(numbers)

    def _forget_gradients(self) -> None:
        if self.session is not None:
            self.session.forget_gradients()
        for param in self.params:
            param.grad = None

    def _apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Commit, in place of the optimizer's `apply`."""
        if not self._open or self._committed:
            raise UsageError(
                "optimizer.apply was called outside of train_step, or twice in it; with parameter "
                "servers each batch makes one gradient, of a batch that this worker was dealt."
            )
        self._committed = True
        known = self.model.optimizer._trainable_variables
        variables = known if trainable_variables is None else trainable_variables
        given = {id(v.value): g for v, g in zip(variables, grads, strict=True)}
        if self.session is not None:
            for i, param in enumerate(self.session.params):
                self._put_gradient(self.session, i, param, given.get(id(param)))
        assert self._committer is not None
        notes = self._part.notes(self.model, self._loss or 0.0)
        self._check_weights()
        self._counted = self._committer.commit(notes).counted
        if self.custom:
            self._fetch()

    def _put_gradient(self, session: KerasSession, index: int, param: Any, grad: Any) -> None:
        """Put the gradient given to `apply` into the outbox, unless it is the one of backward."""
        if grad is not None and (id(grad), grad._version) == session.made[index]:
            return
        if not self._part.whole and grad is not None:
            raise NotDistributable(
                "train_step changed the gradients before it handed them to the optimizer, and "
                "this worker has a part of the batch only; let the optimizer clip them "
                "(global_clipnorm=...), or use Asynchronous(), whose workers get whole batches."
            )
        param.grad = None if grad is None else grad.detach()
        session.worker.memory.take(index)

    def _noting_loss(self, tracker: Any) -> Callable[..., Any]:
        def update_state(values: Any, sample_weight: Any = None) -> Any:
            if self._open:
                self._loss = float(torch.as_tensor(values).detach())
                self.tracked = not self.custom
                if self.tracked and self.session is not None and self._exchange is None:
                    # backward comes next, and just once
                    self.session.worker.begin_backward(listens=self.session.cancels)
            return type(tracker).update_state(tracker, values, sample_weight=sample_weight)

        return update_state

    def _follow_changes(self, news: Any) -> None:
        """Take over the values and attributes that callbacks have changed on the chief."""
        if news is not None and news["edition"] > self._edition:
            self._edition = news["edition"]
            self.adapter.follow(news["attributes"])
            self.adapter.take(news["weights"])


class TicketWorker:
    """Works on the tickets of one training; the first device of its worker."""

    def __init__(self, adapter: KerasAdapter, session: KerasSession) -> None:
        self.adapter, self.session, self.worker = adapter, session, session.worker
        self._devices: CommandLoop | None = None
        if in_group(adapter.replica):
            self._devices = CommandLoop(adapter.replica.collective)
            self._tell("begin", {**session.told, "worker": self.worker.index})
            setup.spread(kept(adapter.model), adapter.replica)
        self.step = TicketStep(adapter, session.told, session)
        #: the logs of the last step that counts
        self.logs: Any = None
        self._epoch = 0
        self.begin()

    def close(self) -> None:
        self.step.close()

    def begin(self) -> None:
        """Begin the counts of the next report."""
        self._worked, self.step.tracked = 0, False
        self._sums: dict[str, list[float]] = {}
        self._base = [v.value.detach().clone() for v in self._tracked()]

    def follow(self) -> Any:
        """Work until the chief ends the training; returns its last message."""
        self.adapter.model.train()
        while True:
            work = self.next()
            if isinstance(work, FitOver):
                self.session.end()
                return self.session.take_last(work)
            if isinstance(work, EpochOver):
                self.worker.report(self.report())
                self.begin()
            else:
                self.do(work)

    def next(self) -> Assignment | EpochOver | FitOver:
        """Wait for work, unless the last step has it."""
        work, self.step.ahead = self.step.ahead, None
        return self.worker.next() if work is None else work

    def do(self, work: Assignment) -> None:
        """Compute and commit the gradient of a ticket, with all devices."""
        if work.epoch != self._epoch:
            if self._worked and not self.worker.is_chief:  # absent when the last epoch ended
                self._tell("reset")
                self.adapter.metrics.begin()
                self.begin()
            self._epoch = work.epoch
        examples = count_rows(work.payload["rows"])
        self._tell("train", work.payload)
        assert self.step.push is not None
        borrowed = "borrowed" in work.payload
        self.step.push.begin(work.ticket, examples, borrowed=borrowed)
        counted = self.step.train(work.payload)
        self._worked += borrowed
        if counted:
            self.logs = self.adapter.last
            self._worked += 1
            self._add_up(examples)

    def _tell(self, verb: str, *arguments: Any) -> None:
        """Tell the other devices of this worker a verb."""
        if self._devices is not None:
            self._devices.tell(verb, *arguments)

    def _add_up(self, examples: int) -> None:
        """Sum the step's logs for their mean over the epoch."""
        if self.session.plan.workers == 1:  # the last step's, as on one device
            self._sums = {}
        for log, number in self.step.numbers.items():
            total, weight = self._sums.get(log, (0.0, 0.0))
            self._sums[log] = [total + number * examples, weight + examples]

    def report(self) -> dict[str, Any]:
        """Return the counts since the last report; workers but the chief hand theirs over."""
        if self._devices is not None:
            self._tell("drain")
            self.adapter.drain()
            self._tell("average")
            self.adapter.average()
        sources = self.adapter.sources.get("train_step")
        report: dict[str, Any] = {
            "worker": self.worker.index,
            "tracked": self.step.tracked,
            "logs": self._sums,
            "sources": {} if sources is None else sources.known,
            "counts": None,
            "kept": None,
        }
        if self._worked:
            state = kept(self.adapter.model)
            report["kept"] = [t.detach() for t in state if t.is_floating_point()]
            if not self.worker.is_chief:
                report["counts"] = self.adapter.metrics.hand_over()
        return report

    @torch.no_grad()
    def merge(self, reports: list[Any], loss: float, examples: int) -> None:
        """As the chief: add the counts of the other workers to those of this one."""
        for report in reports:
            if report["counts"] is not None:
                self.adapter.metrics.add(report["counts"])
        if any(report["tracked"] for report in reports):
            tracked = zip(self._tracked(), self._base, (loss, float(examples)), strict=True)
            for variable, base, new in tracked:
                variable.value.copy_(base + new)

    def _tracked(self) -> list[Any]:
        tracker = getattr(self.adapter.model, "_loss_tracker", None)
        return [] if tracker is None else list(tracker.variables)


def assist(seat: FollowerModel, replica: Replica) -> None:
    """Serve the first device's verbs, as another device of a worker, until the training ends."""
    loop = CommandLoop(replica.collective)
    verb, arguments = loop.hear()
    if verb == END:
        return
    adapter, (told,) = adapter_of(seat.unpacked(), replica), arguments
    adapter.become(told)
    setup.spread(kept(adapter.model), replica)
    roll_dice(adapter.model, told["seed"], told["worker"] + setup.DEVICES * replica.index)
    adapter.model.train()
    step = TicketStep(adapter, told)
    try:
        loop.serve(
            {
                "train": step.train,
                "drain": adapter.drain,
                "average": adapter.average,
                "reset": adapter.metrics.begin,
            }
        )
    finally:
        step.close()


def attend(worker: Client, model: Any, settings: Settings, replica: Replica) -> Any:
    """Take part in a training as a worker that is not the chief; returns the chief's result."""
    adapter = adapter_of(model, replica)
    try:
        session = KerasSession(worker, adapter, settings)
    except Dismissed as nothing:
        return from_chief(nothing.told["result"], model)
    if session.over is not None:
        last = session.take_last(session.over) or {}
    else:
        ticket_worker = TicketWorker(adapter, session)
        try:
            last = ticket_worker.follow() or {}
        finally:
            ticket_worker.close()
    if "states" in last:
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        keras_recipe.restore(model.optimizer, model.trainable_variables, last["states"])
    return from_chief(last.get("result"), model)
