"""One training that servers keep, as the chief sees it: from its first step to its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import UsageError
from stratagem.frontends.keras.adapter import KerasAdapter
from stratagem.frontends.keras.driver import Driver
from stratagem.frontends.keras.step_logs import nested
from stratagem.frontends.keras.worker import TicketWorker
from stratagem.frontends.keras.worker_session import KerasSession
from stratagem.rules.updates import Synchronous
from stratagem.servers.batch_source import AHEAD, parts_of_rows
from stratagem.servers.client import Client, EpochOver, FitOver

log = logging.getLogger("stratagem")


class ServerTraining:
    """Deals batches, works on tickets until few enough wait, and gathers what all have counted."""

    def __init__(
        self, driver: Driver, adapter: KerasAdapter, client: Client, told: dict[str, Any]
    ) -> None:
        self._driver, self._adapter, self.client = driver, adapter, client
        settings, self.optimizer = driver.strategy.settings, driver.model.optimizer
        assert settings.served is not None
        self._updates = settings.served.updates
        #: for the others, from now on with every ticket: the last of each change
        self._news: dict[str, Any] = {"edition": 0, "attributes": [], "weights": []}
        self.session = KerasSession(client, adapter, settings, told)
        self.worker = TicketWorker(adapter, self.session)
        plan = self.session.plan
        others = plan.workers - 1
        #: how many tickets may wait while Keras goes on
        self._ahead = min(others, 1) * plan.parts if plan.parts > 1 else AHEAD * others
        self._epoch = self._batch = 0
        #: whether something was dealt since all was applied, and nothing more comes
        self.is_open = self._closed = False
        #: whether the optimizer's state is here, and the update of which it is
        self.whole_here = False
        self._first = self._state_of = int(self.optimizer._iterations)
        #: by worker, what its layers keep in mind
        self._means: dict[int, list[Tensor]] = {}
        #: by log of the user's own: the sum of this epoch's, and how many examples it is of
        self.sums: dict[str, list[float]] = {}
        #: whether a step of the user's own is known to return what the metrics are called
        self._is_counted = False
        self._returned: dict[str, Any] = {}
        adapter.mark()

    def close(self) -> None:
        """The model and its optimizer are the user's own again."""
        self.worker.close()

    def rescue(self) -> None:
        """After Ctrl-C, say: whoever calls `fit` again goes on from here."""
        if not self.session.rescue():
            log.warning(
                "the training was interrupted while it talked with a server: the weights "
                "are the newest, the optimizer's state is that of update %d.",
                self._state_of,
            )
            self.optimizer._iterations.assign(self._state_of)

    # --- steps ------------------------------------------------------------------------------

    def step(self, data: Any) -> Any:
        """Deal a batch, and work; what the step returns to Keras."""
        self._returned = {}
        parts = parts_of_rows(data)(self.session.plan.parts)
        if self._news["edition"]:
            parts = [{**part, "news": self._news} for part in parts]
        custom = self.worker.step.custom
        if self._waits_for_each(custom):
            self._deal(parts, last=True)
            self.drain()
            return self._logs(self.worker.logs if custom else None)
        left = self._deal(parts, last=False)
        while left > self._ahead:
            work = self.client.next_above(self._ahead)
            if work is None or isinstance(work, EpochOver | FitOver):
                break
            self._do(work)
            left -= 1
            if left > self._ahead:  # unless others have taken some meanwhile
                left = self.client.deal(self._epoch, self._batch, [], False)
        if self._driver.needs.steps:
            self.client.refresh()  # callbacks see what the servers have, as far as they are
        self._adapter.mark()
        return self._logs(self.worker.logs)

    def _waits_for_each(self, custom: bool) -> bool:
        """Whether to wait for this batch to be applied before Keras goes on.

        A synchronous rule gives exact numbers to whoever looks at single steps, and so does Keras
        if a step of the user's own returns others than the metrics. Without such a rule there is no
        such thing; a step of the user's own is waited for once, to know what it returns.
        """
        needs = self._driver.needs
        if isinstance(self._updates, Synchronous):
            return needs.steps or (custom and not self._is_counted)
        return needs.single or (custom and self.worker.logs is None)

    def _deal(self, parts: list[Any], *, last: bool) -> int:
        if not self.is_open:
            self._epoch += 1
            self._batch, self.is_open, self.whole_here = 0, True, False
            self.worker.begin()
        left = self.client.deal(self._epoch, self._batch, [(1, len(parts))], last, parts)
        self._batch += 1
        self._closed = last
        return left

    def _do(self, work: Any) -> None:
        with self._driver.playing():
            self.worker.do(work)
        if self._driver.needs.attributes and self._adapter.attributes is not None:
            self._adapter.attributes.mark()  # every worker's steps change them alike

    def drain(self) -> None:
        """Wait until all that was dealt is applied, and add up what was counted meanwhile."""
        if not self.is_open:
            return
        client, worker = self.client, self.worker
        if not self._closed:
            client.deal(self._epoch, self._batch, [], True)
        while not isinstance(work := client.next(), EpochOver | FitOver):
            self._do(work)
        client.report(worker.report())
        reports, loss, examples = client.gather()
        worker.merge(reports, loss, examples)
        worker.begin()
        self.is_open = False
        self._means |= {r["worker"]: r["kept"] for r in reports if r["kept"] is not None}
        client.refresh()
        self.optimizer._iterations.assign(self._first + client.version)
        self._adapter.mark()
        self._join_logs(reports)

    # --- logs of a step of the user's own -------------------------------------------------------

    def _join_logs(self, reports: list[Any]) -> None:
        """The metrics, and the mean of numbers that none holds.

        Such a number is that of the last step. Where several workers are free of step there is no
        last one, and it is the mean over the epoch. Keras takes for an epoch's logs what its last
        step has returned, so they are put there.
        """
        sources = self._adapter.sources.get("train_step")
        if sources is None:
            return
        if isinstance(self._updates, Synchronous) or self.session.plan.workers == 1:
            self.sums = {}
        for report in reports:
            sources.join(report["sources"])
            for log, (value, weight) in report["logs"].items():
                before = self.sums.get(log, (0.0, 0.0))
                self.sums[log] = [before[0] + value, before[1] + weight]
        if self.sums:
            held = sources.read(self.sums)
            means = {log: value / weight for log, (value, weight) in self.sums.items()}
            self.worker.logs = nested({**means, **held})
            self._returned.update(self.worker.logs)
            metrics = self._driver.own("get_metrics_result")()
            self._is_counted = set(self.worker.logs) == set(metrics)

    def _logs(self, logs: Any) -> Any:
        """What a step returns."""
        if self.worker.step.custom and isinstance(logs, dict):
            self._returned = logs = dict(logs)
        return logs if logs is not None else self._driver.own("get_metrics_result")()

    # --- state ------------------------------------------------------------------------------

    def settle(self, *, whole: bool) -> None:
        """Wait until all is applied; `whole`: with the optimizer's state."""
        self.drain()
        self._average()
        if whole:
            self.session.read_state()
            self.whole_here, self._state_of = True, int(self.optimizer._iterations)
        self._adapter.mark()

    @torch.no_grad()
    def _average(self) -> None:
        """One defined answer for moving statistics: the mean over the workers that worked."""
        everybody, self._means = list(self._means.values()), {}
        floats = [t for t in self.session.beside if t.is_floating_point()]
        numbers = {id(t): i for i, t in enumerate(self._adapter.tensors())}
        changes: list[tuple[int, Tensor]] = []
        for each, tensor in zip(zip(*everybody, strict=True), floats, strict=False):
            if any(not torch.equal(each[0].cpu(), other.cpu()) for other in each[1:]):
                tensor.copy_(torch.stack([part.double().cpu() for part in each]).mean(0))
                changes.append((numbers[id(tensor)], tensor.detach().cpu().clone()))
        if changes:  # the others go on from there, too
            self.announce("weights", changes)

    def announce(self, kind: str, changes: Sequence[Sequence[Any]]) -> None:
        """Tickets bring it to the others from now on, whoever gets one: the last of each."""
        known = {tuple(each[:-1]): list(each) for each in (*self._news[kind], *changes)}
        edition = self._news["edition"] + 1
        self._news = {**self._news, "edition": edition, kind: list(known.values())}

    def take_up(self, written: list[tuple[int, Tensor]], *, last: bool) -> None:
        """Somebody has written to weights, or to the optimizer's state, which servers keep.

        What was dealt before comes first; then what was written counts, and nothing else: the
        values here may be older than those of the servers.
        """
        everything, optimizer = self._adapter.tensors(), self.optimizer
        rate = getattr(optimizer._learning_rate, "value", None)  # a setting, not a state
        slots = {id(v.value) for v in optimizer.variables if v.value is not rate}
        params = {id(param) for param in self.session.params}
        each = ((i, everything[i], value.clone()) for i, value in written)
        found = [(i, tensor, value) for i, tensor, value in each if tensor is not rate]
        trained = any(id(tensor) in params for _, tensor, _ in found)
        states = [(tensor, value) for _, tensor, value in found if id(tensor) in slots]
        if trained or states:
            self.drain()
            self.session.read_state()
        if not last and any(not torch.equal(tensor, value) for tensor, value in states):
            raise UsageError(
                "the optimizer's state was changed while the model trains (load_weights does that, "
                "too), which the servers cannot follow; do it between two calls of fit, or change "
                "the weights alone: model.set_weights(...)."
            )
        with torch.no_grad():
            for _, tensor, value in found:
                tensor.copy_(value)
        if trained:
            self.client.assign(self.session.params)
        beside = [(i, value) for i, tensor, value in found if id(tensor) not in params | slots]
        if beside:
            self.announce("weights", beside)
