"""The lead: the one server that decides, for all of them, what becomes of a gradient.

    push -> ledger: keep or drop, once for all shards -> orders to every server, in one order

Everything happens under the lock of the lead's own shard. Waiting is done in the thread of the
connection that asks, so a worker that waits keeps nobody else from being served.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import NotDistributable, ReplicaError, ReplicaLost, UsageError
from stratagem.rules.ledger import Ledger
from stratagem.rules.push import Push
from stratagem.rules.updates import Synchronous
from stratagem.strategies.parameters.attendance import Attendance
from stratagem.strategies.parameters.epoch import Epoch
from stratagem.strategies.parameters.orders import Orders
from stratagem.strategies.parameters.parties import Attendee, Far, Near
from stratagem.strategies.parameters.plan import Plan


class Lead:
    """Decides, deals out work, keeps the books. Every method may be called from any thread."""

    def __init__(
        self, shard: Near, far: Sequence[Far], end_job: Callable[[ReplicaError], None],
        clock: Callable[[], float] = time.monotonic,
        alive: Callable[[], set[int]] = set,
    ) -> None:  # fmt: skip
        """`alive`: the workers whose processes are heard, whether they train or not."""
        self.shard, self._clock, self._alive = shard, clock, alive
        self.changed = shard.changed
        self.attendance = Attendance()
        self._orders = Orders(shard, far, end_job)
        self.ledger: Ledger | None = None
        self.plan: Plan | None = None
        #: the number of the fit that is under way, or was last
        self.fit = -1
        self.running = False
        #: the chief has left, so no other fit will begin
        self.closed = False
        self._epoch = Epoch()
        self.failure: ReplicaError | None = None
        #: workers to be told that their ticket is too late; once is enough, they may not listen
        self._late: set[int] = set()
        #: by worker: the batch (Ticket.first) that it did last
        self._done: dict[int, int] = {}
        #: who waits for work, and since when; by worker, when it last got some
        self._waiting: dict[Attendee, float] = {}
        self._taken: dict[int, float] = {}
        #: means that the chief has made of what workers reported, and of which epoch
        self._means: tuple[int, Tensor] | None = None
        #: what the chief has put beside the parameters, and what it said at the end
        self._beside = self._told = torch.empty(0, dtype=torch.uint8)

    # --- fits -------------------------------------------------------------------------------

    def open(self, fit: int, plan: Plan, beside: Tensor) -> None:
        """The chief begins a fit; every server has the plan and its values."""
        with self.changed:
            self._check()
            self.plan, self.fit, self.running = plan, fit, True
            self.attendance.open(plan.workers, self._clock())
            self._orders.begin(plan)
            self.ledger, self._epoch = Ledger(plan.updates, 0, plan.workers), Epoch()
            self._late.clear()
            self._done.clear()
            self._means = None
            self._beside, self._told = beside, torch.empty(0, dtype=torch.uint8)
            self.changed.notify_all()

    def enter(self, fit: int) -> tuple[dict[str, Any], list[Tensor]]:
        """Wait for a fit to begin; what a worker must know of it."""
        with self.changed:
            while self.fit < fit:
                self._check()
                if self.closed:
                    raise ReplicaLost(
                        f"the chief has ended after {self.fit + 1} trainings, and this is another; "
                        "run the same script on every task.", "chief",
                    )  # fmt: skip
                self.changed.wait(0.5)
            self._check()
            if self.fit > fit:
                return {"over": True}, []  # and its values are no more
            assert self.plan is not None
            return {"plan": self.plan.to_json()}, [self._beside]

    def finish(self, told: Tensor, chief: Attendee | None = None) -> None:
        """The chief ends the fit; `told` is what the others get to hear.

        In step that is after the batch which it has done its part of.
        """
        with self.changed:
            while self._in_step and self.running and self._books().begun:
                self._refuse_torn(idle=self._nobody_works(chief))
                self.changed.wait(0.5)
            if self._in_step and self.running:
                self._refuse_torn()
            self.running, self._told = False, told
            self.changed.notify_all()

    def clear(self, chief: Attendee | None) -> None:
        """Before another fit: the last one's workers have its values, and its orders are done."""
        with self.changed:
            self.running = False
            if chief is not None:
                self.leave(chief)
            self.changed.notify_all()
            while self.attendance.awake:
                self._check()
                self.changed.wait(0.5)
            self._check()
            if self.plan is not None:
                self._orders.ask(["flush"])

    def close(self) -> None:
        """The chief has left."""
        with self.changed:
            self.closed, self.running = True, False
            self.changed.notify_all()

    # --- who is here ------------------------------------------------------------------------

    def join(self, attendee: Attendee) -> tuple[dict[str, Any], list[Tensor]]:
        """A worker takes part from now on, unless the fit has ended since it entered."""
        with self.changed:
            self._check()
            if attendee.fit != self.fit:
                return {"over": True}, []
            if not self.running:
                return {"over": True, "after": self._orders.given}, [self._told]
            books = self._books()
            before = self.attendance.here.get(attendee.worker)
            if before is not None:
                self._leave(before, dead=True)
            self.attendance.join(attendee)
            books.join(attendee.worker)
            self.changed.notify_all()
            return {}, []

    def leave(self, attendee: Attendee, *, dead: bool = False) -> None:
        """A worker has gone: its work goes back, and the gates count anew.

        If it is dead, the other servers hang up as well; else it may take part in the next fit.
        """
        with self.changed:
            if self.attendance.here.get(attendee.worker) is attendee:
                self._leave(attendee, dead=dead)
                self.changed.notify_all()

    def _leave(self, attendee: Attendee, *, dead: bool) -> None:
        self.attendance.leave(attendee)
        if self.running and self.failure is None and self.ledger is not None:
            self.ledger.leave(attendee.worker)
            self._settle()
            self._orders.give(["bury" if dead else "leave", attendee.seat])

    def retire(self, attendee: Attendee) -> tuple[dict[str, Any], list[Tensor]]:
        """A worker takes no more work: wait for the end of its fit, to fetch what comes of it."""
        with self.changed:
            if (books := self._counts(attendee)) is not None:
                self.attendance.retired.add(attendee)
                books.leave(attendee.worker)
                self._settle()
                self.changed.notify_all()
            while self._counts(attendee) is not None:
                self.changed.wait(0.5)
            return self._last(attendee)

    def _last(self, attendee: Attendee) -> tuple[dict[str, Any], list[Tensor]]:
        """What a worker is told whose fit is over, and how far servers must be for its values."""
        return {"end": True, "after": self._after(attendee)}, [self._told]

    def _after(self, attendee: Attendee) -> int:
        """How many orders a server must have carried out for what this worker may see."""
        return self._orders.given * (attendee.fit == self.fit)

    def _counts(self, attendee: Attendee) -> Ledger | None:
        """The books, if its fit is under way; an error if another has its place there."""
        if self.failure is not None:
            raise self.failure
        if not self.running or attendee.fit != self.fit:
            return None
        if attendee.gone or self.attendance.here.get(attendee.worker) is not attendee:
            self.attendance.refuse(attendee)
        return self.ledger

    def fail(self, failure: ReplicaError) -> None:
        """Nobody goes on after this; whoever asks is told why."""
        with self.changed:
            self.failure = self.failure or failure
            self.shard.failure = self.failure
            self.changed.notify_all()

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _books(self) -> Ledger:
        self._check()
        if self.ledger is None or not self.running:
            raise UsageError("no training is under way here")
        return self.ledger

    # --- work -------------------------------------------------------------------------------

    def deal(self, told: Mapping[str, Any], payloads: Sequence[Tensor]) -> dict[str, Any]:
        """The chief puts batches up: `runs` of (how many, in how many parts each)."""
        with self.changed:
            books = self._books()
            if told["epoch"] > self._epoch.number:
                self._epoch = Epoch(int(told["epoch"]))
                books.clear_deck()  # the chief's loop may have left the last one early
                books.open_deck()
                if self._in_step:
                    self._refuse_torn()
                    for worker in list(self.attendance.aside):  # each has a part of every batch
                        self._come_back(books, worker)
            batch, parcels = int(told["first"]), iter(payloads)
            for count, parts in told["runs"]:
                for _ in range(count):
                    serial = books.deal(batch, parts)
                    for part in range(parts if payloads else 0):
                        self._epoch.payloads[serial + part] = next(parcels)
                    batch += 1
            if told["last"]:
                self._epoch.dealt = True
                books.close_deck()
                self._settle()
            self.changed.notify_all()
            return {"left": books.left}

    def next(
        self, attendee: Attendee, epoch: int, have: int, feeds: int | None, strict: bool = False
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """A ticket for the worker together with the newest values; or the end of something.

        `epoch` is the last one that the worker has done with; `strict`: it wants work of the very
        next, and is told that this is over if the chief has gone on.
        """
        with self.changed:
            begun = self._clock()
            while self._gathering(attendee):
                self.changed.wait(0.5)
            self.attendance.say_who_is_missing(self._clock())
            try:
                while (answer := self.offer(attendee, epoch, have, feeds, begun, strict)) is None:
                    self._waiting[attendee] = begun
                    self.changed.wait(0.5)
            finally:
                self._waiting.pop(attendee, None)
            return answer

    def held_up(self) -> list[tuple[Attendee, float]]:
        """Who has had work in hand while somebody waited for some, and for how long.

        It does not wait for the lock: nobody is named while an order is carried out.
        """
        if not self.changed.acquire(blocking=False):
            return []
        try:
            if not self._waiting or not self.running or self.ledger is None:
                return []
            since, now = min(self._waiting.values()), self._clock()
            return [
                (each, now - max(since, self._taken[each.worker]))
                for each in self.attendance.working()
                if self.ledger.holds(each.worker) and each not in self._waiting and not each.silent
            ]
        finally:
            self.changed.release()

    def _gathering(self, attendee: Attendee) -> bool:
        """Whether a training in step has just begun and somebody is still on the way to it.

        Else who is first does the others' parts too, and its loop makes several steps an update.
        """
        counts = self._counts(attendee) is not None
        return counts and self._in_step and self.attendance.on_the_way(self._clock(), self._alive)

    def offer(
        self, attendee: Attendee, epoch: int, have: int, feeds: int | None, since: float,
        strict: bool = False,
    ) -> tuple[dict[str, Any], list[Tensor]] | None:  # fmt: skip
        """What there is for a worker that has waited since then; None: nothing yet.

        Who feeds is told when no more than so many tickets are left to take, instead of waiting
        for itself.
        """
        with self.changed:
            books = self._counts(attendee)
            if books is None:
                return self._last(attendee)
            if self._epoch.number <= epoch:
                return None
            if strict and self._epoch.number > epoch + 1:
                return {"over": epoch + 1, "after": self._orders.given}, []
            if attendee.worker in self.attendance.aside:
                self._come_back(books, attendee.worker)
            found = self._ticket(books, attendee, have, since)
            if found is not None:
                return found
            if books.over:
                void = attendee.worker in self._epoch.void
                return {"over": self._epoch.number, "after": self._orders.given, "void": void}, []
            hungry = feeds is not None and not self._epoch.dealt and books.left <= feeds
            return ({"hungry": True}, []) if hungry else None

    def _ticket(
        self, books: Ledger, attendee: Attendee, have: int, since: float
    ) -> tuple[dict[str, Any], list[Tensor]] | None:
        """A ticket, if there is one for it, with the newest values."""
        ticket = books.take(attendee.worker)
        if ticket is None:
            return None
        self._taken[attendee.worker] = now = self._clock()
        books.waited(attendee.worker, now - since)
        header, body = self.shard.fetch(attendee.seat, have, 0)
        header["ticket"] = ticket
        header["epoch"], header["after"] = self._epoch.number, self._orders.given
        payload = self._epoch.payloads.get(ticket.serial) if self._epoch.payloads else None
        if payload is not None:
            header["payload"] = payload.numel()
            body = [payload, *body]  # first, so that it can be unpacked while the rest comes
        return header, body

    def abandon(self, attendee: Attendee, serial: int) -> None:
        with self.changed:
            books = self._counts(attendee)
            if books is not None:
                turn = books.turn
                books.abandon(attendee.worker, serial)
                self._settle()
                self._wake(books, turn)

    def stand_aside(self, attendee: Attendee, epoch: int, *, chief: bool = False) -> dict[str, Any]:
        """A worker's loop over an epoch was left: nobody waits for it until it comes for another.

        In step the chief's leaving ends the epoch for all; and the batch that the worker has done
        its part of is waited for, since it will look at what came of it.
        """
        with self.changed:
            books, worker = self._counts(attendee), attendee.worker
            if books is None:
                return {"after": 0}
            turn = books.turn
            books.leave(worker)
            if epoch < self._epoch.number:  # the chief has gone on already
                books.join(worker)
            else:
                self.attendance.aside.add(worker)
                if chief and self._in_step:
                    self._end_epoch(books, worker)
            self._settle()
            self._wake(books, turn)
            while self._in_step and self._counts(attendee) is not None and books.begun:
                if self._epoch.number > epoch or self._nobody_works(None):
                    break  # what is begun waits for this worker; or who comes next is told
                self.changed.wait(0.5)
            return {"after": self._after(attendee)}

    def end_early(self, attendee: Attendee) -> None:
        """The chief wants no more batches in this epoch: what is in hand is finished."""
        with self.changed:
            books = self._books()
            self._end_epoch(books, attendee.worker)
            self._settle()
            self.changed.notify_all()

    def _end_epoch(self, books: Ledger, chief: int) -> None:
        self._epoch.dealt = True
        dropped = books.end_early(self._done.get(chief, -1) if self._in_step else None)
        if dropped:  # others were a batch ahead of the chief
            self._orders.give(["forget"])
            self._epoch.tally.waiting = []
            self._epoch.void |= {push.worker for push in dropped}

    def _come_back(self, books: Ledger, worker: int) -> None:
        if self.attendance.come_back(worker):
            books.join(worker)

    @property
    def _in_step(self) -> bool:
        """Whether every worker has a part of each batch."""
        updates = self.plan.updates if self.plan is not None else None
        return isinstance(updates, Synchronous) and not updates.spares

    def _nobody_works(self, chief: Attendee | None) -> bool:
        """Whether all others have left their loops, and nothing is in anybody's hands."""
        others = [each for each in self.attendance.working() if each is not chief]
        return not others and not self._books().in_hands

    def _refuse_torn(self, *, idle: bool = False) -> None:
        if self._books().torn or idle:
            raise NotDistributable(
                "the loop was left when a batch was half done: in step a batch is done when all "
                "its parts are, and not all workers were here to do theirs. Start them all, or "
                "leave the loop when the epoch is over."
            )

    def skip(self, attendee: Attendee, serial: int) -> None:
        """A worker has gone past a ticket without a gradient: it counts as done."""
        with self.changed:
            books = self._counts(attendee)
            if books is not None:
                ticket, turn = books.holds(attendee.worker), books.turn
                books.skip(attendee.worker, serial)
                if ticket is not None and ticket.serial == serial:
                    self._epoch.payloads.pop(serial, None)
                    self._done[attendee.worker] = ticket.first
                self._settle()
                self._wake(books, turn)

    def push(
        self, attendee: Attendee, push: Push, told: Mapping[str, Any],
        ahead: tuple[int, int] | None = None,
    ) -> tuple[dict[str, Any], list[Tensor]]:  # fmt: skip
        """Decide on a gradient that lies on every server's desk.

        With `ahead`, the worker's epoch and version, its next ticket comes with the answer, if
        there is one: it would wait once more for its turn otherwise, behind others' updates.
        """
        with self.changed:
            books = self._counts(attendee)
            if books is None:
                why = "the training is over"
                return {"kept": False, "tau": 0, "why": why, "after": 0, "version": 0}, []
            if told.get("settings"):
                self._orders.give(["settings", told["settings"]])
            ticket = books.holds(push.worker)
            if ticket is not None and self.attendance.aside and self._in_step:
                self.attendance.refuse_alone(push.worker, ticket.first, self._done)
            turn, update = books.turn, None
            verdict = books.push(push)
            if verdict.kept:
                assert ticket is not None
                self._epoch.payloads.pop(ticket.serial, None)  # nobody will ask for it
                self._done[push.worker] = ticket.first
                loss, examples = told["notes"]
                self._epoch.tally.waiting.append((float(loss), push.weight, int(examples)))
                update = books.ripe()
                self._orders.take_in(attendee.seat, push, verdict, told.get("used"), update)
            if update is not None:
                self._epoch.tally.fold()
            if update is not None or not verdict.kept:
                self._settle()
            elif books.turn != turn or self._late:  # else nobody has become late
                self._tell_late()
            self._wake(books, turn)
            header = {
                "kept": verdict.kept, "tau": verdict.tau, "why": verdict.why,
                "after": self._orders.given, "version": books.version,
            }  # fmt: skip
            if ahead is None or self._epoch.number <= ahead[0]:
                return header, []
            if told.get("strict") and self._epoch.number > ahead[0] + 1:
                return header, []
            found = self._ticket(books, attendee, ahead[1], self._clock())
            if found is None:
                return header, []
            header["next"], body = found
            return header, body

    def _wake(self, books: Ledger, turn: int) -> None:
        """Wake those who wait, but only if there is news for them since that turn."""
        if books.turn != turn or books.over:
            self.changed.notify_all()

    def _settle(self) -> None:
        """Whatever else has become ripe; and a word to those whose work is too late now."""
        assert self.ledger is not None
        while (update := self.ledger.ripe()) is not None:
            self._orders.apply(update)
            self._epoch.tally.fold()
        self._tell_late()

    def _tell_late(self) -> None:
        assert self.ledger is not None
        if overtaken := self.ledger.overtaken():
            self._late.update(overtaken)
        if not self._late:
            return
        for worker in sorted(self._late):
            attendee = self.attendance.here.get(worker)
            if attendee is not None and self.ledger.late(worker):
                told = attendee.tell({"news": self.ledger.version})
            else:
                told = True
            if told:
                self._late.discard(worker)

    # --- what the chief asks ------------------------------------------------------------------

    def settings(self, groups: list[dict[str, Any]]) -> None:
        with self.changed:
            self._books()
            self._orders.give(["settings", groups])

    def snapshot(self, number: int) -> int:
        """Have every server keep its state as of now; returns how far to wait for it."""
        with self.changed:
            self._check()
            self._orders.give(["snapshot", number])
            return self._orders.given

    def report(self, attendee: Attendee, epoch: int, tree: Tensor) -> None:
        """What a worker has counted in an epoch."""
        with self.changed:
            if self._counts(attendee) is not None and epoch == self._epoch.number:
                self._epoch.reports[attendee.worker] = tree
                self.changed.notify_all()

    def gather(self) -> tuple[dict[str, Any], list[Tensor]]:
        """All reports of the epoch, once everybody who is awake has reported."""
        with self.changed:
            while any(
                not each.silent and each.worker not in self._epoch.reports
                for each in self.attendance.working()
            ):
                self._check()
                self.changed.wait(0.5)
            self._check()
            trees = [self._epoch.reports[worker] for worker in sorted(self._epoch.reports)]
            return {"sizes": [tree.numel() for tree in trees], **self.so_far()}, trees

    def set_means(self, epoch: int, tree: Tensor) -> None:
        """The chief has made means of what was reported."""
        with self.changed:
            self._means = epoch, tree
            self.changed.notify_all()

    def means(self, attendee: Attendee, epoch: int) -> list[Tensor]:
        """Wait for the means of an epoch; none if there are none.

        Those of the last one stay until another fit begins: the chief may have ended this one.
        """
        with self.changed:
            while True:
                counts, means = self._counts(attendee) is not None, self._means
                if means is not None and means[0] >= epoch and attendee.fit == self.fit:
                    return [means[1]]
                if not counts or self._epoch.number > epoch:
                    return []
                self.changed.wait(0.5)

    def so_far(self) -> dict[str, Any]:
        """The loss of the epoch's updates added up, and over how many examples."""
        with self.changed:
            return {"loss": self._epoch.tally.total, "examples": self._epoch.tally.examples}

    def stats(self) -> dict[str, Any]:
        with self.changed:
            if self.ledger is None:
                return {}
            told: dict[str, Any] = self.ledger.stats().to_json()
            return told
