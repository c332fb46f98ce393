"""One server's pieces of the parameters, and the optimizer that updates them.

    push -> add -> [ sum ] -> apply -> [ values ], version + 1 -> changed_since -> pull

The values of all pieces lie one after the other in one flat tensor, which is allocated once; the
optimizer works on views of it. The store
decides nothing: the coordinator says which gradients count, and when the sum is applied.

Not thread-safe: a shard calls the store under its own lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stratagem.codecs.codec import PLAIN, Codec
from stratagem.errors import UsageError
from stratagem.state.optimizer_recipe import OptimizerRecipe
from stratagem.state.partition import Piece
from stratagem.state.stepper import stepper_for
from stratagem.state.sums import GradientSum, PieceLayout, distance_squared

_RECENT = 64  # so many updates are kept at most, and their copies take at most
_ROOM = 0.5  # of the piece's rows
_MANY = 16  # from so many updates on the same rows are likely to be named repeatedly

#: rows, and their values after the change; None: their present values
Change = tuple[Tensor, Tensor | None]


class RowVersions:
    """The latest changes of one piece's rows, by version."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._table = torch.zeros(rows, dtype=torch.int64, device=device)
        self._recent: deque[tuple[int, Tensor, Tensor]] = deque()
        self._kept = 0  # rows in `_recent`
        self._forgotten = 0  # the version of the last change that is only in the table

    def note(self, version: int, rows: Tensor, piece: Tensor) -> None:
        """Record that these rows changed; `version` and `piece` are as after the change."""
        self._table[rows] = version
        rows = rows.clone()  # the caller may reuse their memory
        self._recent.append((version, rows, piece.index_select(0, rows)))
        self._kept += len(rows)
        while len(self._recent) > _RECENT or self._kept > _ROOM * len(self._table):
            self._forgotten, forgotten, _ = self._recent.popleft()
            self._kept -= len(forgotten)

    def since(self, version: int) -> list[Change]:
        """Return the changes made after `version`, in order."""
        if version < self._forgotten:
            return [((self._table > version).nonzero().flatten(), None)]
        changes: list[Change] = [
            (rows, new) for changed, rows, new in self._recent if changed > version
        ]
        if len(changes) <= _MANY:
            return changes
        return [(torch.unique(torch.cat([rows for rows, _ in changes])), None)]


@dataclass(frozen=True, eq=False)
class Delta:
    """What a copy of a piece needs to become current: the whole piece, or just these rows.

    Several deltas of one piece apply in order: a later one may name a row again.
    """

    piece: int
    rows: Tensor | None = None
    #: the rows' values, if they are known; never changed again
    values: Tensor | None = None


@dataclass(frozen=True, eq=False)
class StoreSnapshot:
    """A copy of the values and of the optimizer's state by piece, all of one version."""

    version: int
    values: Tensor
    states: list[dict[str, Any]]


class Store:
    """Pieces of variables with their optimizer; see the top of this file."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        recipe: OptimizerRecipe,
        device: torch.device | str = "cpu",
    ) -> None:
        """`pieces` are this server's, in order."""
        self.pieces, self.version = list(pieces), 0
        self.layout = PieceLayout([piece.shape(shapes[piece.variable]) for piece in pieces])
        self.count = self.layout.count
        self.values = torch.zeros(self.count, dtype=dtype, device=device)
        self.views = self.layout.views(self.values)
        self.sum = GradientSum(self.layout, dtype, self.values.device)
        named = [(p.variable, v) for p, v in zip(pieces, self.views, strict=True)]
        self._stepper = stepper_for(recipe, named, self.values)
        #: pieces that take sparse gradients only
        self._rows_only = [i for i in range(len(pieces)) if self._stepper.rows_only(i)]
        #: by piece: the version that last changed all of it; and changes of rows
        self._changed = [0] * len(pieces)
        self._row_versions: dict[int, RowVersions] = {}

    # --- gradients ----------------------------------------------------------------------------

    @torch.no_grad()
    def add(
        self,
        grad: Tensor,
        factor: float,
        used: Sequence[bool] | None = None,
        codec: Codec = PLAIN,
    ) -> None:
        """Add factor * grad to the pending sum.

        `grad` is flat, encoded by `codec` or of any floating-point type, and has all pieces one
        after the other or just the used ones.
        """
        self._refuse_dense(used)
        self.sum.add(grad, factor, used, codec)

    @torch.no_grad()
    def add_rows(self, piece: int, rows: Tensor, values: Tensor, factor: float) -> None:
        """Add factor * values to rows of a piece; a row named twice gets both.

        Without any rows the piece still counts as used: its optimizer counts the step.
        """
        self.sum.add_rows(piece, rows, values, factor)

    @torch.no_grad()
    def norm_squared(self, scale: float) -> float:
        """Return the squared norm of the pending sum times `scale`."""
        return self.sum.norm_squared(scale)

    @torch.no_grad()
    def distance_squared(self, then: Tensor) -> float:
        """Return the squared distance between the present values and `then`."""
        return distance_squared(self.values, then)

    # --- updates ------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, scale: float, rate: float = 1.0, clip_value: float | None = None) -> None:
        """Step with the sum times `scale`; `rate` scales the learning rate of this step only."""
        self._step(self.sum.take(scale, clip_value), rate)

    @torch.no_grad()
    def apply_one(
        self,
        grad: Tensor,
        factor: float,
        used: Sequence[bool] | None = None,
        rate: float = 1.0,
        clip_value: float | None = None,
    ) -> None:
        """Do `add` and `apply` of one gradient in its own memory, which may be changed.

        Gradients of another type, or of many small pieces, are copied after all. Pending rows are
        applied with it.
        """
        self._refuse_dense(used)
        self._step(self.sum.take_one(grad, factor, used, clip_value), rate)

    def forget(self) -> None:
        """Discard the pending sum."""
        self.sum.clear()

    def _step(self, grads: list[Tensor | None], rate: float) -> None:
        moved = self._stepper.step(grads, rate)
        self.version += 1
        for i, rows in moved.items():
            if rows is None:
                self._changed[i] = self.version
            else:
                self._rows_of(i).note(self.version, rows, self.views[i])

    def _refuse_dense(self, used: Sequence[bool] | None) -> None:
        if not self._rows_only:
            return
        flags = self.layout.flags(used)
        if any(flags[i] for i in self._rows_only):
            raise UsageError(
                "SparseAdam takes sparse gradients only, as torch's does: make the layer with "
                "sparse=True, or give its parameters to another optimizer."
            )

    # --- what a worker must get -----------------------------------------------------------------

    @torch.no_grad()
    def changed_since(self, version: int) -> list[Delta]:
        """Return what a worker with the values of `version` (-1: none) lacks, by piece."""
        deltas = []
        for i, changed in enumerate(self._changed):
            if changed > version or version > self.version:
                deltas.append(Delta(i))
            elif i in self._row_versions:
                changes = self._row_versions[i].since(version)
                count = sum(len(rows) for rows, _ in changes)
                if count and not self._worth(i, count):
                    deltas.append(Delta(i))
                else:
                    deltas += [Delta(i, *change) for change in changes if len(change[0])]
        return deltas

    def values_of(self, delta: Delta) -> Tensor:
        """Return the values of a delta: a view of the piece, or a copy of its rows."""
        if delta.values is not None:
            return delta.values
        view = self.views[delta.piece]
        return view if delta.rows is None else view.index_select(0, delta.rows)

    def _worth(self, piece: int, rows: int) -> bool:
        """Return whether rows with their numbers take fewer bytes than the piece."""
        whole = self.layout.sizes[piece] * self.values.element_size()
        return rows * (8 + whole // self.layout.shapes[piece][0]) < whole

    def _rows_of(self, piece: int) -> RowVersions:
        if piece not in self._row_versions:
            rows = self.layout.shapes[piece][0]
            self._row_versions[piece] = RowVersions(rows, self.values.device)
        return self._row_versions[piece]

    # --- settings and copies ----------------------------------------------------------------------

    def settings(self) -> list[dict[str, Any]]:
        """Return each group's settings as the user gave them."""
        return self._stepper.settings()

    def set_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Change settings; groups name at least those that change."""
        self._stepper.set_settings(groups)

    @torch.no_grad()
    def snapshot(self) -> StoreSnapshot:
        """Copy values and states, without the pending sum, so that training may go on."""
        return StoreSnapshot(self.version, self.values.clone(), self._stepper.states())

    @torch.no_grad()
    def restore_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over copies of the optimizer's state by piece."""
        self._stepper.restore(states)

    @torch.no_grad()
    def restore(
        self,
        values: Tensor | None,
        states: Sequence[Mapping[str, Any]] | None,
        version: int | None = None,
    ) -> None:
        """Take over copies of values, of the optimizer's state by piece, or of both.

        All workers must fetch all values again. `version` continues that of a saved job. The
        pending sum is discarded.
        """
        if states is not None:
            self._stepper.restore(states)
        self.version = self.version if version is None else version
        if values is not None:
            self.values.copy_(values)
            # one more than now: a worker with this version has it from before
            self._changed = [self.version + 1] * len(self.pieces)
        self.sum.clear()
