"""The verbs of one replica of a Keras model, which the chief broadcasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.frontends.epoch_sums import FirstBroken
from stratagem.frontends.keras.adapter import (
    KerasAdapter,
    kept,
    replica_progress,
    roll_dice,
    take_progress,
    trainable,
)
from stratagem.frontends.keras.denominators import SharedPart, synchronise
from stratagem.frontends.keras.row_means import OwnStates
from stratagem.rules.cadence import LocalSteps
from stratagem.state.change_tracker import TensorTracker
from stratagem.state.keras_stepper import fuse
from stratagem.training.exchange import GradientExchange, open_exchange
from stratagem.training.local_steps import LocalUpdates
from stratagem.training.lossy_wire import break_off, check_optimizer, handed_on, load_kept, rejoin
from stratagem.training.replica import Replica
from stratagem.training.replica_state import own_of
from stratagem.training.settings import Settings
from stratagem.training.step_figures import figures_of
from stratagem.wire.tree import broadcast_tree, gather_tree


class ReplicaSteps:
    """Runs the chief's verbs on one replica; the committer is an all-reduce."""

    def __init__(self, model: Any, replica: Replica, settings: Settings) -> None:
        self.adapter = adapter = KerasAdapter(model, SharedPart(replica), updates=True)
        self.settings = settings
        self._figures = figures_of(replica)
        for optimizer in adapter.optimizers:
            fuse(optimizer)
        self.committer: GradientExchange | None = None
        self._unsync: Callable[[], None] | None = None
        #: whether a training step runs, in which BatchNorm layers synchronise
        self.active = False
        self._trained = False
        #: by replica, from a backup: the state that the next committer loads
        self._kept: list[dict[str, Any]] = []
        self._trainable: list[bool] = []
        #: what the user's step may set to means over its rows
        self._states: OwnStates | None = None
        #: whether the next training step is the first since metrics were reset; the losses since
        self._fresh, self._losses = True, FirstBroken()
        self.verbs: dict[str, Callable[..., Any]] = {
            "become": self.become,
            "follow": self.follow,
            "take": adapter.take,
            "open": self.open,
            "train": self.train,
            "sync": self.sync,
            "test": partial(self.together, adapter.test),
            "predict": partial(self.together, adapter.predict),
            "logs": adapter.logs,
            "reset": self.reset,
            "drain": adapter.drain,
            "average": self.average,
            "progress": self.progress,
            "go_on": self.go_on,
        }

    def become(self, told: dict[str, Any]) -> None:
        """Become like the chief's copy, but for random numbers."""
        self.adapter.become(told)
        replica = self.adapter.replica
        if not replica.is_chief:
            roll_dice(self.adapter.model, told["seed"], replica.index)

    def follow(self, changes: list[Any], trained: list[bool]) -> None:
        """Take over changes of the chief; with other trained weights the committer is closed."""
        self.adapter.follow(changes, trained)
        if trained != self._trainable and self.committer is not None:
            self.committer.meet()
            mine = handed_on(self.committer)  # for the parameters that are still trained
            self._kept = gather_tree(self.adapter.replica.collective, mine)
            self.close()
        self._trainable = trained

    def reset(self) -> None:
        """Reset metrics at the begin of an epoch; callbacks may have changed the model."""
        self.adapter.metrics.begin()
        self.adapter.captured.stale = self._fresh = True

    def train(self, data: Any, total: int) -> Any:
        adapter = self.adapter
        self.open()
        adapter.mode(True)
        adapter.part.begin(total, total)
        self.active = self._trained = True
        apart = self.committer if self.settings.elastic else None
        if isinstance(apart, LocalUpdates):
            if not adapter.replica.is_chief:  # the chief undoes its steps by `StepUndo`
                apart.remember()
            apart.uncounted = True
        reducing = nullcontext() if self.committer is None else self._reducing(self.committer)
        try:
            with reducing, nullcontext() if self._states is None else self._states.watching():
                result = adapter.play("train_step", data)
        finally:
            self.active = False
        self._note_loss(result)
        if self.committer is not None and not isinstance(apart, LocalUpdates):
            self.committer.sync()
        self._figures.step(adapter.replica.share.examples)
        if self._states is not None:
            self._states.weigh(adapter.replica)
            self._states = self._states if self._states.variables else None
        if total < adapter.replica.count:
            self._share_state()
        return result

    def _note_loss(self, logs: Any) -> None:
        """Note the loss in a step's logs: the mean over this replica's rows so far."""
        if self._fresh:  # not in `reset`, which comes before a validation, too
            self._fresh, self._losses = False, FirstBroken()
        loss = logs.get("loss") if isinstance(logs, dict) else None
        rows = self.adapter.replica.share.examples  # or one is borrowed
        self._losses.add(loss.detach() if rows and isinstance(loss, Tensor) else 0.0)

    def sync(self) -> None:
        """Average weights, if it is time; the step is complete on all replicas."""
        if self.committer is not None:
            self.committer.sync()

    def open(self) -> None:
        """Open the committer and, with `sync_batchnorm`, synchronise BatchNorm layers."""
        if self.committer is not None:
            return
        model, replica = self.adapter.model, self.adapter.replica
        # by number: a model that is built again has other paths
        places = {id(v): i for i, v in enumerate(model.variables)}
        trained = model.trainable_variables
        named = [(f"{v.name} (variable {places[id(v)]})", v.value) for v in trained]
        self._trainable = trainable(model)
        sync = self.settings.sync
        # replicas that meet now and then average all state at the end
        always = sync is None or sync == LocalSteps(1)
        self._states = OwnStates(model, self.adapter.optimizers, sync) if always else None
        if not named:
            return  # Keras trains nothing then, and counts
        check_optimizer(self.settings, model.optimizer, replica)
        self.committer = self._exchange(named)
        self.committer.optimizer = model.optimizer
        if self.settings.elastic:
            rejoin(self.committer, replica)
        load_kept(self.committer, self._kept)
        self._kept = []
        self.committer.armed = False
        if self.settings.sync_batchnorm:
            self._unsync = synchronise(model, replica, lambda: self.active)

    def _exchange(self, named: Sequence[tuple[str, Any]]) -> GradientExchange:
        """Open the committer. Collective."""
        replica, settings = self.adapter.replica, self.settings
        if replica.count == 1:  # the only replica of an elastic job
            settings = replace(settings, committer=None, sync=None)
        return open_exchange(named, replica, settings, every_backward=True)

    @contextmanager
    def _reducing(self, exchange: GradientExchange) -> Iterator[None]:
        """All-reduce the gradients of a training step."""
        exchange.armed, reduced = True, exchange.finished
        weights = TensorTracker(exchange.buckets.params)
        try:
            yield
        finally:
            exchange.armed = False
        if exchange.finished == reduced and weights.changes():
            raise NotDistributable(
                "train_step changed the weights without loss.backward(), so the replicas could "
                "not add their gradients up; call loss.backward() and take the gradients from "
                "[v.value.grad for v in self.trainable_weights]."
            )

    @torch.no_grad()
    def _share_state(self) -> None:
        """Copy the chief's moving statistics to replicas that had no example. Collective."""
        state, replica = kept(self.adapter.model), self.adapter.replica
        if self._states is not None:
            state += [v.value for v in self._states.variables if v.trainable]
        if state:
            chiefs = broadcast_tree(replica.collective, [t.detach() for t in state])
            if not replica.share.examples:
                for mine, theirs in zip(state, chiefs, strict=True):
                    mine.copy_(theirs)

    def average(self) -> None:
        if self._trained:
            self.together(self.adapter.average)

    def together(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Average weights (`sync=`), then call a function. Collective."""
        if self.committer is not None:
            self.committer.meet()
        return act(*arguments)

    def progress(self) -> list[Any]:
        """Return the state of every replica for a backup. Collective."""
        adapter = self.adapter
        mine = replica_progress(adapter.model, adapter.replica)
        mine["residuals"] = {} if self.committer is None else self.committer.state()
        mine["broken"] = [self._losses.first(), adapter.replica.name]
        return gather_tree(adapter.replica.collective, mine)

    def go_on(self, saved: list[Any]) -> None:
        """Resume from a backup. The chief has restored all but residuals before it read data."""
        adapter = self.adapter
        self._kept = [each.get("residuals", {}) for each in saved]
        if self.committer is not None:
            load_kept(self.committer, self._kept)
            self._kept = []
        if not adapter.replica.is_chief:
            take_progress(adapter.model, own_of(saved, adapter.replica), adapter.replica)

    def break_off(self) -> None:
        """Break off a failed call, which an elastic job makes again with other replicas."""
        if self.settings.elastic:
            break_off(self.committer)

    def close(self) -> None:
        """Close the committer, and remove the hooks on BatchNorm layers."""
        if self.committer is not None:
            self.committer.close()
            self.committer = None
        if self._unsync is not None:
            self._unsync()
            self._unsync = None
