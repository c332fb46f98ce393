"""Synchronised layers of a model in use: copied, averaged, saved, abandoned after a failure."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.training import sync_batchnorm
from stratagem.training.replica import Replica, be, be_no_more, current_replica
from stratagem.wire.collective import Alone
from tests.support import by_hand, data, distance, moved, strategy

pytestmark = pytest.mark.timeout(60)


def net(**options: Any) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, **options), nn.Linear(8, 4))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def is_plain(module: nn.Module) -> bool:
    """Whether every layer is of torch's own types, without attributes of this package."""
    return all(
        type(layer) in (nn.Sequential, nn.Linear, nn.BatchNorm1d) and "forward" not in vars(layer)
        for layer in module.modules()
    )


@pytest.fixture(scope="module")
def two() -> Iterator[sg.Strategy]:
    made = strategy(2, sync_batchnorm=True)
    yield made
    made.close()


def fitted(on: sg.Strategy, module: nn.Module, *callbacks: sg.callbacks.Callback) -> sg.Model:
    model = sg.Model(module, on)
    model.compile(optimizer=sgd, loss="cross_entropy")
    x, y = data(35)
    model.fit(x, y, batch_size=8, shuffle=False, callbacks=callbacks, verbose=0)
    return model


# --- layers by themselves ------------------------------------------------------------------------


@pytest.fixture
def replica() -> Iterator[Replica]:
    """A replica that is one of two for its layers."""
    lone = current_replica()
    made = Replica(0, 2, lone.device, "replica 0", Alone(), lone.membership)
    be(made)
    yield made
    be_no_more(made)


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        saved,
        lambda m: AveragedModel(m).module,
    ],
    ids=["deepcopy", "pickle", "torch.save", "AveragedModel"],
)
def test_a_copy_is_plain(replica: Replica, duplicate: Any) -> None:
    x, _ = data(10, features=8)
    module = net()[1]
    sync_batchnorm.install(module, replica)
    other = duplicate(module)
    assert is_plain(other) and not is_plain(module)
    nn.init.constant_(other.weight, 2.0)
    torch.testing.assert_close(other(x), 2 * module(x))
    torch.testing.assert_close(other.running_mean, module.running_mean)


def test_taken_back_once_or_twice(replica: Replica) -> None:
    module = net()
    undo = sync_batchnorm.install(module, replica)
    assert not is_plain(module)
    again = sync_batchnorm.install(module, replica)  # as after a failure: nobody took it back
    undo()
    assert not is_plain(module)  # what is there now is another's
    again()
    again()
    assert is_plain(module)


def test_a_layer_is_itself_where_no_replica_runs(replica: Replica) -> None:
    """As after Ctrl-C in mid-training, when no peer answers."""
    x, _ = data(10)
    module, alone = net(), net()
    sync_batchnorm.install(module, replica)
    replica.collective.close()
    be_no_more(replica)
    assert torch.equal(module(x), alone(x))
    assert distance(module, alone) == 0


def test_one_row_in_all_is_refused_as_on_one_device(replica: Replica) -> None:
    module = net()
    for _ in range(2):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            module(torch.ones(1, 6))
        sync_batchnorm.install(module, replica)


# --- models that train ---------------------------------------------------------------------------


def test_averaged_in_a_loop_of_ones_own_and_returned(two: sg.Strategy) -> None:
    x, y = data(35)

    def train() -> tuple[nn.Module, nn.Module, Tensor]:
        model = net()
        averaged = None
        loader = DataLoader(TensorDataset(x, y), batch_size=8)
        optimizer = sgd(model.parameters())
        model, optimizer, loader = two.prepare(model, optimizer, loader)
        for rows, targets in loader:
            F.cross_entropy(model(rows), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if averaged is None:
                averaged = AveragedModel(model, use_buffers=True)
            averaged.update_parameters(model)
        assert averaged is not None
        return model, averaged.module, averaged.eval()(x).detach()

    models, averages, outputs = zip(*two.run(train), strict=True)
    alone, expected = net(), None
    optimizer = sgd(alone.parameters())
    for start in range(0, 35, 8):
        F.cross_entropy(alone(x[start : start + 8]), y[start : start + 8]).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = expected or AveragedModel(alone, use_buffers=True)
        expected.update_parameters(alone)
    assert expected is not None and moved(net(), expected.module)
    for i in range(2):
        assert distance(models[i], alone) < 2e-6
        assert distance(averages[i], expected.module) < 2e-6
        assert torch.allclose(outputs[i], expected.eval()(x), atol=2e-6)
    assert is_plain(models[1])  # it came from its replica
    for model in models:  # and may train on by itself
        assert torch.allclose(model(x), alone(x), atol=2e-6)


class _Keep(sg.callbacks.Callback):
    def on_train_begin(self) -> None:
        self.averaged = AveragedModel(self.model.module)

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.averaged.update_parameters(self.model.module)
        self.saved = saved(self.model.module)


def test_averaged_and_saved_by_a_callback(two: sg.Strategy) -> None:
    x, y = data(35)
    keep = _Keep()
    model = fitted(two, net(), keep)
    alone = by_hand(net(), sgd, F.cross_entropy, x, y, batch=8, epochs=1)
    assert is_plain(model.module) and is_plain(keep.saved) and is_plain(keep.averaged.module)
    assert distance(model.module, alone) < 2e-6
    assert distance(keep.saved, alone) < 2e-6
    assert distance(keep.averaged.module, alone, buffers=False) < 2e-6
    alone.train()
    assert torch.allclose(keep.averaged(x), alone(x), atol=1e-5)


class _Fail(sg.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        raise KeyboardInterrupt


def test_a_model_whose_training_was_interrupted(two: sg.Strategy) -> None:
    module = net()
    with pytest.raises(KeyboardInterrupt):
        fitted(two, module, _Fail())
    alone, x = saved(module), data(35)[0]
    assert moved(net(), alone)
    assert torch.equal(module(x), alone(x))
    start = copy.deepcopy(module)
    model = fitted(two, module)
    expected = by_hand(start, sgd, F.cross_entropy, *data(35), batch=8, epochs=1)
    assert distance(model.module, expected) < 2e-6
    assert torch.allclose(model.predict(x, verbose=0), expected.eval()(x), atol=1e-5)


def test_without_running_statistics(two: sg.Strategy) -> None:
    x, y = data(35)
    start = net(track_running_stats=False)
    model = fitted(two, copy.deepcopy(start))
    alone = by_hand(start, sgd, F.cross_entropy, x, y, batch=8, epochs=1)
    assert distance(model.module, alone) < 2e-6
    refused = (sg.NotDistributable, sg.ReplicaFailed)  # whichever replica comes there first
    with pytest.raises(refused, match="BatchNorm1d with track_running_stats=False"):
        model.fit(x, y, validation_data=(x, y), verbose=0)
    for call in (lambda: model.evaluate(x, y, verbose=0), lambda: model.predict(x, verbose=0)):
        with pytest.raises(sg.NotDistributable, match="track_running_stats=False"):
            call()


def test_a_forward_pass_of_the_chief_alone(two: sg.Strategy) -> None:
    x, y = data(24)

    def train(evaluates: bool) -> bool:
        model = net()
        loader = DataLoader(TensorDataset(x, y), batch_size=8)
        model, optimizer, loader = two.prepare(model, sgd(model.parameters()), loader)
        for rows, targets in loader:
            F.cross_entropy(model(rows), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            if two.is_chief:
                model.train(not evaluates)(x[:5])
                model.train()
        return True

    assert all(two.run(train, True))
    with pytest.raises((sg.UsageError, sg.ReplicaFailed), match=r"model.eval\(\) before a forward"):
        two.run(train, False)


# --- each replica by itself ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def apart() -> Iterator[sg.Strategy]:
    made = strategy(2)
    yield made
    made.close()


_FEW = (
    r"Expected more than 1 value(.|\n)*replica [01] has 1 of this batch's 2 rows here.*sync_batch"
)


def test_a_share_of_one_row_is_explained(apart: sg.Strategy) -> None:
    module = net()
    model = sg.Model(module, apart)
    model.compile(optimizer=sgd, loss="cross_entropy")
    x, y = data(34)
    with pytest.raises((ValueError, sg.ReplicaFailed), match=_FEW):
        model.fit(x, y, batch_size=32, verbose=0)
    model.fit(x, y, batch_size=30, verbose=0)
    assert is_plain(module)


def test_a_share_of_one_row_is_explained_in_a_loop_of_ones_own(apart: sg.Strategy) -> None:
    x, y = data(34)

    def train() -> None:
        model = net()
        loader = DataLoader(TensorDataset(x, y), batch_size=32)
        model, _, loader = apart.prepare(model, sgd(model.parameters()), loader)
        for rows, targets in loader:
            F.cross_entropy(model(rows), targets).backward()

    with pytest.raises((ValueError, sg.ReplicaFailed), match=_FEW):
        apart.run(train)


# --- running statistics --------------------------------------------------------------------------


def looped(on: sg.Strategy | None, module: nn.Module) -> nn.Module:
    optimizer = sgd(module.parameters())
    x, y = data(21)
    loader: Any = DataLoader(TensorDataset(x, y), batch_size=4)  # the last one has one row
    if on is not None:
        module, optimizer, loader = on.prepare(module, optimizer, loader)
    for a, b in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(a), b).backward()
        optimizer.step()
    return module


def frozen_statistics() -> nn.Module:
    """As fine-tuning freezes them: normalised over the batch, and nothing tracked."""
    module = net()
    module[1].running_mean.fill_(0.3)  # type: ignore[operator, union-attr]
    module[1].track_running_stats = False  # type: ignore[assignment]
    return module


def of_instances() -> nn.Module:
    torch.manual_seed(5)
    norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (2, 3)), norm, nn.Flatten(), nn.Linear(6, 4))


def by_instances(rows: int, batch: int) -> nn.Module:
    x, y = data(rows)
    return by_hand(of_instances(), sgd, F.cross_entropy, x, y, batch=batch, epochs=1)


def test_statistics_that_are_not_tracked_stay(two: sg.Strategy) -> None:
    x, y = data(20)
    expected = by_hand(frozen_statistics(), sgd, F.cross_entropy, x, y, batch=8, epochs=1)
    model = sg.Model(frozen_statistics(), two)
    model.compile(optimizer=sgd, loss="cross_entropy")
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert distance(model.module, expected) < 1e-6 and moved(expected, frozen_statistics())


@pytest.mark.parametrize("replicas", [2, 3])
def test_what_instances_track_is_a_mean_over_rows(replicas: int) -> None:
    expected = by_instances(21, 4)
    made = strategy(replicas)
    try:
        for trained in made.run(lambda: looped(made, of_instances())):
            assert distance(trained, expected) < 1e-6
        x, y = data(21)
        model = sg.Model(of_instances(), made)
        model.compile(optimizer=sgd, loss="cross_entropy")
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        assert distance(model.module, expected) < 1e-6
        assert type(model.module[1]) is nn.InstanceNorm1d
    finally:
        made.close()
