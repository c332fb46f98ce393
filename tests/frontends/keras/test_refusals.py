"""What cannot be distributed is refused with a sentence that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist
from keras import layers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import stratagem as sg
from stratagem.frontends.keras import scope
from tests.frontends.keras.served_support import close_served, served
from tests.keras_support import digits, strategy

ROOT = str(Path(sg.__file__).parent.parent)


def fake(version: str, backend: str) -> Any:
    return SimpleNamespace(__version__=version, config=SimpleNamespace(backend=lambda: backend))


@pytest.mark.parametrize(
    ("keras", "words"),
    [
        (fake("3.11.3", "torch"), ["3.11.3", "too old", "pip install -U 'keras>=3.12'"]),
        (fake("2.15.0", "tensorflow"), ["2.15.0", "too old"]),
        (fake("3.15.1", "jax"), ["runs on jax", "KERAS_BACKEND=torch"]),
        (SimpleNamespace(__file__="/home/ann/keras.py"), ["/home/ann/keras.py", "not Keras"]),
    ],
)
def test_a_keras_that_cannot_be_followed(keras: Any, words: list[str]) -> None:
    with pytest.raises(sg.UsageError) as refusal:
        scope.check(keras)
    assert all(word in str(refusal.value) for word in words)


def test_the_keras_that_is_here_can_be_followed() -> None:
    scope.check(keras)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_keras_imported_inside_the_scope_is_followed(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import numpy as np\n"
        "import stratagem as sg\n"
        "strategy = sg.MirroredStrategy(['cpu:0', 'cpu:1'])\n"
        "with strategy.scope():\n"
        "    import keras\n"
        "    class Seen(keras.layers.Layer):\n"
        "        def call(self, x):\n"
        "            print('rows', x.shape[0], flush=True)\n"
        "            return x\n"
        "    model = keras.Sequential([keras.Input((2,)), Seen(), keras.layers.Dense(1)])\n"
        "    model.compile(optimizer='sgd', loss='mse')\n"
        "x = np.ones((10, 2), 'float32')\n"
        "model.fit(x, x[:, :1], batch_size=10, verbose=0)\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": ROOT, "KERAS_BACKEND": "torch"},
    )
    assert done.returncode == 0, done.stderr
    assert "[replica 1] rows 5" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_replica_has_the_keras_of_the_chief() -> None:
    """Also where another Keras stands first on the path: test_oldest_keras has it so."""
    found = strategy(2).run(lambda: __import__("keras").__version__)
    assert found == [keras.__version__] * 2


def compiled(replicas: int = 2, **more: Any) -> Any:
    with strategy(replicas).scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(3)])
        model.compile(optimizer="sgd", loss="mse", **more)
    return model


@pytest.mark.timeout(120)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_compiled_step(replicas: int) -> None:
    x, _ = digits(9)
    with pytest.raises(sg.NotDistributable, match="jit_compile=False"):
        compiled(replicas, jit_compile=True).fit(x, x[:, :3], verbose=0)


@pytest.mark.timeout(120)
def test_parameters_sharded_by_torch() -> None:
    """On its own, Keras would go on training the parameters of before."""
    x, _ = digits(9)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = compiled()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(sg.NotDistributable, match="fully_shard"):
            model.fit(x, x[:, :3], verbose=0)
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict", "validation_data"])
def test_a_sampler_that_takes_a_part_of_the_data(call: str) -> None:
    x, _ = digits(9)
    rows = TensorDataset(torch.from_numpy(x), torch.from_numpy(x[:, :3]))
    sampler: Any = DistributedSampler(rows, num_replicas=2, rank=0)
    loader = DataLoader(rows, 4, sampler=sampler)
    with pytest.raises(sg.UsageError, match="leave the sampler out"):
        if call == "validation_data":
            compiled().fit(x, x[:, :3], validation_data=loader, verbose=0)
        getattr(compiled(), call)(loader, verbose=0)


class Turned(layers.Layer):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        return keras.ops.transpose(x)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape[::-1]


@pytest.mark.timeout(120)
def test_predicting_what_has_its_rows_elsewhere() -> None:
    x, _ = digits(10)
    with strategy(2).scope():
        model = keras.Sequential([keras.Input((8,)), Turned()])
        model.compile(loss="mse")
    with pytest.raises(sg.NotDistributable, match="does not begin with its rows"):
        model.predict(x, batch_size=10, verbose=0)


@pytest.mark.timeout(120)
def test_no_compile_is_keras_own_refusal() -> None:
    x, _ = digits(9)
    with strategy(2).scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(3)])
    with pytest.raises(ValueError, match="compile"):
        model.fit(x, x[:, :3], verbose=0)


@pytest.mark.parametrize("place", ["mirrored", "served"])
def test_hooks_on_variables(place: str) -> None:
    x, y = digits()
    where = strategy(2) if place == "mirrored" else served(sg.Synchronous())
    with where.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    handle = model.layers[0].kernel.value.register_hook(lambda grad: grad * 0.5)
    for train in (model.fit, model.train_on_batch):
        with pytest.raises(sg.NotDistributable, match=r"'.*' has a hook.*clipnorm"):
            train(x[:32], y[:32])
    model.evaluate(x[:32], y[:32], verbose=0)
    handle.remove()
    model.fit(x[:32], y[:32], verbose=0)
    close_served()


# --- a share of one row ---------------------------------------------------------------------------


class WantsTwo(layers.Layer):
    """Stands for a kernel that fails with a single row."""

    def call(self, x: Any) -> Any:
        if x.device.type != "meta" and x.shape[0] == 1:
            raise ValueError("two rows, please")
        return x


@pytest.mark.timeout(60)
@pytest.mark.parametrize("verb", ["fit", "evaluate", "predict"])
def test_a_layer_that_wants_two_rows_is_told_of_its_share(verb: str) -> None:
    x, y = digits(10)
    with strategy(2).scope():
        model = keras.Sequential([keras.Input(x.shape[1:]), layers.Flatten(), layers.Dense(10)])
        model.add(WantsTwo())
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = (x,) if verb == "predict" else (x, y)
    told = r"two rows, please(.|\n)*replica [01] has 1 of this batch's 2 rows.*drop_last=True"
    with pytest.raises((ValueError, sg.ReplicaFailed), match=told):
        getattr(model, verb)(*data, batch_size=4, verbose=0)


# --- a batch that is not made of rows -------------------------------------------------------------


class Anchors(keras.utils.PyDataset):
    """The first axis is anchors and positives; the second one has the examples."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng(index).normal(size=(2, 5, 6)).astype("float32")


class Metric(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        anchors, positives = data[0][0], data[0][1]
        self.zero_grad()
        loss = ((self(anchors, training=True) - self(positives, training=True)) ** 2).mean()
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("replicas", [2, 3])
def test_data_whose_first_axis_is_not_rows(replicas: int) -> None:
    with strategy(replicas).scope():
        model = Metric()
        model.compile("sgd")
    told = r"a tuple of arrays with a row for each example.*all 2 rows.*index 1 is out of bounds"
    with pytest.raises(sg.NotDistributable, match=told):
        model.fit(Anchors(), verbose=0)


@pytest.mark.timeout(60)
def test_a_step_that_fails_itself_is_not_taken_on_trust(caplog: Any) -> None:
    x, y = digits(16)
    with strategy(2).scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises((IndexError, sg.StratagemError), match="out of bounds"):
        model.fit(x, y + 7, verbose=0)
    assert "unchecked" not in caplog.text
