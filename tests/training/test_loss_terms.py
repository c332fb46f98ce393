"""What a loss is divided by: shares add up to the batch, or the loss is refused.

The replicas of these tests are readers in one process, whose numbers are added up here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import stratagem as sg
from stratagem.cluster.membership import Membership
from stratagem.training import custom_loop
from stratagem.training.custom_loop import LossReader
from stratagem.training.loss_reading import NOTES, largest
from stratagem.training.loss_terms import Doubt, terms_of
from stratagem.training.replica import Replica
from stratagem.wire.collective import Alone

Loss = Callable[[nn.Module, "Rows"], Tensor]
CLASSES = 4


class Rows:
    """Some rows of a batch: inputs, values, labels of which some are ignored, and a mask."""

    def __init__(self, count: int, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        kind = {"dtype": torch.float64, "generator": dice}
        self.x, self.v = torch.randn(count, 3, **kind), torch.randn(count, CLASSES, **kind)
        self.y = torch.randint(0, CLASSES, (count,), generator=dice)
        self.y[torch.rand(count, generator=dice) < 0.3] = -100
        self.mask = torch.rand(count, generator=dice) < 0.6

    def cut(self, start: int, end: int) -> Rows:
        part = object.__new__(Rows)
        for name, value in vars(self).items():
            setattr(part, name, value[start:end])
        return part


def _penalty(model: nn.Module) -> Tensor:
    return sum((p.pow(2).sum() for p in model.parameters()), torch.zeros(()))


WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
#: all of them means or sums over rows, by one count or another
TERMS: dict[str, Loss] = {
    "mse": lambda m, r: F.mse_loss(m(r.x), r.v),
    "mse of some": lambda m, r: F.mse_loss(m(r.x)[r.mask], r.v[r.mask]),
    "mse, summed": lambda m, r: F.mse_loss(m(r.x), r.v, reduction="sum"),
    "mean by hand": lambda m, r: (m(r.x) - r.v).abs().mean(),
    "rows first": lambda m, r: (m(r.x) - r.v).pow(2).mean(0).sum(),
    "rows last": lambda m, r: (m(r.x) - r.v).pow(2).sum(1).mean(),
    "sum by hand": lambda m, r: (m(r.x) * r.v).sum(),
    "batchmean": lambda m, r: F.kl_div(
        m(r.x).log_softmax(1), r.v.softmax(1), reduction="batchmean"
    ),
    "cross entropy": lambda m, r: F.cross_entropy(m(r.x), r.y),
    "class weights": lambda m, r: F.cross_entropy(m(r.x), r.y, weight=WEIGHTS),
    "smoothed": lambda m, r: F.cross_entropy(m(r.x), r.y, label_smoothing=0.2),
    "probabilities": lambda m, r: F.cross_entropy(m(r.x), r.v.softmax(1)),
    "picked": lambda m, r: (m(r.x) - r.v).pow(2)[r.mask].mean(),
    "masked": lambda m, r: ((m(r.x) - r.v).pow(2).mean(1) * r.mask).sum() / r.mask.sum(),
    "in a list": lambda m, r: torch.stack([m(r.x).mean(), m(r.x).pow(2).mean()]).sum(),
    "logits": lambda m, r: F.binary_cross_entropy_with_logits(m(r.x), r.v.sigmoid()),
    "smooth l1": lambda m, r: F.smooth_l1_loss(m(r.x), r.v),
    "divided, then summed": lambda m, r: ((m(r.x) - r.v).pow(2).mean(1) / len(r.x)).sum(),
    "masked, then summed": lambda m, r: (m(r.x).abs().mean(1) * r.mask / r.mask.sum()).sum(),
    "by the mean of a mask": lambda m, r: (
        (m(r.x).abs().mean(1) * r.mask).mean() / r.mask.double().mean()
    ),
    "times one by a mask": lambda m, r: (
        (m(r.x).abs().mean(1) * r.mask).sum() * (1 / r.mask.double().sum())
    ),
    "columns": lambda m, r: ((m(r.x) - r.v).pow(2).mean(0) * WEIGHTS).sum(),
    "a list with weights": lambda m, r: (
        torch.stack([m(r.x).abs().mean(), m(r.x).pow(2).mean()]) * WEIGHTS[:2]
    ).sum(),
    "one column": lambda m, r: (m(r.x) - r.v).pow(2).mean(0)[1],
    "picked by number": lambda m, r: (m(r.x) - r.v).pow(2)[r.mask.nonzero().flatten()].mean(),
    "of every class": lambda m, r: F.nll_loss(m(r.x).log_softmax(1), r.y.clamp(min=0)),
    "twice": lambda m, r: (q := F.cross_entropy(m(r.x), r.y, weight=WEIGHTS)) + 0.5 * q,
    "by a number of each row": lambda m, r: (m(r.x).abs().mean(1) / r.v.abs().sum(1)).mean(),
    "by weights": lambda m, r: (
        (m(r.x).abs().mean(1) * r.v[:, 0].exp()).sum() / r.v[:, 0].exp().sum()
    ),
    "margin": lambda m, r: F.multi_margin_loss(m(r.x), r.y.clamp(min=0)),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def gradients(net: nn.Module) -> list[Tensor]:
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in net.parameters()]
    net.zero_grad()
    return found


def in_shares(loss: Loss, batch: Rows, sizes: Sequence[int], readers: list[LossReader]) -> Any:
    """Compute the gradient as replicas with shares of these sizes do."""
    net, total = model(), sum(sizes)
    notes = torch.zeros(NOTES, dtype=torch.float64)
    added: list[Tensor] = [torch.zeros_like(p) for p in net.parameters()]
    start = 0
    for reader, size in zip(readers, sizes, strict=True):
        reader.share.set(size, total)
        rows = batch.cut(start, start + size) if size else batch.cut(0, 1)
        start += size
        value = loss(net, rows)
        reader.read([value], value.backward)
        weight = reader.share.weight
        for into, mine in zip(added, gradients(net), strict=True):
            into.add_(torch.nan_to_num(mine) if not weight else mine, alpha=weight)
        if weight:
            notes += weight * torch.tensor(reader.reading.notes(), dtype=torch.float64)
    (divisor,) = {reader.settle(notes.tolist()) for reader in readers}
    return [each / divisor for each in added], notes


def readers(count: int, reduction: str | None = None) -> list[LossReader]:
    made = [
        Replica(i, count, torch.device("cpu"), f"replica {i}", Alone(), Membership.alone())
        for i in range(count)
    ]
    kept.extend(made)
    found = [LossReader(each, reduction) for each in made]
    first: list[Any] = []

    def gather(told: Any) -> list[Any]:
        """Give all replicas the unit of the first that has rows."""
        if told[0] and not first:
            first.append(told)
        return [*first, [[], told[1]]] if first else [told]

    for reader in found:
        reader.gather = gather
        reader.prepared.serve(All.ours)
    return found


class All:
    """Every parameter is prepared."""

    ours: All

    def keep_earlier(self) -> None:
        return None

    def has(self, param: Tensor) -> bool:
        return True


All.ours = All()
kept: list[Replica] = []


def compare(loss: Loss, batch: Rows, sizes: Sequence[int], by: list[LossReader]) -> None:
    net = model()
    loss(net, batch).backward()
    expected = gradients(net)
    found, notes = in_shares(loss, batch, sizes, by)
    divisor = float(notes[0])
    for mine, theirs in zip(expected, found, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-9, atol=1e-12, msg=f"divided by {divisor}")


@given(
    names=st.lists(st.sampled_from(sorted(TERMS)), min_size=1, max_size=3),
    scale=st.sampled_from([1.0, 0.3, -3.0]),
    penalty=st.booleans(),
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(lambda s: sum(s) > 1),
    seed=st.integers(0, 50),
)
def test_shares_add_up_to_the_batch_or_the_loss_is_refused(
    names: list[str], scale: float, penalty: bool, sizes: list[int], seed: int
) -> None:
    batch = Rows(sum(sizes), seed)
    if not (batch.y != -100).any() or not batch.mask.any():
        return  # nothing to divide by on one device, either

    def loss(net: nn.Module, rows: Rows) -> Tensor:
        value = sum((scale * TERMS[name](net, rows) for name in names), torch.zeros(()))
        return value + 0.1 * _penalty(net) if penalty else value

    by = readers(len(sizes))
    try:
        compare(loss, batch, sizes, by)
        compare(loss, batch, sizes, by)  # with what replicas have learned of the first pass
    except sg.NotDistributable as refusal:
        assert len(set(names)) > 1, f"{names} is refused: {refusal}"


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("sizes", [(5, 5), (4, 3, 1), (1, 0, 1)])
def test_each_loss_by_itself_is_exact(name: str, sizes: tuple[int, ...]) -> None:
    by = readers(len(sizes))
    for turn in range(7):  # from the fifth on a usual loss is read at once
        batch = Rows(sum(sizes), 3 + turn)
        batch.y[0], batch.mask[:: 1 if turn else sum(sizes)] = 1, True
        compare(TERMS[name], batch, sizes, by)


@pytest.mark.parametrize("name", ["masked", "masked, then summed"])
def test_a_share_of_which_no_row_counts_adds_nothing(name: str) -> None:
    batch, by = Rows(7, 3), readers(2)
    for mask in (batch.mask.clone(), torch.arange(7) < 4):
        batch.mask[:] = mask
        compare(TERMS[name], batch, (4, 3), by)


@pytest.mark.parametrize("usual", ["mse", "cross entropy"])
def test_a_usual_loss_is_read_in_full_ever_less(
    usual: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: list[int] = []

    def noting(*args: Any, **options: Any) -> Any:
        full.append(by[0].passes)
        return terms_of(*args, **options)

    monkeypatch.setattr(custom_loop, "terms_of", noting)
    by, sizes = readers(2), (4, 3)
    for turn in range(33):
        compare(TERMS[usual], Rows(7, turn), sizes, by)
    assert full[::2] == [1, 2, 3, 4, 8, 16, 32]
    for name in TERMS:  # another one is right or refused, whatever came before
        batch = Rows(7, 5)
        batch.y[0], batch.mask[0] = 1, True
        with suppress(sg.NotDistributable):
            compare(TERMS[name], batch, sizes, by)
        compare(TERMS[usual], batch, sizes, by)
    mixed = lambda m, r: F.mse_loss(m(r.x) - m(r.x).mean(0), r.v)  # noqa: E731
    if usual == "mse":
        with pytest.raises(sg.NotDistributable, match="compares rows"):
            for _ in range(2 * by[0].passes):
                in_shares(mixed, Rows(7, 5), sizes, by)


def test_half_of_the_rows_that_weigh_twice_are_no_usual_loss() -> None:
    by, twice = readers(2), torch.full((CLASSES,), 2.0, dtype=torch.float64)

    def half(net: nn.Module, rows: Rows) -> Tensor:
        return F.cross_entropy(net(rows.x)[:2], rows.y[:2], weight=twice)

    for turn in range(9):
        batch = Rows(8, turn)
        batch.y[:] = 1
        compare(TERMS["cross entropy"], batch, (4, 4), by)
    with pytest.raises(sg.NotDistributable, match="by their place"):
        in_shares(half, batch, (4, 4), by)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda m, r: F.mse_loss(m(r.x), r.v).sqrt(), r"a function \(sqrt\)"),
        (lambda m, r: F.mse_loss(m(r.x), r.v).exp(), r"a function \(exp\)"),
        (lambda m, r: torch.linalg.norm(m(r.x) - r.v), "a function"),
        (lambda m, r: (m(r.x) - r.v).std(), "a function"),
        (lambda m, r: F.mse_loss(m(r.x), r.v) / m(r.x).pow(2).mean(), "product or a quotient"),
        (lambda m, r: m(r.x).pow(2).sum() / 7, "divided by 7"),
        (lambda m, r: m(r.x).pow(2).sum() / 10, "divided by 10"),
        (lambda m, r: m(r.x).pow(2).sum() * (1 / 5), "divided by 5"),
        (lambda m, r: m(r.x).pow(2).sum() * (0.5 / 5), "divided by 10"),
        (lambda m, r: (m(r.x) - r.v).pow(2).mean(0).sqrt().sum(), r"a function \(sqrt\)"),
        (lambda m, r: m(r.x).pow(2).mean(0).clamp(min=0.1).sum(), r"a function \(clamp"),
        (lambda m, r: F.mse_loss(m(r.x).mean(0), r.v.mean(0)), "a function of a sum or mean"),
        (lambda m, r: (m(r.x) - m(r.x).mean(0)).pow(2).mean(), "compares rows with"),
        (lambda m, r: (m(r.x) / m(r.x).norm()).sum(), "compares rows with"),
        (lambda m, r: (m(r.x) - r.v).abs().mean(1).topk(2).values.mean(), "ranks the rows"),
        (lambda m, r: sum(F.mse_loss(m(r.x)[i], r.v[i]) for i in range(5)) / 5, "by their place"),
        (lambda m, r: (m(r.x) - r.v)[:2].pow(2).mean(), "by their place"),
        (lambda m, r: F.mse_loss(m(r.x)[:, :1], r.v[:, 0]), "every row meets every other"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_is_no_mean_over_rows_is_refused(loss: Loss, why: str) -> None:
    for reader in readers(2):
        reader.share.set(5, 10)
        value = loss(model(), Rows(5, 0))
        with pytest.raises(sg.NotDistributable, match=why):
            reader.read([value], value.backward)


def test_a_penalty_on_weights_is_no_sum_over_rows() -> None:
    net = model()
    weight = next(net.parameters())
    like, square = torch.randn_like(weight), torch.eye(5, dtype=torch.float64)
    for value in (
        _penalty(net),
        weight.norm(),
        (weight - 1).pow(2).mean().sqrt(),
        (like * (weight - like) ** 2).sum(),
        (weight - like).norm() ** 2,
        ((weight @ weight.T - square) ** 2).sum(),
        (weight * (like > 0)).abs().sum(),
    ):
        assert {term.kind for term in terms_of(value, 4, 8).terms} == {"fixed"}
    kinds = [t.kind for t in terms_of(F.mse_loss(net(Rows(4, 0).x), Rows(4, 0).v), 4, 8).terms]
    assert kinds == ["mean"]


def test_what_was_said_is_not_doubted() -> None:
    batch, sizes = Rows(10, 0), (6, 4)
    compare(lambda m, r: m(r.x).pow(2).sum() / 7, batch, sizes, readers(2, "sum"))
    with pytest.raises(Doubt):
        terms_of(model()(batch.x).pow(2).sum() / 7, 6, 10)


def test_losses_of_two_counts_are_refused_by_all_replicas() -> None:
    batch, by = Rows(10, 1), readers(2)
    with pytest.raises(
        sg.NotDistributable, match=r"different counts.*backward\(loss, count=tasks\)"
    ):
        in_shares(lambda m, r: TERMS["cross entropy"](m, r) + TERMS["mse"](m, r), batch, (5, 5), by)


def test_a_factor_that_replicas_have_otherwise_is_refused() -> None:
    """The load of each expert, as this share sees it, by its mean gate."""
    by, batch = readers(2), Rows(10, 1)
    first = by[0].gather

    def both(told: Any) -> list[Any]:
        return [*first(told), told]

    for reader in by:
        reader.gather = both
    with pytest.raises(sg.NotDistributable, match="another one on each replica"):
        in_shares(lambda m, r: (m(r.x).mean(0) * r.v.mean(0)).sum(), batch, (5, 5), by)


def test_more_terms_than_python_nests_calls() -> None:
    weight = nn.Parameter(torch.ones(2))
    value = sum((weight.pow(2).sum() for _ in range(1500)), torch.zeros(()))
    assert len(terms_of(value, 4, 8).terms) == 1500


@pytest.mark.parametrize("loss", [lambda d: d.T.mean(0).mean(), lambda d: d.T.sum(0).mean()])
def test_another_axis_than_the_first_may_be_that_of_the_rows(loss: Any) -> None:
    compare(lambda m, r: loss((m(r.x) - r.v).pow(2)), Rows(8, 2), (5, 3), readers(2))


def test_marks_that_were_apart_in_one_of_several_passes_are_told() -> None:
    """On a GPU, notes of several passes are looked at together."""
    apart = torch.tensor([1.0, 0.0, 0.2, 0.05, 0.0])  # marks 0.1 and 0.3
    alike = torch.tensor([1.0, 0.0, 0.75, 0.5625, 0.0])
    (reader,) = readers(1)
    reader.settle(largest(alike, largest(alike, None)).tolist())
    with pytest.raises(sg.NotDistributable, match="differ in form"):
        reader.settle(largest(alike, largest(apart, None)).tolist())
