"""Whole passes through the stages of a pipeline: all microbatches forward, then all backward.

What a custom loop needs, whose loss is computed from the outputs of whole batches: between the two
the stages keep what every microbatch has left. Parameters, gradients and the optimizer's state lie
in memory that all processes share; the first one says what is done, and the others do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.data.shares import rows, share, tensors_in
from stratagem.errors import NotDistributable
from stratagem.rules.schedules import SCHEDULES
from stratagem.state.shared_model import OwnedState
from stratagem.training import setup
from stratagem.training.layer_graph import LayerGraph, trace
from stratagem.training.led_loop import LedLoop
from stratagem.training.loop_process import Mode, with_tensors
from stratagem.training.replica import Replica
from stratagem.training.settings import Pipeline
from stratagem.training.stage import Kept, Stage, StageChannels
from stratagem.training.stage_parts import cut, tensors_of
from stratagem.training.stage_plan import check_layers, make_plan, prove, prove_rows, say_plan
from stratagem.training.tied_gradients import TiedGradients, devices_of, refuse_strays
from stratagem.wire.tree import broadcast_tree, gather_tree
from stratagem.wire.tree_channel import TreeChannel, open_channels


@dataclass
class StageSplit:
    """The model in stages, for one mode."""

    mode: Mode
    stage: Stage
    microbatches: int
    #: the inputs that processes other than the first one use
    elsewhere: set[int]
    #: numbers of the parameters whose gradients come into being here
    owned: list[int]
    ties: TiedGradients
    #: of whole outputs and their gradients, between the first device and the last
    outputs: TreeChannel
    gradients: TreeChannel
    #: whether its forward draws random numbers; known to the first process
    draws: bool


@dataclass
class WholePass:
    """One forward that may be followed by a backward."""

    split: StageSplit
    pieces: list[tuple[int, int]]
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)
    #: on the last device: the outputs of microbatches, and the gradients of their tensors
    found: list[Any] = field(default_factory=list)
    gradients: list[list[Tensor | None]] = field(default_factory=list)
    #: which tensors of an output have a gradient
    trained: list[bool] = field(default_factory=list)

    def judge(self, m: int, output: Any) -> Tensor:
        """Something to begin a backward with, whose gradients will be known then."""
        self.found.append(with_tensors(output, Tensor.detach))
        tensors = list(tensors_in(output))
        self.trained = [each.requires_grad for each in tensors]
        if not any(self.trained):
            return torch.zeros(())
        tail: Tensor = _Tail.apply(self, m, *tensors)  # type: ignore[no-untyped-call]
        return tail


class _Tail(torch.autograd.Function):
    """The end of the last stage: backward gives what the loop has made of the outputs."""

    @staticmethod
    def forward(ctx: Any, held: WholePass, m: int, *tensors: Tensor) -> Tensor:
        ctx.held, ctx.m = held, m
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.held.gradients[ctx.m]


class StagePasses(LedLoop):
    """One process of a pipeline, and what it does when the first one says so. Made collectively."""

    def __init__(
        self, replica: Replica, pipeline: Pipeline, model: nn.Module, optimizer: Optimizer
    ) -> None:
        self._pipeline = pipeline
        #: what this process steps, once the model is split
        self._stepped: list[int] = []
        self._state: OwnedState | None = None
        self._draws = False
        super().__init__(replica, model, optimizer, [*model.parameters(), *model.buffers()])

    def _split(self, told: dict[str, Any], x: dict[str, Any] | None = None) -> None:
        """Trace, measure and cut; the first process has a batch at hand."""
        mode, count = Mode(**told), self._replica.count
        self._become(mode)
        graph = trace(self._model, dict.fromkeys(mode.names))
        check_layers(graph, self._pipeline, count)
        if self._pipeline.microbatches != 1:
            setup.refuse_frequencies(self._model)
        mine = None if x is None else self._planned(graph, list(x.values()))
        microbatches, firsts = broadcast_tree(self._collective, mine)
        parts = cut(graph, firsts)
        users: list[set[Tensor]] = [set() for _ in range(count)]
        for part in parts:
            users[part.index % count] |= tensors_of(graph, part)
        used = devices_of(users)
        rank, last = self._collective.rank, (len(parts) - 1) % count
        channels = StageChannels(parts, count, self._collective)
        outputs, gradients = open_channels(self._collective, [(last, 0), (0, last)], 1)
        split = StageSplit(
            mode,
            Stage(graph, parts, rank, channels, self._cast),
            microbatches,
            {place for part in parts if part.index % count for place in part.inputs},
            [i for i, p in enumerate(self._params) if used.get(p, [0])[0] == rank],
            TiedGradients(self._collective, self._params, used),
            outputs,
            gradients,
            self._draws,
        )
        self._splits.append(split)
        if self._state is None:
            self._stepped = split.owned
            self._own()
        self._shared.own(used)
        self._shared.leave_home()

    def _planned(self, graph: LayerGraph, given: list[Any]) -> list[Any]:
        total = self._rows
        self._draws = prove(graph, total, lambda count: rows(given, 0, count))
        with self._cast():
            plan, table = make_plan(
                graph, self._pipeline, self._replica.count, total, lambda n: rows(given, 0, n)
            )
        if plan.microbatches > 1 and self._pipeline.batch_norm is None:
            prove_rows(graph, total, lambda start, end: rows(given, start, end))
        say_plan(self._pipeline, plan, table)
        return [plan.microbatches, list(plan.firsts)]

    def _own(self) -> None:
        """Have every process the state of what it steps."""
        setup.align_state(self._optimizer, self._replica)
        owned: set[Tensor] = {self._params[i] for i in self._stepped}
        self._state = OwnedState(self._optimizer, owned, leads=self._replica.leads)
        self._state.share(self._collective)

    def _lead_pass(self, at: int, cast: list[Any], dropped: list[int], x: Any) -> tuple[Any, Any]:
        split, dice = self._splits[at], torch.get_rng_state()
        seeds = torch.randint(2**62, (max(min(split.microbatches, self._rows), 1),)).tolist()
        if split.draws:  # else the loop's own draws are those of one device
            dice = torch.get_rng_state()
        given = [x[name] for name in split.mode.names]
        sent = [value if i in split.elsewhere else None for i, value in enumerate(given)]
        number, total = self._count, self._rows
        self._commands.tell("forward", at, number, total, seeds, cast, dropped, sent)
        self._play_forward(at, number, total, seeds, cast, dropped, given)
        torch.set_rng_state(dice)
        told = split.outputs.take()
        try:
            return joined(told["pieces"], self._passes[number].pieces), told["trained"]
        finally:
            split.outputs.release()

    def _play_forward(
        self,
        at: int,
        number: int,
        total: int,
        seeds: list[int],
        cast: list[Any],
        dropped: list[int],
        given: list[Any],
    ) -> None:
        for each in dropped:
            self._passes.pop(each, None)
        split, self._autocast, count = self._splits[at], cast, len(seeds)
        self._become(split.mode)
        pieces = [share(total, count, m) for m in range(count)]
        inputs = [given]
        if count > 1:
            inputs = [[v if v is None else rows(v, *piece) for v in given] for piece in pieces]
        held = self._passes[number] = WholePass(split, pieces)
        with torch.enable_grad():
            self._play(held, "F", inputs, seeds)
        if split.outputs.sender == self._collective.rank:
            split.outputs.post({"pieces": held.found, "trained": held.trained})
            held.found = []

    def _tell_backward(
        self, number: int, there: list[bool], grads: Sequence[Tensor | None]
    ) -> None:
        """Only the last stage is given the gradients."""
        self._commands.tell("backward", number, there, [])
        self._passes[number].split.gradients.post(list(grads))

    def _play_backward(
        self, number: int, there: list[bool], grads: Sequence[Tensor | None]
    ) -> list[int]:
        held = self._passes.pop(number)
        split = held.split
        if split.gradients.receiver == self._collective.rank:
            whole = split.gradients.take()
            held.gradients = [
                [
                    None if g is None else (g[start:end] if len(held.pieces) > 1 else g).clone()
                    for g in whole
                ]
                for start, end in held.pieces
            ]
            split.gradients.release()
        self._hold(split.owned, there)
        with torch.no_grad():
            self._play(held, "B", [], [])
        split.ties.send()
        return self._settled(split)

    def _play(
        self, held: WholePass, kind: str, inputs: Sequence[Any], seeds: Sequence[int]
    ) -> None:
        """One direction of all microbatches."""
        schedule = SCHEDULES["interleaved" if self._pipeline.parts > 1 else "gpipe"]
        rank, count = self._replica.index, self._replica.count
        ops = schedule(rank, count, len(held.pieces), self._pipeline.parts)
        held.split.stage.kept = held.kept
        held.split.stage.play((op for op in ops if op.kind == kind), inputs, seeds, held.judge)

    def _hold(self, owned: Sequence[int], there: Sequence[bool]) -> None:
        """Have these parameters the gradients that are there, and the others none."""
        mine = set(owned)
        for index, param in enumerate(self._params):
            param.grad = self._lent(index) if index in mine and there[index] else None

    def _settled(self, split: StageSplit) -> list[int]:
        """Put gradients where all see them; returns the numbers of all that are there."""
        named = dict(self._model.named_parameters())
        refuse_strays(named, {self._params[i] for i in split.owned}, self._replica.name)
        mine = [i for i in split.owned if self._params[i].grad is not None]
        self._handed_in()
        return [i for each in gather_tree(self._collective, mine) for i in each]

    def _before_update(self, there: list[bool]) -> None:
        self._hold(self._stepped, there)

    def _finish_step(self) -> None:
        self._shared.take_back([self._params[i] for i in self._stepped])
        assert self._state is not None
        self._state.share(self._collective)


def joined(outputs: Sequence[Any], pieces: Sequence[tuple[int, int]]) -> Any:
    """The rows of all microbatches, in memory of their own."""
    if len(outputs) == 1:
        return with_tensors(outputs[0], Tensor.clone)
    found = []
    for each in zip(*map(tensors_in, outputs), strict=True):
        for tensor, (start, end) in zip(each, pieces, strict=True):
            if tensor.dim() == 0 or len(tensor) != end - start:
                raise NotDistributable(
                    f"the model returns a tensor of shape {tuple(tensor.shape)} for {end - start} "
                    "rows, which cannot be put together to that of a batch; return a row for each "
                    "example, or use microbatches=1."
                )
        found.append(torch.cat(each))
    whole = iter(found)
    return with_tensors(outputs[0], lambda _: next(whole))
