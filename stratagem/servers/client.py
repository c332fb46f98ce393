"""A worker's side of the job: what it asks of the servers, and tells them.

    next    a ticket, and the newest values
    push    a gradient: the coordinator decides about it, once for all shards
    ask     any other request that the servers' table has (coordinator_requests.py)

How values and gradients travel: transfers.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from stratagem.figures.meter import METER
from stratagem.rules.stats import Stats
from stratagem.rules.tickets import Ticket
from stratagem.rules.updates import Asynchronous
from stratagem.servers.connections import Address, Connections
from stratagem.servers.training_plan import TrainingPlan
from stratagem.servers.transfers import Transfers
from stratagem.servers.worker_memory import WorkerMemory
from stratagem.training.agreement import Patience
from stratagem.training.step_figures import SlowWatch, StepFigures
from stratagem.wire.tcp import Frame
from stratagem.wire.tree import decode, encode

log = logging.getLogger("stratagem")

_FRESH = 0.02  # seconds after which values that came ahead are fetched anew


@dataclass(frozen=True)
class Assignment:
    """Something to do: a ticket, the epoch that it belongs to, and its data if that travels."""

    ticket: Ticket
    epoch: int
    payload: Any = None


@dataclass(frozen=True)
class EpochOver:
    """Every batch of the epoch has been applied; `void`: but for what was pushed here last."""

    epoch: int
    void: bool = False


@dataclass(frozen=True)
class FitOver:
    """The chief has ended the training; what it tells the others."""

    told: Any


class Client(Transfers):
    """One worker of a job with parameter servers."""

    def __init__(
        self,
        index: int,
        name: str,
        chief: bool,
        address: Address,
        patience: Patience,
        watch: Callable[[], None] = lambda: None,
        *,
        returns: bool = False,
    ) -> None:
        """`watch` is called while servers do not answer yet, and may raise. `returns`: to servers
        one of which was lost."""
        self.index, self.name, self.is_chief = index, name, chief
        #: the last epoch that this worker has done with
        self.epoch = 0
        #: how many trainings this process has taken part in
        self.fits = 0
        #: ends a training that is still open: a prepared loop's
        self.at_end: Callable[[], None] | None = None
        #: the loader of that loop
        self.prepared: Any = None
        #: gives the model back as it is, after a training that has failed
        self.at_fall: Callable[[], None] | None = None
        super().__init__()
        me = {"worker": index, "name": name, "chief": chief, "returns": returns}
        self.lines = Connections(me, address, patience, watch)
        if chief:
            self.lines.heartbeat.on_figures = SlowWatch().hear
        #: of the steps of this worker
        self.figures = StepFigures(name, self.lines.heartbeat.send_figures)

    # --- a fit ------------------------------------------------------------------------------

    def enter(self, fit: int) -> tuple[TrainingPlan, Any] | FitOver:
        """Wait for the chief to begin the fit; its plan, and what it has put beside."""
        header, told = self.ask("enter", fit=fit)
        if "plan" not in header:
            return FitOver(told)
        self.plan = TrainingPlan.from_json(header["plan"])
        self.lines.resumes = self.plan.resumes
        return self.plan, told

    def join(
        self, fit: int, params: Sequence[nn.Parameter], names: Sequence[str] = ()
    ) -> FitOver | None:
        """Take a slot at every server, and have the parameters live in memory they can reach."""
        assert self.plan is not None
        self.begin_traffic(WorkerMemory(self.plan, params, near=self.lines.near, names=names))
        self.epoch, self._strict = 0, False
        self._told: Any = None
        self._ahead = None
        self._came = 0.0
        if self.plan.backups:
            self.renew()
        for i in range(len(self.lines)):
            self.lines.call_all(i, {"t": "attach", "fit": fit, "memory": self.memory.handle})
        header, told = self.ask("join", fit=fit)
        if "over" not in header:
            return None
        over = FitOver(told)
        if "after" in header:  # the servers still have what came of it
            self._after = int(header["after"])
            self.refresh()
        self.memory.close()
        return over

    def settle(self) -> None:
        """End a training that a prepared loop has left open."""
        if self.at_end is not None:
            end, self.at_end, self.prepared = self.at_end, None, None
            end()

    def fall(self) -> None:
        """Nothing comes of the training: the model is the user's own again."""
        self.at_end = self.prepared = None
        if self.at_fall is not None:
            fall, self.at_fall = self.at_fall, None
            fall()
            if hasattr(self, "memory"):
                self.memory.complete()  # threads wait for no more gradients
                self.memory.close()

    # --- a step -----------------------------------------------------------------------------

    def next(
        self, feed: Callable[[], None] | None = None, *, wait: bool = True
    ) -> Assignment | EpochOver | FitOver:
        """Wait for something to do, with the newest values; `feed` puts more batches up.

        Without `wait` the values may still be on their way: `arrive` waits for them.
        """
        found: Assignment | EpochOver | FitOver | None = None
        while found is None:
            if feed is not None:
                feed()
            found = self.next_above(None if feed is None else 0, wait=wait)
        return found

    def next_above(
        self, low: int | None, *, wait: bool = True
    ) -> Assignment | EpochOver | FitOver | None:
        """As `next`, but None when no more than `low` tickets are left for anybody to take.

        For a worker that deals and works in turn: nobody else deals while it waits.
        """
        work: Assignment | None = self._ahead
        self._ahead = None
        if work is None:
            header = {"t": "next", "epoch": self.epoch, "have": self._have[0], "feeds": low}
            with METER.waiting():
                frame = self.lines.call(0, header | {"strict": self._strict})
            told = frame.header
            if "hungry" in told:
                return None
            if "end" in told:
                self._after = int(told["after"])
                return FitOver(self.lines.tree(frame))
            if "over" in told:
                self.epoch, self._after = int(told["over"]), int(told["after"])
                return EpochOver(self.epoch, bool(told.get("void")))
            work = self._take(told, frame)
        elif time.monotonic() - self._came > _FRESH:
            self.refresh()  # something else was done meanwhile, and the others went on
        if wait:
            self.arrive()
        return work

    def retire(self) -> FitOver:
        """Take no more work, and wait for the chief to end the training."""
        self._ahead = None  # it goes back with this
        header, told = self.ask("retire")
        self._after = int(header["after"])
        return FitOver(told)

    def _take(self, told: Mapping[str, Any], frame: Frame) -> Assignment:
        """A ticket has come; its values are on their way."""
        payload = frame.room(int(told.get("payload", 0)))
        if "payload" in told:
            self.lines.read_into(0, [payload], more=True)
        after = int(told["after"])
        for i in range(1, len(self.lines)):
            self.lines.write(i, {"t": "fetch", "have": self._have[i], "after": after})
        settling = self._settle(after)
        carry, lines = self._transfer_threads.carry, self.lines.of
        carry(lines(0)[0], lambda: self._take_values(0, told))
        for each in settling:  # before values: one of these may have to be asked for them
            self.lines.finish(*each)
        for i in range(1, len(self.lines)):
            carry(lines(i)[0], partial(self._take_from, i, after))
        ticket = Ticket(*(int(n) for n in told["ticket"]))
        return Assignment(
            ticket, int(told["epoch"]), decode(payload) if "payload" in told else None
        )

    def push(
        self,
        ticket: Ticket,
        weight: float,
        loss: float,
        examples: int,
        settings: list[dict[str, Any]] | None = None,
    ) -> bool:
        """Hand in the gradients that lie in memory; whether they count."""
        self.memory.landed()
        used = self.memory.used()
        streamed = self.finish_stream()
        self._lay_down([i for i in range(1, len(self.lines)) if i not in streamed])
        header: dict[str, Any] = {
            "t": "push",
            "serial": ticket.serial,
            "version": self.version,
            "weight": weight,
            "notes": [loss, examples],
            "used": used,
        }
        assert self.plan is not None
        if isinstance(self.plan.updates, Asynchronous) and not self._transfer_threads:
            # what threads bring would change the values while others may look at them
            header["next"], header["strict"] = [self.epoch, self._have[0]], self._strict
        if settings is not None and settings != self._told:
            self._told, header["settings"] = settings, settings
        frame = self._ask_for_verdict(header, laid=0 in streamed)
        answer = frame.header
        self._after = int(answer["after"])
        if "next" in answer:
            self._ahead, self._came = self._take(answer["next"], frame), time.monotonic()
        self._leftovers = not answer["kept"]
        METER.pushes += 1
        METER.staleness += int(answer["tau"])
        METER.bytes += self.memory.outbox.nbytes
        self.memory.outbox.settle(counted=bool(answer["kept"]))
        return bool(answer["kept"])

    def abandon(self, ticket: Ticket) -> None:
        """Stop working on a ticket that came too late."""
        self.finish_stream()
        self.memory.forget()
        self.ask("abandon", serial=ticket.serial)

    def want(self, epoch: int) -> None:
        """From now on work of this very epoch, for a loop that counts them itself."""
        self.epoch, self._strict = epoch - 1, True

    def stand_aside(self, epoch: int) -> None:
        """Have nobody wait for this worker until it wants work of another epoch."""
        self.finish_stream()
        self.memory.forget()
        self._ahead = None  # it goes back with this
        self._after = int(self.ask("aside", epoch=epoch)[0]["after"])
        self.refresh()

    # --- as the chief -------------------------------------------------------------------------

    def deal(
        self,
        epoch: int,
        first: int,
        runs: Sequence[tuple[int, int]],
        last: bool,
        payloads: Sequence[Any] = (),
    ) -> int:
        """Put batches up; returns how many tickets nobody has taken yet."""
        parcels = [encode(payload) for payload in payloads]
        header = {
            "t": "deal",
            "epoch": epoch,
            "first": first,
            "runs": [list(run) for run in runs],
            "last": last,
            "sizes": [parcel.numel() for parcel in parcels],
        }
        return int(self.lines.call(0, header, parcels).header["left"])

    def gather(self) -> tuple[list[Any], float, int]:
        """Every worker's report on the epoch, the loss added up, and over how many examples."""
        frame = self.lines.call(0, {"t": "gather"})
        trees = [frame.room(int(size)) for size in frame.header["sizes"]]
        if frame.size:
            self.lines.read_into(0, trees)
        told = frame.header
        return [decode(tree) for tree in trees], float(told["loss"]), int(told["examples"])

    def report(self, tree: Any) -> None:
        """Tell the chief what this worker has counted in the epoch that is over."""
        self.ask("report", tree, epoch=self.epoch)

    def set_settings(self, groups: list[dict[str, Any]]) -> None:
        """Have the servers' optimizers follow, unless they know."""
        if groups != self._told:
            self._told = groups
            self.ask("settings", groups=groups)

    def finish(self, told: Any) -> None:
        """End the fit; `told` is what the others get to hear."""
        self.put_back()
        self.ask("finish", told)

    def stats(self) -> Stats | None:
        """What the coordinator has counted; any thread may ask at any time."""
        return self.lines.stats()

    def close(self, *, goodbye: bool = True) -> None:
        """Leave the job; without a goodbye the servers are gone, or nobody is to wait for them."""
        if goodbye:
            self.finish_stream()
        else:
            self.lines.hang_up()  # a thread may be waiting for something
        self._transfer_threads.end()
        self.lines.close(goodbye=goodbye)
