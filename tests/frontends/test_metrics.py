"""Collections of metrics become their members."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

import stratagem as sg
from tests.support import data, mlp, strategy


@pytest.fixture(scope="module", params=[1, 2])
def some(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    made = strategy(request.param)
    yield made
    made.close()


def collection() -> torchmetrics.MetricCollection:
    """Two that share their state (a compute group), one with another."""
    return torchmetrics.MetricCollection(
        {"acc": MulticlassAccuracy(4), "f1": MulticlassF1Score(4), "auroc": MulticlassAUROC(4)},
        prefix="my_",
    )


NAMES = ["my_acc", "my_f1", "my_auroc"]
FORMS: dict[str, Any] = {
    "itself": (collection, NAMES),
    "in a list": (lambda: [collection()], NAMES),
    "in a dict": (lambda: {"all": collection()}, [f"all_{name}" for name in NAMES]),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", list(FORMS))
def test_a_collection_becomes_its_members(some: sg.Strategy, form: str) -> None:
    x, y = data(37)
    make, names = FORMS[form]
    model = sg.Model(mlp(), some)
    model.compile("sgd", "cross_entropy", make())
    history = model.fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(x, y)
    ).history
    results = model.evaluate(x, y, batch_size=8)
    reference = collection()
    with torch.no_grad():
        reference.update(model.module(x), y)
    expected = [float(reference.compute()[name]) for name in NAMES]
    assert set(results) == {"loss", *names}
    assert [results[name] for name in names] == pytest.approx(expected, abs=1e-6)
    assert [history[f"val_{name}"][-1] for name in names] == pytest.approx(expected, abs=1e-6)
    assert all(len(history[name]) == 2 for name in names)


@pytest.mark.timeout(60)
def test_a_collection_of_classes_and_a_name(some: sg.Strategy) -> None:
    x, y = data(37)
    both = torchmetrics.MetricCollection(
        [MulticlassAccuracy(4, average="micro"), MulticlassF1Score(4)]
    )
    model = sg.Model(mlp(), some)
    model.compile("sgd", "cross_entropy", [both, "accuracy"])
    results = model.evaluate(x, y, batch_size=8)
    assert set(results) == {"loss", "MulticlassAccuracy", "MulticlassF1Score", "accuracy"}
    assert results["MulticlassAccuracy"] == pytest.approx(results["accuracy"])


@pytest.mark.timeout(60)
def test_a_collection_that_was_used_before(some: sg.Strategy) -> None:
    """Its members share one state by then: each must still count every example once."""
    x, y = data(37)
    used = collection()
    with torch.no_grad():
        for i in (0, 10):
            used.update(mlp()(x[i : i + 10]), y[i : i + 10])
        used.compute()
        expected = copy.deepcopy(used)
        expected.reset()
        expected.update(mlp()(x), y)
    model = sg.Model(mlp(), some)
    model.compile("sgd", "cross_entropy", used)
    results = model.evaluate(x, y, batch_size=8)
    for name, value in expected.compute().items():
        assert results[name] == pytest.approx(float(value), abs=1e-6)


def test_two_collections_with_the_same_names_are_refused() -> None:
    with pytest.raises(sg.UsageError, match=r'two metrics are called "my_acc"'):
        sg.Model(mlp(), strategy(1)).compile("sgd", "cross_entropy", [collection(), collection()])


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_who_has_no_metrics_does_not_wait_for_torchmetrics() -> None:
    """It takes seconds to import; with metrics, replicas import it while the caller does."""
    code = """if True:
        import sys, torch, stratagem as sg

        def there():
            return "torchmetrics" in sys.modules

        strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        with strategy.scope():
            model = sg.Model(torch.nn.Linear(2, 1))
            model.compile("sgd", loss="mse")
            assert strategy.run(there) == [False, False]
            model.compile("sgd", loss="mse", metrics=["mae"])
        strategy.close()
        assert strategy.run(there) == [True, True]
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
