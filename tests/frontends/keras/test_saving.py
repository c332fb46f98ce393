"""Plain on disk for Keras: the file that one device writes, for any backend and number of replicas.

Backends that the interpreter has not are tried in others if STRATAGEM_OTHER_PYTHONS names some
(paths with colons between), each with Keras and one of TensorFlow, JAX or torch.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import torch
from keras import layers

from tests.keras_support import apart, digits, strategy, train

pytestmark = pytest.mark.timeout(240)

LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
X, Y = digits(200)
#: 64, 64, 64 and 8 examples; without shuffling, so that two epochs are one and another
FIT = {"x": X, "y": Y, "batch_size": 64, "shuffle": False}
STEPS = 4
TOLERANCE = 2e-6


def build() -> Any:
    return keras.Sequential(
        [
            keras.Input((8,), name="in"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(16, activation="tanh", kernel_regularizer="l2", name="hidden"),
            layers.Dense(3, name="out"),
        ],
        name="small",
    )


def compile() -> dict[str, Any]:
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.8)
    adam = keras.optimizers.Adam(rate, epsilon=1e-3, name="adam")
    return {"optimizer": adam, "loss": LOGITS, "metrics": ["accuracy"]}


def spread(count: int) -> Any:
    return strategy(count, sync_batchnorm=True)


def trained(count: int | None, epochs: int = 1, **fit: Any) -> Any:
    """A model trained by `count` replicas; by plain Keras if there is no count."""
    where = None if count is None else spread(count)
    return train(build, compile, {**FIT, "epochs": epochs, **fit}, where)[0]


def load(path: Any, count: int | None) -> Any:
    """Load a model inside a scope, or without one."""
    with spread(count).scope() if count is not None else nullcontext():
        return keras.models.load_model(path)


def replicas(model: Any) -> int | None:
    """How many took part in the model's last call; None when it is Keras' own alone."""
    driver = model.__dict__.get("_stratagem")
    return None if driver is None else int(driver.side.adapter.replica.count)


def config(path: Path) -> Any:
    return json.loads(zipfile.ZipFile(path).read("config.json"))


def arrays(path: Path) -> dict[str, Any]:
    """Every array in a .keras or .weights.h5 file: weights, optimizer state, all else."""
    content = path.read_bytes()
    if path.suffix == ".keras":
        content = zipfile.ZipFile(path).read("model.weights.h5")
    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = np.asarray(item, dtype=np.float64)

    with h5py.File(io.BytesIO(content)) as file:
        file.visititems(visit)
    return found


def files_apart(a: Path, b: Path) -> float:
    """The largest difference between two files that hold the same things."""
    ours, theirs = arrays(a), arrays(b)
    assert ours.keys() == theirs.keys() and len(ours) > 4
    return max(float(np.abs(ours[key] - theirs[key]).max()) for key in ours if ours[key].size)


def values(variables: Any) -> list[Any]:
    return [np.asarray(keras.ops.convert_to_numpy(v), dtype=np.float64) for v in variables]


def assert_same(ours: Any, theirs: Any, tolerance: float = 0.0) -> None:
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert np.abs(a - b).max(initial=0.0) <= tolerance


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def model() -> Any:
    """One epoch on two replicas."""
    return trained(2)


@pytest.fixture(scope="module")
def saved(model: Any, folder: Path) -> Path:
    path = folder / "two.keras"
    model.save(path)
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """Two epochs of plain Keras without a break: where everybody who goes on must arrive."""
    path = folder / "whole.keras"
    trained(None, epochs=2).save(path)
    return path


# --- the file ---------------------------------------------------------------------------------


def without_addresses(config: Any) -> Any:
    """Keras writes `id(object)` into the file, which is another one each time."""
    if isinstance(config, dict):
        return {k: without_addresses(v) for k, v in config.items() if k != "shared_object_id"}
    return [without_addresses(v) for v in config] if isinstance(config, list) else config


def test_the_file_is_the_one_that_plain_keras_writes(saved: Path, folder: Path) -> None:
    plain = folder / "plain.keras"
    trained(None).save(plain)
    assert zipfile.ZipFile(saved).namelist() == zipfile.ZipFile(plain).namelist()
    assert files_apart(saved, plain) < TOLERANCE
    expected, found = without_addresses(config(plain)), without_addresses(config(saved))
    mended = expected["compile_config"]["optimizer"]
    assert mended["module"].startswith("keras.src.backend.torch")  # Keras' bug; else drop this
    mended.update(module="keras.optimizers", registered_name=None)
    assert found == expected


def test_the_file_names_neither_us_nor_what_is_private_to_a_backend(saved: Path) -> None:
    with zipfile.ZipFile(saved) as file:
        for name in file.namelist():
            assert b"stratagem" not in file.read(name)
    assert "keras.src" not in json.dumps(config(saved))


def nested(optimizers: Any) -> dict[str, Callable[[], Any]]:
    """Optimizers that hold others."""
    found = {"LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.Adam())}
    if hasattr(optimizers, "MultiOptimizer"):
        found["MultiOptimizer"] = lambda: optimizers.MultiOptimizer(
            optimizers.OptimizerMap(optimizers.SGD(), {"hidden/.*": optimizers.Adam()})
        )
    return found


def every_optimizer() -> dict[str, Callable[[], Any]]:
    base = keras.optimizers.Optimizer
    found = {
        name: kind
        for name, kind in vars(keras.optimizers).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    }
    return {**found, **nested(keras.optimizers)}


@pytest.mark.parametrize("name", every_optimizer())
def test_optimizers_have_their_public_names(name: str, tmp_path: Path) -> None:
    make = every_optimizer()[name]
    with spread(2).scope():
        model = build()
        model.compile(optimizer=make(), loss=LOGITS)
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "a.keras")
    assert "keras.src" not in json.dumps(config(tmp_path / "a.keras"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Keras, that it does not restore a MultiOptimizer
        assert type(load(tmp_path / "a.keras", None).optimizer) is type(model.optimizer)


@keras.saving.register_keras_serializable("stratagem_tests")
class Own(keras.optimizers.SGD):
    pass


def test_an_optimizer_of_the_users_own_keeps_its_name(tmp_path: Path) -> None:
    with spread(2).scope():
        model = build()
        model.compile(optimizer=Own(0.1), loss=LOGITS)
    model.save(tmp_path / "a.keras")
    said = config(tmp_path / "a.keras")["compile_config"]["optimizer"]
    assert said["registered_name"] == "stratagem_tests>Own"
    assert type(load(tmp_path / "a.keras", None).optimizer) is Own


# --- other backends ---------------------------------------------------------------------------

#: opens the file with nothing but Keras, and goes on training where the backend can
OPEN = """
import os, sys
from importlib.machinery import ModuleSpec
from types import ModuleType

class Absent(ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(name)
    def __call__(self, *args, **kwargs):
        return self

class Finder:
    # Keras' numpy backend imports JAX, for convolutions and Fourier transforms
    def __init__(self, stubs, barred):
        self.stubs, self.barred = stubs, barred
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.barred:
            raise ModuleNotFoundError(name, name=name)
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.stubs else None
    def create_module(self, spec):
        return Absent(spec.name)
    def exec_module(self, module):
        pass

data, path, out, stubs = sys.argv[1:]
backend = os.environ["KERAS_BACKEND"]
barred = {"stratagem"} | ({"torch"} if backend != "torch" else set())
sys.meta_path.insert(0, Finder(set(filter(None, stubs.split(","))), barred))
import numpy as np
import keras

assert keras.backend.backend() == backend
given = np.load(data)
model = keras.models.load_model(path)
found = {}
def keep(when):
    for what, variables in (("weights", model.weights), ("optimizer", model.optimizer.variables)):
        for i, variable in enumerate(variables):
            found[f"{when} {what} {i:02}"] = keras.ops.convert_to_numpy(variable)
keep("opened")
found["predicted"] = model.predict(given["x"], verbose=0)
if backend != "numpy":
    model.fit(given["x"], given["y"], batch_size=int(given["batch"]), shuffle=False, verbose=0)
    keep("trained")
np.savez(out, **found)
"""


def others() -> Iterator[Any]:
    """An interpreter and a backend each."""
    for backend in ("torch", "numpy", "tensorflow", "jax"):
        needed = "scipy" if backend == "numpy" else backend
        absent = find_spec(needed) is None
        reason = f"this interpreter has no {needed}; see STRATAGEM_OTHER_PYTHONS"
        yield pytest.param(
            sys.executable, backend, id=backend, marks=pytest.mark.skipif(absent, reason=reason)
        )
    for python in filter(None, os.environ.get("STRATAGEM_OTHER_PYTHONS", "").split(":")):
        ask = "from importlib.util import find_spec as f; print(*[b for b in {} if f(b)])"
        known = subprocess.run(
            [python, "-c", ask.format(("torch", "tensorflow", "jax"))],
            check=True,
            text=True,
            capture_output=True,
        ).stdout.split()
        for backend in known:
            yield pytest.param(python, backend, id=f"{python}-{backend}")


@pytest.mark.slow
@pytest.mark.parametrize(("python", "backend"), list(others()))
def test_every_backend_opens_it_and_goes_on(
    python: str, backend: str, model: Any, saved: Path, whole: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "data.npz", x=X, y=Y, batch=FIT["batch_size"])
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KERAS_HOME")}
    environ.update(KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
    stubs = "jax,jaxlib" if backend == "numpy" and python == sys.executable else ""
    out = tmp_path / "found.npz"
    done = subprocess.run(
        [python, "-c", OPEN, str(tmp_path / "data.npz"), str(saved), str(out), stubs],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = np.load(out)

    def kept(what: str) -> list[Any]:
        return [found[key].astype(np.float64) for key in sorted(found.files) if what in key]

    assert_same(kept("opened weights"), values(model.weights))
    assert_same(kept("opened optimizer"), values(model.optimizer.variables))
    assert_same(kept("predicted"), [model.predict(X, verbose=0)], 1e-5)
    if backend != "numpy":
        there = load(whole, None)
        assert_same(kept("trained weights"), values(there.weights), 1e-5)
        assert_same(kept("trained optimizer"), values(there.optimizer.variables), 1e-5)


# --- going on ---------------------------------------------------------------------------------


def test_opened_without_a_scope_it_is_plain_keras(model: Any, saved: Path, whole: Path) -> None:
    again = load(saved, None)
    assert_same(values(again.weights), values(model.weights))
    assert_same(values(again.optimizer.variables), values(model.optimizer.variables))
    again.fit(**FIT, verbose=0)
    assert replicas(again) is None
    assert apart(again, load(whole, None)) < TOLERANCE


@pytest.mark.parametrize("count", [1, 2, 3])
def test_opened_in_a_scope_it_is_distributed(
    count: int, model: Any, saved: Path, whole: Path, tmp_path: Path
) -> None:
    """Saved by two replicas; one, two or three go on as one device without a break would."""
    again = load(saved, count)
    assert int(again.optimizer.iterations.numpy()) == STEPS
    assert_same(values(again.weights), values(model.weights))
    assert_same(values(again.optimizer.variables), values(model.optimizer.variables))
    again.fit(**FIT, verbose=0)
    assert replicas(again) == count if count > 1 else "_stratagem" in again.__dict__
    again.save(tmp_path / "a.keras")
    assert files_apart(tmp_path / "a.keras", whole) < TOLERANCE
    assert files_apart(saved, whole) > 1e-3  # there was a way to go


OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "accumulation": lambda: keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=3),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, epsilon=1e-3), initial_scale=4.0, dynamic_growth_steps=3
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_survives_another_number_of_replicas(name: str, tmp_path: Path) -> None:
    """One epoch ends between two updates of an accumulation, and in mid-growth of a scale."""
    make = lambda: {"optimizer": OPTIMIZERS[name](), "loss": LOGITS}  # noqa: E731
    train(build, make, FIT)[0].save(tmp_path / "one.keras")
    alone = load(tmp_path / "one.keras", None)
    alone.fit(**FIT, verbose=0)
    alone.save(tmp_path / "alone.keras")
    two, _ = train(build, make, FIT, spread(2))
    two.save(tmp_path / "two.keras")
    three = load(tmp_path / "two.keras", 3)
    assert_same(values(three.optimizer.variables), values(two.optimizer.variables))
    three.fit(**FIT, verbose=0)
    three.save(tmp_path / "three.keras")
    assert files_apart(tmp_path / "three.keras", tmp_path / "alone.keras") < TOLERANCE
    assert files_apart(tmp_path / "two.keras", tmp_path / "alone.keras") > 1e-3


@keras.saving.register_keras_serializable("stratagem_tests")
class Subclassed(keras.Model):
    def __init__(self, width: int = 8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = width
        self.hidden, self.out = layers.Dense(width, activation="tanh"), layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def get_config(self) -> Any:
        return {**super().get_config(), "width": self.width}


def test_a_subclassed_model(tmp_path: Path) -> None:
    alone, _ = train(Subclassed, compile, {**FIT, "epochs": 2})
    two, _ = train(Subclassed, compile, FIT, spread(2))
    two.save(tmp_path / "a.keras")
    three = load(tmp_path / "a.keras", 3)
    three.fit(**FIT, verbose=0)
    assert apart(three, alone) < TOLERANCE < apart(two, alone)


def test_saved_and_opened_inside_one_scope(whole: Path, tmp_path: Path) -> None:
    keras.utils.set_random_seed(7)
    with spread(2).scope():
        model = build()
        model.compile(**compile())
        model.save(tmp_path / "new.keras")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Keras: the optimizer had no state yet
            model = keras.models.load_model(tmp_path / "new.keras")
        model.fit(**FIT, verbose=0)
        model.save(tmp_path / "a.keras")
        again = keras.models.load_model(tmp_path / "a.keras")
        again.fit(**FIT, verbose=0)
        assert replicas(again) == 2
        again.save(tmp_path / "b.keras")
    assert files_apart(tmp_path / "b.keras", whole) < TOLERANCE


def test_opened_without_compiling_it_belongs_to_nobody(saved: Path) -> None:
    with spread(2).scope():
        model = keras.models.load_model(saved, compile=False)
    assert replicas(model) is None
    with spread(2).scope():
        model.compile(**compile())
    model.fit(**FIT, verbose=0)
    assert replicas(model) == 2


# --- weights alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.weights.h5", "a.weights.json"])
def test_weights_alone(name: str, model: Any, whole: Path, tmp_path: Path) -> None:
    """Into three replicas; in one file with the optimizer's state, which pieces do without."""
    pieces = {"max_shard_size": 1e-6} if name.endswith("json") else {}
    model.save_weights(tmp_path / name, **pieces)
    with spread(3).scope():
        again = build()
        again.compile(**compile())
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / name)
    assert_same(values(again.weights), values(model.weights))
    if not pieces:
        assert_same(values(again.optimizer.variables), values(model.optimizer.variables))
        again.fit(**FIT, verbose=0)
        assert apart(again, load(whole, None)) < TOLERANCE


def test_weights_of_plain_keras_loaded_between_two_fits(whole: Path, tmp_path: Path) -> None:
    """The replicas have the model already, and must notice."""
    plain = trained(None)
    plain.save_weights(tmp_path / "a.weights.h5")
    model = trained(2, epochs=3)
    model.load_weights(tmp_path / "a.weights.h5")
    assert_same(values(model.optimizer.variables), values(plain.optimizer.variables))
    model.fit(**FIT, verbose=0)
    assert apart(model, load(whole, None)) < TOLERANCE


# --- in mid-training --------------------------------------------------------------------------


class At(keras.callbacks.Callback):
    """Calls a function after a step."""

    def __init__(self, step: int, what: Callable[[Any], object]) -> None:
        super().__init__()
        self.step, self.what, self.seen = step, what, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += 1
        if self.seen == self.step:
            self.what(self.model)


WAYS: dict[str, tuple[str, Callable[[Any, Path], object]]] = {
    "model.save": ("a.keras", lambda model, path: model.save(path)),
    "keras.saving": ("a.keras", lambda model, path: keras.saving.save_model(model, path)),
    "weights": ("a.weights.h5", lambda model, path: model.save_weights(path)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [2, 3])
def test_from_a_callback(way: str, count: int, whole: Path, tmp_path: Path) -> None:
    """The file has the weights of that step, and saving does not change the training."""
    name, save = WAYS[way]
    here, there = tmp_path / name, tmp_path / f"plain.{name}"
    trained(None, callbacks=[At(3, lambda model: save(model, there))])
    model = trained(count, epochs=2, callbacks=[At(3, lambda model: save(model, here))])
    assert files_apart(here, there) < TOLERANCE
    assert apart(model, load(whole, None)) < TOLERANCE


@pytest.mark.parametrize("way", WAYS)
def test_statistics_of_all_replicas_from_a_callback(way: str, tmp_path: Path) -> None:
    """Without synchronisation each replica has its own; the mean of equal shares is the batch's."""
    name, save = WAYS[way]
    means = []
    for where in (None, strategy(2)):
        path = tmp_path / f"{len(means)}.{name}"
        watch = At(3, lambda model, path=path: save(model, path))
        train(build, compile, {**FIT, "callbacks": [watch]}, where)
        means.append(arrays(path)["layers/batch_normalization/vars/2"])
    assert means[0].shape == (8,) and np.abs(means[0]).max() > 1e-3
    assert np.abs(means[0] - means[1]).max() < 1e-6


def test_loaded_by_a_callback(tmp_path: Path) -> None:
    """Weights of another model in mid-epoch reach every replica."""
    keras.utils.set_random_seed(99)
    other = build()
    other.compile(**compile())
    other.optimizer.build(other.trainable_variables)
    path = tmp_path / "a.weights.h5"
    other.save_weights(path)
    alone = trained(None, callbacks=[At(2, lambda model: model.load_weights(path))])
    model = trained(3, callbacks=[At(2, lambda model: model.load_weights(path))])
    assert apart(alone, model) < TOLERANCE


def test_checkpoints_of_steps_are_named_alike(tmp_path: Path) -> None:
    """The loss in the name is that of all replicas."""
    names = []
    for where, count in (("plain", None), ("ours", 2)):
        each = keras.callbacks.ModelCheckpoint(
            str(tmp_path / where / "{epoch}-{batch}-{loss:.4f}.keras"), save_freq=2
        )
        trained(count, epochs=2, callbacks=[each])
        names.append(sorted(path.name for path in (tmp_path / where).iterdir()))
    assert names[0] == names[1] and len(names[0]) == STEPS
    for name in names[0]:
        assert files_apart(tmp_path / "plain" / name, tmp_path / "ours" / name) < TOLERANCE


class Stopped(Exception):
    pass


@pytest.mark.parametrize("count", [2, 3])
def test_backup_and_restore(count: int, whole: Path, tmp_path: Path) -> None:
    """Training that broke off after an epoch goes on in a new model, whatever its seed."""

    def stop(model: Any) -> None:
        raise Stopped

    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    with pytest.raises(Stopped):
        trained(2, epochs=2, callbacks=[backup(), At(STEPS + 2, stop)])
    keras.utils.set_random_seed(99)
    with spread(count).scope():
        model = build()
        model.compile(**compile())
    history = model.fit(**FIT, epochs=2, callbacks=[backup()], verbose=0)
    assert history.epoch == [1]
    assert int(model.optimizer.iterations.numpy()) == 2 * STEPS
    assert apart(model, load(whole, None)) < TOLERANCE


# --- other ways out ---------------------------------------------------------------------------


def test_a_folder_instead_of_a_file(model: Any, tmp_path: Path) -> None:
    model.save(tmp_path / "folder", zipped=False)
    assert apart(load(tmp_path / "folder", None), model) == 0.0


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_copies_are_plain(way: str, model: Any) -> None:
    again = pickle.loads(pickle.dumps(model)) if way == "pickle" else copy.deepcopy(model)
    assert apart(again, model) == 0.0
    again.fit(**FIT, verbose=0)
    assert replicas(again) is None


def test_legacy_h5(tmp_path: Path) -> None:
    """Weights and predictions; Keras 3.15 itself cannot go on training from such a file."""
    model = trained(2)
    model.save(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        said = " ".join(str(value) for value in file.attrs.values())
    assert "stratagem" not in said and "keras.src" not in said
    again = load(tmp_path / "a.h5", 2)
    assert apart(again, model) == 0.0
    assert np.allclose(again.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-6)
    assert replicas(again) == 2


@pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) < (3, 15), reason="Keras before 3.15 has none"
)
@pytest.mark.filterwarnings("ignore")
def test_export_for_torch(model: Any, tmp_path: Path) -> None:
    """`export` is Keras' own and works; formats of packages that are not there it refuses."""
    path = str(tmp_path / "a.pt2")
    shape = [keras.InputSpec(shape=(40, 8), dtype="float32")]
    model.export(path, format="torch", input_signature=shape, verbose=False)
    said = torch.export.load(path).module()(torch.as_tensor(X[:40]))
    said = said[0] if isinstance(said, list | tuple) else said
    assert np.allclose(said.detach().numpy(), model.predict(X[:40], verbose=0), atol=1e-6)
