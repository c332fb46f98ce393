"""Keras' own `fit` on its torch backend, plain and in a strategy's scope; TensorFlow beside it.

    python benchmarks/keras_fit/bench.py [--parts one,two] [--models tiny,cnn,large] [--rounds 5]
    python benchmarks/keras_fit/bench.py --tensorflow [FOLDER] --jax [FOLDER]    made there

Every arm is a fresh process tree with the same model, data, optimizer (Adam), accuracy tracked and
threads set; arms take turns within a round, in the other order every second round. Only the last
epoch counts, by the clock of a callback. Printed are medians over the rounds, and medians of the
rounds' ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

#: batch, steps of an epoch
SIZES = {"tiny": (32, 300), "cnn": (100, 15), "large": (128, 12)}
EPOCHS = 3
#: of the peers' environments
PACKAGES = {
    "tensorflow": ("tensorflow==2.21.0", "keras==3.15.1"),
    "jax": ("jax==0.10.2", "keras==3.15.1"),
}
TIMEOUT = 600


class Arm(NamedTuple):
    """`kind` is plain (Keras alone), ours, bare (a loop of torch's own, without Keras) or mirrored
    (tf.distribute); threads are a replica's."""

    backend: str
    kind: str
    model: str
    batch: int
    replicas: int
    threads: int


# --- in a child -------------------------------------------------------------------------------


def build(keras: Any, name: str) -> Any:
    """What Keras users would write: channels last, logits, accuracy."""
    layers = keras.layers
    if name == "tiny":
        hidden = [keras.Input((20,)), layers.Dense(64, activation="relu")]
    elif name == "large":
        hidden = [keras.Input((784,))] + [layers.Dense(2750, activation="relu") for _ in range(2)]
    else:
        hidden = [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
        ]
    return keras.Sequential([*hidden, layers.Dense(10)])


def scope(arm: Arm) -> Any:
    """Where the model is compiled."""
    if arm.backend == "torch":
        import torch

        torch.set_num_threads(arm.threads)
        import stratagem as sg

        return sg.MirroredStrategy([f"cpu:{i}" for i in range(arm.replicas)]).scope()
    if arm.backend == "jax":
        return nullcontext()  # it uses all cores
    import tensorflow as tf

    # one pool of threads for all replicas of the process
    tf.config.threading.set_intra_op_parallelism_threads(arm.threads * arm.replicas)
    tf.config.threading.set_inter_op_parallelism_threads(arm.threads * arm.replicas)
    one = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        one, [tf.config.LogicalDeviceConfiguration() for _ in range(arm.replicas)]
    )
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(arm.replicas)]).scope()


def bare(arm: Arm) -> float:
    """Steps a second of the same network in torch alone: no metrics, no callbacks, torch's own
    layout (channels first) and its fused Adam."""
    import torch
    from torch import nn

    torch.set_num_threads(arm.threads)
    if arm.model == "cnn":
        shape: tuple[int, ...] = (1, 28, 28)
        convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()]
        dense = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU()]
        model = nn.Sequential(*convolutions, *dense, nn.Linear(128, 10))
    else:
        shape, sizes = ((20,), (20, 64)) if arm.model == "tiny" else ((784,), (784, 2750, 2750))
        pairs = itertools.pairwise(sizes)
        hidden = [each for a, b in pairs for each in (nn.Linear(a, b), nn.ReLU())]
        model = nn.Sequential(*hidden, nn.Linear(sizes[-1], 10))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    steps = SIZES[arm.model][1]
    x, y = torch.randn(arm.batch * steps, *shape), torch.randint(0, 10, (arm.batch * steps,))
    for _ in range(EPOCHS):
        started = time.perf_counter()
        for rows in torch.randperm(len(x)).split(arm.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        took = time.perf_counter() - started
    return steps / took


def run(arm: Arm) -> float:
    """Steps a second in the last epoch."""
    if arm.kind == "bare":
        return bare(arm)
    inside = scope(arm)  # sets the threads, also for those who then stay outside
    import keras
    import numpy as np

    assert keras.backend.backend() == arm.backend

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.started = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.took = time.perf_counter() - self.started

    def compiled() -> Any:
        keras.utils.set_random_seed(0)
        model = build(keras, arm.model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
        return model

    if arm.kind == "plain":
        model = compiled()
    else:
        with inside:
            model = compiled()
    steps = SIZES[arm.model][1]
    dice = np.random.default_rng(0)
    x = dice.normal(size=(arm.batch * steps, *model.input_shape[1:])).astype("float32")
    y = dice.integers(0, 10, len(x))
    clock = Clock()
    model.fit(x, y, batch_size=arm.batch, epochs=EPOCHS, callbacks=[clock], verbose=0)
    return float(steps / clock.took)


# --- in the parent ----------------------------------------------------------------------------


def measure(arm: Arm, pythons: dict[str, str]) -> float:
    pool = arm.threads * (arm.replicas if arm.backend == "tensorflow" else 1)
    environ = {
        **os.environ,
        "KERAS_BACKEND": arm.backend,
        "OMP_NUM_THREADS": str(pool),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [pythons[arm.backend], __file__, "--child", *map(str, arm)],
        stdout=subprocess.PIPE,
        env=environ,
        timeout=TIMEOUT,
        check=True,
        text=True,
    )
    return float(done.stdout.split()[-1])


def rounds(arms: dict[str, Arm], count: int, pythons: dict[str, str]) -> list[dict[str, float]]:
    found = []
    for number in range(count):
        order = list(arms) if number % 2 == 0 else list(arms)[::-1]
        speeds = {name: measure(arms[name], pythons) for name in order}
        found.append({name: speeds[name] for name in arms})
    return found


def median(found: list[dict[str, float]], name: str, to: str | None = None) -> float:
    """Of an arm's speed, or of its ratio to another's in the same round."""
    return statistics.median(r[name] / (r[to] if to else 1.0) for r in found)


def one_replica(name: str, args: Any, pythons: dict[str, str]) -> dict[str, Any]:
    batch = SIZES[name][0]
    arms = {
        "plain": Arm("torch", "plain", name, batch, 1, args.threads),
        "ours": Arm("torch", "ours", name, batch, 1, args.threads),
        "bare": Arm("torch", "bare", name, batch, 1, args.threads),
    }
    if "tensorflow" in pythons:
        arms["tf"] = Arm("tensorflow", "plain", name, batch, 1, args.threads)
        arms["tf mirrored"] = Arm("tensorflow", "mirrored", name, batch, 1, args.threads)
    if "jax" in pythons:
        arms["jax"] = Arm("jax", "plain", name, batch, 1, args.threads)
    found = rounds(arms, args.rounds, pythons)
    line = f"{name:8}{batch:7}" + "".join(f"{median(found, a):13.2f}" for a in arms)
    line += f"{median(found, 'ours', 'plain'):13.3f}{median(found, 'ours', 'bare'):13.3f}"
    row = {
        "part": "one",
        "model": name,
        "batch": batch,
        "threads": args.threads,
        "rounds": found,
        "ours/plain": median(found, "ours", "plain"),
        "ours/bare": median(found, "ours", "bare"),
    }
    if "tf" in arms:
        line += f"{median(found, 'tf mirrored', 'tf'):13.3f}{median(found, 'ours', 'tf'):13.3f}"
        row["tf mirrored/tf"] = median(found, "tf mirrored", "tf")
        row["ours/tf"] = median(found, "ours", "tf")
    if "jax" in arms:
        line += f"{median(found, 'ours', 'jax'):13.3f}"
        row["ours/jax"] = median(found, "ours", "jax")
    print(line, flush=True)
    return row


def two_replicas(batch: int, args: Any, pythons: dict[str, str]) -> list[dict[str, Any]]:
    """One global batch: how long for one replica on all threads, on one, and for two replicas."""
    half = max(1, args.threads // 2)
    arms = {
        "one, all threads": Arm("torch", "ours", "cnn", batch, 1, args.threads),
        "one, 1 thread": Arm("torch", "ours", "cnn", batch, 1, 1),
        "two": Arm("torch", "ours", "cnn", batch, 2, half),
    }
    if "tensorflow" in pythons:
        arms["tf one, all threads"] = Arm("tensorflow", "mirrored", "cnn", batch, 1, args.threads)
        arms["tf one, 1 thread"] = Arm("tensorflow", "mirrored", "cnn", batch, 1, 1)
        arms["tf two"] = Arm("tensorflow", "mirrored", "cnn", batch, 2, half)
    found = rounds(arms, args.rounds, pythons)
    rows = []
    for name, arm in arms.items():
        family = "tf " if name.startswith("tf ") else ""
        all_threads = median(found, name, f"{family}one, all threads")
        one_thread = median(found, name, f"{family}one, 1 thread")
        print(
            f"{name:22}{batch:7}{arm.replicas:10}{arm.threads:9}{median(found, name):10.2f}"
            f"{median(found, name) * batch:13.0f}{all_threads:14.3f}{one_thread:12.3f}",
            flush=True,
        )
        rows.append(
            {
                "part": "two",
                "arm": name,
                "batch": batch,
                "replicas": arm.replicas,
                "threads": arm.threads,
                "steps/s": median(found, name),
                "to one, all threads": all_threads,
                "to one, 1 thread": one_thread,
                "rounds": [r[name] for r in found],
            }
        )
    return rows


def peer_in(folder: Path, backend: str) -> str:
    """An interpreter of its own, made unless it is there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, *PACKAGES[backend]], check=True)
    return str(python)


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="one,two")
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--batches", default="100,200", help="global batches of part two")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=cores, help="of all replicas together")
    for backend in PACKAGES:
        parser.add_argument(
            f"--{backend}",
            nargs="?",
            const="",
            metavar="FOLDER",
            help="also Keras on it, in an environment made there, or made for this run",
        )
    parser.add_argument("--json")
    parser.add_argument("--child", nargs=len(Arm._fields))
    args = parser.parse_args()
    if args.child:
        backend, kind, model, *numbers = args.child
        print(run(Arm(backend, kind, model, *map(int, numbers))))
        return
    pythons = {"torch": sys.executable}
    with tempfile.TemporaryDirectory(prefix="keras_fit_") as passing:
        for backend in PACKAGES:
            folder = getattr(args, backend)
            if folder is not None:
                pythons[backend] = peer_in(Path(folder or f"{passing}/{backend}"), backend)
        rows = everything(args, cores, pythons)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


def everything(args: Any, cores: int, pythons: dict[str, str]) -> list[dict[str, Any]]:
    from importlib.metadata import version

    said = f"keras {version('keras')}, torch {version('torch')}"
    said += "".join(f", {PACKAGES[backend][0]}" for backend in PACKAGES if backend in pythons)
    print(
        f"{platform.machine()}, {cores} cores, {said}; steps a second, median of {args.rounds} "
        "rounds"
    )
    rows = []
    parts = args.parts.split(",")
    if "one" in parts:
        with_tf = "tensorflow" in pythons
        names = [
            "plain",
            "ours",
            "bare",
            *(["tf", "tf mirrored"] if with_tf else []),
            *(["jax"] if "jax" in pythons else []),
            "ours/plain",
            "ours/bare",
            *(["tf mirr./tf", "ours/tf"] if with_tf else []),
            *(["ours/jax"] if "jax" in pythons else []),
        ]
        print(
            f"\none replica, {args.threads} threads\n{'model':8}{'batch':>7}"
            + "".join(f"{name:>13}" for name in names)
        )
        rows += [one_replica(name, args, pythons) for name in args.models.split(",")]
    if "two" in parts:
        print(
            f"\ntwo replicas, cnn; the batch is the global one\n{'arm':22}{'batch':>7}"
            f"{'replicas':>10}{'threads':>9}{'steps/s':>10}{'examples/s':>13}"
            f"{'/ one, all':>14}{'/ one, 1':>12}"
        )
        for batch in map(int, args.batches.split(",")):
            rows += two_replicas(batch, args, pythons)
    return rows


if __name__ == "__main__":
    main()
