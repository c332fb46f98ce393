"""Collections of metrics become their members; metrics made of metrics count every example."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    LambdaInputTransformer,
    MinMaxMetric,
    MultioutputWrapper,
    Running,
)

import stratagem as sg
from stratagem.frontends.metrics import MetricSet, _flat
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


# --- metrics made of metrics ---------------------------------------------------------------------


def accuracy(average: str | None = "macro") -> torchmetrics.Metric:
    return MulticlassAccuracy(4, average=average)


class Halved(torchmetrics.Metric):
    """A metric of one's own that keeps a state and another metric."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = accuracy()
        self.add_state("seen", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, output: Any, target: Any) -> None:
        self.inner.update(output, target)
        self.seen += len(target)

    def compute(self) -> Any:
        return {"accuracy": self.inner.compute() / 2, "seen": self.seen}

    def reset(self) -> None:
        self.inner.reset()
        super().reset()


MADE: dict[str, Any] = {
    "sum": lambda: accuracy() + MulticlassF1Score(4),
    "with itself": lambda: (lambda one: one * one)(accuracy("micro")),
    "nested": lambda: abs(2 - (accuracy() + MulticlassAUROC(4))),
    "classwise": lambda: ClasswiseWrapper(accuracy(None)),
    "least and most": lambda: MinMaxMetric(accuracy()),
    "transformed": lambda: LambdaInputTransformer(accuracy(), lambda output: -output),
    "one's own": Halved,
}


def made() -> dict[str, Any]:
    return {name: make() for name, make in MADE.items()}


def flat(values: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        inner = {f"{name}_{key}": v for key, v in value.items()} if isinstance(value, dict) else {}
        found |= flat(inner) if isinstance(value, dict) else {name: float(value)}
    return found


def by_torchmetrics(metrics: dict[str, Any], output: Any, target: Any) -> dict[str, float]:
    """Each fed with everything at once, in this process."""
    for metric in metrics.values():
        metric.reset()
        metric.update(output, target)
    return flat({name: metric.compute() for name, metric in metrics.items()})


@pytest.mark.timeout(60)
def test_metrics_of_metrics_count_every_example(some: sg.Strategy) -> None:
    """One evaluation of 33 rows (the last batch has one), and another of others."""
    x, y = data(60)
    model, reference = sg.Model(mlp(), some), made()
    model.compile("sgd", "cross_entropy", made())
    with torch.no_grad():
        for rows in (slice(33), slice(20, 60)):  # the second's least and most know the first's
            results = model.evaluate(x[rows], y[rows], batch_size=8)
            expected = by_torchmetrics(reference, model.module(x[rows]), y[rows])
            del results["loss"]
            assert results == pytest.approx(expected, abs=1e-6)
    assert expected["least and most_max"] != pytest.approx(expected["least and most_min"])


@pytest.mark.timeout(60)
def test_metrics_of_several_outputs_and_tasks(some: sg.Strategy) -> None:
    x, _ = data(33)
    model = sg.Model(nn.Linear(6, 2), some)
    model.compile("sgd", "mse", {"r2": MultioutputWrapper(torchmetrics.R2Score(), 2)})
    results = model.evaluate(x, x[:, :2], batch_size=8)
    with torch.no_grad():
        expected = torchmetrics.R2Score(multioutput="raw_values")(model.module(x), x[:, :2])
    assert [results["r2_0"], results["r2_1"]] == pytest.approx(expected.tolist(), rel=1e-4)


def test_values_in_values_are_named_one_by_one() -> None:
    nested = {"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor(3.0)}}
    assert _flat("m", nested) == {"m_a_0": 1.0, "m_a_1": 2.0, "m_b_c": 3.0}


def test_states_of_metrics_of_metrics_are_merged() -> None:
    """As parameter servers do: each worker counts, the chief merges, also for one without a row."""
    x, y = data(60)
    output = mlp()(x).detach()
    workers = [MetricSet(made()) for _ in range(2)]
    workers[0].update(output[:25], y[:25])
    workers[1].update(output[25:], y[25:])
    states = [worker.state() for worker in workers]
    expected = by_torchmetrics(made(), output, y)
    for chief in (workers[0], MetricSet(made())):
        assert chief.merged(states) == pytest.approx(expected, abs=1e-6)
    workers[0].update(output[25:], y[25:])  # what it counted itself is as it was
    one = [workers[0].state()]
    assert workers[1].merged(one)["sum"] == pytest.approx(expected["sum"], abs=1e-6)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_wrappers_that_replicas_cannot_follow_are_refused(some: sg.Strategy, verb: str) -> None:
    x, y = data(33)
    for make in (lambda: BootStrapper(accuracy()), lambda: 2 * Running(accuracy())):
        model = sg.Model(mlp(), some)
        model.compile("sgd", "cross_entropy", {"m": make()})
        if some.num_replicas_in_sync == 1:
            getattr(model, verb)(x, y, batch_size=8, verbose=0)
            continue
        with pytest.raises(sg.NotDistributable, match=r"(BootStrapper|Running).*one device"):
            getattr(model, verb)(x, y, batch_size=8, verbose=0)


class Pair(NamedTuple):
    scores: torch.Tensor
    more: torch.Tensor


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> Pair:
        scores = self.inner(x)
        return Pair(scores, scores * 2)


@pytest.mark.timeout(60)
def test_outputs_with_names(some: sg.Strategy) -> None:
    x, y = data(33)
    model = sg.Model(TwoHeads(), some)
    model.compile(
        "sgd", lambda out, target: F.cross_entropy(out.scores, target, reduction="none"),
        {"right": lambda out, target: (out.scores.argmax(1) == target).float()},
    )  # fmt: skip
    right = model.evaluate(x, y, batch_size=8)["right"]
    with torch.no_grad():
        expected = float((model.module(x).scores.argmax(1) == y).float().mean())
    assert right == pytest.approx(expected)


# --- when torchmetrics is imported ---------------------------------------------------------------


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
