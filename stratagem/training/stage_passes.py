"""Whole passes through the stages of a pipeline: all microbatches forward, then all backward.

For custom loops, whose loss is computed from the outputs of whole batches: between the two
directions the stages keep the graphs of all microbatches. Parameters, gradients and the optimizer's
state are in shared memory; the first process sends commands to the other processes.

Rows of pipelines (mesh_grid.py) each take some rows of a batch. They all-reduce gradients after a
backward, and the first pipeline updates the one set of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.cluster.failure import refused_by
from stratagem.data.shares import rows, share, tensors_in, with_tensors
from stratagem.errors import NotDistributable, ReplicaFailed
from stratagem.rules.schedules import SCHEDULES
from stratagem.state.shared_model import OwnedState
from stratagem.tracebacks import for_other_tasks
from stratagem.training import setup
from stratagem.training.layer_graph import LayerGraph, trace
from stratagem.training.led_loop import LedLoop
from stratagem.training.loop_process import Mode
from stratagem.training.mesh_grid import MeshGrid, TiedGradients, open_stages, refuse_strays
from stratagem.training.replica import Replica
from stratagem.training.settings import Pipeline
from stratagem.training.stage import Kept, Stage
from stratagem.training.stage_plan import check_layers, make_plan, prove, prove_rows, say_plan
from stratagem.wire.tree import broadcast_tree, gather_tree
from stratagem.wire.tree_channel import TreeChannel, open_channels

#: first and one-past-last row of each microbatch
Pieces = list[tuple[int, int]]


@dataclass
class StageSplit:
    """The model in stages for one mode."""

    mode: Mode
    stage: Stage
    microbatches: int
    #: the inputs that processes other than the first one use
    elsewhere: set[int]
    #: indices of the parameters whose gradients this process computes
    owned: list[int]
    ties: TiedGradients
    #: channels between the first process and the last device of each pipeline
    outputs: Sequence[TreeChannel]
    gradients: Sequence[TreeChannel]
    #: on the first process: whether forward draws random numbers, whether rows are proved to be
    #: independent, and the layers
    draws: bool
    proved: bool
    graph: LayerGraph


@dataclass
class WholePass:
    """One forward that may be followed by a backward."""

    split: StageSplit
    #: the microbatches of this pipeline, and of all pipelines
    pieces: Pieces
    everywhere: list[Pieces]
    kept: dict[tuple[int, int], Kept] = field(default_factory=dict)
    #: on the last device: the outputs of microbatches, and the gradients of their tensors
    found: list[Any] = field(default_factory=list)
    gradients: list[list[Tensor | None]] = field(default_factory=list)
    #: which tensors of an output require a gradient
    trained: list[bool] = field(default_factory=list)

    def judge(self, m: int, output: Any) -> Tensor:
        """A stand-in for the loss, whose backward takes the gradients computed by the loop."""
        self.found.append(with_tensors(output, Tensor.detach))
        tensors = list(tensors_in(output))
        self.trained = [each.requires_grad for each in tensors]
        if not any(self.trained):
            return torch.zeros(())
        tail: Tensor = _Tail.apply(self, m, *tensors)  # type: ignore[no-untyped-call]
        return tail


class _Tail(torch.autograd.Function):
    """The end of the last stage: backward returns the loop's gradients of the outputs."""

    @staticmethod
    def forward(ctx: Any, held: WholePass, m: int, *tensors: Tensor) -> Tensor:
        ctx.held, ctx.m = held, m
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.held.gradients[ctx.m]


class StagePasses(LedLoop):
    """One process of a pipeline, in a custom loop. Made collectively."""

    def __init__(
        self, replica: Replica, pipeline: Pipeline, model: nn.Module, optimizer: Optimizer
    ) -> None:
        self._pipeline, self._grid = pipeline, MeshGrid(replica, pipeline.data)
        #: indices of the parameters that this process steps, once the model is split
        self._stepped: list[int] = []
        self._state: OwnedState | None = None
        self._draws = False
        #: the exception of a layer of this process in this pass
        self._raised: Exception | None = None
        super().__init__(replica, model, optimizer, [*model.parameters(), *model.buffers()])

    def _split(self, told: dict[str, Any], x: dict[str, Any] | None = None) -> None:
        """Trace the model, measure it and cut it; the first process has a batch `x`."""
        mode, place, several = Mode(**told), self._grid.place, self._grid.has_rows
        count = place.count
        self._become(mode)
        graph = trace(self._model, dict.fromkeys(mode.names))
        check_layers(graph, self._pipeline, count)
        if self._pipeline.microbatches != 1 or several:
            setup.refuse_frequencies(self._model)
        agreed = self._agreed(graph, x)
        if agreed is None:
            return  # the first process raises the error
        microbatches, firsts = agreed
        opened = open_stages(graph, firsts, place, self._params, self._cast)
        lasts = self._grid.ranks(opened.last)
        ends = [(last, 0) for last in lasts] + [(0, last) for last in lasts]
        whole = open_channels(self._collective, ends, 1)
        others = (part for part in opened.stage.parts if part.index % count or several)
        split = StageSplit(
            mode,
            opened.stage,
            microbatches,
            {given for part in others for given in part.inputs},
            [i for i, p in enumerate(self._params) if p in opened.owned],
            opened.ties,
            whole[: len(lasts)],
            whole[len(lasts) :],
            self._draws,
            not self._cuts(microbatches) or self._rows > 1,
            graph,
        )
        self._splits.append(split)
        if self._state is None:
            self._stepped = [] if self._grid.row else split.owned
            self._own()
        stages_of = opened.used.items()
        self._shared.own(
            {t: [r for s in used for r in self._grid.ranks(s)] for t, used in stages_of}
        )
        self._shared.leave_home()

    def _agreed(self, graph: LayerGraph, x: dict[str, Any] | None) -> list[Any] | None:
        """The first process' plan; None if planning has failed there. Collective."""
        try:
            mine = None if x is None else self._planned(graph, list(x.values()))
        except Exception:
            broadcast_tree(self._collective, None)
            self._failed = False  # no process waits
            raise
        found: list[Any] | None = broadcast_tree(self._collective, mine)
        return found

    def _planned(self, graph: LayerGraph, given: list[Any]) -> list[Any]:
        total, count = self._rows, self._grid.place.count
        _, mine = self._grid.share(total)
        self._draws, written = prove(graph, total, lambda n: rows(given, 0, n))
        if written and self._grid.count > 1:
            raise NotDistributable(
                f"a forward writes the buffer {written[0]!r}, which pipelines beside each other "
                "would all write; use one of them (a PipelineStrategy), or sg.Model(...).fit."
            )
        with self._cast():
            plan, table = make_plan(graph, self._pipeline, count, mine, lambda n: rows(given, 0, n))
        if self._cuts(plan.microbatches):
            prove_rows(graph, total, lambda start, end: rows(given, start, end))
        say_plan(self._pipeline, plan, table)
        return [plan.microbatches, list(plan.firsts)]

    def _cuts(self, microbatches: int) -> bool:
        """Whether a batch is cut, so that rows must be independent."""
        return microbatches * self._grid.count > 1 and self._pipeline.batch_norm is None

    def _prove_later(self, split: StageSplit, given: list[Any]) -> None:
        """Check that rows are independent if the first batch had only one."""
        if not split.proved and self._rows > 1:
            self._failed = False  # no process waits yet
            prove_rows(split.graph, self._rows, lambda start, end: rows(given, start, end))
            self._failed, split.proved = True, True

    def _own(self) -> None:
        """Give every process the optimizer state of the parameters that it steps."""
        setup.align_state(self._optimizer, self._replica)
        owned: set[Tensor] = {self._params[i] for i in self._stepped}
        self._state = OwnedState(self._optimizer, owned, leads=self._replica.leads)
        self._state.share(self._collective)

    def _lead_pass(self, at: int, cast: list[Any], dropped: list[int], x: Any) -> tuple[Any, Any]:
        split, rng = self._splits[at], torch.get_rng_state()
        pieces = [piece for each in self._cut(split, self._rows) for piece in each]
        seeds = torch.randint(2**62, (len(pieces),)).tolist()
        if split.draws:  # else the loop's rng is as on one device
            rng = torch.get_rng_state()
        given = [x[name] for name in split.mode.names]
        self._prove_later(split, given)
        sent = [value if i in split.elsewhere else None for i, value in enumerate(given)]
        number, total = self._count, self._rows
        self._commands.tell("forward", at, number, total, seeds, cast, dropped, sent)
        self._play_forward(at, number, total, seeds, cast, dropped, given)
        torch.set_rng_state(rng)
        used = self._of_each(split.outputs, self._passes[number])
        told = [channel.take() for channel, _ in used]
        self._failed = False  # no process waits, even if one has failed
        try:
            self._raise([each["failure"] for each in told if each["failure"] is not None])
            return joined([m for each in told for m in each["pieces"]], pieces), told[0]["trained"]
        except Exception:
            self.dropped.append(number)
            raise
        finally:
            for channel, _ in used:
                channel.release()

    def _raise(self, failures: list[Any]) -> None:
        """Raise the exception of a layer in this pass, of this process or another."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised
        for name, text, refusal in failures:
            if refusal:
                raise refused_by(name, refusal, text)
            raise ReplicaFailed(
                f"{name} raised an exception in a forward; this batch has no output, and the loop "
                f"may go on with another. Its traceback:\n\n{text}",
                name,
            )

    def _note(self, error: Exception) -> list[str]:
        """Return a layer's exception as it is sent to the first process."""
        if self._replica.leads:
            self._raised = error
        return [self._replica.name, *for_other_tasks(error)]

    def _cut(self, split: StageSplit, total: int) -> list[Pieces]:
        """Return the microbatches of each pipeline, in rows of the batch."""
        found: list[Pieces] = []
        for row in range(self._grid.count):
            first, end = share(total, self._grid.count, row)
            count = max(min(split.microbatches, end - first), int(row == 0))
            cuts = [share(end - first, count, m) for m in range(count)]
            found.append([(first + start, first + stop) for start, stop in cuts])
        return found

    @staticmethod
    def _of_each(
        channels: Sequence[TreeChannel], held: WholePass
    ) -> list[tuple[TreeChannel, Pieces]]:
        """Return the channels and microbatches of the pipelines that have rows."""
        both = zip(channels, held.everywhere, strict=True)
        return [(channel, pieces) for channel, pieces in both if pieces]

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
        split, self._autocast, row = self._splits[at], cast, self._grid.row
        self._become(split.mode)
        everywhere = self._cut(split, total)
        held = self._passes[number] = WholePass(split, everywhere[row], everywhere)
        inputs = [given]
        if len(seeds) > 1:
            inputs = [[v if v is None else rows(v, *piece) for v in given] for piece in held.pieces]
        first = sum(map(len, everywhere[:row]))
        with torch.enable_grad():
            self._play(held, "F", inputs, seeds[first : first + len(held.pieces)])
        if held.pieces and split.outputs[row].sender == self._collective.rank:
            told = {"pieces": held.found, "trained": held.trained, "failure": split.stage.failure}
            split.outputs[row].post(told)
            held.found = []

    def _tell_backward(
        self, number: int, there: list[bool], grads: Sequence[Tensor | None]
    ) -> None:
        """Send each last stage the gradients of its microbatches.

        All processes hear which parameters require a gradient now.
        """
        self._commands.tell("backward", number, there, [p.requires_grad for p in self._params])
        held = self._passes[number]
        cuts = sum(map(len, held.everywhere)) > 1
        for channel, pieces in self._of_each(held.split.gradients, held):
            channel.post(
                [[g[lo:hi] if cuts and g is not None else g for g in grads] for lo, hi in pieces]
            )

    def _play_backward(self, number: int, there: list[bool], told: Sequence[Any]) -> list[int]:
        held = self._passes.pop(number)
        for param, trained in zip(self._params, () if self._replica.leads else told, strict=False):
            param.requires_grad_(trained)
        split = held.split
        channel = split.gradients[self._grid.row]
        if held.pieces and channel.receiver == self._collective.rank:
            held.gradients = with_tensors(channel.take(), Tensor.clone)
            channel.release()
        self._hold([] if self._grid.row else split.owned, there)
        with torch.no_grad():
            self._play(held, "B", [], [])
        split.ties.send()
        return self._settled(split)

    def _play(
        self, held: WholePass, kind: str, inputs: Sequence[Any], seeds: Sequence[int]
    ) -> None:
        """Run one direction of all microbatches."""
        schedule = SCHEDULES["interleaved" if self._pipeline.parts > 1 else "gpipe"]
        place = self._grid.place
        ops = schedule(place.index, place.count, len(held.pieces), self._pipeline.parts)
        stage = held.split.stage
        stage.kept, stage.notes, stage.failure = held.kept, self._note, None
        stage.play((op for op in ops if op.kind == kind), inputs, seeds, held.judge)

    def _hold(self, owned: Sequence[int], there: Sequence[bool]) -> None:
        """Give the `owned` parameters their existing gradients, and all other parameters none."""
        mine = set(owned)
        for index, param in enumerate(self._params):
            param.grad = self._lent(index) if index in mine and there[index] else None

    def _settled(self, split: StageSplit) -> list[int]:
        """Share the gradients; returns the indices of all parameters that have one."""
        named = dict(self._model.named_parameters())
        owned = [self._params[i] for i in split.owned]
        refuse_strays(named, set(owned), self._replica.name)
        self._grid.add_up(owned)
        if self._grid.row:
            self._hold([], [])
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
    """Concatenate the outputs of all microbatches, in new memory."""
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
