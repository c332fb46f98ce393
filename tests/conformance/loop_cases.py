"""Custom loops: each written once, in plain torch, and run on one device as it stands."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import stratagem as sg
from stratagem import capabilities
from tests.conformance.net import ADAPTIVE, UNSYNCED, Cases, Result, plain
from tests.conformance.placements import PLACEMENTS

case = Cases()
BATCH = 8
#: in a loop's body, and between two epochs
WRITES = ["weights written in a loop", "weights written outside of steps"]
BY_TURN = {"servers 2": "the order in which workers take parts decides which masks they draw"}


class OneDevice:
    """What a loop may call: here nothing is distributed, and the loop is plain torch."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.losses: list[float | None] = []

    def prepare(self, *given: Any, **options: Any) -> Any:
        return given if len(given) > 1 else given[0]

    def mean(self, loss: Tensor, count: Any = None) -> float:
        return float(loss.detach())

    def backward(self, loss: Tensor, count: Any, **options: Any) -> None:
        loss.backward(**options)

    def sum(self, value: Tensor) -> Tensor:
        return value

    def rows(self, batch: Any) -> Any:
        return batch

    def mine(self, rows: int) -> int:
        """How many rows of the batch in hand are this replica's own."""
        return rows

    def epochs(self, loader: Any, count: int) -> Iterable[int]:
        return range(count)

    def remember(self, loader: Any, **things: Any) -> None:
        """An elastic loop says what it keeps beside model and optimizer."""
        if hasattr(loader, "remember"):
            loader.remember(**things)

    def note(self, loss: Tensor, count: Any = None) -> None:
        self.losses.append(self.mean(loss, count))

    # --- what loops are made of

    def net(self, *layers: nn.Module, seed: int = 3) -> Any:
        """The layers, or an MLP with weights from this seed."""
        torch.manual_seed(seed)
        if not layers:
            layers = (nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        return nn.Sequential(*layers).to(self.dtype)

    def data(self, rows: int = 19, seed: int = 7) -> tuple[Tensor, Tensor]:
        dice = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, 5, generator=dice, dtype=torch.float64)
        return x.to(self.dtype), torch.randint(0, 4, (rows,), generator=dice)

    def loader(self, *tensors: Tensor, batch: int = BATCH) -> Any:
        return DataLoader(TensorDataset(*(tensors or self.data())), batch_size=batch)


class Spread(OneDevice):
    """The same calls of a strategy."""

    def __init__(self, strategy: Any, name: str) -> None:
        super().__init__(PLACEMENTS[name].dtype)
        self.strategy, self.name = strategy, name
        self._says_means = not capabilities.refused(PLACEMENTS[name].kinds, ["mean of a loop"])

    def prepare(self, *given: Any, **options: Any) -> Any:
        return self.strategy.prepare(*given, **options)

    def mean(self, loss: Tensor, count: Any = None) -> float:
        return float(self.strategy.mean(loss, count=count))

    def backward(self, loss: Tensor, count: Any, **options: Any) -> None:
        self.strategy.backward(loss, count=count, **options)

    def sum(self, value: Tensor) -> Tensor:
        return self.strategy.reduce("sum", value)

    def rows(self, batch: Any) -> Any:
        return self.strategy.rows(batch)

    def mine(self, rows: int) -> int:
        return sg.current_replica().share.examples

    def epochs(self, loader: Any, count: int) -> Iterable[int]:
        """An elastic loop says what an epoch is."""
        own: Iterable[int] = loader.epochs(count) if hasattr(loader, "epochs") else range(count)
        return own

    def note(self, loss: Tensor, count: Any = None) -> None:
        self.losses.append(self.mean(loss, count) if self._says_means else None)


def play(name: str, on: OneDevice) -> Result:
    """Run the case; its tensors and losses."""
    torch.manual_seed(11)
    found = plain(case[name].play(on))
    return found | {f"loss {i}": each for i, each in enumerate(on.losses)}


def spread(name: str, strategy: Any, place: str) -> Result:
    """The same in a process of a strategy."""
    return play(name, Spread(strategy, place))


def sgd(model: nn.Module, rate: float = 0.2) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=0.01)


def train(
    on: OneDevice,
    model: Any,
    optimizer: Any,
    loader: Any,
    loss_of: Callable[[Any, Any], Tensor] = F.cross_entropy,
    epochs: int = 2,
) -> None:
    """The loop that everybody writes."""
    for _ in on.epochs(loader, epochs):
        for x, y in loader:
            loss = loss_of(model(x), y)
            loss.backward()
            on.note(loss)
            optimizer.step()
            optimizer.zero_grad()


@case("batches that do not divide")
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    train(on, model, optimizer, loader)
    return model.state_dict()


# --- rows -----------------------------------------------------------------------------------------


@case("fewer rows than replicas", borrows=True)
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader(*on.data(11), batch=3))
    train(on, model, optimizer, loader)
    return model.state_dict()


@case("batches from a stream")
def _(on: OneDevice) -> Result:
    model = on.net()
    loader = DataLoader(Stream(*on.data()), batch_size=BATCH)
    model, optimizer, loader = on.prepare(model, sgd(model), loader)
    train(on, model, optimizer, loader)
    return model.state_dict()


class Stream(IterableDataset[Any]):
    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*self.tensors, strict=True))


class Named(Dataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "y": self.y[i]}


@case("batches as dicts")
def _(on: OneDevice) -> Result:
    model = on.net()
    loader = DataLoader(Named(*on.data()), batch_size=BATCH)
    model, optimizer, loader = on.prepare(model, sgd(model), loader)
    for _ in on.epochs(loader, 2):
        for batch in loader:
            loss = F.cross_entropy(model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            on.note(loss)
    return model.state_dict()


@case("batches without a loader", needs=["a model without a loader", "rows of a loop"])
def _(on: OneDevice) -> Result:
    model, (x, y) = on.net(), on.data()
    model, optimizer, _ = on.prepare(model, sgd(model), None)
    for start in [*range(0, len(x), BATCH)] * 2:
        a, b = on.rows((x[start : start + BATCH], y[start : start + BATCH]))
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        on.note(loss)
    return model.state_dict()


@case("shuffled by a seed")
def _(on: OneDevice) -> Result:
    model = on.net()
    dice = torch.Generator().manual_seed(3)
    rows = DataLoader(TensorDataset(*on.data()), batch_size=BATCH, shuffle=True, generator=dice)
    model, optimizer, loader = on.prepare(model, sgd(model), rows)
    train(on, model, optimizer, loader)
    return model.state_dict()


@case("a loader broken off", needs=["a loader broken off"])
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    for _ in range(2):
        for i, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 1:
                break
    return model.state_dict()


@case("two loaders zipped", needs=["a second loader"])
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    others = on.prepare(on.loader(*on.data(seed=8)))
    for _ in on.epochs(loader, 2):
        for (x, y), (a, b) in zip(loader, others, strict=True):
            loss = F.cross_entropy(model(x), y) + 0.5 * F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@case("batches fetched ahead", needs=["batches fetched ahead"])
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    for _ in on.epochs(loader, 2):
        for x, y in list(loader):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@case("a test loader in the loop", needs=["a second loader"])
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    test = on.prepare(on.loader(*on.data(11, seed=8)))
    found: Result = {}
    for epoch in on.epochs(loader, 2):
        train_one_epoch(model, optimizer, loader)
        model.eval()
        right = torch.zeros(())
        with torch.no_grad():
            for x, y in test:
                right += (model(x).argmax(1) == y)[: on.mine(len(x))].sum()
        model.train()
        found[f"right {epoch}"] = on.sum(right)
    return found | model.state_dict()


def train_one_epoch(model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- losses ---------------------------------------------------------------------------------------


def simple(
    on: OneDevice,
    loss_of: Callable[[Any, Any], Tensor] = F.cross_entropy,
    y: Tensor | None = None,
    make: Callable[[Any], Any] = sgd,
    model: Any = None,
) -> Result:
    """A case that differs from the plain one in its loss, its targets, its optimizer or model."""
    model = on.net() if model is None else model
    x, classes = on.data()
    loader = on.loader(x, classes if y is None else y)
    model, optimizer, loader = on.prepare(model, make(model), loader)
    train(on, model, optimizer, loader, loss_of)
    return model.state_dict()


def holes(on: OneDevice) -> Tensor:
    """Targets of which a whole share is ignored."""
    y = on.data()[1].clone()
    y[:4] = y[10] = y[17] = -100
    return y


@case("ignored targets", linear=False)
def _(on: OneDevice) -> Result:
    return simple(on, y=holes(on))


@case("class weights and ignored targets", linear=False)
def _(on: OneDevice) -> Result:
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=on.dtype)
    return simple(on, nn.CrossEntropyLoss(weight=weight), holes(on))


@case("label smoothing")
def _(on: OneDevice) -> Result:
    return simple(on, nn.CrossEntropyLoss(label_smoothing=0.1))


@case(
    "a masked mean",
    linear=False,
    elsewhere={"servers": "is no multiple of the rows, and servers weigh"},
)
def _(on: OneDevice) -> Result:
    def masked(output: Tensor, y: Tensor) -> Tensor:
        mask = (y != 0).to(output.dtype)
        return (F.cross_entropy(output, y, reduction="none") * mask).sum() / mask.sum()

    return simple(on, masked)


@case("a summed loss")
def _(on: OneDevice) -> Result:
    return simple(on, lambda output, y: 0.1 * F.cross_entropy(output, y, reduction="sum"))


@case(
    "a count that is declared",
    linear=False,
    needs=["a backward for each term"],
    elsewhere={"servers": "adds up terms that are divided by different counts"},
)
def _(on: OneDevice) -> Result:
    model, (x, y) = on.net(), on.data()
    y = holes(on)
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader(x, y))
    for _ in on.epochs(loader, 2):
        for a, b in loader:
            output, kept = model(a), b != -100
            by_target = F.cross_entropy(output, b, reduction="sum") / kept.sum().clamp(min=1)
            on.backward(by_target, kept.sum(), retain_graph=True)
            on.backward(output.square().mean(), len(a))
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@case("two losses, a backward each")
def _(on: OneDevice) -> Result:
    model, (x, y) = on.net(), on.data()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader(x, y))
    for _ in on.epochs(loader, 2):
        for a, b in loader:
            F.cross_entropy(model(a), b).backward()
            (0.1 * model(a).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@case("several outputs and losses")
def _(on: OneDevice) -> Result:
    def both(outputs: Any, y: Tensor) -> Tensor:
        classes, number = outputs
        return F.cross_entropy(classes, y) + 0.3 * F.mse_loss(number.squeeze(1), y.to(number.dtype))

    torch.manual_seed(3)
    return simple(on, both, model=TwoHeads().to(on.dtype))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.classes, self.number = nn.Linear(6, 4), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.classes(h), self.number(h)


@case("a penalty on weights")
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    for _ in on.epochs(loader, 2):
        for x, y in loader:
            penalty = sum(p.square().sum() for p in model.parameters())
            loss = F.cross_entropy(model(x), y) + 0.01 * penalty
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


# --- optimizers -----------------------------------------------------------------------------------


@case("Adam", tolerance=ADAPTIVE, linear=False)
def _(on: OneDevice) -> Result:
    return simple(on, make=lambda model: torch.optim.Adam(model.parameters(), 0.05))


@case("AdamW of two groups", tolerance=ADAPTIVE, linear=False)
def _(on: OneDevice) -> Result:
    def make(model: Any) -> Any:
        groups = [
            {"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.0},
            {"params": model[2].parameters()},
        ]
        return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)

    return simple(on, make=make)


@case(
    "Adagrad, sparse rows",
    tolerance=ADAPTIVE,
    needs=["sparse gradients", "sparse gradients in a loop"],
)
def _(on: OneDevice) -> Result:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(11, 6, sparse=True), nn.Flatten(), nn.Linear(12, 4))
    model = model.to(on.dtype)
    words = torch.randint(0, 11, (19, 2), generator=torch.Generator().manual_seed(1))
    optimizer: Any = torch.optim.Adagrad(model.parameters(), 0.1)
    model, optimizer, loader = on.prepare(model, optimizer, on.loader(words, on.data()[1]))
    train(on, model, optimizer, loader)
    return model.state_dict()


@case("LBFGS", needs=["LBFGS", "optimizers of whole parameters"])
def _(on: OneDevice) -> Result:
    model = on.net()
    optimizer: Any = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    model, optimizer, loader = on.prepare(model, optimizer, on.loader())
    for _ in on.epochs(loader, 1):
        for x, y in loader:

            def closure(x: Any = x, y: Any = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
    return model.state_dict()


@case("clip by norm", linear=False, needs=["clip in a loop"])
def _(on: OneDevice) -> Result:
    return clipped(on, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@case("clip by value", linear=False, needs=["clip in a loop"])
def _(on: OneDevice) -> Result:
    return clipped(on, lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.02))


def clipped(on: OneDevice, clip: Callable[[Any], Any]) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    for _ in on.epochs(loader, 2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            clip(model)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@case("accumulation")
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader(*on.data(24)))
    for _ in on.epochs(loader, 2):
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y) / 3).backward()
            if i == 2:
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


@case("schedules by step and by epoch")
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    by_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=6)
    by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    on.remember(loader, by_step=by_step, by_epoch=by_epoch)
    for _ in on.epochs(loader, 2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            by_step.step()
        by_epoch.step()
    return model.state_dict() | {"rate": by_epoch.get_last_lr()[0]}


@case("AMP in bfloat16", tolerance=(5e-3, 5e-3))
def _(on: OneDevice) -> Result:
    model = on.net().float()
    x, y = on.data()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.2)
    model, optimizer, loader = on.prepare(model, optimizer, on.loader(x.float(), y))
    for _ in on.epochs(loader, 2):
        for a, b in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


# --- models ---------------------------------------------------------------------------------------


@case("checkpointed activations")
def _(on: OneDevice) -> Result:
    torch.manual_seed(3)
    return simple(on, model=Recomputed().to(on.dtype))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))  # type: ignore[no-any-return]


@case("a frozen layer")
def _(on: OneDevice) -> Result:
    model = on.net()
    model[0].requires_grad_(False)
    return simple(on, model=model, make=lambda m: torch.optim.SGD(m[2].parameters(), 0.2))


@case("an unused parameter", tolerance=ADAPTIVE, linear=False)
def _(on: OneDevice) -> Result:
    torch.manual_seed(3)
    model = Spare().to(on.dtype)
    return simple(
        on, model=model, make=lambda m: torch.optim.AdamW(m.parameters(), 0.05, weight_decay=0.1)
    )


class Spare(nn.Module):
    """Has a parameter that no forward uses: a zero gradient would let it decay."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 4)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


@case("tied parameters")
def _(on: OneDevice) -> Result:
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 4))
    model[2].weight = model[0].weight
    return simple(on, model=model.to(on.dtype))


@case("BatchNorm", needs=["BatchNorm"], without=UNSYNCED)
def _(on: OneDevice) -> Result:
    layers = (nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))
    model = on.net(*layers)
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader(*on.data(20)))
    train(on, model, optimizer, loader)
    return model.state_dict()


@case("dropout draws alike twice", needs=["several models in a loop"], without=BY_TURN)
def _(on: OneDevice) -> Result:
    weights = []
    for _ in range(2):
        torch.manual_seed(9)
        model = on.net(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 4))
        model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
        train(on, model, optimizer, loader)
        weights.append([p.detach().clone() for p in model.parameters()])
    on.losses.clear()
    return {"gap": max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True))}


# --- steps of several parts -----------------------------------------------------------------------


@case(
    "a GAN with an averaged copy",
    tolerance=ADAPTIVE,
    linear=False,
    needs=["a model without a loader", "several models in a loop"],
)
def _(on: OneDevice) -> Result:
    made, judge = on.net(nn.Linear(2, 5)), on.net(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
    by_made: Any = torch.optim.Adam(made.parameters(), 0.05)
    by_judge: Any = torch.optim.Adam(judge.parameters(), 0.05)
    noise = torch.randn(19, 2, generator=torch.Generator().manual_seed(2)).to(on.dtype)
    loader = on.loader(on.data()[0], noise)
    made, by_made, loader = on.prepare(made, by_made, loader)
    judge, by_judge, _ = on.prepare(judge, by_judge, None)
    averaged = copy.deepcopy(made)
    binary = F.binary_cross_entropy_with_logits
    for _ in on.epochs(loader, 2):
        for real, z in loader:
            fake = made(z)
            a, b = judge(real), judge(fake.detach())
            (binary(a, torch.ones_like(a)) + binary(b, torch.zeros_like(b))).backward()
            by_judge.step()
            by_judge.zero_grad()
            c = judge(fake)
            binary(c, torch.ones_like(c)).backward()
            by_made.step()
            by_made.zero_grad()
            by_judge.zero_grad()
            follow(averaged, made, 0.9)
    return {
        **plain(made.state_dict()),
        **plain(judge.state_dict(), "judge "),
        **plain(averaged.state_dict(), "averaged "),
    }


def follow(copied: Any, model: Any, keep: float) -> None:
    with torch.no_grad():
        for a, b in zip(copied.parameters(), model.parameters(), strict=True):
            a.mul_(keep).add_(b, alpha=1 - keep)


@case("distillation")
def _(on: OneDevice) -> Result:
    teacher = on.net(seed=5).requires_grad_(False).eval()
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    for _ in on.epochs(loader, 2):
        for x, y in loader:
            output = model(x)
            soft = F.log_softmax(output / 2, 1), F.log_softmax(teacher(x) / 2, 1)
            loss = F.cross_entropy(output, y) + F.kl_div(
                *soft, reduction="batchmean", log_target=True
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(5, 4), nn.Linear(2, 5)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.down(x).chunk(2, 1)
        return self.up(mean + noise * (log / 2).exp()), mean, log


@case("a VAE with summed losses", tolerance=ADAPTIVE, linear=False)
def _(on: OneDevice) -> Result:
    torch.manual_seed(3)
    model: Any = Vae().to(on.dtype)
    optimizer: Any = torch.optim.Adam(model.parameters(), 0.02)
    noise = torch.randn(19, 2, generator=torch.Generator().manual_seed(2)).to(on.dtype)
    model, optimizer, loader = on.prepare(model, optimizer, on.loader(on.data()[0], noise))
    for _ in on.epochs(loader, 2):
        for x, z in loader:
            back, mean, log = model(x, z)
            loss = F.mse_loss(back, x, reduction="sum")
            loss = loss - 0.5 * (1 + log - mean.square() - log.exp()).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


class Quantized(nn.Module):
    """A VQ-VAE: the nearest vectors of a codebook, straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(5, 3), nn.Linear(3, 5)
        self.book = nn.Embedding(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.down(x)
        words = self.book(torch.cdist(h.detach(), self.book.weight.detach()).argmin(1))
        return self.up(h + (words - h).detach()), h, words


@case("a VQ-VAE", tolerance=ADAPTIVE, linear=False)
def _(on: OneDevice) -> Result:
    torch.manual_seed(3)
    model: Any = Quantized().to(on.dtype)
    optimizer: Any = torch.optim.Adam(model.parameters(), 0.02)
    model, optimizer, loader = on.prepare(model, optimizer, on.loader())
    for _ in on.epochs(loader, 2):
        for x, _y in loader:
            back, h, words = model(x)
            loss = F.mse_loss(back, x) + F.mse_loss(words, h.detach())
            loss = loss + 0.25 * F.mse_loss(h, words.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@case("a penalty on gradients", needs=["gradients of inputs"])
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    for _ in on.epochs(loader, 2):
        for x, y in loader:
            x = x.clone().requires_grad_()
            output = model(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            (F.cross_entropy(output, y) + 0.1 * slope.square().sum(1).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


# --- between two steps ----------------------------------------------------------------------------


@case("an average by hand and AveragedModel")
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    by_hand = copy.deepcopy(model)
    swa = torch.optim.swa_utils.AveragedModel(model)
    for _ in on.epochs(loader, 2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            follow(by_hand, model, 0.8)
            swa.update_parameters(model)
    return {
        **plain(model.state_dict()),
        **plain(by_hand.state_dict(), "by hand "),
        **plain(swa.module.state_dict(), "swa "),
    }


@case("a target network")
def _(on: OneDevice) -> Result:
    model = on.net()
    target = copy.deepcopy(model).requires_grad_(False)
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    for _ in on.epochs(loader, 2):
        for x, y in loader:
            wanted = 0.5 * target(x).amax(1) + y
            F.mse_loss(model(x)[:, 0], wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
            follow(target, model, 0.7)
    return model.state_dict() | plain(target.state_dict(), "target ")


@case("weights clamped between steps", linear=False, needs=WRITES)
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    for _ in on.epochs(loader, 2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for p in model.parameters():
                    p.clamp_(-0.3, 0.3)
    return model.state_dict()


@case(
    "optimizer state read and written",
    linear=False,
    needs=["optimizer state read in a loop", "optimizer state written in a loop"],
)
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    found: Result = {}
    for _ in on.epochs(loader, 2):
        for i, (x, y) in enumerate(loader):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 1:  # a replica of ShardedStrategy has the state of some parameters
                momentum = optimizer.state[model[0].weight].get("momentum_buffer")
                found["read"] = None if momentum is None else momentum.clone()
                if momentum is not None:
                    momentum.mul_(0.5)
    return found | model.state_dict()


@case("an update by hand", linear=False, needs=WRITES)
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    for _ in on.epochs(loader, 2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.2 * p.grad
            optimizer.zero_grad()
    return model.state_dict()


@case("SAM", linear=False, needs=WRITES)
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    for _ in on.epochs(loader, 2):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            steps = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
            shift(model, steps, 1)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            shift(model, steps, -1)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def shift(model: Any, steps: list[Tensor], sign: int) -> None:
    with torch.no_grad():
        for p, step in zip(model.parameters(), steps, strict=True):
            p.add_(step, alpha=sign)


@case("add_param_group in mid-training", needs=["parameters added in a loop"])
def _(on: OneDevice) -> Result:
    model = on.net()
    optimizer: Any = torch.optim.SGD(model[2].parameters(), 0.2, momentum=0.9)
    model, optimizer, loader = on.prepare(model, optimizer, on.loader())
    for epoch in on.epochs(loader, 2):
        train_one_epoch(model, optimizer, loader)
        model.zero_grad()
        if epoch == 0:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
    return model.state_dict()


@case(
    "another optimizer in mid-training",
    tolerance=ADAPTIVE,
    linear=False,
    needs=["a model prepared again", "several models in a loop"],
)
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    train(on, model, optimizer, loader, epochs=1)
    second: Any = torch.optim.Adam(model.parameters(), 0.05)
    model, second, loader = on.prepare(model, second, on.loader())
    train(on, model, second, loader, epochs=1)
    return model.state_dict()


@case("load_state_dict in mid-training", needs=WRITES[1:])
def _(on: OneDevice) -> Result:
    model = on.net()
    model, optimizer, loader = on.prepare(model, sgd(model), on.loader())
    for epoch in on.epochs(loader, 3):
        train_one_epoch(model, optimizer, loader)
        if epoch == 0:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if epoch == 1:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
    return model.state_dict()


@case("a layer frozen in mid-training")
def _(on: OneDevice) -> Result:
    model = on.net()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.2)
    model, optimizer, loader = on.prepare(model, optimizer, on.loader())
    for _ in on.epochs(loader, 2):
        train_one_epoch(model, optimizer, loader)
        model[0].requires_grad_(False)
    return model.state_dict()
