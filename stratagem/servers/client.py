"""A worker's client: its requests to the servers.

    next    a ticket, and the newest values
    push    a gradient: the coordinator decides about it, once for all shards
    ask     any other request of the servers' table (coordinator_requests.py)

Values and gradients travel by transfers.py; server_state.py says how the class is made up.
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

_FRESH = 0.02  # seconds after which values that came with a push are fetched again


@dataclass(frozen=True)
class Assignment:
    """A ticket to work on, its epoch, and its data if that travels."""

    ticket: Ticket
    epoch: int
    payload: Any = None


@dataclass(frozen=True)
class EpochOver:
    """The epoch is over; `void`: the last push of this worker was dropped again."""

    epoch: int
    void: bool = False


@dataclass(frozen=True)
class FitOver:
    """The chief has ended the training; `told` is its message to the other workers."""

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
        """`watch` is called while servers do not answer yet, and may raise. `returns`: the worker
        meets the servers again after one was lost."""
        me = {"worker": index, "name": name, "chief": chief, "returns": returns}
        super().__init__(index, Connections(me, address, patience, watch))
        self.name, self.is_chief = name, chief
        #: the last epoch that this worker has finished
        self.epoch = 0
        #: ends the open training of a prepared loop
        self.at_end: Callable[[], None] | None = None
        #: the loader of that loop
        self.prepared: Any = None
        #: gives the model back after a training has failed
        self.at_failure: Callable[[], None] | None = None
        if chief:
            self.lines.heartbeat.on_figures = SlowWatch().hear
        self.figures = StepFigures(name, self.lines.heartbeat.send_figures)

    # --- a fit ------------------------------------------------------------------------------

    def enter(self, fit: int) -> tuple[TrainingPlan, Any] | FitOver:
        """Wait for the chief to begin the fit; return its plan and its message."""
        header, told = self.ask("enter", fit=fit)
        if "plan" not in header:
            return FitOver(told)
        self.plan = TrainingPlan.from_json(header["plan"])
        self.lines.resumes = self.plan.resumes
        return self.plan, told

    def join(
        self, fit: int, params: Sequence[nn.Parameter], names: Sequence[str] = ()
    ) -> FitOver | None:
        """Take a slot at every server, and move the parameters to memory that servers can reach."""
        assert self.plan is not None
        self.begin_transfers(WorkerMemory(self.plan, params, near=self.lines.near, names=names))
        self.epoch, self._strict = 0, False
        self._settings: Any = None
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
        if "after" in header:  # the servers still have its values
            self._after = int(header["after"])
            self.refresh()
        self.memory.close()
        return over

    def settle(self) -> None:
        """End the open training of a prepared loop."""
        if self.at_end is not None:
            end, self.at_end, self.prepared = self.at_end, None, None
            end()

    def give_model_back(self) -> None:
        """Give the model back to the user after a failed training."""
        self.at_end = self.prepared = None
        if self.at_failure is not None:
            give_back, self.at_failure = self.at_failure, None
            give_back()
            if hasattr(self, "memory"):
                self.memory.complete()  # threads wait for no more gradients
                self.memory.close()

    # --- a step -----------------------------------------------------------------------------

    def next(
        self, feed: Callable[[], None] | None = None, *, wait: bool = True
    ) -> Assignment | EpochOver | FitOver:
        """Wait for work, with the newest values; `feed` deals more batches.

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
        """As `next`, but return None when no more than `low` tickets are left in the queue.

        For the chief, which deals and works in turn: no batch is dealt while it waits.
        """
        work: Assignment | None = self._ahead
        self._ahead = None
        if work is None:
            header = {"t": "next", "epoch": self.epoch, "have": self._have[0], "low": low}
            with METER.waiting():
                frame = self.lines.call(0, header | {"strict": self._strict})
            told = frame.header
            if "deal" in told:
                return None
            if "end" in told:
                self._after = int(told["after"])
                return FitOver(self.lines.tree(frame))
            if "over" in told:
                self.epoch, self._after = int(told["over"]), int(told["after"])
                return EpochOver(self.epoch, bool(told.get("void")))
            work = self._take(told, frame)
        elif time.monotonic() - self._came > _FRESH:
            self.refresh()  # time has passed, and other workers went on
        if wait:
            self.arrive()
        return work

    def retire(self) -> FitOver:
        """Take no more work; wait for the chief to end the training."""
        self._ahead = None  # it goes back with this
        header, told = self.ask("retire")
        self._after = int(header["after"])
        return FitOver(told)

    def _take(self, told: Mapping[str, Any], frame: Frame) -> Assignment:
        """Receive a ticket that has come; its values are on their way."""
        payload = frame.room(int(told.get("payload", 0)))
        if "payload" in told:
            self.lines.read_into(0, [payload], more=True)
        after = int(told["after"])
        for i in range(1, len(self.lines)):
            self.lines.write(i, {"t": "fetch", "have": self._have[i], "after": after})
        settling = self._settle(after)
        self._carry(self.lines.of(0)[0], lambda: self._take_values(0, told))
        for each in settling:  # before values, which these holders may have to send
            self.lines.finish(*each)
        for i in range(1, len(self.lines)):
            self._carry(self.lines.of(i)[0], partial(self._take_from, i, after))
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
        """Push the gradients in memory; return whether they count."""
        self.memory.wait_for_copies()
        used = self.memory.used()
        streamed = self.finish_stream()
        self._send_gradients([i for i in range(1, len(self.lines)) if i not in streamed])
        header: dict[str, Any] = {
            "t": "push",
            "serial": ticket.serial,
            "version": self.version,
            "weight": weight,
            "notes": [loss, examples],
            "used": used,
        }
        assert self.plan is not None
        if isinstance(self.plan.updates, Asynchronous) and self._threads is None:
            # threads would change the values while the caller may read them
            header["next"], header["strict"] = [self.epoch, self._have[0]], self._strict
        if settings is not None and settings != self._settings:
            self._settings, header["settings"] = settings, settings
        frame = self._ask_for_verdict(header, sent=0 in streamed)
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
        """Give up a ticket that came too late."""
        self.finish_stream()
        self.memory.forget()
        self.ask("abandon", serial=ticket.serial)

    def want(self, epoch: int) -> None:
        """Ask for work of exactly this epoch from now on; for loops that count epochs."""
        self.epoch, self._strict = epoch - 1, True

    def leave_loop(self, epoch: int) -> None:
        """Leave the loop: no worker waits for this one until it wants another epoch's work."""
        self.finish_stream()
        self.memory.forget()
        self._ahead = None  # it goes back with this
        self._after = int(self.ask("leave loop", epoch=epoch)[0]["after"])
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
        """Deal batches; return how many tickets are left in the queue."""
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
        """Return all workers' reports on the epoch, the summed loss, and its number of examples."""
        frame = self.lines.call(0, {"t": "gather"})
        trees = [frame.room(int(size)) for size in frame.header["sizes"]]
        if frame.size:
            self.lines.read_into(0, trees)
        told = frame.header
        return [decode(tree) for tree in trees], float(told["loss"]), int(told["examples"])

    def report(self, tree: Any) -> None:
        """Send the chief this worker's counts of the epoch that is over."""
        self.ask("report", tree, epoch=self.epoch)

    def set_settings(self, groups: list[dict[str, Any]]) -> None:
        """Send the servers' optimizers these settings, if they are new."""
        if groups != self._settings:
            self._settings = groups
            self.ask("settings", groups=groups)

    def finish(self, told: Any) -> None:
        """End the fit; the other workers get `told`."""
        self.put_back()
        self.ask("finish", told)

    def stats(self) -> Stats | None:
        """Return the coordinator's statistics. Thread-safe."""
        return self.lines.stats()

    def close(self, *, goodbye: bool = True) -> None:
        """Leave the job; without a goodbye if the servers are gone or need not be waited for."""
        if goodbye:
            self.finish_stream()
        else:
            self.lines.hang_up()  # a thread may be waiting for something
        self.end_threads()
        self.lines.close(goodbye=goodbye)
