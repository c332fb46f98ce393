"""Requests to every server, about its shard of the parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import UsageError
from stratagem.servers.outbox import PackedGradient, check_pieces
from stratagem.servers.requests import CHIEF, WORKER, Peer, request, tree
from stratagem.servers.shard import Shard, WorkerSlot
from stratagem.servers.training_plan import TrainingPlan
from stratagem.wire.tcp import Frame
from stratagem.wire.tree import TREE_LIMIT, decode, encode

_request = partial(request, part="shard")


def opening(shard: Shard, peer: Peer, frame: Frame) -> tuple[TrainingPlan, Tensor, Any]:
    """Read the plan of a fit, this shard's values and the optimizer's state for them."""
    plan = TrainingPlan.from_json(frame.header["plan"])
    load = plan.layout.loads[shard.index]
    if load * plan.dtype.itemsize > frame.size:  # before memory is taken
        raise UsageError(f"{peer.name} announces more values than it sends")
    values, has_states = torch.empty(load, dtype=plan.dtype), "states" in frame.header
    peer.connection.read_into([values], more=has_states)
    states = decode(peer.connection.read(TREE_LIMIT)) if has_states else None
    return plan, values, states


def gradient(shard: Shard, peer: Peer, frame: Frame) -> None:
    """Read a gradient into the worker's slot; rows of sparse ones beside it.

    An empty frame is valid: no row was touched here, or no piece was used.
    """
    if frame.header.get("sent"):
        return  # it came during backward
    if frame.header.get("after"):  # the last gradient may not be read yet
        after = frame.header["after"]
        if type(after) is not int:
            raise UsageError(f"{peer.name} sends a gradient after {after!r}, which is no number")
        shard.wait_until(lambda: shard.done >= after)
    slot = shard.slots.get(peer.token)
    if slot is None:  # of an earlier fit
        peer.connection.skip(TREE_LIMIT)
        return
    packed = None if frame.header.get("dense") else slot.packed
    rows, left = _announced_rows(slot, peer, frame, packed)
    into: list[Tensor] = [tensor for _, numbers, values in rows for tensor in (numbers, values)]
    if slot.targets is None and packed is None:
        slot.filled = left // slot.codec.itemsize
        into.insert(0, slot.gradient[: slot.filled])
    elif slot.targets is None and packed is not None:
        pieces = frame.header.get("pieces")
        into.insert(0, packed.room(pieces, left, peer.name))
        if pieces is not None:  # whole, or by rows
            both = sorted([*pieces, *(piece for piece, _, _ in rows)])
            check_pieces(both, len(slot.views), peer.name)
    peer.connection.read_into(into)
    for piece, numbers, _ in rows:
        length = len(slot.views[piece])
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < length:
            raise UsageError(f"a gradient of rows that piece {piece} does not have")
    if packed is not None:
        rows = [(n, at, packed.rows(values, slot.views[n], len(at))) for n, at, values in rows]
        if slot.targets is None:
            slot.filled = packed.decode(slot.gradient, peer.name)
    slot.rows = rows


def _announced_rows(
    slot: WorkerSlot, peer: Peer, frame: Frame, packed: PackedGradient | None
) -> tuple[list[tuple[int, Tensor, Tensor]], int]:
    """Return memory for the rows of sparse gradients in a frame, and the bytes left."""
    rows: list[tuple[int, Tensor, Tensor]] = []
    left = frame.size
    announced = frame.header.get("rows", [])
    if not isinstance(announced, list) or any(
        not isinstance(each, list) or len(each) != 2 or type(each[1]) is not int
        for each in announced
    ):
        raise UsageError(f"{peer.name} announces rows of a gradient in another form")
    check_pieces([piece for piece, _ in announced], len(slot.views), peer.name)
    for piece, count in announced:
        view = slot.views[piece]
        width = view[:1].numel()
        if not 0 <= count <= left:  # before it is used
            raise UsageError(f"{peer.name} announces more rows than it sends")
        size = None if packed is None else packed.row_bytes(width * count)
        left -= 8 * count + (count * width * slot.codec.itemsize if size is None else size)
        if left < 0:  # before memory is taken
            raise UsageError(f"{peer.name} announces more rows than it sends")
        numbers = torch.empty(count, dtype=torch.int64)
        values = (
            slot.codec.room([count, *view.shape[1:]])
            if size is None
            else torch.empty(size, dtype=torch.uint8)
        )
        rows.append((piece, numbers, values))
    return rows, left


@_request("open", CHIEF, body=opening, fit=int, plan=dict)
def open_shard(
    shard: Shard, peer: Peer, fit: int, plan: Any, body: tuple[TrainingPlan, Tensor, Any]
) -> None:
    """Begin a fit with these values."""
    made, values, states = body
    with shard.changed:  # not while reading: a failing job needs the lock
        shard.open(made, fit)
        shard.store.restore(values, states)


@_request("attach", WORKER, fit=int, memory=str | None)
def attach(shard: Shard, peer: Peer, fit: int, memory: str | None) -> None:
    """Give a worker a slot for its gradients."""
    shard.attach(peer.token, memory, fit)


@_request("stage", WORKER, body=gradient)
def stage(shard: Shard, peer: Peer, body: None) -> None:
    """Keep a gradient, about which the coordinator decides."""


@_request("settled", WORKER, after=int)
def settled(shard: Shard, peer: Peer, after: int) -> None:
    """Wait until a worker may overwrite the gradient in its memory."""
    shard.wait_until(lambda: shard.done >= after)


@_request("fetch", WORKER, have=int, after=int)
def fetch(shard: Shard, peer: Peer, have: int, after: int) -> Any:
    """Send what has changed since version `have`."""
    return shard.fetch(peer.token, have, after)


@_request("snapshot taken", WORKER, number=int, after=int)
def snapshot_taken(shard: Shard, peer: Peer, number: int, after: int) -> Any:
    """Send a snapshot that the coordinator has ordered."""
    taken = shard.snapshot(number, after)
    states = encode(taken.states)
    return {"version": taken.version, "states": states.numel()}, [taken.values.cpu(), states]


@_request("assign", WORKER, pieces=list)
def assign(shard: Shard, peer: Peer, pieces: list[int]) -> None:
    """Replace the values of some pieces from outside of the training."""
    plan = shard.training()
    extents = plan.layout.extents[shard.index]
    count = sum(extents[piece].hi - extents[piece].lo for piece in pieces)
    values = torch.empty(count, dtype=plan.dtype)
    peer.connection.read_into([values])
    shard.assign(values, pieces)


@_request("assign states", WORKER, body=tree)
def assign_states(shard: Shard, peer: Peer, body: Tensor) -> None:
    """Replace the optimizer's state from outside of the training."""
    states = decode(body)
    with shard.changed:
        shard.training()
        shard.store.restore_states(states)


@_request("bye", WORKER)
def bye(shard: Shard, peer: Peer) -> None:
    """Note that a worker leaves the job."""
    peer.said_bye = True
