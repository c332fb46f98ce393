"""Callbacks around the batches of validation, `evaluate` and `predict`.

With every strategy they see what one device shows, once, and their changes take effect.
"""

from __future__ import annotations

import copy
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stratagem as sg
from tests.ports import free_ports
from tests.replicas.scripts import nursery
from tests.support import IN_STEP, data, in_step, mlp

pytestmark = pytest.mark.timeout(60)

ROWS, BATCH = 25, 8  # the last batch has one row: empty shares


@pytest.fixture(scope="module", params=IN_STEP)
def where(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    with in_step(request.param, 3) as made:
        yield made


def model_on(where: sg.Strategy) -> sg.Model:
    model = sg.Model(mlp(), where)
    rate = 0.1
    model.compile(optimizer=lambda p: torch.optim.SGD(p, lr=rate), loss="cross_entropy")
    return model


def halve(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(0.5)


def by_hand(module: nn.Module, x: Tensor, y: Tensor, *, halved_before: int = -1) -> list[float]:
    """Return the running loss after each batch; the weights may be halved before one of them."""
    total, running = 0.0, []
    for number, start in enumerate(range(0, len(x), BATCH)):
        if number == halved_before:
            halve(module)
        part = slice(start, start + BATCH)
        with torch.no_grad():
            total += float(F.cross_entropy(module(x[part]), y[part])) * len(x[part])
        running.append(total / min(start + BATCH, len(x)))
    return running


def close(ours: Any, theirs: Any) -> bool:
    return bool(torch.allclose(torch.as_tensor(ours), torch.as_tensor(theirs), atol=1e-5))


class Note(sg.callbacks.Callback):
    """Records the calls and their arguments; halves the weights before or after one batch."""

    def __init__(self, halve_before: int = -1, halve_after: int = -1) -> None:
        self.seen: list[Any] = []
        self.losses: list[float] = []
        self.outputs: list[Any] = []
        self.halve_before, self.halve_after = halve_before, halve_after

    def on_test_begin(self, logs: Any = None) -> None:
        self.seen.append("begin")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)
        if batch == self.halve_before:
            halve(self.model.module)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)
        self.losses.append(logs["loss"])
        if batch == self.halve_after:
            halve(self.model.module)

    def on_test_end(self, logs: Any = None) -> None:
        self.seen.append(f"end, {sorted(logs)}")

    def on_predict_begin(self, logs: Any = None) -> None:
        self.seen.append("predict")

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.on_test_batch_begin(batch)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)
        self.outputs.append(logs["outputs"])

    def on_predict_end(self, logs: Any = None) -> None:
        self.seen.append("end")


@pytest.mark.parametrize("halved", [-1, 2])
def test_evaluate(where: sg.Strategy, halved: int) -> None:
    x, y = data(ROWS)
    model, note = model_on(where), Note(halved)
    results = model.evaluate(x, y, batch_size=BATCH, verbose=0, callbacks=[note])
    expected = by_hand(mlp(), x, y, halved_before=halved)
    assert note.seen == ["begin", 0, 0, 1, 1, 2, 2, 3, 3, "end, ['loss']"]
    assert close(note.losses, expected) and close(results["loss"], expected[-1])


@pytest.mark.parametrize("halved", [-1, 2])
def test_predict(where: sg.Strategy, halved: int) -> None:
    x, _ = data(ROWS)
    model, note = sg.Model(mlp(), where), Note(halved)
    outputs = model.predict(x, batch_size=BATCH, verbose=0, callbacks=[note])
    plain = mlp()
    expected = []
    for number, part in enumerate(x.split(BATCH)):
        if number == halved:
            halve(plain)
        expected.append(plain(part).detach())
    assert note.seen == ["predict", 0, 0, 1, 1, 2, 2, 3, 3, "end"]
    assert len(note.outputs) == 4 and all(map(close, note.outputs, expected))
    assert close(outputs, torch.cat(expected))


def test_validation(where: sg.Strategy) -> None:
    """Training continues with weights that a callback changed in mid-validation."""
    x, y = data(ROWS)
    model, note, plain = model_on(where), Note(halve_before=2, halve_after=3), mlp()
    options: Any = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, epochs=2, validation_data=(x, y), callbacks=[note], **options).history
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses: list[float] = []
    for _ in range(2):
        for rows, classes in zip(x.split(BATCH), y.split(BATCH), strict=True):
            sgd.zero_grad()
            F.cross_entropy(plain(rows), classes).backward()  # type: ignore[no-untyped-call]
            sgd.step()
        losses += by_hand(plain, x, y, halved_before=2)
        halve(plain)  # after the last batch
    assert note.seen == 2 * ["begin", 0, 0, 1, 1, 2, 2, 3, 3, "end, ['loss']"]
    assert close(note.losses, losses)
    assert close(history["val_loss"], losses[3::4])
    ours = torch.cat([p.detach().flatten() for p in model.module.parameters()])
    assert close(ours, torch.cat([p.detach().flatten() for p in plain.parameters()]))


class Swap(sg.callbacks.Callback):
    """Replaces the weights during `evaluate` and `predict`, as weight averaging does."""

    def on_test_begin(self, logs: Any = None) -> None:
        self.kept = copy.deepcopy(self.model.module.state_dict())
        halve(self.model.module)

    def on_test_end(self, logs: Any = None) -> None:
        self.model.module.load_state_dict(self.kept)

    on_predict_begin, on_predict_end = on_test_begin, on_test_end


def test_other_weights_for_evaluate_and_predict(where: sg.Strategy) -> None:
    x, y = data(ROWS)
    model, plain = model_on(where), mlp()
    halve(plain)
    options: Any = {"batch_size": BATCH, "verbose": 0}
    for callbacks, expected in (([Swap()], plain), ([], mlp())):
        found = model.evaluate(x, y, callbacks=callbacks, **options)["loss"]
        assert close(found, by_hand(expected, x, y)[-1])
        assert close(model.predict(x, callbacks=callbacks, **options), expected(x).detach())


def test_a_callback_that_evaluates_and_predicts(where: sg.Strategy) -> None:
    """It runs on the chief alone, while the other replicas wait."""
    x, y = data(ROWS)
    model = model_on(where)
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append(model.evaluate(x, y, verbose=0)["loss"])
        seen.append(float(model.predict(x, verbose=0).sum()))

    names = ("on_test_begin", "on_test_batch_begin", "on_test_batch_end", "on_test_end")
    note = sg.callbacks.LambdaCallback(**dict.fromkeys(names, look))
    model.evaluate(x, y, batch_size=16, verbose=0, callbacks=[note])
    plain = mlp()
    expected = [F.cross_entropy(plain(x), y).item(), plain(x).sum().item()]
    assert len(seen) == 12 and close(seen, 6 * expected)


def test_an_error_in_a_callback_ends_the_call(where: sg.Strategy) -> None:
    x, y = data(ROWS)
    model = model_on(where)

    def fail(batch: int, logs: Any = None) -> None:
        raise KeyError("mine")

    note = sg.callbacks.LambdaCallback(on_test_batch_end=fail)
    with pytest.raises(KeyError, match="mine"):
        model.evaluate(x, y, verbose=0, callbacks=[note])
    assert close(model.evaluate(x, y, verbose=0)["loss"], F.cross_entropy(mlp()(x), y).detach())


WORKER = """
import json, os
import torch
import stratagem as sg
from tests.frontends.test_around_batches import BATCH, ROWS, Note, model_on
from tests.support import data

me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
strategy = sg.MultiWorkerMirroredStrategy()
x, y = data(ROWS)
model, note = model_on(strategy), Note(halve_before=2)
callbacks = [note] if me == 0 else []
found = model.evaluate(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)["loss"]
outputs = model.predict(x, batch_size=BATCH, verbose=0, callbacks=callbacks)
print("told =", json.dumps([found, float(outputs.sum()), len(note.outputs), note.losses]))
"""


def test_several_workers_of_which_the_chief_has_callbacks(tmp_path: Path) -> None:
    workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
    everybody = []
    for index in range(2):
        task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        everybody.append(
            nursery().start(
                tmp_path, textwrap.dedent(WORKER), f"worker{index}", TF_CONFIG=json.dumps(task)
            )
        )
    try:
        for script in everybody:
            assert script.ends(50) == 0, script
    finally:
        nursery().clear()
    x, y = data(ROWS)
    plain = mlp()
    losses = by_hand(plain, x, y, halved_before=2)
    with torch.no_grad():
        total = float(plain(x[:16]).sum())
        halve(plain)
        total += float(plain(x[16:]).sum())
    told: Any = [script.noted("told") for script in everybody]
    chief, other = told
    assert close(chief[:2], [losses[-1], total]) and close(other[:2], chief[:2])
    assert chief[2] == 4 and close(chief[3], losses)
    assert other[2:] == [0, []]
