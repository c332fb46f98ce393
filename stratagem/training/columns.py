"""One device of a stack of recurrent layers in columns: chunks of time forward, then backward.

    device 0    before   F0 F1 F2 ......... B2 B1 B0   before, backward
    device 1                F0 F1 F2 after B2 B1 B0

A chunk is a piece of the sequence, or a piece of the rows with the whole sequence; chunks by rows
pass no state on. Every chunk has a graph of its own, whose leaves are the values received from the
device before and the state that the previous chunk left. Backward takes the gradients of what a
chunk has sent from the next device, and those of its state from the following chunk. The last
device computes what comes after the columns on all chunks put together; the other devices send it
their "rest": states that were left, and values from before the columns. The result is that of the
whole sequence.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from stratagem.data.shares import share, tensors_in, with_tensors
from stratagem.errors import NotDistributable
from stratagem.rules.chunk_choice import ChunkChoice
from stratagem.rules.schedules import Op, waves
from stratagem.training.column_plan import ColumnOp, ColumnPlan, fast_recurrence
from stratagem.training.layer_graph import run_node
from stratagem.training.stage import Inputs, Judge, reseed
from stratagem.wire.collective import Collective
from stratagem.wire.tree_channel import TreeChannel, open_channels

log = logging.getLogger("stratagem")

_SLOTS = 4
#: the axis of rows in the state of a recurrent layer
_ROWS_OF_STATE = 1
#: random numbers of what runs once are apart from those of chunks
_WHOLE = 1 << 19
#: the state of a layer, (h,) or (h, c)
State = tuple[Tensor, ...]


@dataclass
class _Chunk:
    """What a chunk keeps until its backward."""

    received: list[Tensor]
    #: by layer: the state that it began with, and the one that it left
    began: dict[str, State] = field(default_factory=dict)
    left: dict[str, State] = field(default_factory=dict)
    sent: list[Tensor] = field(default_factory=list)


@dataclass
class _Batch:
    """What one device keeps of a batch between its operations."""

    seed: int
    #: first and last step, or row, of each chunk; the axis that is cut
    cuts: list[tuple[int, int]]
    axis: int
    by_rows: bool
    #: values outside the columns
    values: dict[fx.Node, Any]
    #: on the first device: what the columns begin with, and its gradients by chunk, in order
    entry: Tensor | None = None
    entry_gradients: list[Tensor] = field(default_factory=list)
    chunks: dict[int, _Chunk] = field(default_factory=dict)
    #: by layer, the state that the newest chunk left
    states: dict[str, State] = field(default_factory=dict)
    #: this device's rest, of which the first `state_count` are states; and its gradients
    rest: list[Tensor] = field(default_factory=list)
    state_count: int = 0
    rest_gradients: list[Tensor | None] = field(default_factory=list)
    #: on the last device, as leaves: outputs of the columns, and the rest of every device
    outputs: dict[str, Tensor] = field(default_factory=dict)
    rest_leaves: list[list[Tensor]] = field(default_factory=list)


class ColumnChannels:
    """Channels from each device to the next, and to the last, both ways. Made collectively."""

    def __init__(self, devices: int, collective: Collective) -> None:
        last = devices - 1
        ways = [(d, "chunks") for d in range(last)] + [(d, "rest") for d in range(last)]
        pairs = [(d, d + 1 if kind == "chunks" else last) for d, kind in ways]
        there = open_channels(collective, pairs, _SLOTS)
        back = open_channels(collective, [(to, source) for source, to in pairs], _SLOTS)
        self.forward = dict(zip(ways, there, strict=True))
        self.backward = dict(zip(ways, back, strict=True))


class ColumnStage:
    """The layers of one device."""

    def __init__(
        self,
        plan: ColumnPlan,
        device: int,
        choice: ChunkChoice,
        channels: ColumnChannels,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._plan, self._device, self._choice = plan, device, choice
        self._channels, self._autocast = channels, autocast
        self._is_last = device == plan.devices - 1
        self._ops = plan.of(device)
        #: names of the values that a chunk receives, and of those that it sends
        self._receives = [plan.entry.name] if device == 0 else plan.live(device - 1)
        self._sends = plan.live(device)

    def run(
        self, ops: Iterable[Op], inputs: Sequence[Inputs], seeds: Sequence[int], judge: Judge
    ) -> None:
        """One batch, in one piece; `ops` of microbatches are not used: columns have their own."""
        started = time.perf_counter()
        with self._autocast():
            batch = self._begin(inputs[0], seeds[0])
        last = len(batch.cuts) - 1
        for kind, _, k in waves(self._device, self._plan.devices, len(batch.cuts)):
            if kind == "B":
                self._backward_chunk(batch, k)
                continue
            with self._autocast():
                self._forward_chunk(batch, k)
                loss = self._turn(batch, inputs[0], judge) if k == last else None
            if k == last:
                batch.rest_gradients = self._rest_gradients(batch, loss)
        self._backward_before(batch)
        if self._choice.took(time.perf_counter() - started):
            log.warning("columns: %s are the fastest", self._choice.best)

    # --- forward ----------------------------------------------------------------------------

    def _begin(self, inputs: Inputs, seed: int) -> _Batch:
        """Run what comes before the columns, and cut the sequence; later devices follow."""
        if self._device:
            channel = self._channels.forward[self._device - 1, "chunks"]
            message = channel.take()
            channel.release()
        else:
            values: dict[fx.Node, Any] = {}
            self._run_whole(self._plan.before, inputs, values, seed)
            entry = self._entry(inputs, values)
            time_axis = self._plan.axis
            chunks = self._choice.begin(entry.shape[time_axis], entry.shape[1 - time_axis])
            length = entry.shape[1 - time_axis if chunks.by_rows else time_axis]
            message = {"seed": seed, "length": length}
            message |= {"number": chunks.number, "by_rows": chunks.by_rows}
        if not self._is_last:
            self._channels.forward[self._device, "chunks"].post(message)
        number, by_rows = message["number"], message["by_rows"]
        cuts = [share(message["length"], number, k) for k in range(number)]
        axis = 1 - self._plan.axis if by_rows else self._plan.axis
        if self._device:
            return _Batch(message["seed"], cuts, axis, by_rows, {})
        return _Batch(seed, cuts, axis, by_rows, values, entry)

    def _entry(self, inputs: Inputs, values: dict[fx.Node, Any]) -> Tensor:
        """The value that the columns begin with."""
        entry = values.get(self._plan.entry)
        if entry is None:
            entry = inputs[self._plan.graph.inputs.index(self._plan.entry)]
        if not isinstance(entry, Tensor) or entry.dim() != 3:
            raise NotDistributable(
                "columns cut a tensor of (rows, time, features), and the recurrent layers are "
                f"given a {type(entry).__name__}; pad the sequences, or use microbatches instead."
            )
        return entry

    def _forward_chunk(self, batch: _Batch, k: int) -> None:
        chunk = batch.chunks[k] = _Chunk(self._received(batch, k))
        values: dict[str, Tensor] = dict(zip(self._receives, chunk.received, strict=True))
        for number, op in enumerate(self._ops, self._plan.firsts[self._device]):
            reseed(batch.seed, number * len(batch.cuts) + k)
            values[op.name] = self._apply(op, values, batch, chunk)
        chunk.sent = [values[name] for name in self._sends]
        if not self._is_last:
            trained = [tensor.requires_grad for tensor in chunk.sent]
            message = {"values": chunk.sent, "trained": trained}
            self._channels.forward[self._device, "chunks"].post(message)

    def _received(self, batch: _Batch, k: int) -> list[Tensor]:
        """The inputs of a chunk, as leaves."""
        if batch.entry is not None:
            start, end = batch.cuts[k]
            piece = batch.entry.detach().narrow(batch.axis, start, end - start)
            return [piece.requires_grad_(batch.entry.requires_grad)]
        channel = self._channels.forward[self._device - 1, "chunks"]
        message = channel.take()
        pairs = zip(message["values"], message["trained"], strict=True)
        found = [value.clone().requires_grad_(trained) for value, trained in pairs]
        channel.release()
        return found

    def _apply(
        self, op: ColumnOp, values: dict[str, Tensor], batch: _Batch, chunk: _Chunk
    ) -> Tensor:
        """The output of an operation for one chunk."""
        if op.layer is None:
            assert op.node is not None
            names = self._plan.names
            found: Tensor = run_node(
                self._plan.graph.module, op.node, lambda node: values[names[node.name]]
            )
            return found
        before = batch.states.get(op.name)
        given: Any = None
        if before is not None and not batch.by_rows:
            began = tuple(t.detach().requires_grad_(t.requires_grad) for t in before)
            chunk.began[op.name] = began
            given = began if isinstance(op.layer, nn.LSTM) else began[0]
        with fast_recurrence():
            output, state = op.layer(values[op.inputs[0]], given)
        chunk.left[op.name] = state if isinstance(state, tuple) else (state,)
        batch.states[op.name] = chunk.left[op.name]
        return F.dropout(output, op.dropout, op.layer.training) if op.dropout else output

    # --- after the columns ------------------------------------------------------------------

    def _turn(self, batch: _Batch, inputs: Inputs, judge: Judge) -> Tensor | None:
        """Hand over this device's rest; on the last device, run what comes after the columns and
        return the loss."""
        stacks = self._plan.states
        rest: list[Any] = [self._state(batch, op.name) for op in self._ops if op.stack in stacks]
        batch.state_count = len(list(tensors_in(rest)))
        if self._device == 0:
            rest += [batch.values[node] for node in self._plan.carried()]
        batch.rest = list(tensors_in(rest))
        if self._is_last:
            return self._after(batch, rest, inputs, judge)
        trained = [tensor.requires_grad for tensor in batch.rest]
        message = {"values": rest, "trained": trained}
        self._channels.forward[self._device, "rest"].post(message)
        return None

    def _state(self, batch: _Batch, name: str) -> list[Tensor]:
        """The state that a layer has left at the end, for all rows."""
        if not batch.by_rows:
            return list(batch.states[name])
        parts = zip(*(chunk.left[name] for chunk in batch.chunks.values()), strict=True)
        return [torch.cat(each, _ROWS_OF_STATE) for each in parts]

    def _after(self, batch: _Batch, own: list[Any], inputs: Inputs, judge: Judge) -> Tensor:
        """Everything after the columns, on the whole sequence; returns the loss."""
        plan = self._plan
        for i, name in enumerate(self._sends):
            pieces = [chunk.sent[i].detach() for chunk in batch.chunks.values()]
            batch.outputs[name] = _leaf(torch.cat(pieces, batch.axis))
        rest = [self._received_rest(device) for device in range(plan.devices - 1)]
        rest.append(with_tensors(own, lambda tensor: _leaf(tensor.detach())))
        batch.rest_leaves = [list(tensors_in(each)) for each in rest]
        self._place(batch, rest)
        nodes = [node for node in plan.after if node is not plan.graph.output]
        self._run_whole(nodes, inputs, batch.values, batch.seed)
        get = self._getter(inputs, batch.values)
        return judge(0, fx.node.map_arg(plan.graph.output.args[0], get))

    def _received_rest(self, device: int) -> list[Any]:
        """The rest of another device, as leaves."""
        channel = self._channels.forward[device, "rest"]
        message = channel.take()
        trained = iter(message["trained"])
        found: list[Any] = with_tensors(
            message["values"], lambda tensor: tensor.clone().requires_grad_(next(trained))
        )
        channel.release()
        return found

    def _place(self, batch: _Batch, rest: list[list[Any]]) -> None:
        """Give the outputs of the columns, and the rest of all devices, to their nodes."""
        plan = self._plan
        by_name = {node.name: node for node in plan.graph.graph.nodes}
        for name, value in plan.names.items():
            if value in batch.outputs:
                batch.values[by_name[name]] = batch.outputs[value]
        left: dict[str, list[list[Tensor]]] = {}
        for device, values in enumerate(rest):
            stacked = [op for op in plan.of(device) if op.stack in plan.states]
            for op, state in zip(stacked, values, strict=False):
                left.setdefault(op.stack, []).append(state)
            if device == 0:
                batch.values.update(zip(plan.carried(), values[len(stacked) :], strict=True))
        for stack, layers in left.items():
            state = tuple(torch.cat(parts) for parts in zip(*layers, strict=True))
            read = state if len(state) > 1 else state[0]
            for node in by_name[stack].users:
                if node.args[1] == 1:
                    batch.values[node] = read

    def _run_whole(
        self, nodes: Sequence[fx.Node], inputs: Inputs, values: dict[fx.Node, Any], seed: int
    ) -> None:
        """Run nodes outside the columns, and add what they return to `values`."""
        get, order = self._getter(inputs, values), list(self._plan.graph.graph.nodes)
        for node in nodes:
            reseed(seed, _WHOLE + order.index(node))
            values[node] = run_node(self._plan.graph.module, node, get)

    def _getter(self, inputs: Inputs, values: dict[fx.Node, Any]) -> Callable[[fx.Node], Any]:
        graph = self._plan.graph
        places = {node: i for i, node in enumerate(graph.inputs)}

        def get(node: fx.Node) -> Any:
            return inputs[places[node]] if node in places else graph.value(node, values)

        return get

    # --- backward ---------------------------------------------------------------------------

    def _rest_gradients(self, batch: _Batch, loss: Tensor | None) -> list[Tensor | None]:
        """The gradients of this device's rest; the last device makes them, for all devices."""
        if not self._is_last:
            return _gradients_from(self._channels.backward[self._device, "rest"])
        assert loss is not None
        if loss.requires_grad:
            torch.autograd.backward([loss])
        *others, own = batch.rest_leaves
        for device, leaves in enumerate(others):
            self._channels.backward[device, "rest"].post([leaf.grad for leaf in leaves])
        return [leaf.grad for leaf in own]

    def _backward_chunk(self, batch: _Batch, k: int) -> None:
        """One chunk backward, after the chunk that follows it."""
        chunk, following = batch.chunks[k], batch.chunks.pop(k + 1, None)
        pairs = list(zip(chunk.sent, self._sent_gradients(batch, k), strict=True))
        for name, left in chunk.left.items():
            if following is not None and name in following.began:
                pairs += zip(left, (t.grad for t in following.began[name]), strict=True)
        n = batch.state_count
        if batch.by_rows:
            pairs += self._state_gradients(batch, k)
        elif following is None:
            pairs += zip(batch.rest[:n], batch.rest_gradients[:n], strict=True)
        _backward(pairs)
        if self._device:
            grads = [leaf.grad for leaf in chunk.received]
            self._channels.backward[self._device - 1, "chunks"].post(grads)
        elif (gradient := chunk.received[0].grad) is not None:
            batch.entry_gradients.insert(0, gradient)

    def _sent_gradients(self, batch: _Batch, k: int) -> list[Tensor | None]:
        """The gradients of what a chunk has sent, or given to what comes after the columns."""
        if not self._is_last:
            return _gradients_from(self._channels.backward[self._device, "chunks"])
        start, end = batch.cuts[k]
        grads = [batch.outputs[name].grad for name in self._sends]
        return [None if g is None else g.narrow(batch.axis, start, end - start) for g in grads]

    def _state_gradients(self, batch: _Batch, k: int) -> list[tuple[Tensor, Tensor | None]]:
        """The states that a piece of the rows has left, and their gradients."""
        stacks, (start, end) = self._plan.states, batch.cuts[k]
        names = [op.name for op in self._ops if op.stack in stacks]
        left = [tensor for name in names for tensor in batch.chunks[k].left[name]]
        grads = [
            None if g is None else g.narrow(_ROWS_OF_STATE, start, end - start)
            for g in batch.rest_gradients[: batch.state_count]
        ]
        return list(zip(left, grads, strict=True))

    def _backward_before(self, batch: _Batch) -> None:
        """What comes before the columns, backward; on the first device."""
        if batch.entry is None or not self._plan.before:
            return
        n = batch.state_count
        pairs = list(zip(batch.rest[n:], batch.rest_gradients[n:], strict=True))
        if batch.entry_gradients:
            pairs.append((batch.entry, torch.cat(batch.entry_gradients, batch.axis)))
        _backward(pairs)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


def _backward(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Backward from several tensors that have gradients."""
    found = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
    if found:
        roots, gradients = zip(*found, strict=True)
        torch.autograd.backward(roots, gradients)


def _gradients_from(channel: TreeChannel) -> list[Tensor | None]:
    """The gradients of the next message, in memory of their own."""
    found = [None if g is None else g.clone() for g in channel.take()]
    channel.release()
    return found
