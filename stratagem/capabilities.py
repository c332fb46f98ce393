"""What a placement cannot do with an option: one table, which errors, docs and tests read."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: the placements of the table, in users' words
PLACEMENTS = {
    "replicas": "replicas of `MirroredStrategy`, `CentralStorageStrategy`, `ShardedStrategy`",
    "averaged": "`sync=`",
    "compressed": "a compression as `wire=`",
    "elastic": "`elastic=True`",
    "sharded": "`ShardedStrategy`",
    "stages": "`PipelineStrategy`, `Mesh`",
    "mesh": "`Mesh`",
    "divided": "`TensorParallelStrategy`",
    "one copy": "`PipelineStrategy`, `Mesh`, `TensorParallelStrategy`",
    "servers": "parameter servers",
}
#: placement -> option -> the sentence, with its remedy first; {words} are filled in by the error
TABLE: dict[str, dict[str, str]] = {
    "replicas": {
        "sparse gradients": (
            "use sparse=False, or servers, which take sparse gradients from workers of one device "
            "each (ParameterServerStrategy, CentralStorageStrategy(updates=sg.Asynchronous())): a "
            "parameter has sparse gradients (nn.Embedding(sparse=True)?), which this strategy's "
            "replicas cannot add up."
        ),
        "LBFGS": (
            "use another optimizer, or sg.MirroredStrategy of one device: LBFGS evaluates the loss "
            "several times a step, which replicas cannot follow: each would search along a line by "
            "the loss of its own share."
        ),
    },
    "averaged": {
        "a scaler of gradients": (
            "{instead}, or leave sync out: {scaler} scales gradients by a number that changes, and "
            "with sync={sync} each replica would find its own, and skip other steps."
        ),
        "sync_batchnorm": (
            "leave out sync_batchnorm=True, which has replicas meet in every layer of every step, "
            "or sync={sync}, which keeps them apart."
        ),
    },
    "compressed": {
        "a scaler of gradients": (
            "{instead}, or leave wire out: {scaler} scales gradients by a number that changes, and "
            "wire={wire} keeps parts of gradients for later steps."
        ),
    },
    "elastic": {
        "a generator": (
            "give elastic=True arrays, a dataset, a DataLoader or a list of batches: the data is a "
            "generator, which cannot give a batch again when a replica dies."
        ),
        "a model without a loader": (
            "give prepare(..., resume=...), or prepare with elastic=True, the DataLoader that is "
            "trained on: it counts the batches, and goes on with the next one."
        ),
        "a model prepared again": (
            "call prepare once, before the loop, and change learning rates in "
            "optimizer.param_groups: this model is prepared already, with its optimizer."
        ),
        "several models in a loop": (
            "put several models into one nn.ModuleList with one optimizer, or leave elastic out: "
            "with elastic=True a function prepares one model, whose loader counts the batches."
        ),
        "a loader broken off": (
            "read a loader that was prepared with resume=..., or with elastic=True, once in each "
            "epoch of `for epoch in loader.epochs(n):`, so that it is known where to go on. To "
            "look at its data besides, prepare another loader."
        ),
    },
    "sharded": {
        "optimizers of whole parameters": (
            "use SGD, AdamW or another of torch's optimizers that treat each element by itself, or "
            "MirroredStrategy: {optimizer} may look at whole parameters, of which a replica of "
            "ShardedStrategy updates a part."
        ),
        "float16": (
            'use precision="bfloat16", or MirroredStrategy: precision="float16" unscales whole '
            "gradients, of which a replica of ShardedStrategy has a part."
        ),
        "float64": (
            "use module.float(), or MirroredStrategy: parameter {parameter!r} is {dtype}, and CPU "
            "replicas of ShardedStrategy share float32 parameters."
        ),
        "Keras between machines": (
            "use MirroredStrategy, or write the network as an nn.Module for sg.Model: {model!r} is "
            "a Keras model, whose layers and optimizer keep whole variables, and between machines "
            "and on GPUs ShardedStrategy divides them."
        ),
        "a train_step of its own": (
            "use MirroredStrategy: {model} has a train_step of its own, which may look at whole "
            "gradients, and replicas of ShardedStrategy keep none of them."
        ),
        "use_ema": (
            "leave use_ema=True out, or use a MirroredStrategy: it averages all variables at once, "
            "and a replica of ShardedStrategy has its own."
        ),
        "gradient_accumulation_steps": (
            "use a batch_size that many times as large, or a MirroredStrategy: "
            "gradient_accumulation_steps keeps gradients of all variables, and a replica of "
            "ShardedStrategy has its own."
        ),
        "mixed_float16": (
            "use mixed_bfloat16, which needs no scaler of gradients: a replica of ShardedStrategy "
            "has none, so {optimizer} (mixed_float16) cannot be used."
        ),
        "optimizers that are not Keras' own": (
            "use one of keras.optimizers: a replica of ShardedStrategy steps the optimizer on its "
            "own variables, and {optimizer} is not one of Keras' own."
        ),
        "weights written outside of steps": (
            "load weights before prepare, leave changes to the optimizer, or use MirroredStrategy: "
            "weights were written outside of the prepared optimizer's step(), and replicas of "
            "ShardedStrategy share them, so that each would write once more."
        ),
        "optimizer state written in a loop": (
            "use optimizer.load_state_dict with tensors of its own, optimizer.state.clear(), or "
            "MirroredStrategy: the optimizer's state was written in the loop, and replicas of "
            "ShardedStrategy share it, so that some would write once more."
        ),
    },
    "stages": {
        "BatchNormalization": (
            "use GroupNormalization or LayerNormalization, or {remedy}, or say "
            'batch_norm="microbatch" to have it normalise over microbatches, unlike one device: '
            "{layer!r} is a BatchNormalization, which looks at all rows of a batch, and a pipeline "
            "cuts batches into microbatches."
        ),
        "a train_step of its own": (
            "give the loss and the metrics to compile(), or use a MirroredStrategy: {model} has a "
            "train_step, compute_loss or compute_metrics of its own, which sees a batch as a "
            "whole, and a pipeline has it in microbatches."
        ),
        "use_ema": (
            "leave use_ema=True out, or use a MirroredStrategy: it averages all variables at once, "
            "and a stage of a pipeline has its own."
        ),
        "gradient_accumulation_steps": (
            "use a batch_size that many times as large, or a MirroredStrategy: "
            "gradient_accumulation_steps keeps gradients of all variables, and a stage of a "
            "pipeline has its own."
        ),
        "mixed_float16": (
            "use mixed_bfloat16, which needs no scaler of gradients: a stage of a pipeline has "
            "none, so {optimizer} (mixed_float16) cannot be used."
        ),
        "optimizers that are not Keras' own": (
            "use one of keras.optimizers: a stage of a pipeline steps the optimizer on its own "
            "variables, and {optimizer} is not one of Keras' own."
        ),
        "an activity regularizer": (
            "leave the activity_regularizer of layer {layer!r} out, or use a MirroredStrategy: its "
            "loss depends on all rows of a batch."
        ),
        "float16": (
            'use precision="bfloat16", which needs no gradient scaler: a pipeline has none, so '
            'precision="float16" cannot be used.'
        ),
        "jit_compile": (
            "leave jit_compile=True out: a pipeline runs the layers of a model one by one."
        ),
        "divided by a mask": (
            "use {remedy}, or a MirroredStrategy: the loss is divided by a mask or by the sum of "
            "the sample weights, which the last stage knows when all microbatches are there, and "
            "backward has begun before."
        ),
        "optimizers of whole parameters": (
            "use one of torch.optim but LBFGS: each stage of a pipeline steps the optimizer on its "
            "own parameters, and {optimizer} may look at all of them at once."
        ),
        "BatchNorm": (
            'use GroupNorm or LayerNorm, or microbatches=1, or say batch_norm="microbatch" to '
            "have it normalise over microbatches, unlike one device: {layer!r} is a BatchNorm, "
            "which looks at all rows of a batch, and a pipeline cuts batches into microbatches."
        ),
    },
    "mesh": {
        "sparse gradients": (
            "use sparse=False: {layer!r} has sparse gradients, which rows of pipelines cannot add "
            "up."
        ),
        "BatchNorm": (
            "use GroupNorm or LayerNorm, or one pipeline with microbatches=1, or in "
            'sg.Model(...).fit say batch_norm="microbatch" to have it normalise over microbatches, '
            "unlike one device: {layer!r} is a BatchNorm, which looks at all rows of a batch, and "
            "pipelines beside each other share it out."
        ),
    },
    "divided": {
        "optimizers of whole parameters": (
            "use SGD, AdamW or another of torch's optimizers that treat each element by itself, or "
            "a PipelineStrategy: {optimizer} may look at whole parameters, of which a process of "
            "TensorParallelStrategy updates a part."
        ),
        "float16": (
            'use precision="bfloat16", which needs no gradient scaler: processes that divide '
            'layers have none, so precision="float16" cannot be used.'
        ),
        "jit_compile": (
            "leave jit_compile=True out: processes that divide layers run them one by one."
        ),
        "Keras": (
            "give sg.Model a torch module of the same layers, or use a MirroredStrategy: layers of "
            "torch are divided, and this is a Keras model."
        ),
    },
    "one copy": {
        "a model prepared again": (
            "call prepare once, before the loop, and change learning rates in "
            "optimizer.param_groups: this model is prepared already, with its optimizer."
        ),
        "several models in a loop": (
            "call the second model from the first one's forward, or use a MirroredStrategy: "
            "processes that have one model together have one in a loop of your own."
        ),
        "gradients of inputs": (
            "detach the inputs, or use a MirroredStrategy: an input of the model requires a "
            "gradient, which the other processes do not bring back."
        ),
        "a backward for each term": (
            "add up the losses and call backward once, or call the model again: this output of the "
            "model has been through a backward already, and the processes keep nothing behind it."
        ),
        "sparse gradients in a loop": (
            "use sparse=False: a parameter has a sparse gradient, for which processes have no "
            "shared place."
        ),
        "parameters added in a loop": (
            "add the parameters before prepare: until requires_grad_(True) they have no gradient "
            "and stay as they are. The optimizer's groups have got other parameters behind "
            "prepare, which the other processes do not know."
        ),
    },
    "servers": {
        "attributes set by callbacks": (
            "change {what!r} of the model between two fits, or use sg.MirroredStrategy: a callback "
            "changed it, and workers of servers do not follow such changes."
        ),
        "weights written by callbacks": (
            "change weights and the optimizer's state in on_epoch_end, or use sg.MirroredStrategy: "
            "a callback changed them between two batches, and in step with servers the others have "
            "gone on with the old ones by then."
        ),
        "a variable assigned in a step": (
            "use a MirroredStrategy, one worker, or a metric (keras.metrics) for {variable!r}: it "
            "has come out differently on the workers. A step sets it from their rows or gradients, "
            "or counts, and a worker without a row of a batch makes no step."
        ),
        "what is trainable changed": (
            "change what is trainable between two calls of fit: it was changed while the model "
            "trains, which the servers cannot follow."
        ),
        "several optimizers": (
            "use MirroredStrategy where models train in turn (a GAN), and mixed_bfloat16 in place "
            "of mixed_float16: the model steps several optimizers, or one inside of another "
            "(LossScaleOptimizer, made by mixed_float16), and parameter servers run a single one."
        ),
        "mean of a loop": (
            "use sg.Model, whose fit reports the loss of the epoch, and let the chief's settings "
            "(its learning rate) count for all: with parameter servers workers do not meet at each "
            "batch, so there is no mean over all of them."
        ),
        "rows of a loop": (
            "loop over the loader that strategy.prepare returned: with parameter servers it deals "
            "batches out, so there are no rows to take."
        ),
        "a second loader": (
            "give prepare the model, its optimizer and the loader that is trained on: model, "
            "optimizer, loader = strategy.prepare(model, optimizer, loader); for a loop without an "
            "optimizer torch.optim.SGD(model.parameters(), lr=...) serves, whose step() the "
            "servers make."
        ),
        "a model without a loader": (
            "give prepare the DataLoader that is trained on, not {loader}, or use MirroredStrategy "
            "where models train in turn (a GAN): with parameter servers a loader's batches are "
            "dealt out to whoever is free."
        ),
        "resume of a loop": (
            "use sg.Model and fit(..., checkpoint=..., resume=True), or a mirrored strategy: with "
            "parameter servers workers do not meet between two batches, so a custom loop cannot be "
            "saved there."
        ),
        "clip in a loop": (
            "use sg.Model with compile(clip_norm=...) to clip; to mask or scale, multiply the loss "
            "or hook the parameters, param.register_hook(lambda g: g * mask); for all else "
            "MirroredStrategy or updates=sg.Asynchronous(). Gradients were changed between "
            "backward() and optimizer.step(), but in step each of {parts} workers has the gradient "
            "of its part of the batch."
        ),
        "batches fetched ahead": (
            "loop over the prepared loader itself, with one optimizer.step() for each batch: it "
            "was called outside of that loop, or a second time for one batch, and gradients belong "
            "to a batch that was dealt."
        ),
        "optimizer state read in a loop": (
            "call optimizer.state_dict() after optimizer.step() and before optimizer.state is "
            "read: the state is on the servers, which have gone on, and that fetches it."
        ),
        "weights written in a loop": (
            "write weights between two epochs, and step only with the optimizer that "
            "strategy.prepare returned: weights were written in the loop, by it or by an optimizer "
            "that was not prepared, and servers do not see that."
        ),
        "optimizer state written in a loop": (
            "change the optimizer's state between two epochs: it was changed in the loop, and the "
            "servers, which have it, have gone on meanwhile."
        ),
        "parameters added in a loop": (
            "put every parameter into the optimizer, in groups if they differ, or freeze them with "
            "requires_grad_(False): {count} trainable parameters of the model are not in it "
            "({first} is one), and servers run one optimizer for all."
        ),
        "LBFGS": (
            "use another optimizer: LBFGS evaluates the loss several times a step, which a "
            "parameter server cannot."
        ),
        "accumulate": (
            "use Asynchronous(buffer=...) or a larger batch_size: accumulate cannot go with "
            "parameter servers, which decide themselves how many gradients make an update."
        ),
        "float16": (
            'use precision="bfloat16": "float16" scales gradients in a way that servers do not '
            "follow."
        ),
    },
}


def sentence(placement: str, option: str, **words: object) -> str:
    """Return why the placement refuses the option, and what to do instead."""
    return TABLE[placement][option].format(**words)


def refused(placements: Sequence[str], options: Sequence[str]) -> str | None:
    """Return the sentence with which one of the placements refuses an option; None: none does."""
    for option in options:
        for placement in placements:
            if option in TABLE[placement]:
                return TABLE[placement][option]
    return None


def page() -> list[str]:
    """Return the table's rows in Markdown, as docs/strategies.md has them."""
    rows = ["| where | what cannot be | the error |", "| --- | --- | --- |"]
    for placement, name in PLACEMENTS.items():
        for option, said in TABLE[placement].items():
            words = re.sub(r"\{(\w+)(!r)?\}", r"*\1*", said)
            rows.append(f"| {name} | {option} | {words} |")
    return rows
