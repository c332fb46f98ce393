"""sg.Model: kinds of data, callbacks, saving, and refusals."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import stratagem as sg
from tests.clock import PATIENCE, unless_late
from tests.support import by_hand, data, distance, mlp, strategy


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.fixture(scope="module", params=[1, 2, 3])
def some(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    made = strategy(request.param)
    yield made
    made.close()


def model_on(on: sg.Strategy, module: nn.Module | None = None, **options: Any) -> sg.Model:
    with on.scope():
        model = sg.Model(copy.deepcopy(module or mlp()))
        model.compile(**{"optimizer": sgd, "loss": "cross_entropy", **options})
    return model


class Rows(Dataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


class Stream(IterableDataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.x, self.y, strict=True))


KINDS: dict[str, Any] = {
    "tensors": lambda x, y: ((x, y), {"batch_size": 20}),
    "numpy": lambda x, y: ((x.numpy().astype(np.float64), y.numpy()), {"batch_size": 20}),
    "dataset": lambda x, y: ((Rows(x, y),), {"batch_size": 20}),
    "loader": lambda x, y: ((DataLoader(TensorDataset(x, y), batch_size=20),), {}),
    "loader with workers": lambda x, y: (
        (DataLoader(Rows(x, y), batch_size=20, num_workers=1),),
        {},
    ),
    "stream": lambda x, y: ((Stream(x, y),), {"batch_size": 20}),
    "stream loader": lambda x, y: ((DataLoader(Stream(x, y), batch_size=20),), {}),
    "list of batches": lambda x, y: (
        ([(x[i : i + 20], y[i : i + 20]) for i in range(0, len(x), 20)],),
        {},
    ),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_data(some: sg.Strategy, kind: str) -> None:
    """83 rows in batches of 20, the last of which has 3."""
    x, y = data(83)
    start = mlp()
    model = model_on(some, start)
    args, options = KINDS[kind](x, y)
    model.fit(*args, **options, shuffle=False, epochs=2, verbose=0)
    alone = by_hand(start, sgd, F.cross_entropy, x, y, batch=20)
    assert distance(alone, model.module) < 2e-6
    with torch.no_grad():
        expected = alone(x)
    assert model.evaluate(*args, **options)["loss"] == pytest.approx(
        float(F.cross_entropy(expected, y)), abs=1e-5
    )
    if kind not in ("list of batches",):
        outputs = model.predict(args[0], **options)
        assert outputs.shape == expected.shape
        assert float((outputs - expected).abs().max()) < 1e-5


def test_a_generator_is_read_once_by_the_chief(two: sg.Strategy) -> None:
    x, y = data(60)
    model = model_on(two)
    batches = ((x[i : i + 20], y[i : i + 20]) for i in range(0, 60, 20))
    model.fit(batches, verbose=0)
    alone = by_hand(mlp(), sgd, F.cross_entropy, x, y, batch=20, epochs=1)
    assert distance(alone, model.module) < 2e-6


def test_every_example_once_per_epoch(some: sg.Strategy) -> None:
    """Law 2: a model that adds up the ids of its rows sees each once, for any batches."""

    def total(output: Tensor, target: Tensor) -> Tensor:
        return output.squeeze(1) * 0 + target

    ids = 2.0 ** torch.arange(23)  # every subset has its own sum
    for batch in (1, 4, 7, 23, 50):
        model = model_on(some, nn.Linear(1, 1), loss=total)
        history = model.fit(ids[:, None], ids, batch_size=batch, epochs=2, verbose=0).history
        for loss in history["loss"]:
            assert loss * 23 == pytest.approx(2.0**23 - 1, rel=1e-6)


def test_shuffled_alike_whatever_the_number_of_replicas() -> None:
    x, y = data(50)
    results = []
    for count in (1, 2, 3):
        made = strategy(count)
        model = model_on(made)
        torch.manual_seed(42)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        results.append(model.module)
        made.close()
    assert distance(results[0], results[1]) < 2e-6
    assert distance(results[0], results[2]) < 2e-6
    model = model_on(strategy(1))
    torch.manual_seed(43)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert distance(results[0], model.module) > 1e-4, "another seed, the same order"


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(6, 4)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"sum": self.layer(left) + self.layer(right), "left": left}


@pytest.mark.parametrize("named", [False, True])
def test_several_inputs_and_outputs(two: sg.Strategy, named: bool) -> None:
    x, y = data(41)
    model = model_on(two, TwoInputs(), loss=lambda out, target: F.cross_entropy(out["sum"], target))
    inputs: Any = {"left": x, "right": x * 2} if named else (x, x * 2)
    model.fit(inputs, y, batch_size=10, shuffle=False, verbose=0)
    outputs = model.predict(inputs, batch_size=10)
    assert outputs["sum"].shape == (41, 4)
    assert torch.equal(outputs["left"], x)


def test_metrics_of_every_kind(some: sg.Strategy) -> None:
    x, y = data(37)
    model = model_on(
        some,
        metrics={
            "accuracy": "accuracy",
            "f1": torchmetrics.F1Score("multiclass", num_classes=4),
            "auroc": torchmetrics.AUROC("multiclass", num_classes=4),
            "own": lambda output, target: (output.argmax(1) == target).float(),
            "one number": lambda output, target: (output.argmax(1) == target).float().mean(),
        },
    )
    results = model.evaluate(x, y, batch_size=8)
    with torch.no_grad():
        output = model.module(x)
    assert results["accuracy"] == pytest.approx(float((output.argmax(1) == y).float().mean()))
    assert results["own"] == pytest.approx(results["accuracy"])
    assert results["one number"] == pytest.approx(results["accuracy"])
    f1 = torchmetrics.functional.f1_score(output, y, "multiclass", num_classes=4)
    assert results["f1"] == pytest.approx(float(f1), abs=1e-6)
    auroc = torchmetrics.functional.auroc(output, y, "multiclass", num_classes=4)
    assert results["auroc"] == pytest.approx(float(auroc), abs=1e-5)


@pytest.mark.parametrize("loss", ["binary_cross_entropy_with_logits", nn.BCEWithLogitsLoss()])
def test_binary_accuracy_and_regression_metrics(two: sg.Strategy, loss: Any) -> None:
    """Most logits are between 0 and 1, so that they look like probabilities."""
    x, y = data(30, classes=2)
    target = y.float()[:, None]
    torch.manual_seed(0)
    layer = nn.Linear(6, 1)
    with torch.no_grad():
        layer.weight.mul_(0.3)
        layer.bias.fill_(0.2)
    model = model_on(two, layer, loss=loss, metrics=["accuracy", "mae"])
    results = model.evaluate(x, target, batch_size=7)
    with torch.no_grad():
        output = model.module(x)
    right = ((output > 0) == (target > 0)).float()
    assert results["accuracy"] == pytest.approx(float(right.mean()))
    assert results["mae"] == pytest.approx(float((output - target).abs().mean()), abs=1e-5)


# --- callbacks -----------------------------------------------------------------------------------


def test_callbacks_run_once_in_order(two: sg.Strategy) -> None:
    calls: list[str] = []

    class Speak(sg.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            calls.append("begin")

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            calls.append(f"epoch {epoch}")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            calls.append(f"batch {batch} {logs['loss'] > 0}")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            calls.append(f"end {epoch} {sorted(logs)}")

        def on_train_end(self, logs: Any = None) -> None:
            calls.append("done")

    x, y = data(20)
    model_on(two).fit(x, y, batch_size=10, epochs=2, callbacks=[Speak()], verbose=0)
    logs = "['examples_per_second', 'loss']"
    assert calls == [
        "begin",
        "epoch 0",
        "batch 0 True",
        "batch 1 True",
        f"end 0 {logs}",
        "epoch 1",
        "batch 0 True",
        "batch 1 True",
        f"end 1 {logs}",
        "done",
    ]


@pytest.mark.parametrize("per", ["epoch", "step"])
@pytest.mark.parametrize("op", ["shared_memory", "ring"])
def test_learning_rate_schedules_reach_every_replica(per: str, op: str) -> None:
    x, y = data(60)
    start = mlp()

    def schedule(number: int, rate: float) -> float:
        return 0.2 / (number + 1)

    module = copy.deepcopy(start)
    optimizer = sgd(module.parameters())
    step = 0
    for epoch in range(3):
        for i in range(0, 60, 20):
            optimizer.param_groups[0]["lr"] = schedule(epoch if per == "epoch" else step, 0.0)
            F.cross_entropy(module(x[i : i + 20]), y[i : i + 20]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    made = strategy(3, cross_device_ops=op)
    model = model_on(made, start)
    callback = sg.callbacks.LearningRateScheduler(schedule, per=per)
    model.fit(x, y, batch_size=20, epochs=3, shuffle=False, callbacks=[callback], verbose=0)
    made.close()
    assert distance(module, model.module) < 2e-6


@pytest.mark.parametrize("op", ["shared_memory", "ring"])
@pytest.mark.parametrize("when", ["on_epoch_begin", "on_train_batch_begin", "on_train_batch_end"])
def test_weights_changed_by_a_callback_reach_every_replica(op: str, when: str) -> None:
    x, y = data(40)
    start = mlp()
    made = strategy(2, cross_device_ops=op)

    def run(on: sg.Strategy) -> nn.Module:
        def double(*_: Any) -> None:
            with torch.no_grad():
                model.module[0].weight.mul_(1.5)

        model = model_on(on, start)
        callback = sg.callbacks.LambdaCallback(**{when: double})
        model.fit(x, y, batch_size=20, epochs=2, shuffle=False, callbacks=[callback], verbose=0)
        return model.module

    assert distance(run(strategy(1)), run(made)) < 1e-5
    made.close()


def test_early_stopping_restores_the_best(some: sg.Strategy) -> None:
    x, y = data(40)
    model = model_on(some, optimizer=lambda p: torch.optim.SGD(p, lr=5.0))
    best: dict[str, Any] = {}

    def keep(epoch: int, logs: Any) -> None:
        if not best or logs["val_loss"] < best["loss"]:
            best.update(loss=logs["val_loss"], weights=copy.deepcopy(model.module.state_dict()))

    stopping = sg.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    keeper = sg.callbacks.LambdaCallback(on_epoch_end=keep)
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=50,
        validation_data=data(30, seed=5),
        callbacks=[keeper, stopping],
        verbose=0,
    )
    assert len(history.epoch) < 50
    assert stopping.stopped_epoch == history.epoch[-1]
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, best["weights"][name])


def test_stopping_between_steps(some: sg.Strategy) -> None:
    x, y = data(100)
    model = model_on(some)

    def stop(batch: int, logs: Any) -> None:
        if batch == 2:
            model.stop_training = True

    callback = sg.callbacks.LambdaCallback(on_train_batch_end=stop)
    model.fit(x, y, batch_size=10, epochs=5, shuffle=False, callbacks=[callback], verbose=0)
    alone = by_hand(mlp(), sgd, F.cross_entropy, x[:30], y[:30], batch=10, epochs=1)
    assert distance(alone, model.module) < 2e-6


def test_reduce_on_plateau_and_tensorboard(two: sg.Strategy, tmp_path: Path) -> None:
    x, y = data(40)
    model = model_on(two, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    plateau = sg.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1)
    model.optimizer.param_groups[0]["lr"] = 1e-12
    board = sg.callbacks.TensorBoard(tmp_path / "logs")
    model.fit(x, y, epochs=4, shuffle=False, callbacks=[plateau, board], verbose=0)
    assert model.optimizer.param_groups[0]["lr"] < 1e-12
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    assert len(events.Scalars("train/loss")) == 4


# --- saving --------------------------------------------------------------------------------------

PLAIN_LOAD = """
import sys, torch
from safetensors.torch import load_file
weights = load_file(sys.argv[1])
state = torch.load(sys.argv[2], weights_only=True)
assert "stratagem" not in sys.modules
print(sorted(weights), state["optimizer"]["state"][0]["exp_avg"].shape)
"""


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


@pytest.mark.timeout(120)
def test_saved_files_are_plain_and_resume_under_any_strategy(tmp_path: Path) -> None:
    """Law 5: save on three replicas and continue on one (and two), as if never interrupted."""
    x, y = data(50)
    straight = by_hand(mlp(), adam, F.cross_entropy, x, y, batch=16, epochs=4)
    made = strategy(3)
    model = model_on(made, optimizer=adam)
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    path = model.save(tmp_path / "saved")
    made.close()
    assert path == tmp_path / "saved.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_LOAD, str(path), str(tmp_path / "saved.state.pt")],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    assert "'0.weight'" in done.stdout and "[16, 6]" in done.stdout
    for count in (1, 2):
        made = strategy(count)
        again = model_on(made, optimizer=adam)
        again.load(path)
        again.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        made.close()
        assert distance(straight, again.module) < 2e-6


@pytest.mark.parametrize("op", ["shared_memory", "ring"])
def test_checkpoints_hold_the_optimizer_state_of_their_epoch(op: str, tmp_path: Path) -> None:
    x, y = data(50)
    made = strategy(2, cross_device_ops=op)
    model = model_on(made, optimizer=adam)
    checkpoint = sg.callbacks.ModelCheckpoint(tmp_path / "{epoch}-{loss:.1f}")
    model.fit(x, y, batch_size=16, epochs=3, shuffle=False, callbacks=[checkpoint], verbose=0)
    made.close()
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert [name[0] for name in files] == ["1", "2", "3"]
    again = model_on(strategy(1), optimizer=adam)
    again.load(tmp_path / files[0])
    again.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert distance(again.module, model.module) < 2e-6


def test_best_only_checkpoints(tmp_path: Path) -> None:
    model = model_on(strategy(1), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    checkpoint = sg.callbacks.ModelCheckpoint(
        tmp_path / "{epoch}", monitor="loss", save_best_only=True
    )
    x, y = data(30)
    model.fit(x, y, epochs=3, shuffle=False, callbacks=[checkpoint], verbose=0)
    assert [p.name for p in tmp_path.glob("*.safetensors")] == ["1.safetensors"]


# --- optimizers, second fits, refusals -----------------------------------------------------------


@pytest.mark.parametrize("form", ["name", "class", "function", "instance"])
def test_forms_of_optimizer(two: sg.Strategy, form: str) -> None:
    module = mlp()
    choice: Any = {
        "name": "adamw",
        "class": torch.optim.AdamW,
        "function": lambda p: torch.optim.AdamW(p),
        "instance": torch.optim.AdamW(module.parameters()),
    }[form]
    x, y = data(40)
    with two.scope():
        model = sg.Model(module)
        model.compile(choice, "cross_entropy")
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    alone = by_hand(mlp(), torch.optim.AdamW, F.cross_entropy, x, y, batch=16, epochs=1)
    assert distance(alone, model.module) < 2e-6


def test_parameter_groups_keep_their_settings(two: sg.Strategy) -> None:
    def groups(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            [{"params": module[0].parameters(), "lr": 0.1}, {"params": module[2].parameters()}],
            lr=1e-3,
            weight_decay=0.1,
        )

    x, y = data(40)
    module, start = mlp(), mlp()
    with two.scope():
        model = sg.Model(module)
        model.compile(groups(module), "cross_entropy")
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    alone = by_hand(start, lambda p: groups_of(p), F.cross_entropy, x, y, batch=16)
    assert distance(alone, model.module) < 2e-6


def groups_of(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.Adam(
        [{"params": params[:2], "lr": 0.1}, {"params": params[2:]}], lr=1e-3, weight_decay=0.1
    )


def test_a_second_fit_goes_on(some: sg.Strategy) -> None:
    x, y = data(50)
    model = model_on(some, optimizer=adam)
    for _ in range(3):
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    straight = by_hand(mlp(), adam, F.cross_entropy, x, y, batch=16, epochs=3)
    assert distance(straight, model.module) < 2e-6


def test_steps_per_epoch_and_initial_epoch(some: sg.Strategy) -> None:
    x, y = data(50)
    model = model_on(some)
    history = model.fit(
        x, y, batch_size=10, epochs=3, initial_epoch=1, steps_per_epoch=2, shuffle=False, verbose=0
    )
    assert history.epoch == [1, 2]
    alone = by_hand(mlp(), sgd, F.cross_entropy, x[:20], y[:20], batch=10)
    assert distance(alone, model.module) < 2e-6


def test_the_original_module_is_trained_in_place(two: sg.Strategy) -> None:
    module = mlp()
    weight = module[0].weight
    with two.scope():
        model = sg.Model(module)
        model.compile(sgd, "cross_entropy")
    before = weight.detach().clone()
    model.fit(*data(30), verbose=0)
    assert model.module is module and module[0].weight is weight
    assert not torch.equal(before, weight)


X, Y = data(12)
REFUSED: dict[str, tuple[Any, str]] = {
    "fit before compile": (lambda s: bare(s).fit(X, Y), "compile"),
    "no loss": (lambda s: bare(s).compile("adam"), "loss"),
    "unknown loss": (lambda s: bare(s).compile("adam", "nonsense"), "cross_entropy"),
    "unknown optimizer": (lambda s: bare(s).compile("nonsense", "mse"), "adam"),
    "foreign optimizer": (
        lambda s: bare(s).compile(torch.optim.SGD(mlp().parameters()), "mse"),
        "module.parameters",
    ),
    "unknown metric": (lambda s: bare(s).compile("adam", "mse", ["nonsense"]), "torchmetrics"),
    "bad precision": (lambda s: bare(s).compile("adam", "mse", precision="int3"), "bfloat16"),
    "bad accumulate": (lambda s: bare(s).compile("adam", "mse", accumulate=0), "1 or more"),
    "lengths differ": (lambda s: model_on(s).fit(X, Y[:5]), "different lengths"),
    "no data": (lambda s: model_on(s).fit(X[:0], Y[:0]), "empty"),
    "bad batch size": (lambda s: model_on(s).fit(X, Y, batch_size=0), "1 or more"),
    "bad steps per epoch": (lambda s: model_on(s).fit(X, Y, steps_per_epoch=0), "1 or more"),
    "y with a loader": (
        lambda s: model_on(s).fit(DataLoader(TensorDataset(X, Y)), Y),
        "DataLoader itself",
    ),
    "not data": (lambda s: model_on(s).fit(42), "arrays"),
    "not a module": (lambda s: sg.Model(42), "nn.Module"),
    "not a callback": (lambda s: model_on(s).fit(X, Y, callbacks=[42]), "Callback"),
    "unknown monitor": (
        lambda s: model_on(s).fit(X, Y, callbacks=[sg.callbacks.EarlyStopping()], verbose=0),
        "validation_data",
    ),
    "nothing saved there": (lambda s: model_on(s).load("/nowhere/model"), "no saved model"),
    "batch of four parts": (
        lambda s: model_on(s).fit([(X, Y, Y, Y)], verbose=0),
        "sample_weight",
    ),
    "LBFGS": (
        lambda s: model_on(s, optimizer=torch.optim.LBFGS).fit(X, Y, verbose=0),
        "LBFGS",
    ),
    "sparse gradients": (
        lambda s: model_on(
            s,
            nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(0, 1)),
            loss=lambda o, t: o.sum(1),
        ).fit(torch.zeros(12, 1, dtype=torch.long), Y, verbose=0),
        "sparse",
    ),
}


def bare(on: sg.Strategy, module: nn.Module | None = None) -> sg.Model:
    with on.scope():
        return sg.Model(module or mlp())


@pytest.mark.parametrize("case", list(REFUSED))
def test_refusals_say_what_to_do(two: sg.Strategy, case: str) -> None:
    act, words = REFUSED[case]
    with pytest.raises(sg.StratagemError, match=words):
        act(two)


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_a_batch_in_which_no_target_counts_is_as_on_one_device(wire: str | None) -> None:
    ignored = torch.cat([Y[:6], torch.full_like(Y[6:], -100)])
    found = []
    for devices in (["cpu:0"], ["cpu:0", "cpu:1"]):
        model = sg.Model(mlp(), sg.MirroredStrategy(devices, wire=wire))
        model.compile(sgd, "cross_entropy")
        history = model.fit(X, ignored, batch_size=6, shuffle=False, verbose=0).history
        assert np.isnan(history["loss"]).all()
        found.append([p.detach().clone() for p in model.module.parameters()])
    for one, both in zip(*found, strict=True):
        torch.testing.assert_close(one, both, rtol=1e-2 if wire else 1e-5, atol=1e-3)


def test_fits_leave_no_memory_behind(two: sg.Strategy) -> None:
    model = sg.Model(mlp(), two)
    model.compile(sgd, "cross_entropy")
    open_files = []
    for _ in range(4):
        model.fit(X, Y, verbose=0)
        gc.collect()
        open_files.append(len(os.listdir("/proc/self/fd")))
    unless_late(open_files[-1] <= open_files[1], open_files)  # one more a fit it was


def test_unfreezing_behind_our_back_is_noticed(two: sg.Strategy) -> None:
    module = mlp()
    module[0].weight.requires_grad_(False)
    with two.scope():
        model = sg.Model(module)
        model.compile(sgd, "cross_entropy")

    def thaw(*_: Any) -> None:
        module[0].weight.requires_grad_(True)

    callback = sg.callbacks.LambdaCallback(on_train_batch_end=thaw)
    with pytest.raises(sg.UsageError, match="frozen"):
        model.fit(X, Y, batch_size=4, callbacks=[callback], verbose=0)


def test_progress_is_a_line_an_epoch_without_a_terminal(
    two: sg.Strategy, capsys: pytest.CaptureFixture[str]
) -> None:
    model_on(two, metrics=["accuracy"]).fit(X, Y, epochs=2, verbose=1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "epoch 2/2" in lines[1] and "examples/s" in lines[1]
    assert "accuracy" in lines[1]
