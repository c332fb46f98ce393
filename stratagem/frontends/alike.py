"""How the arguments of `fit`, `evaluate` and `predict` look: every worker has its own."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from stratagem.frontends.evaluation import Evaluation
from stratagem.frontends.feeds import ArrayFeed, Feed, LoaderFeed
from stratagem.frontends.loop import Fit
from stratagem.frontends.losses import CountedLoss
from stratagem.frontends.recipe import Recipe
from stratagem.strategies import likeness
from stratagem.strategies.likeness import Look
from stratagem.strategies.replica import current_replica
from stratagem.strategies.strategy import Strategy
from stratagem.wire.tree import gather_tree


def check(strategy: Strategy, call: str, job: Fit | Evaluation) -> None:
    """Refuse where other workers call something else. Collective, but for a worker on its own."""
    team = strategy.team
    if strategy.served or team.size == len(team.devices):
        return
    told = team.call(_tell, (call, look(call, job)), (call, None))[0]
    likeness.compare(call, [each for each in told if each[2] is not None])


def _tell(call: str, mine: Look | None) -> list[Any]:
    """Everybody's look; followers have none of their own."""
    replica = current_replica()
    return gather_tree(replica.collective, [replica.name, call, mine])


def look(call: str, job: Fit | Evaluation) -> Look:
    """What must be the same on every worker."""
    found = likeness.of_module(job.module)
    if call != "predict":
        found |= _of_recipe(job.recipe)
    if isinstance(job, Evaluation):
        return found | {"number of steps": str(job.steps)} | _of_feed(job.feed, "the data")
    epochs = f"{job.epochs.stop} from {job.epochs.start} on"
    found |= likeness.of_optimizer(job.optimizer, settings=False)
    found |= {"number of epochs": epochs, "steps_per_epoch": str(job.steps_per_epoch)}
    found |= _of_feed(job.feed, "the data") | (_of_often(job) if job.validation else {})
    return found | _of_feed(job.validation, "validation_data")


def _of_often(job: Fit) -> Look:
    when = job.validated if isinstance(job.validated, range) else sorted(job.validated)
    return {"validation_freq": str(when), "validation_steps": str(job.validation_steps)}


def _of_recipe(recipe: Recipe) -> Look:
    plain = {
        "clip_norm": recipe.clip_norm, "clip_value": recipe.clip_value,
        "accumulate": recipe.accumulate, "precision": recipe.autocast,
    }  # fmt: skip
    options = {name: str(value) for name, value in plain.items()}
    names = ", ".join(sorted(recipe.metrics.names))
    return {"loss": _of_loss(recipe.loss), "list of metrics": names or "none", **options}


def _of_loss(loss: Any) -> str:
    kind = f"{type(loss).__name__} {_name(loss.function)}"
    if not isinstance(loss, CountedLoss):
        return kind
    weight = loss.class_weight
    told = None if weight is None else [round(float(w), 4) for w in weight.reshape(-1)[:8]]
    return f"{kind} (ignore_index={loss.ignore_index}, weight={told}, {loss.options})"


def _name(function: Any) -> str:
    """What it is called; of a lambda also what it calls."""
    if isinstance(function, partial):
        return f"partial of {_name(function.func)}"
    if isinstance(function, nn.Module) or not hasattr(function, "__qualname__"):
        reduction = getattr(function, "reduction", None)
        return type(function).__name__ + (f" ({reduction})" if reduction else "")
    name = str(function.__qualname__).rpartition(".")[2]
    code = getattr(function, "__code__", None)
    return f"{name} of {', '.join(code.co_names)}" if name == "<lambda>" and code else name


def _of_feed(feed: Feed | None, label: str) -> Look:
    if feed is None:
        return {f"kind of {label}": "none"}
    if isinstance(feed, LoaderFeed):
        return likeness.of_loader(feed.loader, label)
    if not isinstance(feed, ArrayFeed):
        return likeness.of_stream(label)
    arrays = {"x": feed.x, "y": feed.y, "sample_weight": feed.weight}
    parts = {name: part for name, part in arrays.items() if part is not None}
    found: Look = {
        f"kind of {label}": f"arrays ({', '.join(parts)})",
        f"number of rows in {label}": str(feed.length),
        f"batch_size for {label}": str(feed.batch_size),
        f"shuffle for {label}": str(feed.shuffle),
    }
    for name, part in parts.items():
        found |= likeness.of_arrays(part, f"{name} of {label}")
    return found
