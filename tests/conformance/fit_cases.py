"""Trainings by `sg.Model`: each described once, for `compile` and `fit` and for a loop by hand."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.conformance.loop_cases import Stream
from tests.conformance.net import ADAPTIVE, UNSYNCED, Cases, Result, plain

case = Cases()
BATCH = 8
#: not told: `on_train_batch_end` may come before the update, so that it sees older weights
STALE = {"servers 2": "the chief's callback does not wait for the parts of other workers"}
#: what the check of rows says before the first step
MIXED = dict.fromkeys(("replicas", "servers", "stages"), "it depends for a row on the other rows")


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
    batch: int = BATCH
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
    validation: tuple[Tensor, Tensor] | None = None
    #: whether the training is saved after its first epoch, and goes on in another model
    saved: bool = False
    #: further results, afterwards
    besides: Callable[[], Result] | None = None


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
                output = _forward(module, x)
                loss = _value(job, output, y, w)
            (loss / job.accumulate).backward()
            total += float(loss.detach()) * len(y)
            outputs.append(output.detach() if isinstance(output, Tensor) else output[0])
            targets.append(y)
            batches += 1
            if batches % job.accumulate == 0 or number + 1 == _steps(job):
                batches = 0
                _step(job, module, optimizer, x, y)
            if job.after_batch is not None:
                job.after_batch(module, optimizer, number)
        if job.after_epoch is not None:
            job.after_epoch(module, optimizer, epoch)
        found[f"loss {epoch}"] = total / len(job.y)
        for name, (_, of) in job.metrics.items():
            with torch.no_grad():
                found[f"{name} {epoch}"] = of(torch.cat(outputs), torch.cat(targets))
        if job.validation is not None:
            found[f"val_loss {epoch}"] = _validated(job)
    if job.judged:
        found |= _judged(job)
    found |= job.besides() if job.besides is not None else {}
    return found | plain(module.state_dict())


def _forward(module: nn.Module, x: Any) -> Any:
    return module(**x) if isinstance(x, dict) else module(x)


def _validated(job: Training) -> float:
    assert job.validation is not None
    job.module.eval()
    with torch.no_grad():
        return float(job.value(job.module(job.validation[0]), job.validation[1]))


def _steps(job: Training) -> int:
    return -(-len(job.y) // job.batch)


def _batches(job: Training) -> Iterator[tuple[Any, Any, Any]]:
    for i in range(0, len(job.y), job.batch):
        rows = slice(i, i + job.batch)
        x = {k: v[rows] for k, v in job.x.items()} if isinstance(job.x, dict) else job.x[rows]
        yield x, job.y[rows], None if job.weights is None else job.weights[rows]


def _value(job: Training, output: Any, y: Any, w: Tensor | None) -> Tensor:
    if w is None:
        return job.value(output, y)
    return (job.value(output, y) * w).sum() / len(w)


def _step(job: Training, module: nn.Module, optimizer: Any, x: Any, y: Any) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = job.value(module(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        return
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
            outputs.append(_forward(job.module, x))
            total += float(_value(job, outputs[-1], y, w)) * len(y)
        output = torch.cat(outputs)
        found = {"evaluated loss": total / len(job.y), "predicted": output}
        for name, (_, of) in job.metrics.items():
            found[f"evaluated {name}"] = of(output, job.y)
    return found


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
    fit = {"sample_weight": job.weights, "validation_data": job.validation, **job.fit}
    if any((job.before_batch, job.after_batch, job.after_epoch)):
        fit["callbacks"] = [Between(job)]
    data = fit.pop("data", (job.x, job.y))
    if len(data) > 1:
        fit["batch_size"] = job.batch
    model = _compiled(job, strategy)
    history: dict[str, list[float]] = {}
    for epochs in [(0, 1), (1, 2)] if job.saved else [(0, job.epochs)]:
        if epochs[0]:
            model = _another(model, job, strategy)
        begin = {"initial_epoch": epochs[0], "epochs": epochs[1]}
        seen = model.fit(*data, shuffle=False, verbose=0, **begin, **fit).history
        for name, values in seen.items():
            history.setdefault(name, []).extend(values)
    found: Result = {}
    validated = ["val_loss"] if job.validation is not None else []
    for name in ("loss", *job.metrics, *validated):
        found |= {f"{name} {epoch}": value for epoch, value in enumerate(history[name])}
    if job.judged:
        rows = {"sample_weight": job.weights, "batch_size": job.batch}
        judged = model.evaluate(job.x, job.y, verbose=0, **rows)
        found |= {f"evaluated {name}": judged[name] for name in ("loss", *job.metrics)}
        found["predicted"] = model.predict(job.x, batch_size=job.batch, verbose=0)
    found |= job.besides() if job.besides is not None else {}
    return found | plain(model.module.state_dict())


def _compiled(job: Training, strategy: sg.Strategy) -> sg.Model:
    with strategy.scope():
        model = sg.Model(job.module)
        model.compile(
            job.optimizer,
            job.loss,
            {name: given for name, (given, _) in job.metrics.items()} or None,
            clip_norm=job.clip_norm,
            clip_value=job.clip_value,
            accumulate=job.accumulate,
            precision=job.precision,
        )
    return model


def _another(model: sg.Model, job: Training, strategy: sg.Strategy) -> sg.Model:
    """A model of other weights, which loads what the first has saved."""
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model")
        job.module = copy.deepcopy(model.module)
        with torch.no_grad():
            for p in job.module.parameters():
                p.zero_()
        again = _compiled(job, strategy)
        again.load(f"{folder}/model")
    return again


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


@case("fewer rows than replicas", borrows=True)
def _(dtype: torch.dtype) -> Training:
    return Training(net(dtype), *data(dtype, 11), batch=3)


@case("batches from a generator", needs=["a generator"])
def _(dtype: torch.dtype) -> Training:
    return fed(dtype, lambda x, y: ((cut(x, y),), 1), epochs=1)


@case("batches from a loader")
def _(dtype: torch.dtype) -> Training:
    return fed(dtype, lambda x, y: ((DataLoader(TensorDataset(x, y), batch_size=BATCH),), 2))


@case("batches from a stream")
def _(dtype: torch.dtype) -> Training:
    return fed(dtype, lambda x, y: ((DataLoader(Stream(x, y), batch_size=BATCH),), 2))


@case("a list of batches")
def _(dtype: torch.dtype) -> Training:
    return fed(dtype, lambda x, y: (([*cut(x, y)],), 2))


def fed(dtype: torch.dtype, feed: Callable[..., Any], epochs: int = 2) -> Training:
    x, y = data(dtype)
    given, _ = feed(x, y)
    return Training(net(dtype), x, y, epochs=epochs, fit={"data": given})


def cut(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return ((x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(y), BATCH))


@case("inputs as a dict")
def _(dtype: torch.dtype) -> Training:
    x, y = data(dtype)
    return Training(ByName().to(dtype), {"a": x[:, :2], "b": x[:, 2:]}, y)


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(torch.cat([a, b], 1))))  # type: ignore[no-any-return]


# --- losses and metrics ---------------------------------------------------------------------------


def holes(y: Tensor) -> Tensor:
    """Targets of which a whole share is ignored."""
    y = y.clone()
    y[:4] = y[10] = y[17] = -100
    return y


@case("ignored targets", linear=False)
def _(dtype: torch.dtype) -> Training:
    x, y = data(dtype)
    return Training(net(dtype), x, holes(y), metrics={"accuracy": ("accuracy", counted)})


def counted(output: Tensor, target: Tensor) -> Tensor:
    return right(output[target != -100], target[target != -100])


@case("class weights and ignored targets", linear=False)
def _(dtype: torch.dtype) -> Training:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=dtype))
    x, y = data(dtype)
    return Training(net(dtype), x, holes(y), loss, loss)


@case("label smoothing")
def _(dtype: torch.dtype) -> Training:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    return Training(net(dtype), *data(dtype), loss, loss)


@case("a summed loss")
def _(dtype: torch.dtype) -> Training:
    loss = nn.CrossEntropyLoss(reduction="sum")
    slow = lambda p: torch.optim.SGD(p, 0.02)  # noqa: E731
    return Training(net(dtype), *data(dtype), loss, loss, slow)


def by_row(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


@case("a loss with a value a row")
def _(dtype: torch.dtype) -> Training:
    return Training(net(dtype), *data(dtype), by_row, lambda o, y: by_row(o, y).mean())


@case("sample weights")
def _(dtype: torch.dtype) -> Training:
    weights = torch.linspace(0, 2, 19, dtype=dtype)
    return Training(net(dtype), *data(dtype), value=by_row, weights=weights)


@case("a weight of each class")
def _(dtype: torch.dtype) -> Training:
    x, y = data(dtype)
    job = Training(net(dtype), x, y, value=by_row, judged=False, fit={"class_weight": {1: 4.0}})
    job.weights = torch.where(y == 1, 4.0, 1.0).to(dtype)
    job.fit["sample_weight"] = None
    return job


@case("several outputs and losses")
def _(dtype: torch.dtype) -> Training:
    return Training(TwoHeads().to(dtype), *data(dtype), two_losses, two_losses, judged=False)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.classes, self.number = nn.Linear(6, 4), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.classes(h), self.number(h)


def two_losses(outputs: Any, y: Tensor) -> Tensor:
    classes, number = outputs
    return F.cross_entropy(classes, y) + 0.3 * F.mse_loss(number.squeeze(1), y.to(number.dtype))


@case("metrics of all kinds", tolerance=(1e-9, 1e-5))
def _(dtype: torch.dtype) -> Training:
    area = torchmetrics.AUROC(task="multiclass", num_classes=4)
    score = torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro")
    metrics: dict[str, Any] = {
        "accuracy": ("accuracy", right),
        "area": (area, lambda o, y: area.clone()(o.softmax(1), y)),
        "score": (score, lambda o, y: score.clone()(o, y)),
        "hits": (hits, lambda o, y: hits(o, y).mean()),
    }
    return Training(net(dtype), *data(dtype), metrics=metrics)


def hits(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float()


@case("validation")
def _(dtype: torch.dtype) -> Training:
    return Training(net(dtype), *data(dtype), validation=data(dtype, 11))


# --- optimizers -----------------------------------------------------------------------------------


@case("Adam", tolerance=ADAPTIVE, linear=False)
def _(dtype: torch.dtype) -> Training:
    adam = lambda p: torch.optim.Adam(p, 0.05)  # noqa: E731
    return Training(net(dtype), *data(dtype), optimizer=adam)


@case("AdamW", tolerance=ADAPTIVE, linear=False)
def _(dtype: torch.dtype) -> Training:
    adam = lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1)  # noqa: E731
    return Training(net(dtype), *data(dtype), optimizer=adam)


@case("Adagrad, sparse rows", tolerance=ADAPTIVE, needs=["sparse gradients"])
def _(dtype: torch.dtype) -> Training:
    table = nn.Embedding(11, 6, sparse=True)
    words = torch.randint(0, 11, (19, 2), generator=torch.Generator().manual_seed(1))
    adagrad = lambda p: torch.optim.Adagrad(p, 0.1)  # noqa: E731
    module = net(dtype, table, nn.Flatten(), nn.Linear(12, 4))
    return Training(module, words, data(dtype)[1], optimizer=adagrad)


@case("LBFGS", needs=["LBFGS", "optimizers of whole parameters"])
def _(dtype: torch.dtype) -> Training:
    lbfgs = lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3)  # noqa: E731
    return Training(net(dtype), *data(dtype), optimizer=lbfgs)


@case("clip by norm", linear=False)
def _(dtype: torch.dtype) -> Training:
    return Training(net(dtype), *data(dtype), clip_norm=0.1)


@case("clip by value", linear=False)
def _(dtype: torch.dtype) -> Training:
    return Training(net(dtype), *data(dtype), clip_value=0.02)


@case("accumulation", needs=["accumulate"])
def _(dtype: torch.dtype) -> Training:
    return Training(net(dtype), *data(dtype, 23), accumulate=2)


@case("a schedule by epoch")
def _(dtype: torch.dtype) -> Training:
    return Training(net(dtype), *data(dtype), after_epoch=half)


@case("a schedule by step")
def _(dtype: torch.dtype) -> Training:
    return Training(net(dtype), *data(dtype), after_batch=half)


def half(module: nn.Module, optimizer: Any, at: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.7


@case("AMP in bfloat16", tolerance=(5e-3, 5e-3))
def _(dtype: torch.dtype) -> Training:
    single = torch.float32
    slow = lambda p: torch.optim.SGD(p, 0.1)  # noqa: E731
    return Training(net(single), *data(single), optimizer=slow, precision="bfloat16", judged=False)


# --- models ---------------------------------------------------------------------------------------


@case("checkpointed activations")
def _(dtype: torch.dtype) -> Training:
    return Training(Recomputed().to(dtype), *data(dtype))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))  # type: ignore[no-any-return]


@case("a frozen layer")
def _(dtype: torch.dtype) -> Training:
    module = net(dtype)
    module[0].requires_grad_(False)
    return Training(module, *data(dtype))


@case("an unused parameter", tolerance=ADAPTIVE, linear=False)
def _(dtype: torch.dtype) -> Training:
    adam = lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1)  # noqa: E731
    return Training(Spare().to(dtype), *data(dtype), optimizer=adam)


class Spare(nn.Module):
    """Has a parameter that no forward uses: a zero gradient would let it decay."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 4)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


@case("tied parameters")
def _(dtype: torch.dtype) -> Training:
    module = net(dtype, nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 4))
    module[2].weight = module[0].weight
    return Training(module, *data(dtype))


@case("BatchNorm", needs=["BatchNorm"], without=UNSYNCED)
def _(dtype: torch.dtype) -> Training:
    layers = (nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))
    return Training(net(dtype, *layers), *data(dtype, 20))


@case("a loss over rows together", elsewhere=MIXED)
def _(dtype: torch.dtype) -> Training:
    return Training(net(dtype), *data(dtype), contrastive, contrastive, judged=False)


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    """Each row against all others of the batch."""
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


# --- callbacks ------------------------------------------------------------------------------------


@case("a callback that reads weights", races=STALE)
def _(dtype: torch.dtype) -> Training:
    job = Training(net(dtype), *data(dtype))
    read: list[float] = []

    def reads(module: nn.Module, optimizer: Any, number: int) -> None:
        read.append(sum(float(p.detach().double().sum()) for p in module.parameters()))

    job.after_batch, job.besides = reads, lambda: {"read": torch.tensor(read)}
    return job


@case("a callback that writes weights", needs=["weights written by callbacks"])
def _(dtype: torch.dtype) -> Training:
    def writes(module: nn.Module, optimizer: Any, number: int) -> None:
        if number == 1:
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(0.5)

    return Training(net(dtype), *data(dtype), after_batch=writes)


@case("a callback that averages weights", races=STALE)
def _(dtype: torch.dtype) -> Training:
    job = Training(net(dtype), *data(dtype))
    average = copy.deepcopy(job.module)

    def follows(module: nn.Module, optimizer: Any, number: int) -> None:
        with torch.no_grad():
            for a, b in zip(average.parameters(), module.parameters(), strict=True):
                a.mul_(0.8).add_(b, alpha=0.2)

    job.after_batch, job.besides = follows, lambda: plain(average.state_dict(), "average ")
    return job


@case("a layer frozen between epochs", needs=["attributes set by callbacks"])
def _(dtype: torch.dtype) -> Training:
    def freezes(module: Any, optimizer: Any, epoch: int) -> None:
        module[0].requires_grad_(False)

    free = lambda p: torch.optim.SGD(p, 0.2)  # noqa: E731
    return Training(net(dtype), *data(dtype), optimizer=free, after_epoch=freezes)


@case("an attribute of the model set by a callback", needs=["attributes set by callbacks"])
def _(dtype: torch.dtype) -> Training:
    def warms(module: Any, optimizer: Any, number: int) -> None:
        module.factor = 1.0 + 0.1 * number

    return Training(Scaled().to(dtype), *data(dtype), before_batch=warms, judged=False)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.factor = nn.Linear(5, 6), nn.Linear(6, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x))) * self.factor  # type: ignore[no-any-return]


@case("save, load and fit again", tolerance=ADAPTIVE, linear=False)
def _(dtype: torch.dtype) -> Training:
    adam = lambda p: torch.optim.Adam(p, 0.05)  # noqa: E731
    return Training(net(dtype), *data(dtype), optimizer=adam, saved=True)
