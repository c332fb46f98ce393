"""Trainings by `sg.Model`: each described once, for `compile` and `fit` and for a loop by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stratagem as sg
from tests.conformance.net import Cases, Result, plain

case = Cases()
BATCH = 8


@dataclass
class Training:
    """What is trained, on what, and how."""

    module: nn.Module
    x: Any
    y: Any
    #: as given to `compile`, and what it is on one device, for a batch
    loss: Any = "cross_entropy"
    value: Callable[..., Tensor] = F.cross_entropy
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(
        default=lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, weight_decay=0.01)
    )
    epochs: int = 2
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    precision: str | None = None
    #: a weight of each row; the loss by hand then has a value for each
    weights: Tensor | None = None
    #: of `fit` and not of the loop by hand
    fit: dict[str, Any] = field(default_factory=dict)
    #: for `compile`, and by hand, of all outputs and targets of an epoch
    metrics: dict[str, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = field(default_factory=dict)
    #: what happens before or after each batch: (module, optimizer, number of the batch)
    before_batch: Callable[[nn.Module, Any, int], None] | None = None
    after_batch: Callable[[nn.Module, Any, int], None] | None = None
    after_epoch: Callable[[nn.Module, Any, int], None] | None = None
    #: whether `evaluate` and `predict` are compared, too
    judged: bool = True


def by_hand(job: Training) -> Result:
    """The loop that everybody writes, on one device."""
    module, optimizer = job.module, job.optimizer(job.module.parameters())
    found: Result = {}
    batches = 0
    for epoch in range(job.epochs):
        total, outputs, targets = 0.0, [], []
        module.train()
        for number, (x, y, w) in enumerate(_batches(job)):
            if job.before_batch is not None:
                job.before_batch(module, optimizer, number)
            with torch.autocast("cpu", torch.bfloat16, enabled=job.precision is not None):
                output = module(x)
                loss = _value(job, output, y, w)
            (loss / job.accumulate).backward()
            total += float(loss.detach()) * len(y if isinstance(y, Tensor) else x)
            outputs.append(output.detach())
            targets.append(y)
            batches += 1
            if batches % job.accumulate == 0 or number + 1 == _steps(job):
                batches = 0
                _step(job, module, optimizer)
            if job.after_batch is not None:
                job.after_batch(module, optimizer, number)
        if job.after_epoch is not None:
            job.after_epoch(module, optimizer, epoch)
        found[f"loss {epoch}"] = total / len(job.y)
        for name, (_, of) in job.metrics.items():
            found[f"{name} {epoch}"] = of(torch.cat(outputs), torch.cat(targets))
    if job.judged:
        found |= _judged(job)
    return found | plain(module.state_dict())


def _steps(job: Training) -> int:
    return -(-len(job.y) // BATCH)


def _batches(job: Training) -> Iterator[tuple[Any, Any, Any]]:
    for i in range(0, len(job.y), BATCH):
        rows = slice(i, i + BATCH)
        yield job.x[rows], job.y[rows], None if job.weights is None else job.weights[rows]


def _value(job: Training, output: Any, y: Any, w: Tensor | None) -> Tensor:
    if w is None:
        return job.value(output, y)
    return (job.value(output, y) * w).sum() / len(w)


def _step(job: Training, module: nn.Module, optimizer: Any) -> None:
    if job.clip_norm is not None:
        nn.utils.clip_grad_norm_(module.parameters(), job.clip_norm)
    if job.clip_value is not None:
        nn.utils.clip_grad_value_(module.parameters(), job.clip_value)
    optimizer.step()
    optimizer.zero_grad()


def _judged(job: Training) -> Result:
    """What `evaluate` and `predict` say."""
    job.module.eval()
    total, outputs = 0.0, []
    with torch.no_grad():
        for x, y, w in _batches(job):
            outputs.append(job.module(x))
            total += float(_value(job, outputs[-1], y, w)) * len(y)
    output = torch.cat(outputs)
    found = {"evaluated loss": total / len(job.y), "predicted": output}
    return found | {f"evaluated {name}": of(output, job.y) for name, (_, of) in job.metrics.items()}


class Between(sg.callbacks.Callback):
    """Does in a callback what the loop by hand does between its batches."""

    def __init__(self, job: Training) -> None:
        self.job = job

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.job.before_batch is not None:
            self.job.before_batch(self.model.module, self.model.optimizer, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.job.after_batch is not None:
            self.job.after_batch(self.model.module, self.model.optimizer, batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.job.after_epoch is not None:
            self.job.after_epoch(self.model.module, self.model.optimizer, epoch)


def fitted(job: Training, strategy: sg.Strategy) -> Result:
    """The same by `compile`, `fit`, `evaluate` and `predict`."""
    options = {name: getattr(job, name) for name in ("clip_norm", "clip_value", "precision")}
    with strategy.scope():
        model = sg.Model(job.module)
        model.compile(
            job.optimizer,
            job.loss,
            {name: given for name, (given, _) in job.metrics.items()} or None,
            accumulate=job.accumulate,
            **options,
        )
    between = (job.before_batch, job.after_batch, job.after_epoch)
    fit = {"sample_weight": job.weights, **job.fit}
    if any(between):
        fit["callbacks"] = [Between(job), *fit.get("callbacks", ())]
    data = fit.pop("data", (job.x, job.y))
    if len(data) > 1:
        fit["batch_size"] = BATCH
    history = model.fit(*data, epochs=job.epochs, shuffle=False, verbose=0, **fit).history
    found: Result = {}
    for name in ("loss", *job.metrics):
        found |= {f"{name} {epoch}": value for epoch, value in enumerate(history[name])}
    if job.judged:
        judged = model.evaluate(
            job.x, job.y, sample_weight=job.weights, batch_size=BATCH, verbose=0
        )
        found |= {f"evaluated {name}": judged[name] for name in ("loss", *job.metrics)}
        found["predicted"] = model.predict(job.x, batch_size=BATCH, verbose=0)
    return found | plain(job.module.state_dict())


# --- the cases ------------------------------------------------------------------------------------


def net(dtype: torch.dtype, *layers: nn.Module) -> Any:
    layers = layers or (nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    return nn.Sequential(*layers).to(dtype)


def data(dtype: torch.dtype, rows: int = 19) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(7)
    x = torch.randn(rows, 5, generator=dice, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 4, (rows,), generator=dice)


def make(name: str, dtype: torch.dtype) -> Training:
    torch.manual_seed(3)
    job: Training = case[name].play(dtype)
    return job


def right(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


@case("batches that do not divide")
def _(dtype: torch.dtype) -> Training:
    return Training(net(dtype), *data(dtype), metrics={"accuracy": ("accuracy", right)})
