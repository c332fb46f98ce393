"""Collections of metrics become their members; metrics made of metrics count every example."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
import torchmetrics.classification as tmc
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
from tests.clock import PATIENCE
from tests.support import data, mlp, strategy


@pytest.fixture(scope="module", params=[1, 2])
def some(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    made = strategy(request.param)
    yield made
    made.close()


def collection() -> torchmetrics.MetricCollection:
    """Return a collection in which two metrics share their state (a compute group)."""
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
    """Its members share one state by then, and each must still count every example once."""
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
    """A custom metric with a state and an inner metric."""

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
    """Return the values of metrics that are updated with all rows at once, in this process."""
    for metric in metrics.values():
        metric.reset()
        metric.update(output, target)
    return flat({name: metric.compute() for name, metric in metrics.items()})


@pytest.mark.timeout(60)
def test_metrics_of_metrics_count_every_example(some: sg.Strategy) -> None:
    """In an evaluation of 33 rows, whose last batch has one, and in another one."""
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
    """As with parameter servers: the chief merges workers' counts, also of one without a row."""
    x, y = data(60)
    output = mlp()(x).detach()
    workers = [MetricSet(made()) for _ in range(2)]
    workers[0].update(output[:25], y[:25])
    workers[1].update(output[25:], y[25:])
    states = [worker.progress() for worker in workers]
    expected = by_torchmetrics(made(), output, y)
    for chief in (workers[0], MetricSet(made())):
        assert chief.merged(states) == pytest.approx(expected, abs=1e-6)
    workers[0].update(output[25:], y[25:])  # what it counted itself is as it was
    one = [workers[0].progress()]
    assert workers[1].merged(one)["sum"] == pytest.approx(expected["sum"], abs=1e-6)


class Extreme(torchmetrics.Metric):
    """The largest output, with a custom reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("most", torch.tensor(-9.0), dist_reduce_fx=lambda each: each.max(0).values)

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.most = torch.maximum(self.most, output.max())

    def compute(self) -> torch.Tensor:
        return self.most


def test_states_with_other_reductions_are_merged() -> None:
    """Without a reduction (PearsonCorrCoef joins its states itself), and with a custom one."""
    output, target = torch.randn(2, 60)
    workers = [
        MetricSet({"r": torchmetrics.PearsonCorrCoef(), "most": Extreme()}) for _ in range(3)
    ]
    workers[0].update(output[:25], target[:25])
    workers[1].update(output[25:], target[25:])  # the third counts nothing
    expected = {"r": float(torch.corrcoef(torch.stack([output, target]))[0, 1])}
    expected["most"] = float(output.max())
    counted = [worker.progress() for worker in workers]
    for chief in workers:
        before = chief.progress()
        assert chief.merged(counted) == pytest.approx(expected, abs=1e-5)
        assert str(chief.progress()) == str(before)


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
        "sgd",
        lambda out, target: F.cross_entropy(out.scores, target, reduction="none"),
        {"right": lambda out, target: (out.scores.argmax(1) == target).float()},
    )
    right = model.evaluate(x, y, batch_size=8)["right"]
    with torch.no_grad():
        expected = float((model.module(x).scores.argmax(1) == y).float().mean())
    assert right == pytest.approx(expected)


# --- what a share cannot tell --------------------------------------------------------------------


class First(nn.Module):
    """A module whose logits are the first features."""

    def __init__(self, classes: int = 0) -> None:
        super().__init__()
        self.classes = classes
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, : self.classes] if self.classes else x[:, 0]) * self.one


def batchwise(
    metrics: dict[str, Any], module: nn.Module, x: Any, y: Any, batch: int
) -> dict[str, float]:
    """Return the metrics as one device counts them, batch by batch."""
    with torch.no_grad():
        for start in range(0, len(x), batch):
            for metric in metrics.values():
                metric.update(module(x[start : start + batch]), y[start : start + batch])
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def rowwise(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if output.dim() == 1:
        return F.binary_cross_entropy_with_logits(output, target.float(), reduction="none")
    return F.cross_entropy(output, target, reduction="none")


BINARY: dict[str, Any] = {
    "f1": tmc.BinaryF1Score,
    "auroc": tmc.BinaryAUROC,
    "confusion": lambda: tmc.BinaryMatthewsCorrCoef(ignore_index=0),
    "sum": lambda: tmc.BinaryAccuracy() + tmc.BinaryAveragePrecision(thresholds=7),
    "calibration": tmc.BinaryCalibrationError,
    "other way": lambda: LambdaInputTransformer(tmc.BinaryF1Score(), lambda output: -output),
}
SEVERAL: dict[str, Any] = {
    "auroc": lambda: MulticlassAUROC(3),
    "precision": lambda: torchmetrics.AveragePrecision(task="multiclass", num_classes=3),
    "calibration": lambda: tmc.MulticlassCalibrationError(3),
    "hinge": lambda: tmc.MulticlassHingeLoss(3),
    "accuracy": lambda: MulticlassAccuracy(3),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("outputs", ["logits", "probabilities"])
def test_shares_do_not_decide_what_outputs_are(three: sg.Strategy, outputs: str) -> None:
    """Shares of two logits are within 0 and 1 by chance, and so are some batches of six."""
    x, _ = data(51)
    x = x.sigmoid() if outputs == "probabilities" else x * 0.7 + 0.5
    y = (x[:, 0] > 0.2).long()
    made = {name: make() for name, make in BINARY.items()}
    model = sg.Model(First(), three)
    model.compile("sgd", rowwise, {**made, "named": "accuracy"}, from_logits=outputs == "logits")
    reference = {name: make() for name, make in BINARY.items()} | {"named": tmc.BinaryAccuracy()}
    expected = batchwise(reference, First(), x, y, 51)
    results = model.evaluate(x, y, batch_size=6)
    assert {name: results[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    model.optimizer.param_groups[0]["lr"] = 0.0  # type: ignore[union-attr]
    logs = model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
    assert {name: logs.history[name][0] for name in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.timeout(60)
def test_logits_of_several_classes(three: sg.Strategy) -> None:
    """The loss implies that outputs are logits."""
    x, _ = data(41)
    y = x[:, 1:4].argmax(1)
    model = sg.Model(First(3), three)
    model.compile("sgd", "cross_entropy", {name: make() for name, make in SEVERAL.items()})
    reference = {name: make() for name, make in SEVERAL.items()}
    expected = batchwise(reference, First(3), x, y, 41)
    results = model.evaluate(x, y, batch_size=4)
    assert {name: results[name] for name in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("metric", ["accuracy", tmc.BinaryAUROC()])
def test_what_outputs_are_is_asked_for(three: sg.Strategy, metric: Any) -> None:
    x, _ = data(21)
    y = (x[:, 0] > 0).long()
    for where in (None, three):
        model = sg.Model(First(), where)
        model.compile("sgd", rowwise, metric)
        asked = pytest.raises(sg.NotDistributable, match="Say it: compile")
        with asked if where else nullcontext():
            model.evaluate(x, y, batch_size=6)


def test_torchmetrics_is_left_as_it_was(three: sg.Strategy) -> None:
    """Later updates of the given metric, outside of the model, are unaffected."""
    x, _ = data(21)
    y, given = (x[:, 0] > 0).long(), tmc.BinaryAUROC()
    model = sg.Model(First(), three)
    model.compile("sgd", rowwise, {"auroc": given}, from_logits=True)
    model.evaluate(x, y, batch_size=6)
    few = torch.tensor([0.1, 0.9, 0.7, 0.3])
    given.update(few, torch.tensor([0, 1, 1, 0]))
    assert torch.equal(torch.cat(list(given.preds)), few)


@pytest.mark.timeout(60)
def test_a_replica_without_an_example(three: sg.Strategy) -> None:
    """Its empty lists must not change the dtype of the other replicas' counts."""
    x, _ = data(2)
    y = torch.tensor([0, 2])
    model = sg.Model(First(3), three)
    model.compile("sgd", "cross_entropy", {name: make() for name, make in SEVERAL.items()})
    expected = batchwise({name: make() for name, make in SEVERAL.items()}, First(3), x, y, 32)
    results = model.evaluate(x, y)
    assert {name: results[name] for name in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", [torchmetrics.Accuracy, MulticlassF1Score])
def test_a_class_is_no_metric(kind: Any) -> None:
    with pytest.raises(sg.UsageError, match=rf"{kind.__name__} is a class; give an instance"):
        sg.Model(mlp(), strategy(1)).compile("sgd", "cross_entropy", [kind])


@pytest.mark.timeout(60)
def test_a_short_name(some: sg.Strategy) -> None:
    x, y = data(37)
    model = sg.Model(mlp(), some)
    model.compile("sgd", "cross_entropy", ["acc"])
    with torch.no_grad():
        expected = float((model.module(x).argmax(1) == y).float().mean())
    assert model.evaluate(x, y, batch_size=8)["acc"] == pytest.approx(expected)


def rmse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean().sqrt()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", ["fit", "evaluate"])
def test_a_function_that_is_no_mean_is_refused(some: sg.Strategy, verb: str) -> None:
    x, _ = data(41)
    model = sg.Model(First(), some)
    model.compile("sgd", "mse", {"rmse": rmse})
    if some.num_replicas_in_sync == 1:
        getattr(model, verb)(x, x[:, 1], verbose=0)
        return
    with pytest.raises(sg.NotDistributable, match=r'metric "rmse".*mean over the rows.*one device'):
        getattr(model, verb)(x, x[:, 1], verbose=0)


def recall(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a value for each class."""
    right = output.argmax(1) == target
    return torch.stack([right[target == c].float().sum() / (target == c).sum() for c in range(4)])


def by_column(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return as many values for few rows as for many rows."""
    return F.one_hot(target, 4).float().mean(0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", ["fit", "evaluate"])
@pytest.mark.parametrize("function", [recall, by_column])
def test_values_that_are_not_of_rows_are_refused(
    some: sg.Strategy, verb: str, function: Any
) -> None:
    x, y = data(41)[0], torch.arange(41) % 4
    model = sg.Model(mlp(), some)
    model.compile("sgd", "cross_entropy", [function])
    if some.num_replicas_in_sync == 1:
        getattr(model, verb)(x, y, verbose=0)
        return
    words = rf'metric "{function.__name__}" .*several that are not those of its rows.*one device'
    with pytest.raises(sg.NotDistributable, match=words):
        getattr(model, verb)(x, y, verbose=0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("batch", [7, 41])
def test_values_of_rows(some: sg.Strategy, batch: int, caplog: pytest.LogCaptureFixture) -> None:
    """A function may return a value for each row, for some rows, or several values per row."""
    x, y = data(41)
    functions: dict[str, Any] = {
        "all": lambda o, t: o.argmax(1) == t,
        "some": lambda o, t: (o.argmax(1) == t)[t != 0].float(),
        "several": lambda o, t: (o - F.one_hot(t, 4)).abs(),
    }
    model = sg.Model(mlp(), some)
    model.compile("sgd", "cross_entropy", functions)
    results = model.evaluate(x, y, batch_size=batch)
    with torch.no_grad():
        output = model.module(x)
    for name, function in functions.items():
        assert results[name] == pytest.approx(float(function(output, y).float().mean()), abs=1e-6)
    assert "cannot be tried" not in caplog.text


@pytest.mark.timeout(60)
def test_functions_that_are_means_or_cannot_be_tried(
    three: sg.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    def whole_share(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(output) < 4:
            raise ValueError("too few")
        return (output - target).abs().mean()

    x, _ = data(41)
    model = sg.Model(First(), three)
    metrics = {
        "mean": lambda output, target: float((output - target).abs().mean()),
        "rows": lambda output, target: (output - target).abs(),
        "dice": lambda output, target: torch.rand(()),
        "untried": whole_share,
    }
    model.compile("sgd", "mse", metrics)
    results = [model.evaluate(x[:36], x[:36, 1], batch_size=18) for _ in range(2)]
    expected = float((x[:36, 0] - x[:36, 1]).abs().mean())
    for name in ("mean", "rows", "untried"):
        assert results[1][name] == pytest.approx(expected, abs=1e-6)
    warned = [line for line in caplog.messages if "cannot be tried" in line]
    assert len(warned) == 1 and 'the metric "untried"' in warned[0] and "too few" in warned[0]


# --- when torchmetrics is imported ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_who_has_no_metrics_does_not_wait_for_torchmetrics() -> None:
    """Its import takes seconds; with metrics, replicas import it in parallel with the caller."""
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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
