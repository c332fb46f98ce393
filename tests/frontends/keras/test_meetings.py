"""Keras models with `sync=`: replicas average their weights now and then."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import torch

import stratagem as sg
from tests.frontends.keras.test_compressed import Dies, Kill, LikeKeras, far, fitted, made
from tests.strategies.test_broken_rounds import Renewed
from tests.strategies.test_compressed import RECORDS, by_formula, cluster_of, rows
from tests.strategies.test_meetings import SYNCS, ByHand
from tests.support import data, strategy

pytestmark = pytest.mark.timeout(120)


def trained(sync: Any, optimizer: Any, count: int = 3, **options: Any) -> tuple[list[Any], Any]:
    """The weights, and the last epoch's logs."""
    x, y = (each.numpy() for each in data(50))
    where = strategy(count, sync=sync) if count else nullcontext()
    with where as found:
        model = made(found.scope() if count else nullcontext(), optimizer)
        options = {"validation_data": (x, y), **options}
        told = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, **options)
        weights = [np.array(w) for w in model.get_weights()]
        assert model.evaluate(x, y, verbose=0) == pytest.approx(told.history["val_loss"][-1])
    return weights, {name: values[-1] for name, values in told.history.items()}


def momentum() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.5)


def test_a_meeting_after_every_update_of_sgd_is_one_device() -> None:
    """The last batch has 2 rows for 3 replicas."""
    alone, logs = trained(None, momentum(), count=0)
    met, found = trained(sg.LocalSteps(1), momentum())
    assert far(met, alone) < 2e-6
    assert found == pytest.approx(logs, abs=2e-6)


def test_the_mean_is_an_outer_step_of_rate_one() -> None:
    alone, _ = trained(None, "adam", count=0)
    mean, logs = trained(sg.LocalSteps(3), "adam")
    outer, _ = trained(sg.DiLoCo(3, outer=sg.Outer(1.0, 0.0)), "adam")
    assert far(mean, outer) < 1e-7
    assert 1e-4 < far(mean, alone) < 0.1
    assert logs["val_loss"] < 1.6
    assert far(trained(sg.Gossip("exponential"), "adam")[0], alone) < 0.1


def of_keras(kind: Any, first: list[Any]) -> Any:
    """The formulas for this model, from these weights on."""

    class OfKeras(kind):
        def module(self) -> Any:
            return LikeKeras(first)

        def optimizer(self, params: Any) -> Any:
            return torch.optim.SGD(params, 0.1, momentum=0.5)

    return OfKeras


def by_hand(formulas: ByHand) -> list[Any]:
    return [p.detach().numpy() for p in formulas.train().parameters()]


def test_parts_that_travel_are_what_the_formula_says() -> None:
    """With shares of unequal size, and one without rows."""
    with strategy(3, cross_device_ops="ring", sync=SYNCS["streaming"]) as where:
        first, found = fitted(where, momentum())
    like = of_keras(ByHand, first)
    assert far(found, by_hand(like(SYNCS["streaming"], 3))) < 1e-5
    assert far(found, by_hand(like(sg.DiLoCo(4, sg.Outer(0.5, 0.6), 2, overlap=0), 3))) > 1e-4


WORKER = """
import os, sys
os.environ["KERAS_BACKEND"] = "torch"
import keras
import torch
import stratagem as sg
from tests.frontends.keras.test_compressed import fitted
from tests.frontends.keras.test_meetings import momentum
from tests.strategies.test_compressed import RECORDS
from tests.strategies.test_meetings import SYNCS

name = sys.argv[1]
options = {"sync": SYNCS[name]} if name in SYNCS else {"wire": RECORDS[name]}
with sg.MultiWorkerMirroredStrategy(devices=["cpu:0"], **options) as strategy:
    found = fitted(strategy, momentum() if name in SYNCS else keras.optimizers.SGD(0.1))
torch.save([[torch.from_numpy(w) for w in each] for each in found], sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_of_a_cluster_do_what_the_formula_says(tmp_path: Any) -> None:
    """Two processes with TF_CONFIG, each in its own scope: fewer bytes, then fewer meetings."""
    for name in ("power", "streaming"):
        (tmp_path / name).mkdir()
        running = cluster_of(2, WORKER, name, tmp_path / name)
        assert [each.wait(100) for each in running] == [0, 0]
        told = [torch.load(tmp_path / name / f"{index}.pt") for index in range(2)]
        (first, found), (_, second) = ([[w.numpy() for w in each] for each in t] for t in told)
        assert far(found, second) == 0.0
        if name == "streaming":
            like = of_keras(ByHand, first)
            expected, other = (by_hand(like(SYNCS[n], 2)) for n in (name, "diloco"))
        else:
            wires = RECORDS[name], sg.TopK(1.0)
            trained = [by_formula(wire, 2, module=LikeKeras(first)) for wire in wires]
            expected, other = ([p.detach().numpy() for p in m.parameters()] for m in trained)
        assert far(found, expected) < 1e-5
        assert far(found, other) > 1e-4


LATER = [(sg.DiLoCo(3), 6), (sg.DiLoCo(3), 7), (sg.Gossip(), 5), (sg.Gossip(), 6)]


@pytest.mark.parametrize(
    ("sync", "at"),
    [(sg.DiLoCo(3), 5), *(pytest.param(*each, marks=pytest.mark.slow) for each in LATER)],
)
def test_who_is_new_takes_the_weights_of_a_meeting(sync: Any, at: int, tmp_path: Any) -> None:
    """On one machine all followers begin anew when one dies: within a step, which is done again,
    in mid-round, and at its end."""
    x, y = (each.numpy() for each in rows())
    with strategy(3, cross_device_ops="ring", sync=sync, elastic=True) as where:
        optimizer = Dies(0.1, momentum=0.5)
        optimizer.file = str(tmp_path / "killed") if at == 5 else ""
        model = made(where.scope(), optimizer)
        first = [np.array(w) for w in model.get_weights()]
        options = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
        model.fit(x, y, callbacks=[Kill(where, at if at > 5 else -1)], **options)
        assert (at == 5) == os.path.exists(tmp_path / "killed")
        found = [np.array(w) for w in model.get_weights()]

    like = of_keras(Renewed, first)
    weights = [by_hand(like(sync, 3, at)), by_hand(like(sync, 3, -1))]
    assert far(found, weights[0]) < 1e-5
    assert far(found, weights[1]) > 1e-4  # what followers had done since the meeting is lost


def test_a_backup_has_what_replicas_have_of_their_own(tmp_path: Any) -> None:
    """Each replica's Adam, the outer momentum, and what the wire has left out."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen == 6:
                raise KeyboardInterrupt

    def backup(name: str) -> Any:
        return keras.callbacks.BackupAndRestore(str(tmp_path / name), save_freq=5)

    sync = sg.DiLoCo(4, fragments=2, wire=sg.TopK(0.3))
    expected, _ = trained(sync, "adam", callbacks=[backup("whole")])
    with pytest.raises(KeyboardInterrupt):
        trained(sync, "adam", callbacks=[backup("parts"), Stop()])
    assert far(trained(sync, "adam", callbacks=[backup("parts")])[0], expected) == 0.0


def test_single_batches_are_meetings_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = (each.numpy() for each in data(8))
    for sync, expected in ((sg.LocalSteps(3), 1), (None, 0)):
        caplog.clear()
        with strategy(2, sync=sync) as found:
            model = made(found.scope(), "sgd")
            for _ in range(2):
                model.train_on_batch(x, y)
        assert caplog.text.count("train_on_batch has replicas meet after every batch") == expected
