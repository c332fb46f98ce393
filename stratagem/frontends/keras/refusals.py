"""What a scope, a pipeline, or replicas that share one set of weights refuse of Keras."""

from __future__ import annotations

from typing import Any

import keras
import torch
from torch.distributed.tensor import DTensor

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable
from stratagem.frontends.keras.model_graph import functional, layer_graph
from stratagem.frontends.keras.stage_variables import refuse_optimizer
from stratagem.frontends.keras.step_logs import has_own
from stratagem.training.layer_graph import LayerGraph
from stratagem.training.settings import Pipeline
from stratagem.training.stage_plan import check_layers


def refuse_distribution() -> None:
    """Raise if Keras has a distribution of its own, which would cut batches a second time."""
    theirs = keras.distribution.distribution()
    if theirs is not None:
        raise NotDistributable(
            "leave out keras.distribution.set_distribution, or the strategy's scope: Keras' "
            f"{type(theirs).__name__} is set, and the strategy shares batches itself; both "
            "together would cut each batch twice. keras.distribution.set_distribution(None) takes "
            "it back."
        )


def refuse_model(model: Any) -> None:
    """Raise for a model that no other process can take a share of."""
    refuse_distribution()
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise NotDistributable(
            "the model's parameters were sharded by torch (fully_shard, or a tensor-parallel "
            "plan), which Keras' variables do not follow: it would train wrongly. Leave that "
            "out; the strategy distributes the model."
        )
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise NotDistributable(
                f"layer {layer.name!r} is stateful: it keeps a state for each row of the "
                "batch, and replicas see other rows; use stateful=False, or one replica."
            )


def whole(pipeline: Pipeline) -> str:
    """Name the setting that keeps batches in one piece."""
    return "microbatches=1" if pipeline.data == 1 else "one PipelineStrategy with microbatches=1"


def check_stages(
    model: Any, pipeline: Pipeline, devices: int, graph: LayerGraph | None = None
) -> None:
    """Raise for what a pipeline cannot do exactly; `graph` None: without checks of shapes."""
    if pipeline.columns is not None:
        raise NotDistributable(
            "columns cut torch's recurrent modules, and this is a Keras model; leave columns out."
        )
    _check_own(model)
    refuse_optimizer(model.optimizer, "stages")
    _check_layers(model, pipeline)
    if model.built or not isinstance(model, keras.Sequential):
        functional(model)
        check_layers(graph or layer_graph(model), pipeline, devices // pipeline.data)


def _check_own(model: Any) -> None:
    own = type(model).compute_loss is not keras.Model.compute_loss
    if own or has_own(model, "train_step"):
        raise NotDistributable(
            sentence("stages", "a train_step of its own", model=type(model).__name__)
        )
    if model._compile_loss is None:
        raise NotDistributable(
            "give the loss to compile(), or use a MirroredStrategy: the model was compiled without "
            "one, and a stage does not know what a loss that layers add (add_loss) is divided by."
        )


def _check_layers(model: Any, pipeline: Pipeline) -> None:
    pieces = pipeline.microbatches != 1 or pipeline.data > 1
    many, remedy = pieces and pipeline.batch_norm is None, whole(pipeline)
    for layer in model._flatten_layers():
        if many and isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            raise NotDistributable(
                sentence("stages", "BatchNormalization", layer=layer.name, remedy=remedy)
            )
        counts = not isinstance(layer, keras.Model) and layer.metrics  # as Keras counts
        if pieces and counts:
            raise NotDistributable(
                f"layer {layer.name!r} has a metric of its own, which would count microbatches "
                "where one device counts batches; give metrics to compile(), or use "
                f"{remedy}, or a MirroredStrategy."
            )
        if layer.activity_regularizer is not None:
            raise NotDistributable(sentence("stages", "an activity regularizer", layer=layer.name))


def check_shards(model: Any, *, shared: bool) -> None:
    """Raise for models and optimizers whose result would not be exact."""
    if not shared:
        raise NotDistributable(sentence("sharded", "Keras between machines", model=model.name))
    if has_own(model, "train_step"):
        raise NotDistributable(
            sentence("sharded", "a train_step of its own", model=type(model).__name__)
        )
    refuse_optimizer(model.optimizer, "sharded")
    for variable in model.trainable_variables:
        if variable.value.dtype is not torch.float32:
            raise NotDistributable(
                f"variable {variable.path!r} is {variable.dtype}, and CPU replicas of "
                "ShardedStrategy share float32 variables; use MirroredStrategy."
            )
