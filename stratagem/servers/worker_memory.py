"""A worker's memory: the values that servers write, the gradients that they read.

    values   every variable in order; the parameters of the module are views of it
    outbox   every gradient, ordered by server, so that each server's part is one block

With servers on the same machine both lie in shared memory, and neither is sent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.codecs.codec import Codec, codec_for
from stratagem.codecs.pushed import PushFeedback
from stratagem.errors import NotDistributable
from stratagem.servers.outbox import CompressedOutbox, Outbox
from stratagem.servers.shard import memory_of, memory_size
from stratagem.servers.training_plan import TrainingPlan
from stratagem.wire.device_kinds import DeviceKind, kind_of
from stratagem.wire.segment import Segment
from stratagem.wire.tcp import WireError

log = logging.getLogger("stratagem")


class WorkerMemory:
    """The values and gradients of one module's parameters."""

    def __init__(
        self,
        plan: TrainingPlan,
        params: Sequence[nn.Parameter],
        *,
        near: bool,
        names: Sequence[str] = (),
    ) -> None:
        self.plan, self.params = plan, list(params)
        _check(plan, params)
        self._segment = Segment(memory_size(plan)) if near else None
        self.handle = self._segment.handle if self._segment is not None else None
        layout = plan.layout
        if self._segment is not None:
            self.values, outbox = memory_of(self._segment, plan)
        else:
            self.values = torch.empty(layout.count, dtype=plan.dtype)
            outbox = plan.codec.room([layout.count])
        self._flat = outbox
        #: gradients, encoded unless they lie in shared memory
        self.outbox = Outbox(plan, codec_for(None, plan.dtype) if near else plan.codec, outbox)
        if plan.compression is not None:
            names = names or [str(i) for i in range(len(params))]
            feedback = PushFeedback(plan.compression, names, params)
            self.outbox = CompressedOutbox(plan, outbox, feedback, near=near)
        self._views = [
            self.values[at : at + size].view(shape)
            for at, size, shape in zip(layout.starts, layout.sizes, plan.shapes, strict=True)
        ]
        #: by variable: the (server, number) of its pieces in the outbox
        self._pieces: list[list[tuple[int, int]]] = [[] for _ in params]
        for server, extents in enumerate(layout.extents):
            for number, e in enumerate(extents):
                self._pieces[e.piece.variable].append((server, number))
        #: by server and piece: the rows of a sparse gradient, and their values
        self._rows: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in layout.loads]
        self._ready = [False] * len(params)
        self._news = threading.Condition()
        #: whether gradients may be sent during backward
        self.streams = False
        self._bind()

    def _bind(self) -> None:
        self._homes = [p.data for p in self.params]
        self._elsewhere = any(p.device.type != "cpu" for p in self.params)
        self._pinned = _pin([self.values, self._flat], kind_of(self.params[0].device))
        with torch.no_grad():
            for param, view in zip(self.params, self._views, strict=True):
                view.copy_(param)
                if not self._elsewhere:
                    param.data = view

    # --- values -----------------------------------------------------------------------------

    def incoming(
        self, server: int, told: Mapping[str, Any]
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Return the memory for a server's answer, and a function to call when it is filled."""
        extents, codec = self.plan.layout.extents[server], self.plan.codec
        if told.get("all"):
            targets = [self.values[e.lo : e.hi] for e in extents]
            if not codec.lossy:
                return targets, lambda: None
            landing = codec.room([sum(t.numel() for t in targets)])
            return [landing], lambda: _spread(codec, landing, targets)
        into: list[Tensor] = []
        moves: list[tuple[Tensor, Tensor | None, Tensor]] = []
        for number, count in told.get("pieces", ()):
            e = extents[number]
            shape = self.plan.shapes[e.piece.variable]
            target = self.values[e.lo : e.hi].view(e.piece.stop - e.piece.start, *shape[1:])
            if count > len(target):  # before memory is taken
                raise WireError(f"{count} rows were announced for a piece of {len(target)}")
            rows = torch.empty(count, dtype=torch.int64) if count >= 0 else None
            length = len(target) if rows is None else count
            new = codec.room([length, *shape[1:]])
            into += [new] if rows is None else [rows, new]
            moves.append((target, rows, new))
        return into, lambda: _move(codec, moves)

    def arrived(self) -> None:
        """Copy values that have arrived to parameters on other devices."""
        if self._elsewhere:
            with torch.no_grad():
                for param, view in zip(self.params, self._views, strict=True):
                    param.copy_(view, non_blocking=True)

    # --- gradients --------------------------------------------------------------------------

    def homes(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield variables that are sent whole and unencoded, and their memory in the outbox."""
        if self.outbox.codec.lossy or self.plan.compression is not None:
            return
        for param, pieces in zip(self.params, self._pieces, strict=True):
            if len(pieces) == 1 and param.dtype is self.plan.dtype:
                server, number = pieces[0]
                yield param, self.outbox.slots[server][number].view(param.shape)

    def take(self, index: int) -> None:
        """Copy one variable's gradient into the outbox."""
        grad = self.params[index].grad
        if grad is None:
            return
        if grad.layout != torch.strided:
            self._take_rows(index, grad)
            return
        self.outbox.take(index, grad.detach().reshape(-1), self._pieces[index])
        if self.streams:
            with self._news:
                self._ready[index] = True
                self._news.notify_all()

    def _take_rows(self, index: int, grad: Tensor) -> None:
        if self.streams:
            raise NotDistributable(
                "a gradient that was dense before has become sparse; a parameter's gradients must "
                "stay of one kind while it is trained."
            )
        grad = grad.coalesce()
        if grad.sparse_dim() != 1:
            raise NotDistributable(
                "a sparse gradient with several sparse dimensions cannot be sent; only rows of "
                "an embedding can."
            )
        rows, values = grad.indices()[0].cpu(), grad.values().cpu()
        for server, number in self._pieces[index]:
            piece = self.plan.layout.extents[server][number].piece
            here = (rows >= piece.start) & (rows < piece.stop)
            chosen = self.outbox.rows(index, piece.start, rows[here], values[here])
            self._rows[server][number] = (rows[here] - piece.start).contiguous(), chosen

    def wait_for_copies(self) -> None:
        """Wait for gradients that are being copied from a GPU."""
        if self._pinned:
            kind_of(self.params[0].device).synchronize(self.params[0].device)

    def take_all(self) -> None:
        for index in range(len(self.params)):
            self.take(index)

    def used(self) -> list[bool] | None:
        """Return for each variable whether it has a gradient; None if all do."""
        used = [p.grad is not None for p in self.params]
        return None if all(used) else used

    @property
    def has_rows(self) -> bool:
        """Whether some of the gradients are sparse."""
        return any(self._rows)

    def begin(self) -> None:
        """Begin a new backward, of which no gradient is ready yet."""
        with self._news:
            self._ready = [False] * len(self.params)

    def complete(self) -> None:
        """End backward: stop waiting for variables without a gradient."""
        with self._news:
            self._ready = [True] * len(self.params)
            self._news.notify_all()

    def parts(self, server: int) -> Iterator[Tensor]:
        """Yield the server's gradients in the order of backward, as soon as they are made."""
        extents, at, sent = self.plan.layout.extents[server], 0, 0
        part, sizes = self.outbox.part(server), self.outbox.sizes(server)
        for number, e in enumerate(extents):
            with self._news:
                self._news.wait_for(lambda: self._ready[e.piece.variable])  # noqa: B023
                coming = (
                    number + 1 < len(extents) and (self._ready[extents[number + 1].piece.variable])
                )
            at += sizes[number]
            if not coming:  # the next one is not ready yet: send all that are
                yield part[sent:at]
                sent = at

    def outgoing(self, server: int) -> tuple[dict[str, Any], list[Tensor]]:
        """Return what to send: a header, with the rows of sparse gradients by piece, and tensors.

        Missing dense gradients are left out, unless the policy compares all values.
        """
        rows, self._rows[server] = dict(sorted(self._rows[server].items())), {}
        header: dict[str, Any] = {}
        body: list[Tensor] = []
        if self._segment is None:
            header, body = self._dense(server, set(rows))
        for numbers, values in rows.values():
            body += [numbers, values]
        if rows:
            told = [[number, len(numbers)] for number, (numbers, _) in rows.items()]
            header |= {"rows": told, **self.outbox.header()}
        return header, body

    def forget(self) -> None:
        """Drop a gradient that is not pushed, so that it does not go with the next one."""
        for rows in self._rows:
            rows.clear()
        self.outbox.settle(counted=False)

    def _dense(self, server: int, sparse: set[int]) -> tuple[dict[str, Any], list[Tensor]]:
        part, at, header = self.outbox.part(server), 0, self.outbox.header()
        if (not sparse and self.used() is None) or self.plan.compares:
            return header, [part]
        body, pieces = [], []
        extents = self.plan.layout.extents[server]
        for number, (e, size) in enumerate(zip(extents, self.outbox.sizes(server), strict=True)):
            if number not in sparse and self.params[e.piece.variable].grad is not None:
                body.append(part[at : at + size])
                pieces.append(number)
            at += size
        return (header | {"pieces": pieces} if self.outbox.numbered else header), body

    @torch.no_grad()
    def take_back(self) -> None:
        """Move parameters that were given other memory (`p.data = ...`) back, with their values."""
        for param, view in zip(self.params, self._views, strict=True):
            if not self._elsewhere and param.data_ptr() != view.data_ptr():
                param.data = view.copy_(param.detach())

    def close(self) -> None:
        """Give the parameters private memory again; may be called repeatedly."""
        homes, self._homes = self._homes, []
        with torch.no_grad():
            for param, home, view in zip(self.params, homes, self._views, strict=False):
                home.copy_(view)
                param.data = home
        kind_of(self.params[0].device).unpin(self._pinned)
        self._pinned = []


def _check(plan: TrainingPlan, params: Sequence[nn.Parameter]) -> None:
    shapes = tuple(tuple(p.shape) for p in params)
    if shapes != plan.shapes:
        raise NotDistributable(
            f"the chief trains {len(plan.shapes)} variables of shapes {_short(plan.shapes)}, this "
            f"worker's model has {len(shapes)} of shapes {_short(shapes)}; build the same model "
            "on every task."
        )


def _short(shapes: Sequence[tuple[int, ...]]) -> str:
    shown = ", ".join(str(list(shape)) for shape in shapes[:4])
    return shown + (", ..." if len(shapes) > 4 else "")


def _pin(tensors: Sequence[Tensor], kind: DeviceKind) -> list[Tensor]:
    """Pin memory, for GPU copies at full speed; return the tensors that could be pinned."""
    pinned = kind.pin(tensors)
    if kind.name == "cuda" and len(pinned) < len(tensors):
        log.info("some memory could not be pinned; copies will be slower")
    return pinned


def _spread(codec: Codec, landing: Tensor, targets: Sequence[Tensor]) -> None:
    parts = torch.split(landing, [target.numel() for target in targets])
    for part, target in zip(parts, targets, strict=True):
        codec.decode(part, target)


def _move(codec: Codec, moves: Sequence[tuple[Tensor, Tensor | None, Tensor]]) -> None:
    for target, rows, new in moves:
        if rows is None:
            codec.decode(new, target)
        else:
            target.index_copy_(0, rows, new.to(target.dtype))
