"""One set of parameters in shared memory, of which each replica updates its own slice.

CPU replicas of one machine all read one set of parameters. After backward every replica adds up
its own 1/N of the gradients and steps the optimizer on that 1/N, so that the update costs N times
less, too.

    gradients   row 0 [ . | . | . ]     parameters [ . | . | . ]
                row 1 [ . | . | . ]                  ^   ^   ^
                row 2 [ . | . | . ]                  |   |   replica 2 adds its column and steps
                                                     |   replica 1
                                                     replica 0

Gradients of large linear layers' weights stay factors (factors.py), which each replica multiplies
for its slice. The optimizer's state lies in shared memory, too (shared_state.py). So every replica
sees the whole state at any time: when a checkpoint is due, when a fit ends, and also after another
replica has died or the user has pressed Ctrl-C.

Only optimizers that treat every element by itself can be sliced; `can_slice` knows which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.figures.meter import METER
from stratagem.state.factors import make_factors
from stratagem.state.optimizer_recipe import ELEMENTWISE, group_settings
from stratagem.state.shared_state import MORE_STATE, SharedState
from stratagem.wire.buckets import Buckets
from stratagem.wire.shared_memory import SharedMemoryCollective, slices, sum_parts


def can_slice(optimizer: Optimizer, params: list[nn.Parameter]) -> bool:
    """Return whether the update of one element depends on that element alone."""
    return type(optimizer) in ELEMENTWISE and all(p.dtype is torch.float32 for p in params)


@dataclass
class SlicePiece:
    """Elements lo..hi of a parameter, which this replica updates; they begin at `at`."""

    param: nn.Parameter
    index: int
    lo: int
    hi: int
    at: int
    leaf: Tensor
    grad: Tensor

    @property
    def first(self) -> bool:
        return self.lo == 0

    def of(self, whole: Tensor) -> Tensor:
        """Return the same elements of another tensor of the parameter's shape: a view."""
        return whole.view(-1)[self.lo : self.hi]


class SlicedUpdate:
    """One replica's slice of the parameters and of the optimizer's state. Made collectively."""

    def __init__(
        self,
        optimizer: Optimizer,
        buckets: Buckets,
        collective: SharedMemoryCollective,
        factored: Sequence[int] = (),
    ) -> None:
        """`factored`: parameters whose gradients come in factors."""
        (bucket,) = buckets.buckets
        self.optimizer, self.buckets, self.collective = optimizer, buckets, collective
        self._notes = collective.table_of(self._open_sums(bucket.flat))
        self._norms = collective.table(16, torch.float32)
        made = make_factors([buckets.params[i] for i in factored], collective)
        self.factors = dict(zip(factored, made, strict=True))
        self._share_parameters(bucket.members)
        self.pieces = self._cut(bucket.members)
        self._plain = self._plain_runs()
        self._state = SharedState(optimizer, buckets.params, collective)
        self.twin = self._state.twin(optimizer, self.pieces)
        #: parameters that the optimizer has stepped here, and whether more of them get state now
        self._known: set[int] = set()
        self._grows = False
        try:
            if collective.live:
                self._state.take_in(self.twin, self.pieces)
            collective.barrier()
        except BaseException:  # a replica has died meanwhile
            self._go_home()
            raise
        self._state.give(optimizer, copy=False)
        self._tails = self._notes.grid[:, -buckets.notes_size :]
        #: a copy of the parameters made by `keep`, and whether an update has begun since
        self._kept: Tensor | None = None
        self._under_way = False
        #: by parameter: how many replicas have a gradient in the present step
        self._counts: list[float] = []

    def _open_sums(self, flat: Tensor) -> Tensor:
        """Open the memory for sums of gradients; return the memory that has the notes."""
        self.table = self.collective.table_of(flat)
        return flat

    # --- one step ---------------------------------------------------------------------------

    def add_up(self) -> list[float]:
        """Wait for every replica's gradients; return the sums of the notes."""
        METER.bytes += self._notes.rows[0].nbytes
        self.collective.meet("gradient")
        numbers: list[float] = self._tails.sum(0).tolist()
        notes = len(numbers) - len(self.buckets.params)
        self._counts = numbers[notes:]
        return numbers[:notes]

    def step(self, scale: float, clip_norm: float | None, clip_value: float | None) -> None:
        """Sum this slice, scale it, clip, update, and wait until all replicas have updated."""
        self._sum(scale)
        if clip_norm is not None:
            self._clip(clip_norm)
        if clip_value is not None:
            for part in self._parts:
                part.clamp_(-clip_value, clip_value)
        self._leave_out_unused()
        self.twin.step()
        if self._grows:
            self._state.take_in(self.twin, self.pieces)
        self.collective.meet("update")
        self._under_way = False
        if self._grows:
            self._state.give(self.optimizer, copy=False)
            self._grows = False

    def _sum(self, scale: float) -> None:
        """Sum the gradient of this slice over all replicas."""
        weights = [scale] * self.collective.size
        for parts, total in self._plain:
            sum_parts(parts, weights, total)
        for piece in self.pieces:
            factors = self.factors.get(piece.index)
            if factors is not None:
                rows = piece.lo // factors.width, piece.hi // factors.width
                factors.add_up(*rows, scale, (self.table, piece.at), piece.grad)

    def _clip(self, limit: float) -> None:
        """Clip by the norm of the whole gradient, to which every slice contributes."""
        norms = self._norms.rows
        squares = (part.double().square().sum() for part in self._parts)
        norms[self.collective.rank][0] = sum(squares, torch.zeros((), dtype=torch.float64))
        self.collective.meet("gradient")
        norm = sum(float(row[0]) for row in norms) ** 0.5
        if not norm <= limit:  # or it is no number, and then nothing is
            for part in self._parts:
                part.mul_(limit / (norm + 1e-6))

    def _leave_out_unused(self) -> None:
        """Leave out parameters without any gradient: a zero would still move the optimizer."""
        counts = self._counts
        for piece in self.pieces:
            piece.leaf.grad = piece.grad if counts[piece.index] else None
        if len(self._known) < len(counts):
            used = {i for i, count in enumerate(counts) if count}
            self._grows = self._grows or not used <= self._known
            self._known |= used

    # --- setting up and taking down -----------------------------------------------------------

    def _share_parameters(self, members: list[int]) -> None:
        count = sum(p.numel() for p in self.buckets.params)
        self._flat = self.collective.table(count, torch.float32, rows=1).rows[0]
        self._homes = [(p, p.data) for p in self.buckets.params]
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        at = 0
        with torch.no_grad():
            for i in members:
                param = self.buckets.params[i]
                view = self._flat[at : at + param.numel()].view(param.shape)
                if self.collective.rank == 0:
                    view.copy_(param)
                param.data = view
                self._views.append((param, view))
                at += param.numel()
        try:
            self.collective.barrier()
        except BaseException:  # a replica has died, perhaps before it had written
            for param, home in self._homes:
                param.data = home
            raise

    def take_back(self) -> None:
        """Move parameters that were given other memory (`p.data = ...`) back, with their values."""
        for param, view in self._views:
            if param.data_ptr() != view.data_ptr():
                param.data = view.copy_(param.detach())

    def _cut(self, members: list[int]) -> list[SlicePiece]:
        """Choose what this replica updates: rows of each factored weight, as multiplying these is
        work, and one slice of all other parameters."""
        rank, size = self.collective.rank, self.collective.size
        sizes = {i: self.buckets.params[i].numel() for i in members}
        rest = sum(n for i, n in sizes.items() if i not in self.factors)
        start, end = slices(rest, size)[rank]
        ranges, at = [], 0
        for i in members:
            if i in self.factors:
                lo, hi = (row * self.factors[i].width for row in self.factors[i].slice(rank, size))
            else:
                lo, hi = (min(max(bound, 0), sizes[i]) for bound in (start, end))
                start, end = start - sizes[i], end - sizes[i]
            if lo < hi or (rank == 0 and not sizes[i]):  # an empty parameter has state, too
                ranges.append((i, lo, hi, at + lo))
            at += sizes[i]
        grads = self._gradient_memory([(at, hi - lo) for _, lo, hi, at in ranges])
        return [
            SlicePiece(self.buckets.params[i], i, lo, hi, at, self._flat[at : at + hi - lo], grad)
            for (i, lo, hi, at), grad in zip(ranges, grads, strict=True)
        ]

    def _gradient_memory(self, spans: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
        """Return memory for the sum of each span (begin, length) of the gradients."""
        sizes = [size for _, size in spans]
        self._total = torch.empty(sum(sizes), dtype=torch.float32)
        #: all of this slice's gradient
        self._parts: Sequence[Tensor] = [self._total]
        return torch.split(self._total, sizes)

    def _plain_runs(self) -> list[tuple[list[Tensor], Tensor]]:
        """Return the parts of all rows that are added up, and where each sum goes."""
        runs: list[tuple[int, int, int]] = []  # in the table, in the total
        done = 0
        for piece in self.pieces:
            size = piece.hi - piece.lo
            if piece.index not in self.factors:
                if runs and runs[-1][0] + runs[-1][2] - runs[-1][1] == piece.at:
                    runs[-1] = (*runs[-1][:2], done + size)
                else:
                    runs.append((piece.at, done, done + size))
            done += size
        return [
            (self.table.parts_at(at, hi - lo), self._total[lo:hi]) for at, lo, hi in runs if lo < hi
        ]

    def follow_settings(self) -> None:
        """Take over a changed learning rate, or any other setting, from the user's optimizer."""
        for group, own in zip(self.optimizer.param_groups, self.twin.param_groups, strict=True):
            settings = group_settings(group)
            if any(settings[name] != own[name] for name in MORE_STATE if name in settings):
                self._grows = True
            own.update(settings)

    def keep(self) -> None:
        """Copy everything before an update, in which a replica may die and leave half a slice.

        No replica writes to a slice before all have met with their gradients, this one included.
        """
        self._state.keep()
        self._kept = self._flat.clone() if self._kept is None else self._kept.copy_(self._flat)
        self._under_way = True

    def take_over(self) -> None:
        """Continue the slice of a replica that died outside of an update."""
        self._state.give(self.optimizer, copy=False)
        self.twin = self._state.twin(self.optimizer, self.pieces)
        self._state.take_in(self.twin, self.pieces)

    def leave(self) -> None:
        """Take private memory, alone; after a broken update, the kept copies."""
        if self._under_way and self._kept is not None:
            self._state.put_back()
            for param, view in self._views:
                at = view.storage_offset() - self._flat.storage_offset()
                param.data = self._kept[at : at + param.numel()].view(param.shape)
        self._state.give(self.optimizer, copy=True)
        self._go_home()

    def close(self) -> None:
        """Give parameters and state private memory again. Collective."""
        self.collective.barrier()
        self._state.give(self.optimizer, copy=True)
        self._go_home()
        self.collective.barrier()

    @torch.no_grad()
    def _go_home(self) -> None:
        for param, home in self._homes:
            home.copy_(param)
            param.data = home


#: elements squared at a time: in double precision they take twice the memory
_AT_ONCE = 1 << 18


class ShardedUpdate(SlicedUpdate):
    """One replica's slice of parameters, gradients and state. Made collectively.

    All replicas add their gradients to one row in turn (wire/ordered_sum.py); each optimizer reads
    its slice of that sum:

    gradients    [ . | . | . ]     parameters [ . | . | . ]     exp_avg [ . | . | . ]
                   ^   ^   ^
                   |   |   replica 2 scales, clips and steps here
                   |   replica 1
                   replica 0
    """

    def _open_sums(self, flat: Tensor) -> Tensor:
        self._sums = flat
        assert self.buckets.apart is not None
        return self.buckets.apart

    def _gradient_memory(self, spans: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
        grads = [self._sums[at : at + size] for at, size in spans]
        self._parts = [part for grad in grads if len(grad) for part in torch.split(grad, _AT_ONCE)]
        return grads

    def _plain_runs(self) -> list[tuple[list[Tensor], Tensor]]:
        return []

    def _sum(self, scale: float) -> None:
        """Scale the sums, which are complete, and zero those that no replica has written."""
        for piece in self.pieces:
            factors = self.factors.get(piece.index)
            if factors is not None:
                rows = piece.lo // factors.width, piece.hi // factors.width
                factors.add_up(*rows, scale, None, piece.grad)
            elif not self._counts[piece.index]:
                piece.grad.zero_()
            elif scale != 1.0:
                piece.grad.mul_(scale)
