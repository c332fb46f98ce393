"""The row check before the first update refuses models that mix rows, and leaves no trace."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from stratagem.errors import NotDistributable
from stratagem.frontends import row_check
from stratagem.frontends.row_trials import CheckSchedule
from stratagem.frontends.sources import Portion
from stratagem.training.isolated_run import dry_run
from tests.support import by_hand, data, distance, mlp, strategy

pytestmark = pytest.mark.timeout(60)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Around(nn.Module):
    """A network with a function of its outputs."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.inner, self.change = mlp(), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.inner(x))


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def among(x: Tensor) -> Tensor:
    """Mix rows by a contraction over the batch axis."""
    return (x @ x.T).softmax(1) @ x


MIXING = {"centred": centred, "among": among, "slightly": lambda x: x - 3e-4 * x.mean(0)}


@pytest.mark.parametrize(
    ("name", "verb", "batch"),
    [
        ("centred", "fit", 2),
        ("centred", "fit", 12),
        ("centred", "evaluate", 12),
        ("centred", "predict", 12),
        ("among", "fit", 12),
        ("among", "predict", 3),
        ("slightly", "fit", 12),
    ],
)
def test_a_model_that_mixes_rows(
    three: sg.MirroredStrategy, name: str, verb: str, batch: int
) -> None:
    x, y = data(24)
    model = sg.Model(Around(MIXING[name]), three)
    model.compile(sgd, "cross_entropy")
    given = (x,) if verb == "predict" else (x, y)
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    with pytest.raises(NotDistributable, match=r"outputs for a row depend on.*check=False"):
        getattr(model, verb)(*given, batch_size=batch, verbose=0)
    assert all(torch.equal(before[k], v) for k, v in model.module.state_dict().items())


class FirstBatch(nn.Module):
    """Initialises its scale from the first rows that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("scale", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if not self.scale.any():
            self.scale.copy_(1 / x.std(0))
        return self.inner(x * self.scale)  # type: ignore[no-any-return]


class Largest(nn.Module):
    """Scales all rows by the largest value of any row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x / x.abs().max())  # type: ignore[no-any-return]


@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("kind", [FirstBatch, Largest])
def test_whichever_row_decides(two: sg.MirroredStrategy, kind: type[nn.Module], verb: str) -> None:
    for seed in range(10):
        dice = torch.Generator().manual_seed(seed)
        x, y = torch.randn(12, 6, generator=dice), torch.randint(0, 4, (12,), generator=dice)
        model = sg.Model(kind(), two)
        model.compile(sgd, "cross_entropy")
        given = (x,) if verb == "predict" else (x, y)
        with pytest.raises(NotDistributable, match="depend"):
            getattr(model, verb)(*given, batch_size=12, verbose=0)


def test_it_is_skipped_on_demand(three: sg.MirroredStrategy) -> None:
    x, y = data(24)
    for how in ("compile", "scope"):
        with three.scope(check=how != "scope"):
            model = sg.Model(Around(centred))
            model.compile(sgd, "cross_entropy", check=how != "compile")
        model.fit(x, y, batch_size=12, verbose=0)
        model.predict(x, verbose=0)


@pytest.mark.parametrize("kind", ["model", "loss"])
def test_with_servers_that_share_a_batch(kind: str) -> None:
    def against_others(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))

    x, y = data(24)
    module: nn.Module = Around(centred) if kind == "model" else mlp()
    loss = "cross_entropy" if kind == "model" else against_others
    for updates in (sg.Synchronous(), sg.Asynchronous()):
        cluster = sg.LocalCluster(workers=2, ps=1)
        with sg.ParameterServerStrategy(cluster, updates=updates) as where:
            model = sg.Model(module, where)
            model.compile(sgd, loss)
            if isinstance(updates, sg.Asynchronous):  # workers have whole batches
                model.fit(x, y, batch_size=12, verbose=0)
                continue
            with pytest.raises(NotDistributable, match="depend"):
                model.fit(x, y, batch_size=12, verbose=0)


def test_where_gradients_are_rounding(three: sg.MirroredStrategy) -> None:
    """The loss is at its minimum, and outputs are rounded differently by the number of rows."""
    x, _ = data(48)
    model = sg.Model(Around(lambda out: out * len(out) / len(out)), three)
    model.compile(sgd, "mse")
    y = model.predict(x, verbose=0)
    for off in (0.0, 1e-7, 1e-6):
        model.fit(x, y * (1 + off), batch_size=24, verbose=0)


def test_a_loss_that_compares_rows_a_little(three: sg.MirroredStrategy) -> None:
    def slightly(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + 1e-3 * (output.mean(0) ** 2).sum()

    model = sg.Model(mlp(), three)
    model.compile(sgd, slightly)
    with pytest.raises(NotDistributable, match=r"depend|not the mean"):
        model.fit(*data(24), batch_size=12, verbose=0)


# --- what does not mix them, and looks like it ----------------------------------------------------


class Half(nn.Module):
    """Computes in bfloat16 inside, and returns float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()  # type: ignore[no-any-return]


class Attending(nn.Module):
    """Attention within a row, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.4, batch_first=True)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x[:, None] * torch.ones(3, 1)).mean(1))  # type: ignore[no-any-return]


def norm(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, **options))


RANDOM: dict[str, Any] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "normal": lambda x: x + torch.randn_like(x),
    "uniform": lambda x: x * torch.empty_like(x).uniform_(0.5, 1.5),
    "depth": lambda x: x * (random.random() < 0.5),
    "sampled": lambda x: x + F.one_hot(torch.multinomial(x.softmax(1), 1)[:, 0], 4),
    "steps": lambda x: x * torch.randint(1, 9, (len(x), 1)),
    "gumbel": lambda x: F.gumbel_softmax(x),
}
APART: dict[str, Any] = {
    **{name: lambda change=change: Around(change) for name, change in RANDOM.items()},
    "half": Half,
    "attending": Attending,
    "norm": norm,
    "untracked": lambda: norm(track_running_stats=False),
}


@pytest.mark.parametrize("name", list(APART))
def test_what_takes_each_row_by_itself(
    two: sg.MirroredStrategy, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = sg.Model(APART[name](), two)
    model.compile(sgd, "cross_entropy")
    model.fit(*data(24), batch_size=12, verbose=0)
    assert "cannot be tried" not in caplog.text


@pytest.mark.parametrize("tracks", [True, False])
def test_synchronised_norms(tracks: bool, caplog: pytest.LogCaptureFixture) -> None:
    with strategy(2, sync_batchnorm=True) as where:
        model = sg.Model(norm(track_running_stats=tracks), where)
        model.compile(sgd, "cross_entropy")
        model.fit(*data(24), batch_size=12, verbose=0)
    assert "cannot be tried" not in caplog.text


def test_a_single_row(two: sg.MirroredStrategy) -> None:
    """A batch of one row is not checked; the first larger batch is."""
    x, y = data(3)
    model = sg.Model(mlp(), two)
    model.compile(sgd, "cross_entropy")
    model.fit([(x[:1], y[:1]), (x[1:], y[1:])], verbose=0)
    mixing = sg.Model(Around(centred), two)
    mixing.compile(sgd, "cross_entropy")
    with pytest.raises(NotDistributable, match="depend"):
        mixing.fit([(x[:1], y[:1]), (x[1:], y[1:])], verbose=0)


# --- what it costs --------------------------------------------------------------------------------

#: row by row: a forward pass is one, a backward pass two
PASSED: list[int] = []


class Counted(nn.Module):
    """Counts rows in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = mlp(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        PASSED.append(len(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: PASSED.append(2 * len(gradient)))
        return self.last(hidden)  # type: ignore[no-any-return]


def own_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def own_metric(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float()


@pytest.mark.parametrize("share", [4, 32])
@pytest.mark.parametrize(
    ("loss", "metrics"),
    [("cross_entropy", ["accuracy"]), (own_loss, []), ("cross_entropy", [own_metric])],
)
def test_it_costs_less_than_a_step(
    two: sg.MirroredStrategy, loss: Any, metrics: list[Any], share: int
) -> None:
    """The cost is counted in rows that the first replica computes, forward and backward."""
    costs = {}
    for check in (False, True):
        model = sg.Model(Counted(), two)
        model.compile(sgd, loss, metrics, check=check)
        PASSED.clear()
        model.fit(*data(2 * share), batch_size=2 * share, verbose=0)
        costs[check] = sum(PASSED)
    assert costs[False] == 3 * share
    assert 0 < costs[True] - costs[False] <= 10 < costs[False]


# --- which batches are checked --------------------------------------------------------------------


def test_the_batches_that_are_checked() -> None:
    schedule, due = CheckSchedule(), []
    for number in range(1, 40):
        if schedule.is_due("fit", lambda: True):
            due.append(number)
        schedule.count("fit")
    assert due == [1, 2, 4, 8, 16, 32]
    assert schedule.is_due("predict", lambda: False)
    schedule.count("predict")
    assert not schedule.is_due("predict", lambda: False)


def checked(model: sg.Model, verb: str = "fit", batches: int = 4) -> list[int]:
    """Return how many checks a call makes: each has five rows; a share has twelve."""
    PASSED.clear()
    given = data(24 * batches)[: 1 if verb == "predict" else 2]
    getattr(model, verb)(*given, batch_size=24, verbose=0)
    assert PASSED.count(12) == batches
    return PASSED.count(5)


class Seen(nn.Linear):
    """Records how many rows it sees, and may subtract their mean."""

    mixes = False

    def forward(self, x: Tensor) -> Tensor:
        PASSED.append(len(x))
        out = super().forward(x)
        return centred(out) if self.mixes else out


def seen_by(module: nn.Module) -> nn.Module:
    """Record the rows that torch's own layer sees."""
    module.register_forward_pre_hook(lambda layer, given: PASSED.append(len(given[0])))
    return module


OWN: dict[str, Any] = {
    "module": (lambda: Seen(6, 4), "cross_entropy", ["accuracy"]),
    "loss": (lambda: seen_by(nn.Linear(6, 4)), own_loss, []),
    "metric": (lambda: seen_by(nn.Linear(6, 4)), "cross_entropy", [own_metric]),
}


@pytest.mark.parametrize("name", list(OWN))
def test_later_batches_are_checked_for_user_code(two: sg.MirroredStrategy, name: str) -> None:
    build, loss, metrics = OWN[name]
    model = sg.Model(build(), two)
    model.compile(sgd, loss, metrics)
    assert [checked(model) for _ in range(3)] == [3, 1, 0]  # 1, 2 and 4; 8
    assert [checked(model, "evaluate", 2), checked(model, "predict", 1)] == [2, 1]
    model.compile(sgd, loss, metrics)
    assert checked(model) == 3


def test_of_torchs_own_code_the_first_batch_is_checked(two: sg.MirroredStrategy) -> None:
    model = sg.Model(seen_by(nn.Linear(6, 4)), two)
    model.compile(sgd, nn.CrossEntropyLoss(), ["accuracy"])
    assert [checked(model) for _ in range(2)] == [1, 0]
    assert [checked(model, "evaluate"), checked(model, "predict")] == [1, 1]


def test_what_is_refused_is_refused_each_time(two: sg.MirroredStrategy) -> None:
    model = sg.Model(module := Seen(6, 4), two)
    model.compile(sgd, "cross_entropy")
    assert checked(model) == 3
    module.mixes = True
    for _ in range(3):
        with pytest.raises(NotDistributable, match="depend"):
            model.fit(*data(24 * 4), batch_size=24, verbose=0)
    module.mixes = False
    assert checked(model) == 1


def test_a_replica_that_joined_later_counts_as_the_chief(
    two: sg.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where shares are small the check is collective."""
    model = sg.Model(nn.Linear(6, 4), two)
    model.compile(sgd, own_loss)
    monkeypatch.setattr(row_check, "broadcast_tree", lambda collective, mine: 3)
    gathered: list[Any] = []
    monkeypatch.setattr(row_check, "gather_tree", lambda _, mine: gathered.append(mine) or [0, 0])
    joined = Mock(index=1, count=2, device=torch.device("cpu"))
    assert model.recipe is not None
    check = row_check.RowCheck(model.module, model.recipe, joined, "fit")
    for _ in range(2):
        check.before(Portion(*data(2), None, 2, 4))
    assert len(gathered) == 1 and model.recipe.schedule.passed == {"fit": 5}


# --- no trace -------------------------------------------------------------------------------------


class Remembering(nn.Module):
    """Writes in forward to all state that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = mlp(), nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.sizes = 0, []
        self.dice = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        self.seen += len(x)
        out: Tensor = self.norm(self.inner(x))
        with torch.no_grad():
            self.frozen.lerp_(out.mean(0), 0.5)
        if not hasattr(self, "first"):
            self.first = x
        return out + 0.01 * torch.randn(4, generator=self.dice) + random.random()


def test_a_dry_run_leaves_no_trace() -> None:
    module = Remembering()
    x = data(6)[0]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    dice = module.dice.get_state(), torch.get_rng_state(), random.getstate()
    with dry_run(*module.modules()):
        module(x)
        assert module.calls == 1 and module.seen == 6 and module.norm.running_mean.any()
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert (module.calls, module.sizes, hasattr(module, "first")) == (0, [], False)
    assert torch.equal(module.dice.get_state(), dice[0])
    assert torch.equal(torch.get_rng_state(), dice[1]) and random.getstate() == dice[2]


def test_the_same_weights_as_without() -> None:
    """Without a generator in the module, which could not be sent to a replica."""
    x, y = data(36)
    with strategy(2) as two:
        ends = []
        for check in (True, False):
            torch.manual_seed(1)
            module = nn.Sequential(mlp(), nn.Dropout(0.2), nn.BatchNorm1d(4))
            model = sg.Model(module, two)
            model.compile("adam", "cross_entropy", ["accuracy"], check=check)
            history = model.fit(x, y, batch_size=12, epochs=2, verbose=0).history
            history.pop("examples_per_second")
            ends.append((model.module, history, torch.rand(())))
    assert distance(ends[0][0], ends[1][0]) == 0.0
    assert ends[0][1] == ends[1][1] and ends[0][2] == ends[1][2]


def test_what_is_fine_ends_as_on_one_device(three: sg.MirroredStrategy) -> None:
    x, y = data(37)
    model = sg.Model(mlp(), three)
    model.compile(sgd, "cross_entropy")
    model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    assert distance(by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=12), model.module) < 1e-6
