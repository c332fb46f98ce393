"""One server's parameters, and the gradients that workers have laid on its desks.

Workers lay gradients down and fetch values; only the lead's orders change anything, one after the
other and in the same order on every server. `done` counts them, so that a worker can ask for
values that are not older than what it knows to have been ordered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import ReplicaError, UsageError
from stratagem.rules.staleness import Policy
from stratagem.rules.updates import Asynchronous
from stratagem.state.recipe import elementwise
from stratagem.state.store import Snapshot, Store
from stratagem.strategies.parameters.plan import Plan
from stratagem.strategies.parameters.threads import Trial, choices
from stratagem.wire.segment import Segment

Order = list[Any]

_FEW = 2  # workers, for which a server itself writes the rows that have changed


@dataclass
class Desk:
    """What one worker has laid down here, and how it gets values."""

    #: this server's pieces in the fit that the desk belongs to, and how numbers travel there
    views: Sequence[Tensor]
    wire: torch.dtype
    #: the dense gradient of this server's pieces, one after the other
    gradient: Tensor
    #: how many elements of it were sent: all, or those of the pieces that were used
    filled: int
    #: the worker's own memory, where it can be reached
    targets: list[Tensor] | None = None
    #: whether rows are written there, too, or sent for the worker to write them itself
    scatters: bool = True
    #: rows of sparse gradients: piece, row numbers, values
    rows: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    #: the values that the worker computes with, for rules that ask
    then: Tensor | None = None
    #: how often values had been assigned when it last fetched them
    edition: int = 0


class Shard:
    """The data of one server. Every method may be called from any thread."""

    def __init__(self, index: int, device: torch.device, cores: int | None = None) -> None:
        """`cores` are those that may be used while nobody else computes."""
        self.index, self.device, self._cores = index, device, cores
        self.changed = threading.Condition()
        self.done = 0
        #: that of the fit which is under way, or was last
        self.plan: Plan | None = None
        self.fit = -1
        self.failure: ReplicaError | None = None
        self._desks: dict[str, Desk] = {}
        self._published: tuple[int, Tensor] | None = None
        self._snapshots: dict[int, Snapshot] = {}
        self._tried: Any = None
        self._trial = Trial([1])

    # --- a fit begins -----------------------------------------------------------------------

    def open(self, plan: Plan, fit: int) -> None:
        with self.changed:
            self.fit = fit
            layout = plan.layout
            pieces = [extent.piece for extent in layout.extents[self.index]]
            self.store = Store(pieces, plan.shapes, plan.dtype, plan.recipe, device=self.device)
            self._policies = _policies(plan)
            self._memory: dict[str, Tensor] = {}
            self._keeps_then = any(p.needs_then or p.needs_gap for p in self._policies)
            self._measures = any(p.needs_gap for p in self._policies)
            self._stepped = 0.0
            self._try_threads(plan)
            self.plan, self.done = plan, 0
            self._desks.clear()
            self._snapshots.clear()
            self._published = None
            self._edition = 0
            self.changed.notify_all()

    def assign(self, values: Tensor, pieces: Sequence[int]) -> None:
        """Other values of some pieces, from outside of the training."""
        with self.changed:
            self._open()
            views = [self.store.views[piece] for piece in pieces]
            parts = torch.split(values, [view.numel() for view in views]) if views else ()
            for view, part in zip(views, parts, strict=True):
                view.copy_(part.view(view.shape))
            self._edition += 1
            self._published = None
            self.changed.notify_all()

    def assign_states(self, states: Sequence[Any]) -> None:
        """Another state of the optimizer, from outside of the training."""
        with self.changed:
            self._open()
            self.store.restore_states(states)

    # --- what workers do --------------------------------------------------------------------

    def sit(self, seat: str, handle: str | None, fit: int) -> None:
        """Give a worker a desk: in its own memory, if this machine can map it.

        It stays until the lead orders it away, or a fit begins: orders may still be on their way
        that mean a gradient of a worker which has died since.
        """
        with self.changed:
            plan = self._open()
            if fit != self.fit:
                return  # it comes too late, and the lead will say so
            layout = plan.layout
            load = layout.loads[self.index]
            if handle is None:
                gradient = torch.empty(load, dtype=plan.wire_dtype)
                self._desks[seat] = Desk(self.store.views, plan.wire_dtype, gradient, load)
                return
            # Many workers scatter their rows sooner than one server does it for all of them.
            scatters = plan.workers <= _FEW or plan.wire_dtype is not plan.dtype
            segment = Segment.attach(handle)
            if segment.size < memory_size(plan):
                raise UsageError(f"{segment.size} bytes of shared memory are too few for a desk")
            self.share(seat, *memory_of(segment, plan), scatters)

    def share(self, seat: str, values: Tensor, outbox: Tensor, scatters: bool = True) -> None:
        """Give a worker a desk in its own memory: all its values, and its outbox of gradients."""
        with self.changed:
            plan = self._open()
            layout, views = plan.layout, self.store.views
            load, first = layout.loads[self.index], layout.offset(self.index)
            targets = [
                values[e.lo : e.hi].view(view.shape)
                for e, view in zip(layout.extents[self.index], views, strict=True)
            ]
            gradient = outbox[first : first + load]
            self._desks[seat] = Desk(views, plan.wire_dtype, gradient, load, targets, scatters)

    def find(self, seat: str) -> Desk | None:
        """A worker's desk; None if it had one in a fit that is over."""
        return self._desks.get(seat)

    def desk(self, seat: str) -> Desk:
        return self._desks[seat]

    def fetch(self, seat: str, have: int, after: int) -> tuple[dict[str, Any], list[Tensor]]:
        """The answer for a worker that has version `have`: a header, and what to send with it."""
        with self.changed:
            self._await(lambda: self.done >= after or seat not in self._desks)
            if seat not in self._desks:
                return {"version": have}, []  # its fit is over
            store, desk = self.store, self.desk(seat)
            header: dict[str, Any] = {"version": store.version}
            if desk.edition != self._edition:
                desk.edition, have = self._edition, -1
            if have == store.version:
                return header, []
            self._take(self._trial.threads)
            body = self._news(desk, have, header)
            if self._keeps_then:
                if desk.then is None:
                    desk.then = torch.empty_like(store.values)
                desk.then.copy_(store.values)
        return header, body

    def _news(self, desk: Desk, have: int, header: dict[str, Any]) -> list[Tensor]:
        """What has changed since version `have`: into the worker's memory, or to be sent."""
        if not self.store.views:
            return []  # there are more servers than pieces
        changes = self.store.changed_since(have)
        whole = [change.rows is None for change in changes]
        if len(changes) == len(self.store.views) and all(whole):
            if desk.targets is not None:
                torch._foreach_copy_(desk.targets, self.store.views)
                return []
            header["all"] = True
            return [self._publish()]
        pieces: list[list[int]] = []
        body: list[Tensor] = []
        for change in changes:
            new = self.store.values_of(change)
            if desk.targets is not None and (change.rows is None or desk.scatters):
                target = desk.targets[change.piece]
                if change.rows is None:
                    target.copy_(new)
                else:
                    rows = change.rows.to(target.device)
                    target.index_copy_(0, rows, new.to(target.device))
                continue
            pieces.append([change.piece, -1 if change.rows is None else len(change.rows)])
            if change.rows is not None:
                body.append(change.rows.cpu())
            body.append(self._for_wire(new, copy=change.rows is None))
        header["pieces"] = pieces
        return body

    def _for_wire(self, values: Tensor, copy: bool = True) -> Tensor:
        """Sent when others may be at it again, so in memory of its own."""
        wire = self._open().wire_dtype
        return values.detach().to("cpu", wire, copy=copy).contiguous()

    def _publish(self) -> Tensor:
        """All values in memory of their own, made once a version however many ask."""
        if self._published is None or self._published[0] != self.store.version:
            self._published = (self.store.version, self._for_wire(self.store.values))
        return self._published[1]

    def _try_threads(self, plan: Plan) -> None:
        """How many make updates, unless it is known from a fit like this one. Nothing but time may
        depend on it, so an optimizer that adds up whole variables gets one."""
        numbers = choices(self._cores or 1) if elementwise(plan.recipe) else [1]
        fit = (numbers, plan.workers, plan.updates, plan.layout.count)
        if fit != self._tried:
            self._tried, self._trial = fit, Trial(numbers)

    def _take(self, threads: int) -> None:
        """So many threads from here on. torch counts them for each thread of ours by itself."""
        if self._cores is not None and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def _await(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._open()
            self.changed.wait(0.5)
        self._open()

    def _open(self) -> Plan:
        if self.failure is not None:
            raise self.failure
        if self.plan is None:
            raise UsageError("no training is under way here")
        return self.plan

    # --- what the lead orders ---------------------------------------------------------------

    def obey(self, order: Order) -> Any:
        """Carry out one order; returns its number, for those that ask for one."""
        with self.changed:
            # Sums come out the same every time only if as many threads add them up.
            self._take(self._trial.threads if order[0] in _BY_ELEMENT else 1)
            try:
                return _ORDERS[order[0]](self, *order[1:])
            finally:
                if order[0] in _MAKES:
                    self._trial.made()
                self.done += 1
                self.changed.notify_all()

    def _add(self, seat: str, factor: float, used: Sequence[bool] | None) -> None:
        desk = self.desk(seat)
        gradient = self._compensated(desk)
        self.store.add(gradient, factor, self._used(used, desk))
        self._add_rows(desk, factor)

    def _add_rows(self, desk: Desk, factor: float) -> None:
        for piece, rows, values in desk.rows:
            self.store.add_rows(piece, rows, values, factor)
        desk.rows = []

    def _one(self, seat: str, factor: float, rate: float, used: Sequence[bool] | None) -> None:
        """A push that makes an update by itself."""
        desk = self.desk(seat)
        clip = self._open().clip.value
        with self._measured():
            if desk.rows or desk.gradient.dtype != self.store.values.dtype:
                self._add(seat, factor, used)
                self.store.apply(1.0, rate, clip)
            else:
                gradient = self._compensated(desk).to(self.device)
                self.store.apply_one(gradient, factor, self._used(used, desk), rate, clip)

    def _apply(self, scale: float, rate: float) -> None:
        with self._measured():
            self.store.apply(scale, rate, self._open().clip.value)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Note how far an update moves the values, for rules that ask."""
        if not self._measures:
            yield
            return
        before = self.store.values.clone()
        yield
        self._stepped = self.store.distance_squared(before)

    def _step(self) -> float:
        return self._stepped

    def _norm(self, scale: float) -> float:
        return self.store.norm_squared(scale)

    def _distance(self, seat: str) -> float:
        then = self.desk(seat).then
        return 0.0 if then is None else self.store.distance_squared(then)

    def _compensated(self, desk: Desk) -> Tensor:
        gradient = desk.gradient[: desk.filled]
        for policy in self._policies:
            if policy.needs_then and desk.then is not None:
                gradient = gradient.to(desk.then)
                policy.compensate(gradient, self.store.values, desk.then, self._memory)
        return gradient

    def _used(self, used: Sequence[bool] | None, desk: Desk) -> list[bool] | None:
        """By piece: whether its variable has a dense gradient."""
        sparse = {piece for piece, _, _ in desk.rows}
        if used is None and not sparse:
            return None
        extents = self._open().layout.extents[self.index]
        return [
            i not in sparse and (used is None or bool(used[e.piece.variable]))
            for i, e in enumerate(extents)
        ]

    def _leave(self, seat: str) -> None:
        self._desks.pop(seat, None)

    def _flush(self) -> float:
        """Whoever has the answer knows that everything before is done."""
        return 0.0

    def _forget(self) -> None:
        """What was added up makes no update after all."""
        self.store.forget()

    def _settings(self, groups: list[dict[str, Any]]) -> None:
        self.store.set_settings(groups)

    def _snapshot(self, number: int) -> None:
        self._snapshots[number] = self.store.snapshot()

    def snapshot(self, number: int, after: int) -> Snapshot:
        """Take a snapshot that was ordered away from here."""
        with self.changed:
            self._await(lambda: self.done >= after)
            return self._snapshots.pop(number)


_ORDERS: dict[str, Callable[..., Any]] = {
    "add": Shard._add, "one": Shard._one, "apply": Shard._apply, "norm": Shard._norm,
    "distance": Shard._distance, "step": Shard._step, "settings": Shard._settings,
    "snapshot": Shard._snapshot, "leave": Shard._leave, "bury": Shard._leave,
    "flush": Shard._flush, "forget": Shard._forget,
}  # fmt: skip
_MAKES = {"one", "apply"}  # an update
_BY_ELEMENT = {"add", *_MAKES}


def _policies(plan: Plan) -> tuple[Policy, ...]:
    return plan.updates.staleness if isinstance(plan.updates, Asynchronous) else ()


def memory_size(plan: Plan) -> int:
    """Bytes of what a worker shares with the servers of its machine."""
    return 2 * plan.layout.count * plan.dtype.itemsize + 64


def memory_of(segment: Segment, plan: Plan) -> tuple[Tensor, Tensor]:
    """A worker's values, and its outbox of gradients ordered by server."""
    count = plan.layout.count
    values = segment.tensor(plan.dtype, [count])
    outbox = segment.tensor(plan.dtype, [count], offset=count * plan.dtype.itemsize)
    return values, outbox
