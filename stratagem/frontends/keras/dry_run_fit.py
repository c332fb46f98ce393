"""Hands the first batch of a Keras `fit` to the planner instead of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import keras
import torch
from torch import Tensor

from stratagem.data.shares import count_rows
from stratagem.errors import UsageError
from stratagem.frontends.keras import model_pickle
from stratagem.frontends.keras.model_graph import layer_graph, model_inputs
from stratagem.frontends.keras.refusals import check_shards, check_stages
from stratagem.strategies.strategy import Strategy
from stratagem.training import dry_run
from stratagem.training.devices import place
from stratagem.training.layer_graph import LayerGraph
from stratagem.training.settings import Pipeline

_EPOCHS = 2  # the first of them warms up


def rehearse(model: Any, strategy: Strategy, fit: Callable[[], Any]) -> NoReturn:
    """Run Keras' own `fit` up to the first `train_step`, and hand its batch over."""
    if type(model).train_step is not keras.Model.train_step:
        raise UsageError(
            f"{type(model).__name__} has a train_step of its own, in which forward and backward "
            "cannot be told apart; plan the same layers with Keras' own train_step."
        )
    overlaid = model.__dict__.get("train_step")

    def take(data: Any) -> NoReturn:
        _hand_over(model, strategy, data)

    model.__dict__["train_step"] = take
    try:
        fit()
    finally:
        if overlaid is None:
            del model.__dict__["train_step"]
        else:
            model.__dict__["train_step"] = overlaid
    raise UsageError("the data to fit has no batch: it is empty; there is nothing to plan.")


def _hand_over(model: Any, strategy: Strategy, data: Any) -> NoReturn:
    batch = keras.tree.map_structure(_as_tensor, keras.utils.unpack_x_y_sample_weight(data))
    steps = _Steps(model)
    if not model.built:  # a step would change statistics
        steps.loss(batch)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    device = place(strategy.replica_group.devices[0])
    dry_run.hand_over(
        dry_run.DryRun(
            model,
            batch,
            steps.loss,
            steps.update,
            replicas=strategy.num_replicas_in_sync,
            device=str(device),
            train=steps.train,
            beside=[variable.value for variable in model.optimizer.variables],
            inputs=lambda batch: batch[0],
            arguments=lambda names, x: model_inputs(model, x),
            layers=_layers,
            unpiped=dry_run.refusal(partial(check_stages, model, Pipeline(), 2)),
            unsharded=dry_run.refusal(partial(check_shards, model, shared=device.type == "cpu")),
            sharded_here=True,
        )
    )


def _layers(model: Any, inputs: Any) -> LayerGraph:
    return layer_graph(model)


class _Steps:
    """Keras' train_step in two halves."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def loss(self, batch: Any) -> Tensor:
        x, y, weight = batch
        output = self.model(x, training=True)
        value: Tensor = self.model.compute_loss(
            x=x, y=y, y_pred=output, sample_weight=weight, training=True
        )
        return value

    def update(self) -> None:
        variables = self.model.trainable_weights
        with torch.no_grad():
            self.model.optimizer.apply([v.value.grad for v in variables], variables)

    def train(self, strategy: Strategy, batch: Any, steps: int) -> float:
        """Train a copy on one batch repeatedly; returns examples a second."""
        size = count_rows(batch)
        again = torch.arange(size * steps) % size
        x, y, weight = keras.tree.map_structure(lambda part: _rows(part, again), tuple(batch))
        copy = model_pickle.copied(self.model)
        with strategy.scope():  # without metrics, which cost time
            copy.compile(optimizer=copy.optimizer, loss=copy.loss)
        times: list[float] = []
        clock = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: times.append(-time.perf_counter()),
            on_epoch_end=lambda epoch, logs: times.append(times.pop() + time.perf_counter()),
        )
        told = {"batch_size": size, "epochs": _EPOCHS, "shuffle": False, "verbose": 0}
        copy.fit(x, y, sample_weight=weight, callbacks=[clock], **told)
        return size * steps / times[-1]


def _rows(value: Any, chosen: Tensor) -> Any:
    return value if value is None else value[chosen.to(value.device)]


def _as_tensor(value: Any) -> Any:
    return value if value is None else keras.ops.convert_to_tensor(value)
