"""Plays a model's own `train_step` on rows, and stands where it hands over its gradients.

Nothing is updated here: a worker sends the gradients to the servers, another device of that worker
has added its own to them already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from stratagem.errors import NotDistributable, UsageError
from stratagem.frontends.keras import attributes, environment, user_metrics
from stratagem.frontends.keras.denominators import made_exact, whole_activity
from stratagem.frontends.keras.parts import Part
from stratagem.frontends.keras.step_logs import Sources, has_own
from stratagem.strategies.prepare import to_device
from stratagem.strategies.replica import Replica


class Performer:
    """Bound to one model for one training."""

    def __init__(
        self, model: Any, params: Sequence[Tensor], replica: Replica, part: Part
    ) -> None:
        self.model, self.params, self.replica, self.part = model, params, replica, part
        #: whether what a step returns is the user's own, which may be any numbers
        self.custom = has_own(model, "train_step")
        self.sources = Sources(model)
        self._edition = 0
        #: whether a step is under way; whether it has handed its gradients over
        self._open = self._handed = False
        self._loss: float | None = None
        self._tracker = getattr(model, "_loss_tracker", None)
        user_metrics.watch(model)
        model.optimizer.__dict__["apply"] = self._apply
        if self._tracker is not None:
            self._tracker.__dict__["update_state"] = self._listening(self._tracker)

    def close(self) -> None:
        """The optimizer is the user's own again."""
        self.model.optimizer.__dict__.pop("apply", None)
        if self._tracker is not None:
            self._tracker.__dict__.pop("update_state", None)

    # --- one step ---------------------------------------------------------------------------------

    def perform(self, data: Any) -> Any:
        """Play a step on this device's rows; what it returned."""
        self._open, self._handed, self._loss = True, False, None
        try:
            logs = self._play(data)
        finally:
            self._open = False
        if not self._handed:
            raise NotDistributable(
                "train_step did not hand its gradients to self.optimizer.apply, so nothing came "
                "to the servers; call loss.backward(), then self.optimizer.apply(gradients, "
                "self.trainable_variables)."
            )
        return logs

    def _play(self, data: Any) -> Any:
        device = self.replica.device
        mine = self.part.rows(data)
        here = mine if device.type == "cpu" else to_device(mine, device)
        step: Callable[..., Any] = type(self.model).train_step.__get__(self.model)
        written = self._written()
        with ExitStack() as held:
            if self.custom:
                held.enter_context(self.sources.listening())
            if not self.part.plain:
                held.enter_context(made_exact(self.part))
                held.enter_context(whole_activity(self.model, self.part))
            if not self.part.share.examples:
                held.enter_context(environment.unheard(self.model))
            logs = step(here)
        if self._written() != written:
            raise NotDistributable(
                "train_step wrote to weights that are trained, and the servers do not see that; "
                "have the optimizer do it (kernel_constraint=..., weight_decay=...), or a callback."
            )
        return logs

    def _written(self) -> list[int]:
        return [param._version for param in self.params]

    def _apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """In the place of the optimizer's `apply`."""
        if not self._open or self._handed:
            raise UsageError(
                "optimizer.apply was called outside of train_step, or twice in it; with parameter "
                "servers each batch makes one gradient, of a batch that this worker was dealt."
            )
        self._handed = True
        variables = self.model.optimizer._trainable_variables if trainable_variables is None else (
            trainable_variables
        )
        self._hand_over({id(v.value): g for v, g in zip(variables, grads, strict=True)})

    def _hand_over(self, given: dict[int, Any]) -> None:
        """The step's gradients, by what they belong to."""
        raise NotImplementedError

    def _listening(self, tracker: Any) -> Callable[..., Any]:
        def update_state(values: Any, sample_weight: Any = None) -> Any:
            if self._open:
                self._loss = float(torch.as_tensor(values).detach())
                self._heard_loss()
            return type(tracker).update_state(tracker, values, sample_weight=sample_weight)

        return update_state

    def _heard_loss(self) -> None:
        """The step has told the model's own tracker of its loss."""

    # --- what was counted -------------------------------------------------------------------------

    def counted(self) -> list[tuple[Tensor, Tensor]]:
        """What the metrics hold now, for `take_back`."""
        return [(v.value, v.value.detach().clone()) for v in self.model.metrics_variables]

    @torch.no_grad()
    def take_back(self, counted: list[tuple[Tensor, Tensor]]) -> None:
        """A step that does not count has not been counted."""
        before = {id(now): then for now, then in counted}
        for variable in self.model.metrics_variables:
            if id(variable.value) in before:
                variable.value.copy_(before[id(variable.value)])
            else:
                variable.value.zero_()

    def hand_over_counts(self) -> dict[str, list[Tensor]]:
        """What the metrics hold, but for the loss if the lead keeps the books of it; they begin
        anew."""
        metrics = self.metrics()
        before = {name: [v.value.detach().clone() for v in m.variables]
                  for name, m in metrics.items()}  # fmt: skip
        type(self.model).reset_metrics(self.model)
        return {
            name: [then - v.value.detach() for then, v in
                   zip(before[name], metric.variables, strict=True)]
            for name, metric in metrics.items()
        }  # fmt: skip

    @torch.no_grad()
    def add_counts(self, counts: dict[str, list[Tensor]]) -> None:
        """What somebody else has counted."""
        metrics = self.metrics()
        for name, parts in counts.items():
            if parts:  # one that was never given anything may have no variables yet
                for variable, part in zip(metrics[name].variables, parts, strict=True):
                    variable.value.add_(part.to(variable.value.device))

    def metrics(self) -> dict[str, Any]:
        """Those whose counts travel, under a name that is the same on all workers.

        Keras' own step gives its loss to the tracker, by rows, before it hands in, so that the lead
        knows it. Another step may give it later, or weigh it otherwise.
        """
        found: dict[str, Any] = {}
        for metric in self.model.metrics:
            if metric is not self._tracker or self.custom:
                same = sum(name.partition("/")[2] == metric.name for name in found)
                found[f"{same}/{metric.name}"] = metric
        return found

    # --- what the chief has changed ---------------------------------------------------------------

    @torch.no_grad()
    def follow_changes(self, news: Any) -> None:
        if news is None or news["edition"] <= self._edition:
            return
        self._edition = news["edition"]
        attributes.follow(self.model, news["attributes"])
        kept = environment.kept(self.model)
        for index, value in news["weights"]:
            kept[index].copy_(value)
