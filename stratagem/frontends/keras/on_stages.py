"""A Keras model on the stages of a pipeline, or of rows of them, with the result of one device.

Every process has the model, and runs its own layers on one microbatch after another. Weights and
the optimizer's slots lie in shared memory; between machines each has those of its layers. Each
steps the optimizer on its own variables. The last stage has the loss and the metrics. Rows of a
mesh take shares of a batch, and have their gradients added up. Tests and predictions need no
pipeline: each process takes a share of the rows through the whole model, as replicas do.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stratagem.data.streams import mixed
from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.keras.adapter import kept, own_variables, roll_dice, trainable
from stratagem.frontends.keras.driver import Call
from stratagem.frontends.keras.model_graph import StageBatch, layer_graph
from stratagem.frontends.keras.on_replicas import OnReplicas
from stratagem.frontends.keras.refusals import check_stages, whole
from stratagem.frontends.keras.replica_steps import ReplicaSteps
from stratagem.frontends.keras.stage_variables import (
    PartedVariables,
    SharedVariables,
    square,
    update,
)
from stratagem.rules.schedules import SCHEDULES
from stratagem.state.change_tracker import TensorTracker
from stratagem.training.layer_graph import LayerGraph
from stratagem.training.mesh_grid import MeshGrid, open_stages
from stratagem.training.replica import Replica
from stratagem.training.settings import Pipeline, Settings
from stratagem.training.stage import Stage
from stratagem.training.stage_plan import StagePlan, make_plan, say_plan
from stratagem.wire.collective import Collective
from stratagem.wire.tree import broadcast_tree, gather_tree

#: what a plan of stages depends on beside the model
_PlanKey = tuple[Pipeline, int, tuple[bool, ...]]
_plans: weakref.WeakKeyDictionary[Any, tuple[_PlanKey, StagePlan]] = weakref.WeakKeyDictionary()


class OnStages(OnReplicas):
    """The chief's side of a model on stages."""

    def start(self, call: Call) -> Any:
        if call.trains:
            group, settings = self._driver.strategy.replica_group, self._driver.strategy.settings
            assert settings.pipeline is not None
            if any(not name.startswith("cpu") for name in group.devices):
                raise NotDistributable(
                    f"stages of Keras models run on CPUs so far, and the devices here are "
                    f"{', '.join(group.devices)}; name CPUs, or use a MirroredStrategy."
                )
            check_stages(self._driver.model, settings.pipeline, group.size)
        return super().start(call)

    def step(self, name: str, data: Any, total: int) -> Any:
        result = super().step(name, data, total)
        if name == "train_step" and self._driver.needs.steps:
            self._tell("average")  # callbacks read all weights
            self.adapter.mark()
        return result

    def shares(self, step: str) -> tuple[int, bool]:
        """In a whole batch rows may depend on each other; tests and predictions share rows out."""
        whole = step == "train_step" and self._driver.strategy.settings.whole_batches
        return (1 if whole else self.adapter.replica.count), False


class StageSteps(ReplicaSteps):
    """Runs the chief's verbs on one stage."""

    def __init__(self, model: Any, replica: Replica, settings: Settings) -> None:
        super().__init__(model, replica, settings)
        assert settings.pipeline is not None
        self._pipeline: Pipeline = settings.pipeline
        self._stage: Stage | None = None
        self._mesh: MeshGrid | None = None
        self._home: SharedVariables | PartedVariables | None = None
        self._microbatches = 1
        self.verbs["take"] = self.take

    @property
    def _grid(self) -> MeshGrid:
        """The grid of stages and rows, made on first use. Collective then."""
        if self._mesh is None:
            self._mesh = MeshGrid(self.adapter.replica, self._pipeline.data)
        return self._mesh

    @property
    def _collective(self) -> Collective:
        """The collective of the stages of one row."""
        return self._grid.place.collective

    def become(self, told: dict[str, Any]) -> None:
        """Become like the chief's copy; each row of a mesh has other random numbers."""
        self.adapter.become(told)
        replica = self.adapter.replica
        if row := replica.index * self._pipeline.data // replica.count:
            roll_dice(self.adapter.model, told["seed"], row)

    def follow(self, changes: list[Any], trained: list[bool]) -> None:
        self.adapter.follow(changes, trained)
        if trained != self._trainable:
            self._stage = None
        self._trainable = trained

    def take(self, written: list[tuple[int, Tensor]]) -> None:
        """Copy tensors that were written to on the chief."""
        self._bring_home()
        self.adapter.take(written)

    def average(self) -> None:
        """Give all processes the weights and statistics of all stages."""
        self._bring_home()
        if self._pipeline.data > 1 and self._pipeline.batch_norm is not None:
            self.adapter.average()  # statistics of the rows
        self.adapter.replica.collective.barrier()

    def together(self, act: Callable[..., Any], *arguments: Any) -> Any:
        self._bring_home()
        return super().together(act, *arguments)

    def _bring_home(self) -> None:
        if self._home is not None:
            self._home.bring_home()

    def break_off(self) -> None:
        """Keep the stage open, since another process may be about to map its memory."""
        if self._home is not None:
            self._home.break_off()

    def close(self) -> None:
        super().close()
        self._stage = None
        if self._home is not None:
            self._home.close()
            self._home = None

    # --- planning ---------------------------------------------------------------------------

    def _begin(self, data: Any, total: int) -> Stage:
        """Measure the layers with the first batch, and split the model. Collective."""
        model = self.adapter.model
        model._symbolic_build(data_batch=data)  # builds metrics, also on stages without them
        self._trainable = trainable(model)
        self._bring_home()
        if self._home is None:
            form: Any = SharedVariables if self._collective.shares_memory else PartedVariables
            self._home = form(model, self._collective)
        assert self._home is not None
        graph = layer_graph(model)
        check_stages(model, self._pipeline, self.adapter.replica.count, graph)
        mine = None
        if self.adapter.replica.leads:
            plan = self._plan(graph, data, total)
            mine = [plan.microbatches, list(plan.firsts)]
        self._microbatches, firsts = broadcast_tree(self._grid.everybody, mine)
        variables = model.trainable_variables
        opened = open_stages(graph, firsts, self._grid.place, [v.value for v in variables])
        self._has_last, self._ties = opened.is_last, opened.ties
        self._owned = [v for v in variables if v.value in opened.owned]
        self._home.own(opened.used)
        self._state = TensorTracker(kept(model))
        stage: Stage = opened.stage
        return stage

    def _plan(self, graph: LayerGraph, data: Any, total: int) -> StagePlan:
        model = self.adapter.model
        known, key = _plans.get(model), (self._pipeline, total, tuple(trainable(model)))
        if known is not None and known[0] == key:
            return known[1]
        touched = [*own_variables(model), *(v.value for v in model.metrics_variables)]
        own = [(tensor, tensor.detach().clone()) for tensor in touched]

        def inputs(count: int) -> list[Tensor]:
            whole = StageBatch(model, self._grid, data, total).inputs()[0]
            return [each[:count] for each in whole]

        first, last = self._grid.share(total)
        count = self._grid.place.count
        plan, table = make_plan(graph, self._pipeline, count, last - first, inputs)
        with torch.no_grad():
            for tensor, before in own:
                tensor.copy_(before)
        say_plan(self._pipeline, plan, table)
        _plans[model] = (key, plan)
        return plan

    # --- one step ---------------------------------------------------------------------------

    def train(self, data: Any, total: int) -> Any:
        adapter, place = self.adapter, self._grid.place
        adapter.mode(True)
        if self._stage is None:
            self._stage = self._begin(data, total)
        assert self._home is not None
        self._home.leave_home()
        adapter.part.begin(total, total)
        adapter.model.zero_grad()
        batch = StageBatch(adapter.model, self._grid, data, total, self._microbatches)
        dice = torch.get_rng_state()
        seeds = _seeds(dice, int(adapter.model.optimizer.iterations), batch.count)
        schedule = SCHEDULES[self._pipeline.schedule]
        ops = schedule(place.index, place.count, batch.count, self._pipeline.parts)
        self._state.mark()
        adapter.model._clear_losses()
        self._stage.run(ops, batch.inputs(), seeds, batch.judge)
        torch.set_rng_state(dice)
        self._refuse_effects(batch)
        self._ties.send()
        self._check_owned()
        self._grid.add_up(v.value for v in self._owned)
        self._finish(batch, total)
        self._figures.step(adapter.replica.share.examples)
        return adapter.own("get_metrics_result")()

    def _finish(self, batch: StageBatch, total: int) -> None:
        """Gather the loss and the gradient norm, update, and wait for all updates. Collective."""
        model, optimizer = self.adapter.model, self.adapter.model.optimizer
        regular = [v.regularizer(v) for v in self._owned if v.regularizer is not None]
        penalty = float(sum(each.detach() for each in regular))
        for each in regular:
            if each.requires_grad:
                each.backward()
        grads = [v.value.grad for v in self._owned]
        loss = batch.loss() if self._has_last else None
        mine = [loss, penalty, square(grads), _any(grads)]
        everybody = gather_tree(self._grid.everybody, mine)
        row = self._grid.own(everybody)  # gradients are those of all rows
        if not any(some for *_, some in row):
            raise UsageError("no variable of the model has a gradient; is its loss a constant?")
        if self._has_last:
            losses = [loss for loss, *_ in everybody if loss is not None]
            whole = sum(losses) + sum(penalty for _, penalty, _, _ in row)
            if self._grid.row == 0:
                model._loss_tracker.update_state(whole, sample_weight=total)
            batch.count_metrics()
        update(optimizer, grads, self._owned, math.sqrt(sum(each for _, _, each, _ in row)))
        model.zero_grad()
        assert self._home is not None
        self._home.updated()

    def _check_owned(self) -> None:
        """Raise for a gradient that would be lost: no layer of this stage has the variable."""
        own = {id(v) for v in self._owned}
        for variable in self.adapter.model.trainable_variables:
            if variable.value.grad is not None and id(variable) not in own:
                raise NotDistributable(
                    f"variable {variable.path!r} has a gradient on {self.adapter.replica.name}, "
                    "where no layer has it: some layer reaches for another's variables; make it a "
                    "layer of its own that is called twice."
                )

    def _refuse_effects(self, batch: StageBatch) -> None:
        """Raise for layers that write states, once a microbatch, or that add losses."""
        model = self.adapter.model
        written = self._state.changes()
        pieces = batch.count > 1 or self._pipeline.data > 1
        if written and pieces and self._pipeline.batch_norm is None:
            names = [v.path for v in model.non_trainable_weights]
            name = names[written[0]] if written[0] < len(names) else "a buffer"
            raise NotDistributable(
                f"a layer writes to {name!r} when it is called, once a microbatch where one device "
                f"does it once a batch; use {whole(self._pipeline)}, or a MirroredStrategy."
            )
        for layer in model._flatten_layers():
            if layer._losses:
                raise NotDistributable(
                    f"layer {layer.name!r} adds a loss of its own (add_loss), and a stage does not "
                    "know what it is divided by; put it into the loss of compile(), or use a "
                    "MirroredStrategy."
                )


def _seeds(dice: Tensor, step: int, count: int) -> list[int]:
    """Return a seed for each microbatch, without drawing from torch's generator: Keras' layers do
    not draw from it on one device, and it shuffles the data."""
    own = torch.Generator().manual_seed(mixed(zlib.crc32(dice.numpy().tobytes()), step))
    found: list[int] = torch.randint(2**62, (count,), generator=own).tolist()
    return found


def _any(grads: list[Tensor | None]) -> bool:
    return any(grad is not None for grad in grads)


OnStages.form = StageSteps
