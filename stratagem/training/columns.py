"""One device of a stack of recurrent layers in columns: chunks of time forward, then backward.

Chunks may be pieces by rows as well, each with the whole sequence: these leave each other no state.

Every chunk has a graph of its own. What comes from another device, and the state that the chunk
before has left, are its leaves; backward takes their gradients from the next device and from the
chunk behind. The result is that of the whole sequence.
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
from stratagem.rules.chunk_choice import ChunkChoice, Chunks
from stratagem.rules.schedules import Op, waves
from stratagem.training.column_plan import ColumnOp, ColumnPlan, fast_recurrence
from stratagem.training.layer_graph import run_node
from stratagem.training.stage import Inputs, Judge, reseed
from stratagem.wire.collective import Collective
from stratagem.wire.tree_channel import open_channels

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
    """What a chunk leaves until its backward."""

    received: list[Tensor]
    #: by layer: the state that it began with, and the one that it left
    began: dict[str, State] = field(default_factory=dict)
    left: dict[str, State] = field(default_factory=dict)
    sent: list[Tensor] = field(default_factory=list)


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
        self._last = device == plan.devices - 1
        self._ops = plan.of(device)
        self._live = plan.live(device)
        self._come = [plan.entry.name] if device == 0 else plan.live(device - 1)
        self._values: dict[fx.Node, Any] = {}

    def run(
        self, ops: Iterable[Op], inputs: Sequence[Inputs], seeds: Sequence[int], judge: Judge
    ) -> None:
        """One batch, in one piece by rows; `ops` are others here: chunks of time."""
        started = time.perf_counter()
        self._seed, self._values = seeds[0], {}
        self._chunks: dict[int, _Chunk] = {}
        self._states: dict[str, State] = {}
        with self._autocast():
            count = self._begin(inputs[0])
        gradients: list[Tensor | None] = []
        for kind, _, k in waves(self._device, self._plan.devices, count):
            if kind == "B":
                self._back(k, gradients)
                continue
            with self._autocast():
                self._chunk(k)
                loss = self._finish(inputs[0], judge) if k == count - 1 else None
            if k == count - 1:
                gradients = self._turn(loss)
        self._end(gradients)
        self._chunks.clear()
        if self._choice.took(time.perf_counter() - started):
            log.warning("columns: %s are the fastest", self._choice.best)

    # --- forward ----------------------------------------------------------------------------

    def _begin(self, inputs: Inputs) -> int:
        """What comes before the columns, once; returns the number of chunks."""
        if self._device:
            self._inbox = self._channels.forward[self._device - 1, "chunks"]
            told = self._inbox.take()
            self._seed = told["seed"]
            self._inbox.release()
            chunks = Chunks(told["number"], told["by_rows"])
            return self._cut(told["length"], chunks)
        self._run_whole(self._plan.before, inputs)
        entry = self._values.get(self._plan.entry)
        if entry is None:
            entry = inputs[self._plan.graph.inputs.index(self._plan.entry)]
        if not isinstance(entry, Tensor) or entry.dim() != 3:
            raise NotDistributable(
                "columns cut a tensor of (rows, time, features), and the recurrent layers are "
                f"given a {type(entry).__name__}; pad the sequences, or use microbatches instead."
            )
        self._entry, axis = entry, self._plan.axis
        chunks = self._choice.begin(entry.shape[axis], entry.shape[1 - axis])
        length = entry.shape[1 - axis if chunks.by_rows else axis]
        return self._cut(length, chunks)

    def _cut(self, length: int, chunks: Chunks) -> int:
        """Cut so many steps, or rows, into chunks, and have the next device do the same."""
        if not self._last:
            told = {"seed": self._seed, "length": length}
            told |= {"number": chunks.number, "by_rows": chunks.by_rows}
            self._channels.forward[self._device, "chunks"].post(told)
        self._by_rows = chunks.by_rows
        self._axis = 1 - self._plan.axis if chunks.by_rows else self._plan.axis
        self._cuts = [share(length, chunks.number, k) for k in range(chunks.number)]
        return chunks.number

    def _chunk(self, k: int) -> None:
        chunk = self._chunks[k] = _Chunk(self._received(k))
        values: dict[str, Tensor] = dict(zip(self._come, chunk.received, strict=True))
        for number, op in enumerate(self._ops, self._plan.firsts[self._device]):
            reseed(self._seed, number * len(self._cuts) + k)
            values[op.name] = self._apply(op, values, chunk)
        chunk.sent = [values[name] for name in self._live]
        if not self._last:
            trained = [tensor.requires_grad for tensor in chunk.sent]
            message = {"values": chunk.sent, "trained": trained}
            self._channels.forward[self._device, "chunks"].post(message)

    def _received(self, k: int) -> list[Tensor]:
        if self._device == 0:
            start, end = self._cuts[k]
            piece = self._entry.detach().narrow(self._axis, start, end - start)
            return [piece.requires_grad_(self._entry.requires_grad)]
        told = self._inbox.take()
        pairs = zip(told["values"], told["trained"], strict=True)
        found = [value.clone().requires_grad_(trained) for value, trained in pairs]
        self._inbox.release()
        return found

    def _apply(self, op: ColumnOp, values: dict[str, Tensor], chunk: _Chunk) -> Tensor:
        if op.layer is None:
            assert op.node is not None
            names = self._plan.names
            found: Tensor = run_node(
                self._plan.graph.module, op.node, lambda node: values[names[node.name]]
            )
            return found
        before = self._states.get(op.name)
        given: Any = None
        if before is not None and not self._by_rows:
            began = tuple(t.detach().requires_grad_(t.requires_grad) for t in before)
            chunk.began[op.name] = began
            given = began if isinstance(op.layer, nn.LSTM) else began[0]
        with fast_recurrence():
            output, state = op.layer(values[op.inputs[0]], given)
        chunk.left[op.name] = state if isinstance(state, tuple) else (state,)
        self._states[op.name] = chunk.left[op.name]
        return F.dropout(output, op.dropout, op.layer.training) if op.dropout else output

    # --- after the columns ------------------------------------------------------------------

    def _rest(self) -> list[Any]:
        """What the last device needs beside chunks: states that were left, earlier values."""
        stacks = self._plan.states
        mine: list[Any] = [self._state(op.name) for op in self._ops if op.stack in stacks]
        self._left = len(list(tensors_in(mine)))
        if self._device == 0:
            mine += [self._values[node] for node in self._plan.carried()]
        return mine

    def _state(self, name: str) -> list[Tensor]:
        """What a layer has left in the end: of all rows."""
        if not self._by_rows:
            return list(self._states[name])
        parts = zip(*(chunk.left[name] for chunk in self._chunks.values()), strict=True)
        return [torch.cat(each, _ROWS_OF_STATE) for each in parts]

    def _finish(self, inputs: Inputs, judge: Judge) -> Tensor | None:
        """On the last device: everything behind the columns, on the whole sequence."""
        mine = self._rest()
        self._told = list(tensors_in(mine))
        if not self._last:
            trained = [tensor.requires_grad for tensor in self._told]
            message = {"values": mine, "trained": trained}
            self._channels.forward[self._device, "rest"].post(message)
            return None
        plan = self._plan
        whole = {
            name: _leaf(torch.cat([c.sent[i].detach() for c in self._chunks.values()], self._axis))
            for i, name in enumerate(self._live)
        }
        self._whole = [whole[name] for name in self._live]
        self._leaves: list[list[Tensor]] = []
        rest = [self._take_rest(d) for d in range(plan.devices - 1)]
        self._own_rest = [_leaf(t.detach()) for t in self._told]
        own = iter(self._own_rest)
        rest.append([[next(own) for _ in state] for state in mine])
        self._place(whole, rest)
        self._run_whole([n for n in plan.after if n is not plan.graph.output], inputs)
        get = self._getter(inputs)
        output = fx.node.map_arg(plan.graph.output.args[0], get)
        return judge(0, output)

    def _take_rest(self, device: int) -> list[Any]:
        channel = self._channels.forward[device, "rest"]
        told = channel.take()
        trained, leaves = iter(told["trained"]), list[Tensor]()

        def enter(tensor: Tensor) -> Tensor:
            leaves.append(tensor.clone().requires_grad_(next(trained)))
            return leaves[-1]

        found: list[Any] = with_tensors(told["values"], enter)
        channel.release()
        self._leaves.append(leaves)
        return found

    def _place(self, whole: dict[str, Tensor], rest: list[list[Any]]) -> None:
        """Give the values of the columns their names in the graph."""
        plan = self._plan
        by_name = {node.name: node for node in plan.graph.graph.nodes}
        for name, value in plan.names.items():
            if value in whole:
                self._values[by_name[name]] = whole[value]
        left: dict[str, list[list[Tensor]]] = {}
        for device, told in enumerate(rest):
            stacked = [op for op in plan.of(device) if op.stack in plan.states]
            for op, state in zip(stacked, told, strict=False):
                left.setdefault(op.stack, []).append(state)
            if device == 0 and plan.devices > 1:
                self._values.update(zip(plan.carried(), told[len(stacked) :], strict=True))
        for stack, layers in left.items():
            state = tuple(torch.cat(parts) for parts in zip(*layers, strict=True))
            read = state if len(state) > 1 else state[0]
            for node in by_name[stack].users:
                if node.args[1] == 1:
                    self._values[node] = read

    def _run_whole(self, nodes: Sequence[fx.Node], inputs: Inputs) -> None:
        get, order = self._getter(inputs), list(self._plan.graph.graph.nodes)
        for node in nodes:
            reseed(self._seed, _WHOLE + order.index(node))
            self._values[node] = run_node(self._plan.graph.module, node, get)

    def _getter(self, inputs: Inputs) -> Callable[[fx.Node], Any]:
        places = {node: i for i, node in enumerate(self._plan.graph.inputs)}

        def get(node: fx.Node) -> Any:
            if node in places:
                return inputs[places[node]]
            return self._plan.graph.value(node, self._values)

        return get

    # --- backward ---------------------------------------------------------------------------

    def _turn(self, loss: Tensor | None) -> list[Tensor | None]:
        """The gradients of what `_rest` told."""
        if self._last:
            assert loss is not None
            if loss.requires_grad:
                torch.autograd.backward([loss])
            for device, leaves in enumerate(self._leaves):
                self._channels.backward[device, "rest"].post([leaf.grad for leaf in leaves])
            return [leaf.grad for leaf in self._own_rest]
        channel = self._channels.backward[self._device, "rest"]
        found = [None if g is None else g.clone() for g in channel.take()]
        channel.release()
        return found

    def _back(self, k: int, rest: list[Tensor | None]) -> None:
        """One chunk backward; the one behind it has been."""
        chunk = self._chunks[k]
        pairs = list(zip(chunk.sent, self._gradients(k), strict=True))
        behind = self._chunks.get(k + 1)
        for name, left in chunk.left.items():
            if behind is not None and name in behind.began:
                pairs += zip(left, (t.grad for t in behind.began[name]), strict=True)
        if self._by_rows:
            pairs += self._left_by(k, rest)
        elif behind is None:
            pairs += zip(self._told[: self._left], rest[: self._left], strict=True)
        pairs = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
        if pairs:
            roots, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(roots, gradients)
        if self._device:
            told = [leaf.grad for leaf in chunk.received]
            self._channels.backward[self._device - 1, "chunks"].post(told)
        if behind is not None:
            del self._chunks[k + 1]
        self._first_gradient(k, chunk)

    def _left_by(self, k: int, rest: list[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
        """The states that a piece of the rows has left, and their gradients."""
        stacks, (start, end) = self._plan.states, self._cuts[k]
        names = [op.name for op in self._ops if op.stack in stacks]
        left = [tensor for name in names for tensor in self._chunks[k].left[name]]
        cut = [
            None if g is None else g.narrow(_ROWS_OF_STATE, start, end - start)
            for g in rest[: self._left]
        ]
        return list(zip(left, cut, strict=True))

    def _gradients(self, k: int) -> list[Tensor | None]:
        if self._last:
            start, end = self._cuts[k]
            return [
                None if w.grad is None else w.grad.narrow(self._axis, start, end - start)
                for w in self._whole
            ]
        channel = self._channels.backward[self._device, "chunks"]
        found = [None if g is None else g.clone() for g in channel.take()]
        channel.release()
        return found

    def _first_gradient(self, k: int, chunk: _Chunk) -> None:
        if self._device == 0:
            if k == len(self._cuts) - 1:
                self._entered: list[Tensor] = []
            if (gradient := chunk.received[0].grad) is not None:
                self._entered.insert(0, gradient)

    def _end(self, rest: list[Tensor | None]) -> None:
        """What comes before the columns, backward."""
        if self._device or not self._plan.before:
            return
        pairs: list[tuple[Tensor, Tensor | None]] = []
        if self._entered:
            pairs.append((self._entry, torch.cat(self._entered, self._axis)))
        pairs += zip(self._told[self._left :], rest[self._left :], strict=True)
        pairs = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
        if pairs:
            roots, gradients = zip(*pairs, strict=True)
            torch.autograd.backward(roots, gradients)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor
