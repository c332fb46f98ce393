"""`sg.plan(model, batch)`: the planner in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.data.shard import count_rows
from stratagem.errors import UsageError
from stratagem.plan.advice import code, sentence
from stratagem.plan.choose import Plan, choose
from stratagem.plan.cost import Prediction
from stratagem.plan.hardware import Hardware
from stratagem.plan.machine import measure
from stratagem.plan.measure import profile, rehearse
from stratagem.plan.page import fragment, page
from stratagem.plan.plot import png
from stratagem.plan.profile import Profile
from stratagem.plan.report import dumps, text, to_json, write
from stratagem.strategies.rehearsal import Handed, Rehearsal, instead_of_fit


@dataclass(frozen=True, repr=False)
class Answer:
    """A plan that shows itself; `plan` has the figures."""

    plan: Plan

    @property
    def recommendation(self) -> Prediction:
        return self.plan.recommendation

    @property
    def sentence(self) -> str:
        return sentence(self.plan)

    @property
    def code(self) -> str:
        return code(self.plan)

    def to_json(self) -> dict[str, Any]:
        return to_json(self.plan)

    def save(self, path: str) -> None:
        """As plan.json, plan.html or plan.png."""
        make: dict[str, Callable[[Plan], str | bytes]] = {
            ".json": dumps, ".html": page, ".png": png,
        }  # fmt: skip
        kind = Path(path).suffix
        if kind not in make:
            raise UsageError(f"{path!r}: a plan is saved as .json, .html or .png.")
        write(path, make[kind](self.plan))

    def __repr__(self) -> str:
        return text(self.plan)

    def _repr_html_(self) -> str:
        return fragment(self.plan)


def plan(
    model: Any,
    batch: Any,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    link: str | float = "10Gbit",
    latency: str | float = "50us",
    hosts: int = 8,
    gpus_per_host: int | None = None,
    most: int | None = None,
) -> Answer:
    """Measure a model on one batch, and predict every strategy on this hardware.

    Args:
        model: a compiled sg.Model or Keras model; or an nn.Module, with `loss` and `optimizer`.
        batch: (x, y), as many examples as one replica computes at once.
        link, latency: between hosts, as "10Gbit" and "50us".
        hosts: how many there could be, of `gpus_per_host` devices each (as many as are here).
        most: the largest number of replicas to look at.

    >>> sg.plan(model, (x[:64], y[:64]), link="1Gbit", hosts=4)
    """
    # What was asked for is checked before anything is measured.
    asked = Hardware.of(link=link, latency=latency, hosts=hosts, per_host=gpus_per_host or 1)
    if most is not None and most < 1:
        raise UsageError(f"plan for at most {most} replicas? It must be 1 or more.")
    measured = _measured(model, batch, loss, optimizer)
    here = measure(measured.device)
    counts = {"hosts": hosts, "per_host": gpus_per_host or here.per_host}
    hardware = Hardware.of(link=asked.link, latency=asked.latency, base=here, **counts)
    return Answer(choose(measured, hardware, most=most))


def _measured(
    model: Any, batch: Any, loss: Callable[[Any, Any], Tensor] | None, optimizer: Optimizer | None
) -> Profile:
    if hasattr(model, "compile") and hasattr(model, "fit"):
        return _of_fit(model, batch)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"sg.plan takes a compiled sg.Model or Keras model, or an nn.Module, not a "
            f"{type(model).__name__}."
        )
    if loss is None or optimizer is None:
        raise UsageError(
            "to plan for an nn.Module, say how it is trained: sg.plan(module, (x, y), "
            "loss=torch.nn.functional.cross_entropy, optimizer=torch.optim.Adam(...))."
        )
    return profile(model, batch, loss=loss, optimizer=optimizer)


def _of_fit(model: Any, batch: Any) -> Profile:
    """Have the model's own `fit` say what a step is."""
    found: list[Rehearsal] = []
    x, y = _pair(batch)
    size = max(1, count_rows(x) if isinstance(x, Tensor | dict | tuple) else len(x))
    with instead_of_fit(found.append):
        try:
            model.fit(x, y, batch_size=size, verbose=0, shuffle=False)
        except Handed:
            return rehearse(found[0], batch=size)
    raise UsageError(
        f"fit of this {type(model).__name__} cannot be watched; compile it in a strategy's scope: "
        "with sg.MirroredStrategy().scope(): model.compile(...)."
    )


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, torch.Tensor):
        raise UsageError("the batch to plan with is (x, y), not x alone.")
    raise UsageError("the batch to plan with is a pair (x, y) of inputs and targets.")
