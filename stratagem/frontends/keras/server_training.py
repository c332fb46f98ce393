"""One training with parameter servers, on the chief: from its first step to its end.

Keras' loop hands each batch to `ServerTraining.step`, which deals it as tickets. The chief is a
worker, too: it works on tickets while more than `_ahead` of them wait, and then returns to Keras.
The servers apply gradients meanwhile; `drain` waits until all are applied.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.keras.adapter import KerasAdapter
from stratagem.frontends.keras.driver import Driver
from stratagem.frontends.keras.row_means import assignable
from stratagem.frontends.keras.step_logs import nested
from stratagem.frontends.keras.worker import TicketWorker
from stratagem.frontends.keras.worker_session import KerasSession
from stratagem.rules.updates import Synchronous
from stratagem.servers.batch_source import AHEAD, parts_of_rows
from stratagem.servers.client import Client, EpochOver, FitOver

log = logging.getLogger("stratagem")


class ServerTraining:
    """Deals batches, works on tickets, and gathers the counts of all workers."""

    def __init__(
        self, driver: Driver, adapter: KerasAdapter, client: Client, told: dict[str, Any]
    ) -> None:
        self._driver, self._adapter, self.client = driver, adapter, client
        settings, self.optimizer = driver.strategy.settings, driver.model.optimizer
        assert settings.served is not None
        self._updates = settings.served.updates
        #: the newest value of everything that callbacks have changed; goes with every ticket
        self._news: dict[str, Any] = {"edition": 0, "attributes": [], "weights": []}
        self.session = KerasSession(client, adapter, settings, told)
        self.worker = TicketWorker(adapter, self.session)
        plan = self.session.plan
        others = plan.workers - 1
        #: how many tickets may wait when `step` returns to Keras
        self._ahead = min(others, 1) * plan.parts if plan.parts > 1 else AHEAD * others
        self._epoch = self._batch = 0
        #: whether tickets were dealt since the last `drain`, and the last of them was
        self.is_open = self._closed = False
        #: whether the optimizer's state was read, and after which update
        self.whole_here = False
        self._first = self._state_of = int(self.optimizer._iterations)
        #: by worker: moving statistics and the like
        self._means: dict[int, list[Tensor]] = {}
        #: by log of a custom `train_step`: its sum over the epoch, and the number of examples
        self.sums: dict[str, list[float]] = {}
        self._returned: dict[str, Any] = {}
        if self.worker.step.custom and not plan.in_step:
            log.warning(
                "train_step is your own, and %s: what it reads after optimizer.apply is from "
                "before. If it reads weights or optimizer.iterations there, use "
                "updates=sg.Synchronous().",
                "with spares a worker has parts of some batches only"
                if plan.shares_batches
                else "asynchronous servers apply its gradients later",
            )
        adapter.mark()

    def close(self) -> None:
        """Give the model and its optimizer their own methods back."""
        self.worker.close()

    def rescue(self) -> None:
        """Read the weights after Ctrl-C or an error, so that the next `fit` goes on from them."""
        if not self.session.rescue():
            log.warning(
                "the training was interrupted while it talked with a server: the weights "
                "are the newest, the optimizer's state is that of update %d.",
                self._state_of,
            )
            self.optimizer._iterations.assign(self._state_of)

    # --- steps ------------------------------------------------------------------------------

    def step(self, data: Any) -> Any:
        """Deal a batch and work on tickets; returns the logs for Keras."""
        self._returned = {}
        custom, plan = self.worker.step.custom, self.session.plan
        borrow = custom and plan.parts == plan.workers  # what it counts is alike on all workers
        parts = parts_of_rows(data, borrow=borrow)(plan.parts)
        if self._news["edition"]:
            parts = [{**part, "news": self._news} for part in parts]
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
            if left > self._ahead:  # other workers may have taken some meanwhile
                left = self.client.deal(self._epoch, self._batch, [], False)
        if self._driver.needs.steps:
            self.client.refresh()  # callbacks see the servers' newest weights
        self._adapter.mark()
        return self._logs(self.worker.logs)

    def _waits_for_each(self, custom: bool) -> bool:
        """Whether to wait for this batch to be applied before Keras goes on.

        With a synchronous rule callbacks that look at single steps get exact numbers, and a custom
        `train_step` may read what `apply` made. Without such a rule only the first step of a custom
        `train_step` is waited for, to know what it returns.
        """
        needs = self._driver.needs
        if isinstance(self._updates, Synchronous):
            return needs.steps or custom
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
            self._adapter.attributes.mark()  # a step changes attributes alike on every worker

    def drain(self) -> None:
        """Wait until every dealt batch is applied, and add up the counts of all workers."""
        if not self.is_open:
            return
        client, worker = self.client, self.worker
        if not self._closed:
            client.deal(self._epoch, self._batch, [], True)
        while not isinstance(work := worker.next(), EpochOver | FitOver):
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

    # --- logs of a custom train_step --------------------------------------------------------

    def _join_logs(self, reports: list[Any]) -> None:
        """Put the epoch's logs into what the last step returned, where Keras takes them from.

        Logs that are metrics have the metrics' values. Another number is that of the last step; of
        several asynchronous workers, which have no last step, it is the mean over the epoch.
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

    def _logs(self, logs: Any) -> Any:
        """Return a step's logs to Keras; without any, the metrics."""
        if self.worker.step.custom and isinstance(logs, dict):
            self._returned = logs = dict(logs)
        return logs if logs is not None else self._driver.own("get_metrics_result")()

    # --- state ------------------------------------------------------------------------------

    def settle(self, *, whole: bool) -> None:
        """Drain; `whole`: read the optimizer's state, too."""
        self.drain()
        self._average()
        if whole:
            self.session.read_state()
            self.whole_here, self._state_of = True, int(self.optimizer._iterations)
        self._adapter.mark()

    @torch.no_grad()
    def _average(self) -> None:
        """Set moving statistics to the mean over the workers that had a ticket."""
        statistics, self._means = list(self._means.values()), {}
        floats = [t for t in self.session.beside if t.is_floating_point()]
        numbers = {id(t): i for i, t in enumerate(self._adapter.tensors())}
        changes: list[tuple[int, Tensor]] = []
        for each, tensor in zip(zip(*statistics, strict=True), floats, strict=False):
            if any(not torch.equal(each[0].cpu(), other.cpu()) for other in each[1:]):
                self._refuse_apart(tensor)
                tensor.copy_(torch.stack([part.double().cpu() for part in each]).mean(0))
                changes.append((numbers[id(tensor)], tensor.detach().cpu().clone()))
        if changes:  # for the other workers
            self.announce("weights", changes)

    def _refuse_apart(self, tensor: Tensor) -> None:
        """In step: raise if this is what the user's step sets, not a batch norm's."""
        states = assignable(self._adapter.model) if self.session.plan.in_step else []
        for path in (v.path for v in states if v.value is tensor):
            raise NotDistributable(
                sentence("servers", "a variable assigned in a step", variable=path)
            )

    def announce(self, kind: str, changes: Sequence[Sequence[Any]]) -> None:
        """Send changes to the other workers with all further tickets; the newest of each counts."""
        known = {tuple(each[:-1]): list(each) for each in (*self._news[kind], *changes)}
        edition = self._news["edition"] + 1
        self._news = {**self._news, "edition": edition, kind: list(known.values())}

    def take_up(self, written: list[tuple[int, Tensor]], *, last: bool) -> None:
        """A callback has written to these tensors; bring weights to the servers.

        Batches that were dealt before are applied first. Only what was written is sent: the other
        values of the chief may be older than the servers'.
        """
        everything, optimizer = self._adapter.tensors(), self.optimizer
        rate = getattr(optimizer._learning_rate, "value", None)  # a setting, not state
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
