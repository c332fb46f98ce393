"""A worker's side of the job: what it asks of the servers, and tells them.

    next    a ticket, and the newest values            lead
    push    the lead's part, and the question          lead decides, once for all shards

How values and gradients travel: traffic.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.errors import ReplicaError
from stratagem.rules.push import Ticket
from stratagem.rules.stats import Stats
from stratagem.rules.updates import Asynchronous
from stratagem.state.assembly import cut_values
from stratagem.strategies.agreement import Patience
from stratagem.strategies.parameters.lines import Address, Lines, room
from stratagem.strategies.parameters.memory import Memory
from stratagem.strategies.parameters.plan import Plan
from stratagem.strategies.parameters.traffic import Traffic
from stratagem.wire.tcp import Frame
from stratagem.wire.tree import decode, encode

log = logging.getLogger("stratagem")

_FRESH = 0.02  # seconds after which values that came ahead are fetched anew


@dataclass(frozen=True)
class Work:
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


class Worker(Traffic):
    """One worker of a job with parameter servers."""

    def __init__(
        self, index: int, name: str, chief: bool, address: Address, patience: Patience,
        watch: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`watch` is called while servers do not answer yet, and may raise."""
        self.index, self.name, self.is_chief = index, name, chief
        self.plan: Plan | None = None
        self._epoch = 0
        self._snapshots = 0
        #: how many trainings this process has taken part in
        self.fits = 0
        #: ends a training that is still open: a prepared loop's
        self.at_end: Callable[[], None] | None = None
        #: the loader of that loop
        self.prepared: Any = None
        #: gives the model back as it is, after a training that has failed
        self.at_fall: Callable[[], None] | None = None
        super().__init__()
        me = {"worker": index, "name": name, "chief": chief}
        self.lines = Lines(me, address, patience, watch)

    # --- a fit ------------------------------------------------------------------------------

    def open(
        self, fit: int, plan: Plan, params: Sequence[Tensor], states: Sequence[Any] | None,
        beside: Any = None,
    ) -> None:  # fmt: skip
        """As the chief: begin a fit with these values, and the optimizer's state by server.

        `beside` is what the other workers get to know besides: the weights that are not trained.
        """
        self.lines.call(0, {"t": "clear"})
        self.plan = plan
        for i, values in enumerate(self._cut(params)):
            body = [values]
            header: dict[str, Any] = {"t": "open", "fit": fit, "plan": plan.to_json()}
            if states is not None:
                tree = encode(states[i])
                body.append(tree)
                header["states"] = tree.numel()
            self.lines.call(i, header, body)
        self.lines.call(0, {"t": "begin", "fit": fit}, [encode(beside)])

    def enter(self, fit: int) -> tuple[Plan, Any] | FitOver:
        """Wait for the chief to begin the fit; its plan, and what it has put beside."""
        frame = self.lines.call(0, {"t": "enter", "fit": fit})
        told = self.lines.tree(frame)
        if "plan" not in frame.header:
            return FitOver(told)
        self.plan = Plan.from_json(frame.header["plan"])
        return self.plan, told

    def join(self, fit: int, params: Sequence[nn.Parameter]) -> FitOver | None:
        """Take a desk at every server, and have the parameters live in memory they can reach."""
        assert self.plan is not None
        self.begin_traffic(Memory(self.plan, params, near=self.lines.near))
        self._epoch, self._strict = 0, False
        self._told: Any = None
        #: what came with the answer to a push
        self._ahead: Work | None = None
        self._came = 0.0
        for i in range(len(self.lines)):
            self.lines.call(i, {"t": "sit", "fit": fit, "memory": self.memory.handle})
        frame = self.lines.call(0, {"t": "join", "fit": fit})
        if "over" not in frame.header:
            return None
        over = FitOver(self.lines.tree(frame))
        if "after" in frame.header:  # the servers still have what came of it
            self._after = int(frame.header["after"])
            self.refresh()
        self.memory.close()
        return over

    def settle(self) -> None:
        """End a training that a prepared loop has left open."""
        if self.at_end is not None:
            end, self.at_end, self.prepared = self.at_end, None, None
            end()

    def interrupt(self, error: BaseException) -> None:
        """From another thread: have whatever waits here end with this error."""
        if isinstance(error, ReplicaError):
            self.lines.pulse.fall(error)
        else:
            self.lines.hang_up()

    def fall(self) -> None:
        """Nothing comes of the training: the model is the user's own again."""
        self.at_end = self.prepared = None
        if self.at_fall is not None:
            fall, self.at_fall = self.at_fall, None
            fall()
            if hasattr(self, "memory"):
                self.memory.complete()  # couriers wait for no more gradients
                self.memory.close()

    def leave(self) -> None:
        """The fit is over: parameters get memory of their own again."""
        self.memory.close()
        self.lines.call(0, {"t": "leave"})

    # --- a step -----------------------------------------------------------------------------

    def next(
        self, feed: Callable[[], None] | None = None, *, wait: bool = True
    ) -> Work | EpochOver | FitOver:
        """Wait for something to do, with the newest values; `feed` puts more batches up.

        Without `wait` the values may still be on their way: `arrive` waits for them.
        """
        found: Work | EpochOver | FitOver | None = None
        while found is None:
            if feed is not None:
                feed()
            found = self.next_above(None if feed is None else 0, wait=wait)
        return found

    def next_above(
        self, low: int | None, *, wait: bool = True
    ) -> Work | EpochOver | FitOver | None:
        """As `next`, but None when no more than `low` tickets are left for anybody to take.

        For a worker that deals and works in turn: nobody else deals while it waits.
        """
        work, self._ahead = self._ahead, None
        if work is None:
            frame = self.lines.call(
                0, {
                    "t": "next", "epoch": self._epoch, "have": self._have[0], "feeds": low,
                    "strict": self._strict,
                }
            )  # fmt: skip
            told = frame.header
            if "hungry" in told:
                return None
            if "end" in told:
                return self._over(frame)
            if "over" in told:
                self._epoch, self._after = int(told["over"]), int(told["after"])
                return EpochOver(self._epoch, bool(told.get("void")))
            work = self._take(told, frame)
        elif time.monotonic() - self._came > _FRESH:
            self.refresh()  # something else was done meanwhile, and the others went on
        if wait:
            self.arrive()
        return work

    def _over(self, frame: Frame) -> FitOver:
        self._after = int(frame.header["after"])
        return FitOver(self.lines.tree(frame))

    def retire(self) -> FitOver:
        """Take no more work, and wait for the chief to end the training."""
        self._ahead = None  # it goes back with this
        return self._over(self.lines.call(0, {"t": "retire"}))

    def _take(self, told: Mapping[str, Any], frame: Frame) -> Work:
        """A ticket has come; its values are on their way."""
        payload = room(int(told.get("payload", 0)), frame)
        if "payload" in told:
            self.lines.read_into(0, [payload], more=True)
        self._ask_others(int(told["after"]))
        self._carry(0, lambda: self._take_values(0, told))
        for i in range(1, len(self.lines)):
            self._carry(i, partial(self._take_from, i))
        ticket = Ticket(*(int(n) for n in told["ticket"]))
        return Work(ticket, int(told["epoch"]), decode(payload) if "payload" in told else None)

    def push(
        self, ticket: Ticket, weight: float, loss: float, examples: int,
        settings: list[dict[str, Any]] | None = None,
    ) -> bool:  # fmt: skip
        """Hand in the gradients that lie in memory; whether they count."""
        self.memory.landed()
        used = self.memory.used()
        streamed = self.finish_stream()
        others = [i for i in range(1, len(self.lines)) if i not in streamed]
        for i in [i for i in others if self._stage(i, {"t": "stage"})]:
            self.lines.receive(i)
        header = {
            "t": "push", "serial": ticket.serial, "version": self.version, "weight": weight,
            "notes": [loss, examples], "used": used,
        }  # fmt: skip
        assert self.plan is not None
        if isinstance(self.plan.updates, Asynchronous) and not self._couriers:
            # what couriers bring would change the values while others may look at them
            header["next"], header["strict"] = [self._epoch, self._have[0]], self._strict
        if settings is not None and settings != self._told:
            self._told, header["settings"] = settings, settings
        if 0 in streamed:
            self.lines.write(0, {**header, "laid": True})
        else:
            self._stage(0, header)
        frame = self.lines.receive(0)
        answer = frame.header
        self._after = int(answer["after"])
        if "next" in answer:
            self._ahead, self._came = self._take(answer["next"], frame), time.monotonic()
        self._leftovers = not answer["kept"]
        return bool(answer["kept"])

    def put_back(self) -> None:
        """Have somebody else do what was to be done next here."""
        if self._ahead is not None:
            work, self._ahead = self._ahead, None
            self.lines.call(0, {"t": "abandon", "serial": work.ticket.serial})

    @property
    def is_late(self) -> bool:
        """Whether the others have gone on without the gradient that is being computed here."""
        self.lines.listen()
        return self.lines.news > self.version

    def abandon(self, ticket: Ticket) -> None:
        """Stop working on a ticket that came too late."""
        self.finish_stream()
        self.memory.forget()
        self.lines.call(0, {"t": "abandon", "serial": ticket.serial})

    def want(self, epoch: int) -> None:
        """From now on work of this very epoch, for a loop that counts them itself."""
        self._epoch, self._strict = epoch - 1, True

    def stand_aside(self, epoch: int) -> None:
        """Have nobody wait for this worker until it wants work of another epoch."""
        self.finish_stream()
        self.memory.forget()
        self._ahead = None  # it goes back with this
        told = self.lines.call(0, {"t": "aside", "epoch": epoch}).header
        self._after = int(told["after"])
        self.refresh()

    def skip(self, ticket: Ticket) -> None:
        """Be done with a ticket of which there is no gradient; nobody does it again."""
        self.lines.call(0, {"t": "skip", "serial": ticket.serial})

    # --- as the chief -------------------------------------------------------------------------

    def deal(
        self, epoch: int, first: int, runs: Sequence[tuple[int, int]], last: bool,
        payloads: Sequence[Any] = (),
    ) -> int:  # fmt: skip
        """Put batches up; returns how many tickets nobody has taken yet."""
        parcels = [encode(payload) for payload in payloads]
        header = {
            "t": "deal", "epoch": epoch, "first": first, "runs": [list(run) for run in runs],
            "last": last, "sizes": [parcel.numel() for parcel in parcels],
        }  # fmt: skip
        return int(self.lines.call(0, header, parcels).header["left"])

    def enough(self) -> None:
        """No more batches in this epoch: what others have in hand is finished."""
        self.put_back()
        self.lines.call(0, {"t": "enough"})

    def gather(self) -> tuple[list[Any], float, int]:
        """Every worker's report on the epoch, the loss added up, and over how many examples."""
        frame = self.lines.call(0, {"t": "gather"})
        trees = [room(int(size), frame) for size in frame.header["sizes"]]
        if frame.size:
            self.lines.read_into(0, trees)
        told = frame.header
        return [decode(tree) for tree in trees], float(told["loss"]), int(told["examples"])

    def report(self, tree: Any) -> None:
        """What this worker has counted in the epoch that is over."""
        self.lines.call(0, {"t": "report", "epoch": self._epoch}, [encode(tree)])

    def set_means(self, tree: Any) -> None:
        """As the chief: what became of the reports on the epoch that is over."""
        self.lines.call(0, {"t": "set means", "epoch": self._epoch}, [encode(tree)])

    def means(self, epoch: int) -> Any:
        """The same for the others: wait for it; None if there is nothing."""
        return self.lines.tree(self.lines.call(0, {"t": "means", "epoch": epoch}))

    def set_settings(self, groups: list[dict[str, Any]]) -> None:
        """Have the servers' optimizers follow, unless they know."""
        if groups != self._told:
            self._told = groups
            self.lines.call(0, {"t": "settings", "groups": groups})

    def so_far(self) -> tuple[float, int]:
        """The loss added up in this epoch, and over how many examples."""
        told = self.lines.call(0, {"t": "so far"}).header
        return float(told["loss"]), int(told["examples"])

    def snapshot(self) -> tuple[int, list[Tensor], list[Any]]:
        """One version of everything: its number, values and optimizer states by server."""
        self._snapshots += 1
        number = (self._snapshots << 20) + self.index  # nobody else's
        after = int(self.lines.call(0, {"t": "snapshot", "number": number}).header["after"])
        values, states, version = [], [], 0
        assert self.plan is not None
        for i in range(len(self.lines)):
            frame = self.lines.call(i, {"t": "restored", "number": number, "after": after})
            flat = torch.empty(self.plan.layout.loads[i], dtype=self.plan.dtype)
            tree = room(int(frame.header["states"]), frame)
            self.lines.read_into(i, [flat, tree])
            values.append(flat)
            states.append(decode(tree))
            version = int(frame.header["version"])
        self._came = -math.inf  # whoever takes these values over has newer ones than came ahead
        return version, values, states

    def finish(self, told: Any) -> None:
        """End the fit; `told` is what the others get to hear."""
        self.put_back()
        self.lines.call(0, {"t": "finish"}, [encode(told)])

    def assign(self, params: Sequence[Tensor], only: Sequence[int] | None = None) -> None:
        """Put other values into the servers: somebody has changed them here.

        `only` these: of others the servers may have newer values.
        """
        self.put_back()  # it came with values that are not these
        assert self.plan is not None
        chosen = set(range(len(params)) if only is None else only)
        for i, extents in enumerate(self.plan.layout.extents):
            pieces = [n for n, e in enumerate(extents) if e.piece.variable in chosen]
            if not pieces:
                continue
            wanted = [extents[n].piece for n in pieces]
            body = [cut_values(params, wanted).to(self.plan.dtype).cpu()]
            self.lines.call(i, {"t": "assign", "pieces": pieces}, body)

    def assign_states(self, states: Sequence[Any]) -> None:
        """The same for the optimizer's state, by server."""
        for i, tree in enumerate(states):
            self.lines.call(i, {"t": "assign states"}, [encode(tree)])

    def _cut(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Every server's values, one block each."""
        assert self.plan is not None
        flat = torch.cat([p.detach().reshape(-1).cpu() for p in params])
        none = flat[:0]
        return [
            torch.cat([none, *(flat[e.lo : e.hi] for e in extents)])
            for extents in self.plan.layout.extents
        ]

    def stats(self) -> Stats | None:
        """The books; any thread may ask at any time."""
        return self.lines.stats()

    def report_failure(self, text: str) -> None:
        """Tell the others why this worker stops."""
        self.finish_stream()
        self.lines.call(0, {"t": "failed", "text": text})

    @property
    def silent(self) -> set[str]:
        """As the chief: the names of tasks that the lead does not hear."""
        return self.lines.pulse.silent

    @property
    def given_up(self) -> set[str]:
        """As the chief: the names of workers that the lead has given up."""
        return self.lines.pulse.given_up

    def close(self, *, goodbye: bool = True) -> None:
        """Leave the job; without a goodbye the servers are gone, or nobody is to wait for them."""
        if goodbye:
            self.finish_stream()
        else:
            self.lines.hang_up()  # a courier may be waiting for something
        self._dismiss_couriers()
        self.lines.close(goodbye=goodbye)

    def desert(self) -> None:
        """The servers are about to be ended: what becomes of them is no news."""
        self.lines.pulse.mute()
