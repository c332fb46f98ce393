"""The metric "accuracy" takes the most probable class if the loss is a cross entropy."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stratagem as sg
from tests.support import data, mlp, strategy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", params=[1, 2, 3])
def some(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    made = strategy(request.param)
    yield made
    made.close()


def by_hand(module: nn.Module, x: Tensor, classes: Tensor) -> float:
    """Return the accuracy for classes (rows, ...) and outputs (rows, classes, ...)."""
    with torch.no_grad():
        return float((module(x).argmax(1) == classes).float().mean())


def measured(module: nn.Module, some: sg.Strategy, loss: object) -> sg.Model:
    model = sg.Model(copy.deepcopy(module), some)
    model.compile("adam", loss, ["accuracy"])
    return model


def soft(y: Tensor) -> Tensor:
    """Return class probabilities as from mixup, where the largest may be below one half."""
    dice = torch.Generator().manual_seed(1)
    others = torch.randint(0, 4, y.shape, generator=dice)
    return 0.45 * F.one_hot(y, 4) + 0.3 * F.one_hot(others, 4) + 0.0625


@pytest.mark.parametrize("loss", ["cross_entropy", nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_probabilities_and_classes_on_the_same_model(some: sg.Strategy, loss: object) -> None:
    x, y = data(37)
    right = by_hand(mlp(), x, y)
    targets = [F.one_hot(y, 4).float(), y, soft(y), y]
    for order in (targets, targets[1:]):
        model = measured(mlp(), some, loss)
        found = [model.evaluate(x, target, batch_size=8)["accuracy"] for target in order]
        assert found == pytest.approx([right] * len(order), abs=1e-6)


def test_fit_counts_the_most_probable_class(some: sg.Strategy) -> None:
    """`fit` counts the outputs before each step, as in a loop by hand."""
    x, y = data(37)
    hand = mlp()
    optimizer = torch.optim.Adam(hand.parameters())
    right = 0.0
    for start in range(0, 37, 8):
        rows = slice(start, start + 8)
        output = hand(x[rows])
        right += float((output.argmax(1) == y[rows]).sum())
        F.cross_entropy(output, F.one_hot(y[rows], 4).float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = measured(mlp(), some, "cross_entropy")
    one_hot = F.one_hot(y, 4).float()
    history = model.fit(
        x, one_hot, batch_size=8, shuffle=False, verbose=0, validation_data=(x, one_hot)
    ).history
    assert history["accuracy"] == pytest.approx([right / 37], abs=1e-6)
    assert history["val_accuracy"] == pytest.approx([by_hand(hand, x, y)], abs=1e-6)


def test_probabilities_for_each_position(some: sg.Strategy) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(13, 5, 6), torch.randint(0, 4, (13, 6))
    net = nn.Conv1d(5, 4, 1)
    model = measured(net, some, "cross_entropy")
    for target in (F.one_hot(y, 4).float().transpose(1, 2), y):
        found = model.evaluate(x, target, batch_size=4)["accuracy"]
        assert found == pytest.approx(by_hand(net, x, y), abs=1e-6)


def test_several_labels_of_an_example_are_counted_each(some: sg.Strategy) -> None:
    x, _ = data(37)
    labels = (torch.rand(37, 4, generator=torch.Generator().manual_seed(2)) < 0.4).float()
    with torch.no_grad():
        right = float(((mlp()(x) > 0) == (labels > 0)).float().mean())
    model = measured(mlp(), some, "binary_cross_entropy_with_logits")
    assert model.evaluate(x, labels, batch_size=8)["accuracy"] == pytest.approx(right, abs=1e-6)


LOSSES = {"by name": -100, "of a module": 255, "a class that is ignored": 1}


@pytest.mark.parametrize("loss", list(LOSSES))
def test_ignored_targets_do_not_count(some: sg.Strategy, loss: str) -> None:
    torch.manual_seed(0)
    ignored = LOSSES[loss]
    x, y = torch.randn(13, 5, 6), torch.randint(0, 4, (13, 6))
    y[:, 4:] = ignored
    y[3:7] = ignored  # shares of nothing else
    net = nn.Conv1d(5, 4, 1)
    with torch.no_grad():
        right = float((net(x).argmax(1) == y)[y != ignored].float().mean())
    plain = loss == "by name"
    model = measured(
        net, some, "cross_entropy" if plain else nn.CrossEntropyLoss(ignore_index=ignored)
    )
    assert model.evaluate(x, y, batch_size=6)["accuracy"] == pytest.approx(right, abs=1e-6)
    history = model.fit(x, y, batch_size=13, verbose=0).history
    assert history["accuracy"] == pytest.approx([right], abs=1e-6)
    logs = measured(
        nn.Sequential(net, nn.LogSoftmax(1)), some, nn.NLLLoss(ignore_index=ignored)
    ).evaluate(x, y, batch_size=6)
    assert logs["accuracy"] == pytest.approx(right, abs=1e-6)


def test_classes_that_come_last_are_refused(some: sg.Strategy) -> None:
    """Outputs (rows, positions, classes), as of a language model, are refused."""
    torch.manual_seed(0)
    x, y = torch.randn(13, 6, 5), torch.randint(0, 4, (13, 6))
    model = measured(
        nn.Linear(5, 4), some, lambda output, target: F.cross_entropy(output.mT, target)
    )
    with pytest.raises(sg.UsageError, match=r'"accuracy".*second.*\(\d+, 6, 4\).*a function'):
        model.evaluate(x, y, batch_size=6)
