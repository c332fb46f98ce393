"""Parameters once in shared memory, each replica updating its own slice of them.

CPU replicas of one machine need no copy of the model each: all of them read one set of
parameters. After backward every replica adds up its own 1/N of the gradients and lets the
optimizer step on that 1/N alone, so that the update costs N times less, too.

    gradients   row 0 [ . | . | . ]     parameters [ . | . | . ]
                row 1 [ . | . | . ]                  ^   ^   ^
                row 2 [ . | . | . ]                  |   |   replica 2 adds its column and steps
                                                     |   replica 1
                                                     replica 0

Weights of large linear layers have their gradients in factors (factors.py), which each replica
multiplies for its slice. The optimizer's state lies in shared memory, too, each replica writing its
own part:

    exp_avg      [ replica 0 | replica 1 | replica 2 ]
    exp_avg_sq   [ replica 0 | replica 1 | replica 2 ]
    step         a number a parameter, from the replica that has its first element

So every replica sees the whole state at any time: when a checkpoint is due, when a fit ends, and
also after another replica has died or the user has pressed Ctrl-C.

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
    """Whether the update of one element depends on that element alone."""
    return type(optimizer) in ELEMENTWISE and all(p.dtype is torch.float32 for p in params)


@dataclass
class SlicePiece:
    """Elements lo..hi of parameter `index`, which this replica updates; they begin at `at`."""

    index: int
    lo: int
    hi: int
    at: int
    data: Tensor
    grad: Tensor


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
        self.twin = self._twin()
        #: parameters that the optimizer has stepped on here, and whether others get state now
        self._known: set[int] = set()
        self._grows = False
        try:
            if collective.live:
                self._share_state()
            collective.barrier()
        except BaseException:  # somebody has died meanwhile
            self._go_home()
            raise
        self._state.give(optimizer, copy=False)
        self._tails = self._notes.grid[:, -buckets.notes_size :]
        #: of the parameters, as they were at `keep`, and whether an update has begun since
        self._kept: Tensor | None = None
        self._under_way = False
        #: of each parameter, how many replicas have a gradient in the step under way
        self._counts: list[float] = []

    def _open_sums(self, flat: Tensor) -> Tensor:
        """Where gradients are added up; returns what the notes lie in."""
        self.table = self.collective.table_of(flat)
        return flat

    # --- one step ---------------------------------------------------------------------------

    def add_up(self) -> list[float]:
        """Wait for every replica's gradients; returns the notes added up."""
        METER.bytes += self._notes.rows[0].nbytes
        self.collective.meet("gradient")
        numbers: list[float] = self._tails.sum(0).tolist()
        notes = len(numbers) - len(self.buckets.params)
        self._counts = numbers[notes:]
        return numbers[:notes]

    def step(self, scale: float, clip_norm: float | None, clip_value: float | None) -> None:
        """Sum this slice, scale it, clip, update, and wait until everybody has."""
        self._sum(scale)
        if clip_norm is not None:
            self._clip(clip_norm)
        if clip_value is not None:
            for part in self._parts:
                part.clamp_(-clip_value, clip_value)
        self._leave_out_unused()
        self.twin.step()
        if self._grows:
            self._share_state()
        self.collective.meet("update")
        self._under_way = False
        if self._grows:
            self._state.give(self.optimizer, copy=False)
            self._grows = False

    def _sum(self, scale: float) -> None:
        """The gradient of this slice, over all replicas."""
        weights = [scale] * self.collective.size
        for parts, total in self._plain:
            sum_parts(parts, weights, total)
        for piece in self.pieces:
            factors = self.factors.get(piece.index)
            if factors is not None:
                rows = piece.lo // factors.width, piece.hi // factors.width
                factors.add_up(*rows, scale, (self.table, piece.at), piece.grad)

    def _clip(self, limit: float) -> None:
        """By the norm of the whole gradient, which every replica learns from all slices."""
        norms = self._norms.rows
        squares = (part.double().square().sum() for part in self._parts)
        norms[self.collective.rank][0] = sum(squares, torch.zeros((), dtype=torch.float64))
        self.collective.meet("gradient")
        norm = sum(float(row[0]) for row in norms) ** 0.5
        if not norm <= limit:  # or it is no number, and then nothing is
            for part in self._parts:
                part.mul_(limit / (norm + 1e-6))

    def _leave_out_unused(self) -> None:
        """No gradient anywhere means no step there: a zero would still move the optimizer."""
        counts = self._counts
        for piece in self.pieces:
            piece.data.grad = piece.grad if counts[piece.index] else None
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
        except BaseException:  # somebody has died meanwhile, perhaps before it had written
            for param, home in self._homes:
                param.data = home
            raise

    def take_back(self) -> None:
        """Parameters that were given other memory (`p.data = ...`) come back with their values."""
        for param, view in self._views:
            if param.data_ptr() != view.data_ptr():
                param.data = view.copy_(param.detach())

    def _cut(self, members: list[int]) -> list[SlicePiece]:
        """What this replica updates: some rows of each factored weight, since these are work, and
        one slice of all the rest."""
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
            if lo < hi or (rank == 0 and not sizes[i]):  # an empty one has a state, too
                ranges.append((i, lo, hi, at + lo))
            at += sizes[i]
        grads = self._gradient_memory([(at, hi - lo) for _, lo, hi, at in ranges])
        return [
            SlicePiece(i, lo, hi, at, self._flat[at : at + hi - lo], grad)
            for (i, lo, hi, at), grad in zip(ranges, grads, strict=True)
        ]

    def _gradient_memory(self, spans: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
        """Room for the sum of each span of the gradients: where it begins, and how long it is."""
        sizes = [size for _, size in spans]
        self._total = torch.empty(sum(sizes), dtype=torch.float32)
        #: all of this slice's gradient
        self._parts: Sequence[Tensor] = [self._total]
        return torch.split(self._total, sizes)

    def _plain_runs(self) -> list[tuple[list[Tensor], Tensor]]:
        """What is added up, of all rows, and where the sum goes; neighbours in one."""
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

    def _twin(self) -> Optimizer:
        """The same optimizer over this replica's pieces, with the state it already had."""
        by_param = {self.buckets.params[piece.index]: piece for piece in self.pieces}
        groups = [
            {
                **group_settings(g),
                "params": [by_param[p].data for p in g["params"] if p in by_param],
            }
            for g in self.optimizer.param_groups
        ]
        twin: Optimizer = type(self.optimizer)(groups)  # type: ignore[call-arg]
        for piece in self.pieces:
            whole = self.optimizer.state.get(self.buckets.params[piece.index], {})
            had = self._state.part(whole, piece.index, piece.lo, piece.hi)
            if had:
                twin.state[piece.data].update(had)
        return twin

    def _share_state(self) -> None:
        """State that has come into being moves to where everybody sees it."""
        for piece in self.pieces:
            if state := self.twin.state.get(piece.data):
                self._state.move_in(state, piece.index, piece.lo, piece.hi)

    def follow_settings(self) -> None:
        """Take over a changed learning rate, or any other setting, from the user's optimizer."""
        for group, own in zip(self.optimizer.param_groups, self.twin.param_groups, strict=True):
            settings = group_settings(group)
            if any(settings[name] != own[name] for name in MORE_STATE if name in settings):
                self._grows = True
            own.update(settings)

    def keep(self) -> None:
        """An update begins, in which a replica may die and leave its slice half written.

        Nobody writes to a slice before all have met with their gradients, this replica included.
        """
        self._state.keep()
        self._kept = self._flat.clone() if self._kept is None else self._kept.copy_(self._flat)
        self._under_way = True

    def take_over(self) -> None:
        """Go on with the slice of a replica that has died, as it left it before an update."""
        self._state.give(self.optimizer, copy=False)
        self.twin = self._twin()
        self._share_state()

    def leave(self) -> None:
        """Alone: go on with what was kept if an update broke off, else with what is there."""
        if self._under_way and self._kept is not None:
            self._state.put_back()
            for param, view in self._views:
                at = view.storage_offset() - self._flat.storage_offset()
                param.data = self._kept[at : at + param.numel()].view(param.shape)
        self._state.give(self.optimizer, copy=True)
        self._go_home()

    def close(self) -> None:
        """Give parameters and state private memory again."""
        self.collective.barrier()
        self._state.give(self.optimizer, copy=True)
        self._go_home()
        self.collective.barrier()

    @torch.no_grad()
    def _go_home(self) -> None:
        for param, home in self._homes:
            home.copy_(param)
            param.data = home


#: elements whose squares are added up at a time: in double precision they take twice the memory
_AT_ONCE = 1 << 18


class ShardedUpdate(SlicedUpdate):
    """One replica's slice of parameters, gradients and state. Made collectively.

    There is one row of gradients for all replicas, to which they have added in turn
    (wire/ordered_sum.py); a replica's slice of the sum is where its optimizer reads:

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
        """They have been added up: scale them, and erase what nobody has written."""
        for piece in self.pieces:
            factors = self.factors.get(piece.index)
            if factors is not None:
                rows = piece.lo // factors.width, piece.hi // factors.width
                factors.add_up(*rows, scale, None, piece.grad)
            elif not self._counts[piece.index]:
                piece.grad.zero_()
            elif scale != 1.0:
                piece.grad.mul_(scale)
