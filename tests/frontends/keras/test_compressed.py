"""Keras models whose gradients travel compressed."""

from __future__ import annotations

import os
import signal
from typing import Any

import keras
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stratagem as sg
from tests.clock import wait_for
from tests.codecs.by_hand import Pushes
from tests.strategies.test_compressed import by_formula, rows
from tests.support import data, strategy

pytestmark = pytest.mark.timeout(120)


def made(scope: Any, optimizer: Any) -> Any:
    keras.utils.set_random_seed(3)
    with scope:
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(4)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss)
    return model


def trained(wire: Any, **options: Any) -> list[Any]:
    x, y = (each.numpy() for each in data(50))
    with strategy(2, wire=wire) as where:
        model = made(where.scope(), keras.optimizers.SGD(0.1))
        model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, **options)
        return [np.array(w) for w in model.get_weights()]


def fitted(where: Any, optimizer: Any) -> tuple[list[Any], list[Any]]:
    """The weights before and after."""
    x, y = (each.numpy() for each in rows())
    model = made(where.scope(), optimizer)
    first = [np.array(w) for w in model.get_weights()]
    model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return first, [np.array(w) for w in model.get_weights()]


def far(a: list[Any], b: list[Any]) -> float:
    return max(float(np.abs(v - w).max()) for v, w in zip(a, b, strict=True))


def test_a_keras_model_trains_with_the_same_records() -> None:
    """A share of 1 leaves nothing out; eight bits leave little out, and a tenth much."""
    exact = trained(None)
    assert far(trained(sg.TopK(1.0)), exact) < 2e-6
    assert 1e-7 < far(trained(sg.Int8()), exact) < 5e-3
    assert 1e-3 < far(trained(sg.TopK(0.1)), exact) < 0.3


def test_optimizers_that_a_record_leads_astray_are_refused() -> None:
    x, y = (each.numpy() for each in data(20))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    sentences = {"adam": "Adam divides by", scaled: "mixed_bfloat16, or leave wire out"}
    with strategy(2, wire=sg.TopK(0.1)) as where:
        for optimizer, sentence in sentences.items():
            model = made(where.scope(), optimizer)
            with pytest.raises(sg.NotDistributable, match=sentence):
                model.fit(x, y, batch_size=10, verbose=0)


class LikeKeras(nn.Module):
    """The same layers in torch, with weights the way Keras has them."""

    def __init__(self, weights: list[Any]) -> None:
        super().__init__()
        for number, value in enumerate(weights):  # PowerSGD begins with what the name gives
            name = f"{('kernel', 'bias')[number % 2]} (variable {number})"
            self.register_parameter(name, nn.Parameter(torch.tensor(value).double()))

    def forward(self, x: Any) -> Any:
        first, offset, second, last = self.parameters()
        return (x @ first + offset).tanh() @ second + last


@pytest.mark.slow
def test_pushes_of_a_keras_model_do_what_the_formula_says() -> None:
    wire, options = sg.Int8(block=16), {"updates": sg.Asynchronous()}
    with sg.ParameterServerStrategy(sg.LocalCluster(1, 2), wire=wire, **options) as where:
        first, found = fitted(where, keras.optimizers.SGD(0.1))
    module, (x, y) = LikeKeras(first), rows()
    params, pushes = dict(module.named_parameters()), Pushes(wire, dict(module.named_parameters()))
    for batch in [slice(start, start + 16) for start in range(0, len(x), 16)] * 3:
        loss = F.cross_entropy(module(x[batch]), y[batch])
        gradients = torch.autograd.grad(loss, list(params.values()))
        for name, sent in pushes.sent(dict(zip(params, gradients, strict=True))).items():
            params[name].data -= 0.1 * sent
    expected = [p.detach().numpy() for p in params.values()]
    assert far(found, expected) < 1e-6
    for name, left in pushes.e.items():
        params[name].data -= 0.1 * left
    assert far(found, [p.detach().numpy() for p in params.values()]) > 1e-5  # what is left out


class Kill(keras.callbacks.Callback):
    """Kills a follower after some batches."""

    def __init__(self, where: Any, after: int) -> None:
        super().__init__()
        self.where, self.after, self.seen = where, after, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1
        if self.seen == self.after:
            os.kill(self.where.replica_group._pool.followers[0].pid, signal.SIGKILL)
            wait_for(lambda: self.where.replica().membership.trouble is not None)


@keras.saving.register_keras_serializable("tests")
class Dies(keras.optimizers.SGD):
    """Kills the last replica within its sixth step, when gradients have been added up."""

    file = ""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply(grads, trainable_variables)
        last = sg.current_replica().index == 2 and int(self.iterations) == 6
        if last and self.file and not os.path.exists(self.file):
            open(self.file, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("within", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_replicas_may_die_and_the_chief_keeps_what_it_has(within: bool, tmp_path: Any) -> None:
    """Followers begin anew, and the step that broke off is done again; the formula is torch's."""

    def lose(step: int, replicas: Any) -> None:
        if step == 5:
            replicas.e[1].zero_()
            replicas.e[2].zero_()

    wire = sg.PowerSGD(rank=1)
    x, y = (each.numpy() for each in rows())
    with strategy(3, cross_device_ops="ring", wire=wire, elastic=True) as where:
        optimizer = Dies(0.1)
        optimizer.file = str(tmp_path / "killed") if within else ""
        model = made(where.scope(), optimizer)
        first = [np.array(w) for w in model.get_weights()]
        options = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
        model.fit(x, y, callbacks=[Kill(where, -1 if within else 5)], **options)
        assert within == os.path.exists(tmp_path / "killed")
        found = [np.array(w) for w in model.get_weights()]
    expected = by_formula(wire, 3, before=lose, module=LikeKeras(first))
    others = by_formula(wire, 3, module=LikeKeras(first))
    weights = [[p.detach().numpy() for p in each.parameters()] for each in (expected, others)]
    assert far(found, weights[0]) < 1e-5
    assert far(found, weights[1]) > 1e-4  # what followers had kept is lost


def test_a_backup_has_what_was_left_out(tmp_path: Any) -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen == 6:
                raise KeyboardInterrupt

    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=1)

    wire = sg.TopK(0.1, momentum=0.5)
    expected = trained(wire)
    with pytest.raises(KeyboardInterrupt):
        trained(wire, callbacks=[backup(), Stop()])
    assert far(trained(wire, callbacks=[backup()]), expected) == 0.0
