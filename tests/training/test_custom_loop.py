"""Custom loops on real replicas: their calls, warnings and refusals."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import stratagem as sg
from tests.support import cpus, data, distance, mlp, moved, strategy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def fresh() -> Iterator[sg.MirroredStrategy]:
    """Replicas that have warned of nothing yet."""
    with closing(strategy(2)) as made:
        yield made


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# --- strategy.backward --------------------------------------------------------------------------


def root_of_the_mean(on: sg.Strategy | None, *, says: bool) -> nn.Module:
    """A loss of several counts: the valid targets, and the rows."""
    x, y = data(53)
    y[::3] = -100
    model = mlp()
    optimizer = sgd(model)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=10)
    if on is not None:
        model, optimizer, loader = on.prepare(model, optimizer, loader)
    for a, b in loader:
        output = model(a)
        by_target, by_row = F.cross_entropy(output, b), output.pow(2).mean()
        if on is not None and says:
            on.backward(by_target, count=(b != -100).sum(), retain_graph=True)
            on.backward(by_row, count=len(a))
        else:
            (by_target + by_row).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_terms_of_several_counts_are_exact_if_each_is_declared(three: sg.MirroredStrategy) -> None:
    expected = root_of_the_mean(None, says=False)
    assert moved(expected, mlp())
    for trained in three.run(lambda: root_of_the_mean(three, says=True)):
        assert distance(trained, expected) < 1e-6
    with pytest.raises(sg.NotDistributable, match="divided by different counts"):
        three.run(lambda: root_of_the_mean(three, says=False))


def test_one_device_needs_no_count() -> None:
    with closing(strategy(1)) as one:
        trained = root_of_the_mean(one, says=True)
    assert distance(trained, root_of_the_mean(None, says=False)) < 1e-6


def test_a_model_without_its_optimizer_is_told() -> None:
    loader: Any = DataLoader(TensorDataset(*data(12)), batch_size=6)
    with closing(strategy(1)) as one, pytest.raises(sg.UsageError, match=r"to evaluate, prepare\("):
        one.prepare(mlp(), loader)


# --- no loader, and parts of one ----------------------------------------------------------------


def by_hand_cut(on: sg.Strategy | None, how: str) -> nn.Module:
    x, y = data(70 if how == "slices" else 72)  # of the last two rows a third replica has none
    model = mlp()
    optimizer = sgd(model)
    if on is not None:
        model, optimizer, _ = on.prepare(model, optimizer)
    replica = sg.current_replica()
    for start in range(0, len(x), 7):
        batch = x[start : start + 7], y[start : start + 7]
        if on is not None and how == "rows":
            batch = on.rows(batch)
        elif on is not None and how == "slices":
            batch = tuple(t[replica.index :: replica.count] for t in batch)
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("how", ["rows", "slices", "all"])
def test_batches_without_a_loader(how: str, three: sg.MirroredStrategy) -> None:
    expected = by_hand_cut(None, how)
    assert moved(expected, mlp())
    for trained in three.run(by_hand_cut, three, how):
        assert distance(trained, expected) < 1e-6


@pytest.mark.parametrize(
    ("how", "told"),
    [("all", "does the whole of the work"), ("slices", "counts 2 batches as one"), ("rows", "")],
)
def test_a_loop_without_a_loader_is_told_once(
    how: str, told: str, fresh: sg.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.run(by_hand_cut, fresh, how)
    said = [record.getMessage() for record in caplog.records if "no batch was cut" in record.msg]
    assert len(said) == bool(told)
    assert all(told in each and "strategy.rows" in each for each in said)


def test_batches_in_a_list_were_cut_and_dropout_is_no_other_data(
    fresh: sg.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = data(12)

    def train(how: str) -> None:
        model = nn.Sequential(nn.Dropout(0.5), mlp())
        model, _, loader = fresh.prepare(
            model, sgd(model), DataLoader(TensorDataset(x, y), batch_size=6)
        )
        for a, b in list(loader) if how == "list" else [(x, y)]:
            F.cross_entropy(model(a), b).backward()

    fresh.run(train, "list")
    assert "no batch was cut" not in caplog.text
    fresh.run(train, "whole")
    assert "the same rows and other dropout" in caplog.text


def first_batches(on: sg.Strategy | None) -> nn.Module:
    x, y = data(3)
    model = mlp()
    optimizer = sgd(model)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=3)
    if on is not None:
        model, optimizer, _ = on.prepare(model, optimizer)
        loader = on.prepare(loader)
    for _ in range(4):
        a, b = next(iter(loader))
        model(a).gather(1, b[:, None]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_the_first_batch_of_a_loader_by_itself_keeps_its_shares(two: sg.MirroredStrategy) -> None:
    expected = first_batches(None)
    assert moved(expected, mlp())
    for trained in two.run(first_batches, two):
        assert distance(trained, expected) < 1e-6


# --- replicas that come apart -------------------------------------------------------------------


def decide(on: Any, by: str) -> float:
    """A schedule that halves the rate when the loss is high."""
    x, y = data(40)
    x[:20] *= 5  # other losses on the first replica
    model = mlp()
    optimizer = sgd(model)
    model, optimizer, loader = on.prepare(
        model, optimizer, DataLoader(TensorDataset(x, y), batch_size=40)
    )
    for _ in range(3):
        for a, b in loader:
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            seen = on.mean(loss) if by == "mean" else float(loss.detach())
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * seen
            optimizer.step()
            optimizer.zero_grad()
    return float(optimizer.param_groups[0]["lr"])


def test_replicas_that_decide_by_their_own_loss_are_refused(two: sg.MirroredStrategy) -> None:
    with pytest.raises(sg.UsageError, match=r"come apart from .*lr of the optimizer.*mean\(loss"):
        two.run(decide, two, "own")
    first, second = two.run(decide, two, "mean")
    assert first == second


@pytest.mark.parametrize("when", ["never", "before", "after", "accumulated", "at the step"])
def test_a_hook_on_a_parameter_is_told_of(
    when: str, two: sg.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = data(12)

    def train(on: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer, last = sgd(model), list(model.parameters())[-1]
        limit = lambda grad: grad.clamp(-0.01, 0.01)  # noqa: E731
        if when == "before":
            last.register_hook(limit)
        if when == "accumulated":
            last.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", limit(p.grad)))
        if when == "at the step":
            optimizer.register_step_pre_hook(lambda *_: setattr(last, "grad", limit(last.grad)))
        model, optimizer, loader = on.prepare(model, optimizer, DataLoader(TensorDataset(x, y), 6))
        if when == "after":
            last.register_hook(limit)
        for a, b in loader:
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    two.run(train, two)
    told = [each for each in caplog.messages if "has a hook" in each]
    assert len(told) == (when in ("before", "after", "accumulated"))


@pytest.mark.parametrize("ignored", [False, True])
def test_the_mean_is_that_of_the_batch(ignored: bool, three: sg.MirroredStrategy) -> None:
    x, y = data(11)
    if ignored:
        y[:6] = -100
    expected = float(F.cross_entropy(mlp()(x), y))

    def ask() -> list[float]:
        loader = DataLoader(TensorDataset(x, y), batch_size=11)
        model = mlp()
        model, _, loader = three.prepare(model, sgd(model), loader)
        means = []
        for a, b in loader:
            loss = F.cross_entropy(model(a), b)
            means.append(three.mean(loss))
            means.append(three.mean(loss.item(), count=(b != -100).sum()))
            loss.backward()
            means.append(three.mean(loss))
            means.append(three.mean(F.cross_entropy(model(a), b, reduction="sum")) / counted)
        return means

    counted = int((y != -100).sum())
    for means in three.run(ask):
        assert means == pytest.approx([expected] * 4, rel=1e-6)


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_gather_has_every_row_once(replicas: int, request: pytest.FixtureRequest) -> None:
    """The last of 19 rows is a batch of its own, and all replicas but one borrow it."""
    on = request.getfixturevalue({2: "two", 3: "three"}[replicas])
    x, y = data(19)

    def seen() -> list[list[float]]:
        model = mlp()
        train = DataLoader(TensorDataset(x, y), batch_size=6)
        model, _, train = on.prepare(model, sgd(model), train)
        test = on.prepare(DataLoader(TensorDataset(x, y), batch_size=6))
        in_training = [on.gather(a[:, 0]) for a, _ in train]
        in_loop, kept, sums = [], [], []
        for a, _ in test:
            in_loop.append(on.gather(a[:, :1].T, axis=1)[0])
            kept.append(a[:, 0])
            sums.append(float(on.reduce("sum", a[:, 0], axis=0)))
        assert sum(sums) == pytest.approx(float(x[:, 0].sum()), abs=1e-5)
        number = torch.tensor([float(sg.current_replica().index)])
        assert on.gather(number).tolist() == [*range(replicas)]
        return [
            torch.cat(in_training).tolist(),
            torch.cat(in_loop).tolist(),
            on.gather(torch.cat(kept)).tolist(),
        ]

    for in_training, in_loop, behind in on.run(seen):
        assert in_training == in_loop == x[:, 0].tolist()
        assert sorted(behind) == sorted(in_loop)


def kept_losses(on: sg.Strategy | None) -> list[float]:
    """The mean of each batch's loss, asked for a batch later; of the last one, after the loader."""
    x, y = data(21)
    model = mlp()
    optimizer = sgd(model)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=8)
    if on is not None:
        model, optimizer, loader = on.prepare(model, optimizer, loader)
    mean: Any = float if on is None else on.mean
    means, before = [], None
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        if before is not None:
            means.append(mean(before))
        before = loss
        optimizer.step()
        optimizer.zero_grad()
    return [*means, mean(loss)]


def test_the_mean_of_a_loss_is_that_of_its_own_batch(
    two: sg.MirroredStrategy, three: sg.MirroredStrategy
) -> None:
    expected = kept_losses(None)
    for on in (two, three):
        for means in on.run(kept_losses, on):
            assert means == pytest.approx(expected, rel=1e-5)


def number_behind(on: sg.Strategy, rows: int, by_rows: bool) -> float:
    """A mean over this replica's rows of a whole loader, without a graph."""
    total = torch.zeros(2)
    for (a,) in on.prepare(DataLoader(TensorDataset(data(rows)[0]), batch_size=8)):
        mine = sg.current_replica().share.examples
        total += torch.tensor([float(a[:mine, 0].sum()), mine])
    value = float(total[0] / total[1])
    return on.mean(value, count=total[1]) if by_rows else on.mean(value)


def test_a_mean_behind_a_loader_within_a_loop_needs_a_count(two: sg.MirroredStrategy) -> None:
    def validated(rows: int, *, in_loop: bool) -> list[float]:
        found, model = [], mlp()
        model, optimizer, train = two.prepare(
            model, sgd(model), DataLoader(TensorDataset(*data(8)), batch_size=8)
        )
        test = two.prepare(DataLoader(TensorDataset(data(rows)[0]), batch_size=rows))
        for a, b in train:
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            for (c,) in test:
                value = c[:, 0].mean()
                found += [two.mean(value)] if in_loop else []
            found += [] if in_loop else [two.mean(value)]
            found.append(two.mean(loss))
        return found

    for rows, in_loop in ((8, False), (5, True)):
        for found in two.run(lambda: validated(rows, in_loop=in_loop)):  # noqa: B023
            assert found[0] == pytest.approx(float(data(rows)[0][:, 0].mean()), abs=1e-6)
    with pytest.raises(sg.UsageError, match=r"say strategy\.mean\(value, count=n\)"):
        two.run(lambda: validated(5, in_loop=False))


def test_a_mean_behind_a_loader_needs_a_count_where_shares_differ(
    two: sg.MirroredStrategy,
) -> None:
    assert two.run(number_behind, two, 21, True) == pytest.approx(
        [float(data(21)[0][:, 0].mean())] * 2
    )
    assert two.run(number_behind, two, 20, False) == pytest.approx(
        [float(data(20)[0][:, 0].mean())] * 2
    )
    with pytest.raises(sg.UsageError, match=r"after the end of a loader.*count=n"):
        two.run(number_behind, two, 21, False)


def test_the_mean_of_replicas_around_one_device_takes_a_count() -> None:
    def ask() -> float:
        index = sg.current_replica().index
        on.rows(torch.zeros(4, 1))
        return on.mean(float(index), count=1 + 2 * index)

    with sg.CentralStorageStrategy(cpus(2)) as on:
        assert on.run(ask) == [0.75] * 2


def test_a_model_that_one_replica_trains_for_itself(two: sg.MirroredStrategy) -> None:
    """One replica's own model before the first common step: it needs no agreement."""
    x, y = data(12)

    def train() -> float:
        model, probe = mlp(), mlp()
        prepared, optimizer, loader = two.prepare(
            model, sgd(model), DataLoader(TensorDataset(x, y), 6)
        )
        if sg.current_replica().is_chief:
            F.cross_entropy(probe(x), y).backward()
        for a, b in loader:
            F.cross_entropy(prepared(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(next(prepared.parameters()).sum())

    first, second = two.run(train)
    assert first == second


def own_model(on: sg.Strategy | None, when: str) -> nn.Module:
    """The weights of a model that is not prepared, trained on the chief besides the other."""
    x, y = data(28)
    model, probe = mlp(), mlp()
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=5)
    if on is not None:
        model, _, loader = on.prepare(model, sgd(model), loader)
    steps = torch.optim.SGD(probe.parameters(), lr=0.1)

    def train_probe() -> None:
        loss = F.cross_entropy(probe(x), y, reduction="sum" if when == "in the loop" else "mean")
        loss.backward()
        steps.step()
        steps.zero_grad()

    for a, b in loader:
        if on is not None:
            F.cross_entropy(model(a), b).backward()
        if when == "in the loop" and (on is None or on.is_chief):
            train_probe()
    if when == "behind it" and (on is None or on.is_chief):
        train_probe()
    return probe


@pytest.mark.parametrize("when", ["in the loop", "behind it"])
def test_the_gradients_of_another_model_are_its_own(when: str, two: sg.MirroredStrategy) -> None:
    expected = own_model(None, when)
    assert moved(expected, mlp())
    first, second = two.run(own_model, two, when)
    assert distance(first, expected) < 1e-6
    assert not moved(second, mlp())


@pytest.mark.parametrize("what", ["a layer", "a parameter", "frozen"])
def test_what_is_trained_and_not_prepared_is_refused_by_name(
    what: str, two: sg.MirroredStrategy
) -> None:
    def train() -> None:
        model, head = mlp(), nn.Linear(4, 4)
        scale = nn.Parameter(torch.ones(()))
        head.requires_grad_(what == "a layer")
        scale.requires_grad_(what == "a parameter")
        loader = DataLoader(TensorDataset(*data(9)), batch_size=4)
        model, _, loader = two.prepare(model, sgd(model), loader)
        for a, b in loader:
            F.cross_entropy(scale * head(model(a)), b).backward()

    if what == "frozen":
        two.run(train)
        return
    named = "parameter 'weight' of a Linear" if what == "a layer" else r"a parameter of shape \[\]"
    with pytest.raises(sg.UsageError, match=rf"prepare {named}, too"):
        two.run(train)


def test_rows_of_batches_that_replicas_shuffle_each_in_their_own_way(
    two: sg.MirroredStrategy,
) -> None:
    x, y = data(12)

    def train(*, alike: bool) -> None:
        model = mlp()
        two.prepare(model, sgd(model))
        for _ in range(3):
            order = torch.arange(12) if alike else torch.randperm(12)
            two.rows((x[order], y[order]))

    two.run(lambda: train(alike=True))  # a call of its own: the next one looks again
    with pytest.raises(sg.UsageError, match=r"another batch here.*one has drawn more"):
        two.run(lambda: train(alike=False))


def test_all_read_what_the_chief_has_written(two: sg.MirroredStrategy, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.pt"

    def train() -> int:
        if two.is_chief:
            time.sleep(0.2)
            torch.save(torch.arange(7), path)
        two.barrier()
        return len(torch.load(path))

    assert two.run(train) == [7, 7]


# --- random numbers -----------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Draws from the generators of Python, numpy and torch for every row."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))])


def test_rows_of_different_replicas_get_different_augmentations(two: sg.MirroredStrategy) -> None:
    def drawn(seed: int) -> Tensor:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        model = nn.Linear(3, 1)
        _, _, loader = two.prepare(model, sgd(model), DataLoader(Augmented(), batch_size=4))
        return torch.cat([part[: sg.current_replica().share.examples] for part in loader])

    first, second = two.run(drawn, 3)
    for column in range(3):
        assert len({*first[:, column].tolist(), *second[:, column].tolist()}) == 8
    again = two.run(drawn, 3)
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])  # all by the seeds


# --- what people see ----------------------------------------------------------------------------


def evaluate(on: sg.Strategy, *, adds_up: bool) -> None:
    x, y = data(21)
    test = on.prepare(DataLoader(TensorDataset(x, y), batch_size=8))
    right = torch.zeros(())
    for _, b in test:
        right += (b == 1).sum()
    if adds_up:
        on.reduce("sum", right)


@pytest.mark.parametrize("adds_up", [False, True])
def test_an_evaluation_that_is_not_added_up_is_told(
    adds_up: bool, fresh: sg.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.run(lambda: evaluate(fresh, adds_up=adds_up))
    assert ("a loader of 21 rows was read in shares" in caplog.text) is not adds_up


@pytest.mark.parametrize("how", ["mean", "gather", "every other"])
def test_an_evaluation_that_combines_each_batch_is_told_nothing(
    how: str, fresh: sg.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = data(5)
    model = mlp()

    def test() -> float:
        total = 0.0
        loader = fresh.prepare(DataLoader(TensorDataset(x, y), batch_size=2))
        with torch.no_grad():
            for i, (a, b) in enumerate(loader):
                loss = F.cross_entropy(model(a), b, reduction="none")
                if how == "mean":  # batches of 2, 2 and 1 rows
                    total += fresh.mean(loss.mean()) * min(2, 5 - 2 * i)
                elif how == "gather":
                    total += float(fresh.gather(loss).sum())
                elif i % 2:
                    fresh.mean(loss.mean())
        return total

    total = fresh.run(test)[0]
    with torch.no_grad():
        alone = float(F.cross_entropy(model(x), y, reduction="sum"))
    assert how == "every other" or total == pytest.approx(alone, rel=1e-5)
    assert ("read in shares" in caplog.text) is (how == "every other")


@pytest.mark.parametrize("taken", [iter, list])
def test_training_on_a_loader_by_itself_is_no_evaluation(
    taken: Any, fresh: sg.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        model = mlp()
        x, y = data(20)
        model, optimizer, _ = fresh.prepare(model, sgd(model))
        for a, b in taken(fresh.prepare(DataLoader(TensorDataset(x, y), batch_size=5))):
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()

    fresh.run(train)
    assert "read in shares" not in caplog.text and "no batch was cut" not in caplog.text


def test_an_evaluation_before_training_is_told(
    fresh: sg.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        model = mlp()
        x, y = data(20)
        loader: Any = DataLoader(TensorDataset(x, y), batch_size=5)
        model, optimizer, loader = fresh.prepare(model, sgd(model), loader)
        evaluate(fresh, adds_up=False)
        for a, b in loader:
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()

    fresh.run(train)
    assert "a loader of 21 rows was read in shares" in caplog.text


def test_a_model_without_its_optimizer(two: sg.MirroredStrategy) -> None:
    with pytest.raises(sg.UsageError, match=r"for a loop without one, torch\.optim\.SGD\("):
        two.run(lambda: two.prepare(mlp(), None))  # type: ignore[call-overload]


def test_a_share_of_one_row_is_explained(two: sg.MirroredStrategy) -> None:
    def train() -> None:
        model = nn.Linear(6, 1)
        loader = DataLoader(TensorDataset(*data(9)), batch_size=3)
        model, _, loader = two.prepare(model, sgd(model), loader)
        for a, b in loader:
            assert model(a).squeeze().shape == b.shape

    with pytest.raises(sg.ReplicaFailed, match=r"1 of this batch's 3 rows here(.|\n)*squeeze\(1\)"):
        two.run(train)


def test_printing_once(two: sg.MirroredStrategy, capfd: pytest.CaptureFixture[str]) -> None:
    two.run(lambda: two.print("an epoch", "is over", sep=": "))
    assert capfd.readouterr().out == "an epoch: is over\n"


def test_replicas_that_save_to_one_path_leave_a_whole_file(
    three: sg.MirroredStrategy, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"

    def save() -> int:
        model = nn.Linear(300, 300)
        model, _, _ = three.prepare(model, sgd(model))
        read = 0
        for _ in range(15):
            torch.save(model.state_dict(), path)
            read += len(torch.load(path, weights_only=True)["weight"])  # whoever writes meanwhile
        return read

    assert three.run(save) == [15 * 300] * 3
    assert [each.name for each in tmp_path.iterdir()] == ["model.pt"]


def test_batchnorm_over_shares_is_told(
    fresh: sg.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> None:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        fresh.prepare(model, sgd(model))

    fresh.run(train)
    assert caplog.text.count("sync_batchnorm=True normalises over the batch") == 1


def test_a_forward_outside_of_the_loop_counts_its_rows_once() -> None:
    """With the same rows on all replicas the variance is that of one device."""
    x = data(5)[0].double()

    def warm_up(on: sg.Strategy | None) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
        if on is not None:
            on.prepare(model, sgd(model))
        model(x)
        var: Any = model[1].running_var
        return var.clone()  # type: ignore[no-any-return]

    with closing(strategy(2, sync_batchnorm=True)) as two:
        for found in two.run(warm_up, two):
            torch.testing.assert_close(found, warm_up(None), rtol=1e-12, atol=0)


def test_fit_is_not_read(two: sg.MirroredStrategy) -> None:
    """A model that was prepared before stays prepared; steps of `fit` are not steps of its loop."""
    x, y = data(20)

    def loop() -> nn.Module:
        model = mlp()
        model, _, _ = two.prepare(model, sgd(model))
        return model

    kept = two.run(loop)[0]
    with two.scope():
        model = sg.Model(mlp())
        model.compile(
            optimizer=lambda p: torch.optim.SGD(p, lr=0.01), loss=nn.MSELoss(reduction="sum")
        )
    target = F.one_hot(y, 4).float()
    model.fit(x, target, batch_size=7, epochs=1, shuffle=False, verbose=0)
    alone = mlp()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    for a, b in zip(x.split(7), target.split(7), strict=True):
        F.mse_loss(alone(a), b, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(model.module, alone) < 1e-5 and moved(alone, mlp()) and kept is not None


def test_whole_batches_may_have_any_loss() -> None:
    """Asynchronous workers have whole batches, so nothing has to be divided."""

    def train(on: sg.Strategy | None) -> nn.Module:
        x, y = data(40)
        model = mlp()
        optimizer = sgd(model)
        loader: Any = DataLoader(TensorDataset(x, y), batch_size=10)
        if on is not None:
            model, optimizer, loader = on.prepare(model, optimizer, loader)
        for a, b in loader:
            F.cross_entropy(model(a), b).sqrt().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    cluster = sg.LocalCluster(workers=1, ps=1)
    made = sg.ParameterServerStrategy(cluster, updates=sg.Asynchronous(), devices="cpu:0")
    with closing(made) as one:
        trained = one.run(train, one)[0]
    assert distance(trained, train(None)) < 1e-6 and moved(trained, mlp())


# --- gradients that add up over passes ----------------------------------------------------------


def accumulated(on: sg.Strategy | None, forget: bool) -> nn.Module:
    """Only shares of the second replica have a row that does not count."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(3, 4).double()
    x, v = torch.randn(64, 3).double(), torch.randn(64, 4).double()
    counts = torch.arange(64) % 16 != 14
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(x, counts, v), batch_size=8)
    if on is not None:
        model, optimizer, loader = on.prepare(model, optimizer, loader)
    for i, (a, count, b) in enumerate(loader):
        F.mse_loss(model(a)[count], b[count]).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
        elif forget:
            next(model.parameters()).grad = None
    return model


@pytest.mark.parametrize("forget", [False, True])
def test_a_mask_on_one_replica_while_gradients_add_up(
    forget: bool, two: sg.MirroredStrategy
) -> None:
    expected = accumulated(None, forget)
    for trained in two.run(accumulated, two, forget):
        assert distance(trained, expected) < 1e-12
