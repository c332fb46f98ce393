"""One server's parameters, and a slot for each worker's gradient.

Workers send gradients and fetch values; only the coordinator's orders change parameters, in the
same sequence on every server. `done` counts the orders, so that a worker can ask for values as of
an order that it knows of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stratagem.codecs.codec import PLAIN, Codec
from stratagem.compat.torch_names import copy_all
from stratagem.errors import ReplicaError, UsageError
from stratagem.rules.updates import Asynchronous, Policy
from stratagem.servers.outbox import PackedGradient, packed_gradient
from stratagem.servers.thread_tuning import ThreadTrial, choices
from stratagem.servers.training_plan import TrainingPlan
from stratagem.state.optimizer_recipe import elementwise
from stratagem.state.store import Store, StoreSnapshot
from stratagem.wire.segment import Segment

Order = list[Any]

OF_WORKER = (1 << 20) - 1  # the bits of a snapshot's number that say whose it is
_FEW = 2  # up to so many workers, the server itself writes changed rows into their memory


@dataclass
class WorkerSlot:
    """One worker's gradient here, and how the worker gets values."""

    #: this server's pieces in the fit of the slot, and how numbers travel there
    views: Sequence[Tensor]
    codec: Codec
    #: the dense gradient of this server's pieces, one after the other
    gradient: Tensor
    #: how many elements of the gradient were sent: all, or those of used pieces
    filled: int
    #: the worker's own memory by piece, if this process can map it
    targets: list[Tensor] | None = None
    #: whether the server writes rows there, too, or sends them to the worker
    scatters: bool = True
    #: rows of sparse gradients: piece, row numbers, values
    rows: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    #: the values that the worker computes with, for policies that compare
    then: Tensor | None = None
    #: how often values had been assigned at the worker's last fetch
    edition: int = 0
    #: memory for a compressed gradient
    packed: PackedGradient | None = None

    @property
    def dense(self) -> Codec:
        """The codec of the dense gradient; PLAIN in shared memory."""
        return self.codec if self.targets is None else PLAIN


class Shard:
    """The parameters and slots of one server. Thread-safe."""

    def __init__(self, index: int, device: torch.device, cores: int | None = None) -> None:
        """`cores` is how many an update may use."""
        self.index, self.device, self._cores = index, device, cores
        self.changed = threading.Condition()
        self.done = 0
        #: of the present or last fit
        self.plan: TrainingPlan | None = None
        self.fit = -1
        self.failure: ReplicaError | None = None
        #: by placement, the token of a worker's process
        self.slots: dict[str, WorkerSlot] = {}
        self._published: tuple[int, Tensor] | None = None
        self.snapshots: dict[int, StoreSnapshot] = {}
        self._tried: Any = None
        self._trial = ThreadTrial([1])

    # --- a fit begins -----------------------------------------------------------------------

    def open(self, plan: TrainingPlan, fit: int) -> None:
        with self.changed:
            self.fit = fit
            layout = plan.layout
            pieces = [extent.piece for extent in layout.extents[self.index]]
            self.store = Store(pieces, plan.shapes, plan.dtype, plan.recipe, device=self.device)
            self._policies = _policies(plan)
            self._memory: dict[str, Tensor] = {}
            self._keeps_then = any(p.needs_then or p.needs_gap for p in self._policies)
            self._measures = any(p.needs_gap for p in self._policies)
            self.stepped = 0.0
            self._try_threads(plan)
            self.plan, self.done = plan, 0
            self.slots.clear()
            self.snapshots.clear()
            self._published = None
            self._edition = 0
            self.changed.notify_all()

    def assign(self, values: Tensor, pieces: Sequence[int]) -> None:
        """Replace the values of some pieces from outside of the training."""
        with self.changed:
            self.training()
            views = [self.store.views[piece] for piece in pieces]
            parts = torch.split(values, [view.numel() for view in views]) if views else ()
            for view, part in zip(views, parts, strict=True):
                view.copy_(part.view(view.shape))
            self._edition += 1
            self._published = None
            self.changed.notify_all()

    # --- what workers do --------------------------------------------------------------------

    def attach(self, placement: str, handle: str | None, fit: int) -> None:
        """Give a worker a slot: in its own memory, if this machine can map it.

        The slot stays until an order removes it or a fit begins: orders under way may refer to the
        gradient of a worker that has died.
        """
        with self.changed:
            while self.fit < fit:  # another holder's copy is on its way
                _check(self)
                self.changed.wait(0.5)
            plan = self.training()
            if fit != self.fit:
                return  # too late, as the coordinator will answer
            layout = plan.layout
            load = layout.loads[self.index]
            if handle is None:
                gradient = plan.codec.room([load])
                slot = WorkerSlot(self.store.views, plan.codec, gradient, load)
                slot.packed = packed_gradient(plan, self.index)
                self.slots[placement] = slot
                return
            # Many workers write rows faster themselves than one server for all of them.
            scatters = plan.workers <= _FEW or plan.codec.lossy
            segment = Segment.attach(handle)
            if segment.size < memory_size(plan):
                raise UsageError(f"{segment.size} bytes of shared memory are too few for a slot")
            self.share(placement, *memory_of(segment, plan), scatters)

    def share(self, placement: str, values: Tensor, outbox: Tensor, scatters: bool = True) -> None:
        """Give a worker a slot in its own memory: all its values, and its outbox of gradients."""
        with self.changed:
            plan = self.training()
            layout, views = plan.layout, self.store.views
            load, first = layout.loads[self.index], layout.offset(self.index)
            targets = [
                values[e.lo : e.hi].view(view.shape)
                for e, view in zip(layout.extents[self.index], views, strict=True)
            ]
            gradient = outbox[first : first + load]
            slot = WorkerSlot(views, plan.codec, gradient, load, targets, scatters)
            slot.packed = packed_gradient(plan, self.index)
            self.slots[placement] = slot

    def fetch(self, placement: str, have: int, after: int) -> tuple[dict[str, Any], list[Tensor]]:
        """Answer a worker that has version `have`: return a header and the tensors to send."""
        with self.changed:
            self.wait_until(lambda: self.done >= after or placement not in self.slots)
            if placement not in self.slots:
                return {"version": have}, []  # its fit is over
            store, slot = self.store, self.slots[placement]
            header: dict[str, Any] = {"version": store.version}
            if slot.edition != self._edition:
                slot.edition, have = self._edition, -1
            if have == store.version:
                return header, []
            self._take(self._trial.threads)
            body = self._news(slot, have, header)
            if self._keeps_then:
                if slot.then is None:
                    slot.then = torch.empty_like(store.values)
                slot.then.copy_(store.values)
        return header, body

    def _news(self, slot: WorkerSlot, have: int, header: dict[str, Any]) -> list[Tensor]:
        """Write the changes since version `have` into the worker's memory, or return them."""
        if not self.store.views:
            return []  # there are more servers than pieces
        changes = self.store.changed_since(have)
        whole = [change.rows is None for change in changes]
        if len(changes) == len(self.store.views) and all(whole):
            if slot.targets is not None:
                copy_all(slot.targets, self.store.views)
                return []
            header["all"] = True
            return [self._publish()]
        pieces: list[list[int]] = []
        body: list[Tensor] = []
        for change in changes:
            new = self.store.values_of(change)
            if slot.targets is not None and (change.rows is None or slot.scatters):
                target = slot.targets[change.piece]
                if change.rows is None:
                    target.copy_(new)
                else:
                    rows = change.rows.to(target.device)
                    target.index_copy_(0, rows, new.to(target.device))
                continue
            pieces.append([change.piece, -1 if change.rows is None else len(change.rows)])
            if change.rows is not None:
                body.append(change.rows.cpu())
            body.append(self.training().codec.encode(new, copy=change.rows is None))
        header["pieces"] = pieces
        return body

    def _publish(self) -> Tensor:
        """Return a copy of all values, made once per version."""
        if self._published is None or self._published[0] != self.store.version:
            # a copy, as updates go on while it is sent
            encoded = self.training().codec.encode(self.store.values)
            self._published = (self.store.version, encoded)
        return self._published[1]

    def _try_threads(self, plan: TrainingPlan) -> None:
        """Begin to try numbers of threads, unless a fit like this one has. An optimizer that sums
        over whole variables gets one thread: more would change its sums."""
        numbers = choices(self._cores or 1) if elementwise(plan.recipe) else [1]
        fit = (numbers, plan.workers, plan.updates, plan.layout.count)
        if fit != self._tried:
            self._tried, self._trial = fit, ThreadTrial(numbers)

    def _take(self, threads: int) -> None:
        """Set torch's number of threads, which it keeps for each Python thread."""
        if self._cores is not None and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until orders make a condition true."""
        with self.changed:
            while not ready():
                self.training()
                self.changed.wait(0.5)
            self.training()

    def training(self) -> TrainingPlan:
        """Return the plan of the present or last fit; raise if there is none."""
        _check(self)
        if self.plan is None:
            raise UsageError("no training is under way here")
        return self.plan

    # --- what the coordinator orders ------------------------------------------------------------

    def obey(self, order: Order) -> Any:
        """Carry out one order; return its result, for orders that have one."""
        with self.changed:
            # Sums are reproducible only with a fixed number of threads.
            self._take(self._trial.threads if order[0] in _BY_ELEMENT else 1)
            try:
                return _ORDERS[order[0]](self, *order[1:])
            finally:
                if order[0] in _MAKES:
                    self._trial.made()
                self.done += 1
                self.changed.notify_all()

    def _add(self, placement: str, factor: float, used: Sequence[bool] | None) -> None:
        slot = self.slots[placement]
        gradient, codec = self._compensated(slot)
        self.store.add(gradient, factor, self._used(used, slot), codec)
        for piece, rows, values in slot.rows:
            self.store.add_rows(piece, rows, values, factor)
        slot.rows = []

    def _one(self, placement: str, factor: float, rate: float, used: Sequence[bool] | None) -> None:
        """Apply a push that is an update by itself."""
        slot = self.slots[placement]
        clip = self.training().clip.value
        with self._measured():
            # Other holders read the worker's memory, too, so it must not change.
            shared = self.training().backups and slot.targets is not None
            if slot.rows or slot.dense.lossy or shared:
                self._add(placement, factor, used)
                self.store.apply(1.0, rate, clip)
            else:
                gradient = self._compensated(slot)[0].to(self.device)
                self.store.apply_one(gradient, factor, self._used(used, slot), rate, clip)

    def _apply(self, scale: float, rate: float) -> None:
        with self._measured():
            self.store.apply(scale, rate, self.training().clip.value)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Measure how far an update moves the values, for policies that ask."""
        if not self._measures:
            yield
            return
        before = self.store.values.clone()
        yield
        self.stepped = self.store.distance_squared(before)

    def _compensated(self, slot: WorkerSlot) -> tuple[Tensor, Codec]:
        """Return the dense gradient, compensated for delay if a policy does so, and its codec."""
        gradient, codec = slot.gradient[: slot.filled], slot.dense
        for policy in self._policies:
            if policy.needs_then and slot.then is not None:
                if codec.lossy:
                    encoded, gradient = gradient, torch.empty_like(slot.then)
                    codec.decode(encoded, gradient)
                gradient, codec = gradient.to(slot.then), PLAIN
                policy.compensate(gradient, self.store.values, slot.then, self._memory)
        return gradient, codec

    def _used(self, used: Sequence[bool] | None, slot: WorkerSlot) -> list[bool] | None:
        """Return by piece whether its variable has a dense gradient."""
        sparse = {piece for piece, _, _ in slot.rows}
        if used is None and not sparse:
            return None
        extents = self.training().layout.extents[self.index]
        return [
            i not in sparse and (used is None or bool(used[e.piece.variable]))
            for i, e in enumerate(extents)
        ]

    def snapshot(self, number: int, after: int) -> StoreSnapshot:
        """Return a snapshot that was ordered, and forget it."""
        with self.changed:
            self.wait_until(lambda: self.done >= after)
            return self.snapshots.pop(number)


def _check(shard: Shard) -> None:
    if shard.failure is not None:
        raise shard.failure


def shares_memory(shard: Shard) -> bool:
    """Return whether this server writes values into workers' own memory."""
    return any(slot.targets is not None for slot in list(shard.slots.values()))


def _set_aside(shard: Shard, number: int) -> None:
    """Keep a snapshot, and drop the same worker's earlier one."""
    worker = number & OF_WORKER
    shard.snapshots = {n: s for n, s in shard.snapshots.items() if n & OF_WORKER != worker}
    shard.snapshots[number] = shard.store.snapshot()


def _distance(shard: Shard, placement: str) -> float:
    then = shard.slots[placement].then
    return 0.0 if then is None else shard.store.distance_squared(then)


#: the orders of the coordinator; it reads the results of those in `holders.ASKS`
_ORDERS: dict[str, Callable[..., Any]] = {
    "add": Shard._add,
    "one": Shard._one,
    "apply": Shard._apply,
    "norm": lambda shard, scale: shard.store.norm_squared(scale),
    "distance": _distance,
    "step": lambda shard: shard.stepped,
    "settings": lambda shard, groups: shard.store.set_settings(groups),
    "snapshot": _set_aside,
    "leave": lambda shard, placement: shard.slots.pop(placement, None) and None,
    "remove": lambda shard, placement: shard.slots.pop(placement, None) and None,
    "flush": lambda shard: 0.0,  # its answer shows that all earlier orders are done
    "forget": lambda shard: shard.store.forget(),  # drops the sum of a batch that was cancelled
}
_MAKES = {"one", "apply"}  # orders that make an update
_BY_ELEMENT = {"add", *_MAKES}


def _policies(plan: TrainingPlan) -> tuple[Policy, ...]:
    return plan.updates.staleness if isinstance(plan.updates, Asynchronous) else ()


def memory_size(plan: TrainingPlan) -> int:
    """Return the bytes that a worker shares with the servers of its machine."""
    return 2 * plan.layout.count * plan.dtype.itemsize + 64


def memory_of(segment: Segment, plan: TrainingPlan) -> tuple[Tensor, Tensor]:
    """Return a worker's values, and its outbox of gradients ordered by server."""
    count = plan.layout.count
    values = segment.tensor(plan.dtype, [count])
    outbox = segment.tensor(plan.dtype, [count], offset=count * plan.dtype.itemsize)
    return values, outbox
