"""Losses and modules across shares: the result of one device, or a refusal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.errors import NotDistributable
from tests.support import by_hand, data, distance, mlp, strategy

pytestmark = pytest.mark.timeout(60)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def trained(where: Any, module: nn.Module, loss: Any, x: Any, y: Any, **how: Any) -> sg.Model:
    fit = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0, **how.pop("fit", {})}
    model = sg.Model(copy.deepcopy(module), where)
    model.compile(how.pop("optimizer", sgd), loss, **how)
    model.fit(x, y, **fit)
    return model


# --- losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss", ["mse", nn.L1Loss(), F.huber_loss], ids=["name", "module", "function"]
)
def test_targets_that_torch_would_repeat(three: sg.MirroredStrategy, loss: Any) -> None:
    x, _ = data(20)
    with pytest.raises(NotDistributable, match=r"targets of shape \(2,\).*y\[:, None\]"):
        trained(three, nn.Linear(6, 1), loss, x, torch.randn(20))


@pytest.mark.parametrize("shape", [(20, 3), (20, 1)], ids=["alike", "within_a_row"])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_that_meet_their_own_row(
    three: sg.MirroredStrategy, shape: tuple[int, ...]
) -> None:
    x, _ = data(20)
    y = torch.randn(shape)
    module = nn.Linear(6, 3)
    one, several = (trained(where, module, "mse", x, y) for where in (None, three))
    assert distance(one.module, several.module) < 1e-6


def summed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


class Weighed(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight=torch.tensor([1.0, 5.0, 0.1, 2.0]))


@pytest.mark.parametrize("loss", [summed, Weighed()], ids=["summed", "weighed"])
def test_a_row_for_each_replica_and_no_mean(three: sg.MirroredStrategy, loss: Any) -> None:
    x, y = data(12)[0], torch.arange(12) % 4
    with pytest.raises(NotDistributable, match="not the mean over the rows"):
        trained(three, mlp(), loss, x, y, fit={"batch_size": 3})


def test_a_row_for_each_replica_and_a_mean(three: sg.MirroredStrategy) -> None:
    def own(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    x, y = data(12)
    fit = {"batch_size": 3}
    one, several = (trained(where, mlp(), own, x, y, fit=fit) for where in (None, three))
    assert distance(one.module, several.module) < 1e-6


def test_a_mask_that_comes_later(three: sg.MirroredStrategy) -> None:
    def masked(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output[target > 0], target[target > 0])

    x, y = data(60)
    y = y.clamp(min=1)
    y[30::2] = 0
    with pytest.raises(NotDistributable, match="not the mean over the rows"):
        trained(three, mlp(), masked, x, y, fit={"batch_size": 15})


# --- losses of tokens -----------------------------------------------------------------------------

WORDS = torch.arange(21 * 5).reshape(21, 5) * 7 % 11
NEXT = WORDS.roll(-1, 1).where(torch.arange(5) < 2 + torch.arange(21)[:, None] % 4, 0)  # 0: padding


class Tokens(nn.Module):
    """Returns logits for each token, in several forms: flattened, time first, with more outputs."""

    def __init__(self, form: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.form = form
        self.inner = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
        self.scales = nn.Parameter(torch.tensor([0.3, 0.7]))

    def forward(self, x: Tensor) -> Any:
        logits = self.inner(x)
        match self.form:
            case "flat":
                return logits.view(-1, 11)
            case "time first":
                return logits.transpose(0, 1)
            case "scales":
                return logits, self.scales
            case "loss":
                return {"logits": logits, "loss": logits.mean()}
        return logits


def each(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), target, reduction="none")


def valid(output: Tensor, target: Tensor) -> Tensor:
    """Return a value for each token that is no padding."""
    return each(output, target)[target != 0]


def dice(output: Tensor, target: Tensor) -> Tensor:
    """Return the Dice loss of each class, over the batch."""
    p, q = output.softmax(-1).flatten(0, 1), F.one_hot(target, 11).flatten(0, 1)
    return 1 - (2 * (p * q).sum(0) + 1) / (p.sum(0) + q.sum(0) + 1)


def against_others(output: Tensor, target: Tensor) -> Tensor:
    """Return a value for each row, which depends on the other rows."""
    flat = output.flatten(1)
    return F.cross_entropy(flat @ flat.T / 55, torch.arange(len(flat)), reduction="none")


class Flattening(nn.CrossEntropyLoss):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return super().forward(output, target.view(-1))


def trained_on_tokens(where: Any, form: str, loss: Any, batch: int = 7) -> sg.Model:
    return trained(where, Tokens(form), loss, WORDS, NEXT, fit={"batch_size": batch})


UNEVEN: dict[str, Any] = {
    "valid": ("", valid, "not the mean over the rows"),
    "dice": ("", dice, "not the mean over the rows"),
    "others": ("", against_others, "depends on no other row"),
    "flat": ("flat", Flattening(ignore_index=0), "not the mean over the rows"),
}


@pytest.mark.parametrize("batch", [3, 7])
@pytest.mark.parametrize("name", list(UNEVEN))
def test_values_that_are_not_of_single_rows(
    three: sg.MirroredStrategy, name: str, batch: int
) -> None:
    """Refused even if every share has one row."""
    form, loss, words = UNEVEN[name]
    with pytest.raises(NotDistributable, match=words):
        trained_on_tokens(three, form, loss, batch)
    trained_on_tokens(None, form, loss, batch)


@pytest.mark.parametrize("batch", [3, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(UNEVEN))
def test_nor_are_they_in_an_evaluation(three: sg.MirroredStrategy, name: str, batch: int) -> None:
    form, loss, words = UNEVEN[name]
    model = sg.Model(Tokens(form), three)
    model.compile(sgd, loss)
    with pytest.raises(NotDistributable, match=words):
        model.evaluate(WORDS, NEXT, batch_size=batch)


EVEN: dict[str, Any] = {
    "tokens": ("", each),
    "rows": ("", lambda o, t: each(o, t).mean(1)),
    "columns": ("", lambda o, t: each(o, t).mean(0)),
    "masked": ("", lambda o, t: each(o, t) * (t != 0)),
    "flat": ("flat", lambda o, t: F.cross_entropy(o, t.view(-1))),
    "flat tokens": ("flat", lambda o, t: F.cross_entropy(o, t.view(-1), reduction="none")),
    "time first": ("time first", lambda o, t: each(o.transpose(0, 1), t).mean()),
    "scales": ("scales", lambda o, t: (each(o[0], t) * (-o[1][0]).exp()).mean() + o[1].sum()),
    "loss": ("loss", lambda o, t: each(o["logits"], t).mean()),
}


@pytest.mark.parametrize("batch", [3, 6, 7])
@pytest.mark.parametrize("name", list(EVEN))
def test_values_of_single_rows(
    three: sg.MirroredStrategy, name: str, batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    form, loss = EVEN[name]
    several = trained_on_tokens(three, form, loss, batch)
    assert "cannot be tried" not in caplog.text

    def mean(output: Any, target: Tensor) -> Tensor:
        return loss(output, target).mean()  # type: ignore[no-any-return]

    alone = by_hand(Tokens(form), sgd, mean, WORDS, NEXT, batch=batch)
    assert distance(alone, several.module) < 1e-6


# --- shares without rows, batches without an update ----------------------------------------------


def test_a_borrowed_row_counts_for_nothing() -> None:
    """Synchronised norms need a row for an empty share; accumulated batches count targets."""
    where = strategy(3, sync_batchnorm=True)
    x, y = data(17)
    how: dict[str, Any] = {"accumulate": 2}
    one, several = (trained(on, mlp(), "cross_entropy", x, y, **how) for on in (None, where))
    where.close()
    assert distance(one.module, several.module) < 1e-6


@pytest.mark.parametrize("count", [1, 3])
def test_batches_that_waited_when_a_fit_was_left(three: sg.MirroredStrategy, count: int) -> None:
    """Accumulated gradients of an interrupted fit are not added to the next fit's."""
    x, y = data(30)

    class Stop(sg.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                raise KeyboardInterrupt

    model = sg.Model(mlp(), None if count == 1 else three)
    model.compile(sgd, "cross_entropy", accumulate=3)
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=5, verbose=0, shuffle=False, callbacks=[Stop()])
    assert all(p.grad is None for p in model.module.parameters())
    model.fit(x, y, batch_size=5, verbose=0, shuffle=False)
    fresh = trained(None, mlp(), "cross_entropy", x, y, accumulate=3, fit={"epochs": 1})
    assert distance(model.module, fresh.module) < 1e-6


# --- what forward writes -------------------------------------------------------------------------


def bag() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4, max_norm=0.8), nn.Flatten(), nn.Linear(8, 4))


def test_rows_that_forward_rewrites(three: sg.MirroredStrategy) -> None:
    x, y = torch.randint(0, 10, (20, 2)), torch.randint(0, 4, (20,))
    with pytest.raises(NotDistributable, match=r"'?0'? has max_norm=0.8"):
        trained(three, bag(), "cross_entropy", x, y)

    def loop() -> None:
        net = bag()
        three.prepare(net, sgd(net.parameters()), DataLoader(TensorDataset(x, y), batch_size=5))

    with pytest.raises(NotDistributable, match="max_norm"):
        three.run(loop)
    trained(None, bag(), "cross_entropy", x, y)


def test_gradients_that_count_words_of_the_whole_batch(three: sg.MirroredStrategy) -> None:
    words = nn.Embedding(10, 4, scale_grad_by_freq=True)
    module = nn.Sequential(words, nn.Flatten(), nn.Linear(8, 4))
    x, y = torch.randint(0, 10, (20, 2)), torch.randint(0, 4, (20,))

    def loop() -> None:
        three.prepare(module, sgd(module.parameters()), DataLoader(TensorDataset(x, y)))

    with pytest.raises(NotDistributable, match="scale_grad_by_freq"):
        three.run(loop)
    pipes = [sg.PipelineStrategy(["cpu:0", "cpu:1"], count) for count in (2, 1)]
    for on in (three, sg.Mesh(2, 2), pipes[0]):
        with pytest.raises(NotDistributable, match="'0' has scale_grad_by_freq=True"):
            trained(on, copy.deepcopy(module), "cross_entropy", x, y)
    one = trained(None, copy.deepcopy(module), "cross_entropy", x, y)
    with pipes[1], sg.TensorParallelStrategy(["cpu:0", "cpu:1"]) as divided:
        for on in (pipes[1], divided):
            model = trained(on, copy.deepcopy(module), "cross_entropy", x, y)
            for a, b in zip(one.module.parameters(), model.module.parameters(), strict=True):
                assert torch.allclose(a, b, atol=1e-6)


def test_an_optimizer_of_two_models(three: sg.MirroredStrategy) -> None:
    def loop() -> None:
        one, other = nn.Linear(6, 3), nn.Linear(3, 6)
        three.prepare(one, sgd([*one.parameters(), *other.parameters()]))

    with pytest.raises(sg.UsageError, match=r"put them into one nn\.ModuleList and prepare that"):
        three.run(loop)


class Growing(nn.Module):
    """Keeps a table as long as the longest text so far, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(0, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        longest = int((x != 0).any(2).sum(1).max())
        if longest > len(self.table):
            table = torch.cos(torch.arange(longest)[:, None] * torch.ones(4))
            self.register_buffer("table", table, persistent=False)
        result: Tensor = self.inner(x + self.table[:1]).mean(1)
        return result


def test_a_table_that_grows(three: sg.MirroredStrategy) -> None:
    x, y = torch.randn(21, 6, 4), torch.randint(0, 4, (21,))
    for row in range(21):
        x[row, 2 + row % 5 :] = 0
    module = Growing()
    one, several = (trained(where, module, "cross_entropy", x, y) for where in (None, three))
    assert distance(one.module, several.module) < 1e-6


class Named(dict[str, Any]):
    """Outputs whose entries are attributes, as Hugging Face's are."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Talker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Named:
        return Named(logits=self.inner(x))


def test_outputs_that_are_read_as_attributes(
    two: sg.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    def loss(out: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(out.logits, y, reduction="none")

    x, y = data(37)
    module = Talker()
    model = sg.Model(copy.deepcopy(module), two)
    model.compile(lambda p: torch.optim.SGD(p, lr=0.1), loss)
    model.fit(x, y, batch_size=12, shuffle=False, epochs=2, verbose=0)
    alone = by_hand(
        module, lambda p: torch.optim.SGD(p, lr=0.1), lambda o, t: loss(o, t).mean(), x, y, batch=12
    )
    assert distance(model.module, alone) < 1e-5 and "cannot be tried" not in caplog.text
