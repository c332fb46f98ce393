"""The chief's side with parameter servers: Keras' own loop deals out work and takes part in it.

    train_step      the batch is dealt, in parts if the rule is synchronous; then the chief works
                    like everybody else until few enough tickets wait, and Keras goes on
    metrics         whoever reads them waits until all that was dealt has been applied; then what
                    every worker has counted is added up
    everything else evaluate, predict and so on: here alone, with the newest values

Nothing is updated on workers. The optimizer runs on the servers, and its state comes back when the
model is saved and when the training ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.data.shard import rows
from stratagem.errors import NotDistributable, StratagemError, UsageError
from stratagem.frontends.hooks import refuse_on_parameters
from stratagem.frontends.keras import environment, parcel
from stratagem.frontends.keras.attributes import Attributes
from stratagem.frontends.keras.batches import as_tensor, rows_of
from stratagem.frontends.keras.bookkeeper import with_bookkeeper
from stratagem.frontends.keras.group import assist, end
from stratagem.frontends.keras.hand import Hand, attend, begin_group
from stratagem.frontends.keras.needs import Needs
from stratagem.frontends.keras.overlay import TRAINS, Overlay, busy
from stratagem.frontends.keras.results import portable
from stratagem.frontends.keras.seats import Seat
from stratagem.frontends.keras.session import KerasSession, dismiss, refuse
from stratagem.frontends.keras.step_logs import nested
from stratagem.rules.stats import Stats
from stratagem.rules.updates import Synchronous
from stratagem.strategies.parameters.apart import in_group
from stratagem.strategies.parameters.inside import current_worker
from stratagem.strategies.parameters.source import AHEAD, parts_of_rows
from stratagem.strategies.parameters.worker import EpochOver, FitOver
from stratagem.strategies.replica import Replica, current_replica

log = logging.getLogger("stratagem")


class ServedConductor(Overlay):
    """Distributes one model over the workers of parameter servers."""

    session: KerasSession | None = None
    hand: Hand | None = None

    # --- calls ------------------------------------------------------------------------------

    def _lead(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], needs: Needs, *,
        again: bool = False,
    ) -> Any:  # fmt: skip
        own = self._own(name)
        if self._leading:  # a validation, or a callback's call
            before, self._needs = self._needs, self._needs.joined(needs)
            try:
                self._settle()
                return own(*args, **kwargs)
            finally:
                self._needs = before
        if name not in TRAINS or busy():
            with keras.device(environment.device_name(self.strategy.team.start())):
                return own(*args, **kwargs)
        self._refuse()
        seat = Seat(self.number, self.model, self.strategy.settings, environment.config())
        if name == "fit":
            args, kwargs = with_bookkeeper(own, args, kwargs, self.stats)
        mine = (lambda: own(*args, **kwargs), self, needs)
        return self.strategy.team.call(_perform, (mine, seat), sent=(None, seat))[0]

    def _refuse(self) -> None:
        super()._refuse()
        refuse_on_parameters(self.strategy, self.model)
        if len(parcel.optimizers(self.model)) > 1:
            raise NotDistributable(
                "the model has several optimizers, or one inside of another (LossScaleOptimizer, "
                "made by mixed_float16), and parameter servers run a single one; use one "
                "optimizer, and mixed_bfloat16."
            )
        if self.model.compiled:
            refuse(self.model)

    def lead(self, call: Callable[[], Any], needs: Needs) -> Any:
        """In the chief, while the others wait for tickets."""
        self._replica, self._worker = current_replica(), current_worker()
        self.session = self.hand = None
        try:
            with self.leads(needs), keras.device(environment.device_name(self._replica)):
                result = call()
                self._settle(state=True)
                self._follow_changes(last=True)
            self._end(result)
        except BaseException as error:
            if not isinstance(error, StratagemError):
                self._rescue()
            raise
        finally:
            self._release()
        return result

    def stats(self) -> Stats | None:
        """The books of the training that is under way."""
        return self._worker.stats() if self.session is not None else None

    def _end(self, result: Any) -> None:
        """Have everybody end with the same."""
        apart = self.strategy.team.place is not None
        told = portable(result) if apart else None
        served = self.strategy.settings.served
        assert served is not None
        if self.session is None:
            dismiss(self._worker, served, {"result": told})
        else:
            self.session.end(self.session.last_words(told) if apart else {})

    def _rescue(self) -> None:
        """After Ctrl-C, say: whoever calls `fit` again goes on from here."""
        if self.session is not None and not self.session.rescue():
            log.warning("the training was interrupted while it talked with a server: the weights "
                        "are the newest, the optimizer's state is that of update %d.",
                        self._state_of)  # fmt: skip
            self.model.optimizer._iterations.assign(self._state_of)

    def _release(self) -> None:
        """The model and its optimizer are the user's own again."""
        if self.hand is not None:
            self.hand.close()
        self.hand = self.session = None

    # --- steps ------------------------------------------------------------------------------

    def train_step(self, data: Any) -> Any:
        if not self._leading or self._in_step:
            return self._own("train_step")(data)
        data = keras.tree.map_structure(as_tensor, data)
        rows_of(data)  # refuses a batch that cannot be cut
        if self.session is None:
            self._begin(data)
        hand, session = self.hand, self.session
        assert hand is not None and session is not None
        self._returned: dict[str, Any] = {}
        self._follow_changes()
        parts = parts_of_rows(data)(session.plan.parts)
        if self._news["edition"]:
            parts = [{**part, "news": self._news} for part in parts]
        if self._in_step_with_each(hand):
            self._deal(parts, last=True)
            self._drain()
            return self._logs(hand.logs if hand.custom else None)
        left = self._deal(parts, last=False)
        while left > self._ahead:
            work = self._worker.next_above(self._ahead)
            if work is None or isinstance(work, EpochOver | FitOver):
                break
            self._do(work)
            left -= 1
            if left > self._ahead:  # unless others have taken some meanwhile
                left = self._worker.deal(self._epoch, self._batch, [], False)
        if self._needs.steps:
            self._worker.refresh()  # callbacks see what the servers have, as far as they are
        self._mark_versions()
        return self._logs(hand.logs)

    def test_step(self, data: Any) -> Any:
        return self._own("test_step")(data)

    def predict_step(self, data: Any) -> Any:
        return self._own("predict_step")(data)

    def _in_step_with_each(self, hand: Hand) -> bool:
        """Whether to wait for this batch to be applied before Keras goes on.

        A synchronous rule gives exact numbers to whoever looks at single steps, and so does Keras
        if a step of the user's own returns others than the metrics. Without such a rule there is no
        such thing; a step of the user's own is waited for once, to know what it returns.
        """
        if isinstance(self._updates, Synchronous):
            return self._needs.steps or (hand.custom and not self._counted)
        return self._needs.single or (hand.custom and hand.logs is None)

    def _begin(self, data: Any) -> None:
        """The first step of a training: the servers get everything, and the others get to work."""
        model, settings = self.model, self.strategy.settings
        assert settings.served is not None
        if not model.built:
            model(keras.utils.unpack_x_y_sample_weight(rows(data, 0, 1))[0])
        optimizer = model.optimizer
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        self._attributes = Attributes(model)
        self._news: dict[str, Any] = {"edition": 0, "attributes": [], "weights": []}
        told = {
            "example": rows(data, 0, 1), "seed": self._seed(),
            "attributes": [list(each) for each in self._attributes.everything()],
            "trainable": [bool(v.trainable) for v in model.weights],
        }  # fmt: skip
        self._updates = settings.served.updates
        self.session = session = KerasSession(
            self._worker, model, settings, self._replica.device, told
        )
        self.hand = Hand(
            model, session, self._replica, begin_group(model, self._replica, session)
        )
        self._optimizer, self._trainable = optimizer, [v.trainable for v in model.weights]
        #: what the optimizer keeps, but for the rate, which is a setting
        self._slots = [v.value for v in optimizer.variables if v is not optimizer._learning_rate]
        others = session.plan.workers - 1
        self._ahead = min(others, 1) * session.plan.parts if session.plan.parts > 1 else (
            AHEAD * others
        )
        self._epoch = self._batch = 0
        #: whether something was dealt since all was applied; whether the optimizer's state is here
        self._is_open = self._whole_here = False
        #: the update of which the optimizer's state is here
        self._first = self._state_of = int(optimizer._iterations)
        self._means: dict[int, list[Tensor]] = {}
        #: by log of the user's own: the sum of this epoch's, and how many examples it is of
        self._sums: dict[str, list[float]] = {}
        #: whether a step of the user's own is known to return what the metrics are called
        self._counted = False
        self._mark_versions()

    def _deal(self, parts: list[Any], *, last: bool) -> int:
        assert self.hand is not None
        if not self._is_open:
            self._epoch += 1
            self._batch, self._is_open, self._whole_here = 0, True, False
            self.hand.begin()
        left = self._worker.deal(self._epoch, self._batch, [(1, len(parts))], last, parts)
        self._batch += 1
        self._closed = last
        return left

    def _do(self, work: Any) -> None:
        assert self.hand is not None
        self._in_step = True
        try:
            self.hand.do(work)
        finally:
            self._in_step = False
        if self._needs.attributes:
            self._watched().changed()  # every worker's steps change them alike

    def _drain(self) -> None:
        """Wait until all that was dealt is applied, and add up what was counted meanwhile."""
        if self.session is None or not self._is_open:
            return
        hand, worker = self.hand, self._worker
        assert hand is not None
        if not self._closed:
            worker.deal(self._epoch, self._batch, [], True)
        while not isinstance(work := worker.next(), EpochOver | FitOver):
            self._do(work)
        worker.report(hand.report())
        reports, loss, examples = worker.gather()
        hand.merge(reports, loss, examples)
        hand.begin()
        self._is_open = False
        self._means |= {r["worker"]: r["kept"] for r in reports if r["kept"] is not None}
        worker.refresh()
        self.model.optimizer._iterations.assign(self._first + worker.version)
        self._mark_versions()
        self._join_logs(reports)

    def _join_logs(self, reports: list[Any]) -> None:
        """Of a step of the user's own: the metrics, and the mean of numbers that none holds.

        Such a number is that of the last step. Where several workers are free of step there is no
        last one, and it is the mean over the epoch. Keras takes for an epoch's logs what its last
        step has returned, so they are put there.
        """
        assert self.hand is not None and self.session is not None
        sources = self.hand.sources
        if isinstance(self._updates, Synchronous) or self.session.plan.workers == 1:
            self._sums = {}
        for report in reports:
            sources.join(report["sources"])
            for log, (value, weight) in report["logs"].items():
                before = self._sums.get(log, (0.0, 0.0))
                self._sums[log] = [before[0] + value, before[1] + weight]
        if self._sums:
            held = sources.read(self._sums)
            means = {log: value / weight for log, (value, weight) in self._sums.items()}
            self.hand.logs = nested({**means, **held})
            self._returned.update(self.hand.logs)
            self._counted = set(self.hand.logs) == set(self._own("get_metrics_result")())

    def _logs(self, logs: Any) -> Any:
        """What a step returns."""
        assert self.hand is not None
        if self.hand.custom and isinstance(logs, dict):
            self._returned = logs = dict(logs)
        return logs if logs is not None else self._own("get_metrics_result")()

    # --- what callbacks change ----------------------------------------------------------------

    def _follow_changes(self, *, last: bool = False) -> None:
        """Tell servers and workers what a callback has changed here; `last`: no step follows."""
        session = self.session
        if session is None:
            return
        if self.model.optimizer is not self._optimizer:
            raise UsageError(
                "the model's optimizer was replaced while it trains, which the servers cannot "
                "follow; compile the model again between two calls of fit."
            )
        self._worker.set_settings(session.settings())
        if self._needs.attributes:
            self._watched().refuse_replaced()
        if self._needs.attributes and (changes := self._watched().changed()):
            if [v.trainable for v in self.model.weights] != self._trainable:
                raise UsageError(
                    "what is trainable was changed while the model trains, which the servers "
                    "cannot follow; change it between two calls of fit."
                )
            self._announce("attributes", changes)
        if self._written() != self._versions:
            self._take_up(session, last=last)
            self._mark_versions()

    def _take_up(self, session: KerasSession, *, last: bool) -> None:
        """Somebody has written to weights, or to the optimizer's state, which servers keep.

        What was dealt before comes first; then what was written counts, and nothing else: the
        values here may be older than those of the servers.
        """
        params, beside, slots = (
            [(i, t.detach().clone()) for i, t in enumerate(each)
             if t._version != self._versions[id(t)]]
            for each in (session.params, session.beside, self._slots)
        )  # fmt: skip
        if params or slots:
            self._drain()
            session.read_state()
        if not last and any(not torch.equal(self._slots[i], value) for i, value in slots):
            raise UsageError(
                "the optimizer's state was changed while the model trains (load_weights does that, "
                "too), which the servers cannot follow; do it between two calls of fit, or change "
                "the weights alone: model.set_weights(...)."
            )
        with torch.no_grad():
            for own, written in (
                (session.params, params), (session.beside, beside), (self._slots, slots)
            ):  # fmt: skip
                for i, value in written:
                    own[i].copy_(value)
        if params:
            self._worker.assign(session.params)
        if beside:
            self._announce("weights", beside)

    def _announce(self, kind: str, changes: Sequence[Sequence[Any]]) -> None:
        """Tickets bring it to the others from now on, whoever gets one: the last of each."""
        known = {tuple(each[:-1]): list(each) for each in (*self._news[kind], *changes)}
        self._news = {
            **self._news, "edition": self._news["edition"] + 1, kind: list(known.values()),
        }  # fmt: skip

    def _written(self) -> dict[int, int]:
        assert self.session is not None
        tensors = (*self.session.params, *self.session.beside, *self._slots)
        return {id(t): t._version for t in tensors}

    def _mark_versions(self) -> None:
        self._versions = self._written()

    # --- reading ----------------------------------------------------------------------------

    def _settle(self, *, state: bool = False) -> None:
        """Everything that was dealt is applied, and the model here has what came of it.

        From then on until the next step it is a callback's to change, for a while too.
        """
        if not self._listening():
            return
        assert self.session is not None and self._optimizer is not None
        # in few bits values come rounded; whoever looks gets those that will be saved
        rounded = self.session.plan.wire is not None
        whole = state or rounded or self._needs.attributes or self._optimizer.use_ema
        if not self._is_open and (self._whole_here or not whole):
            return
        self._follow_changes()
        self._drain()
        self._average()
        if whole:
            self.session.read_state()
            self._whole_here, self._state_of = True, int(self._optimizer._iterations)
        self._mark_versions()

    @torch.no_grad()
    def _average(self) -> None:
        """One defined answer for moving statistics: the mean over the workers that worked."""
        assert self.session is not None
        floats = [(i, t) for i, t in enumerate(self.session.beside) if t.is_floating_point()]
        everybody, self._means = list(self._means.values()), {}
        changes: list[tuple[int, Tensor]] = []
        for each, (number, tensor) in zip(zip(*everybody, strict=True), floats, strict=False):
            if any(not torch.equal(each[0].cpu(), other.cpu()) for other in each[1:]):
                tensor.copy_(torch.stack([part.double().cpu() for part in each]).mean(0))
                changes.append((number, tensor.detach().cpu().clone()))
        if changes:  # the others go on from there, too
            self._announce("weights", changes)

    def reset_metrics(self) -> None:
        if self._listening():
            self._drain()
            self._sums = {}
        self._own("reset_metrics")()

    def get_metrics_result(self) -> Any:
        self._settle()
        return self._own("get_metrics_result")()

    def get_weights(self) -> Any:
        self._settle()
        return self._own("get_weights")()

    def _gather_statistics(self) -> None:
        self._settle(state=True)  # something is saved

    def _listening(self) -> bool:
        return self._leading and not self._in_step and self.session is not None


def _perform(mine: tuple[Callable[[], Any], ServedConductor, Needs] | None, seat: Seat) -> Any:
    """On every worker: lead, or work until the one that leads ends it."""
    replica = current_replica()
    grouped = in_group(replica)
    if grouped and not replica.leads:
        assist(seat, replica)
        return None
    result = _work(mine, seat, replica)
    if grouped:
        end(replica)
    return result


def _work(
    mine: tuple[Callable[[], Any], ServedConductor, Needs] | None, seat: Seat, replica: Replica
) -> Any:
    worker = current_worker()
    if mine is not None and worker.is_chief:
        call, leader, needs = mine
        return leader.lead(call, needs)
    if mine is not None:
        model = mine[1].model  # another client of the cluster has its own
    else:
        model = seat.model
        environment.configure(seat.config)
        parcel.settle(model)
    with keras.device(environment.device_name(replica)):
        return attend(worker, model, seat.settings, replica)
