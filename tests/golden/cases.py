"""Small trainings in float64 whose weights must not change: each front end, strategy and rule.

Only public names are used, and no random number: weights and data are a formula, so that another
version of torch begins with the same. Everything here is deterministic: asynchronous rules have
one worker, and where spare workers are dropped all batches are alike. The numbers are compared to
1e-12 and not by their bits: another CPU adds in another order.

    python -m tests.golden.cases --write    records what today's code gives, in weights.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # Keras reads it when it is imported

import keras
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from tests.clock import SLOWER

RECORD = Path(__file__).with_name("weights.json")
ROWS, BATCH, EPOCHS = 43, 8, 2  # a last batch of 3 rows
#: weights in one list, or "refused"
Outcome = list[float] | str


def formula(*shape: int) -> Tensor:
    """Numbers between -1 and 1 without a pattern that training could not tell from another."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1, count + 1, dtype=torch.float64) ** 1.5).reshape(shape)


def data(alike: bool) -> tuple[Tensor, Tensor]:
    """Rows to train on; `alike`: every batch is the same one."""
    rows = BATCH if alike else ROWS
    x, y = formula(rows, 3), torch.arange(rows) % 2
    return (x.repeat(5, 1), y.repeat(5)) if alike else (x, y)


# --- front ends ----------------------------------------------------------------------------------


def network() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(formula(*param.shape) / 2)
    return made


def flat(module: nn.Module) -> list[float]:
    return [float(value) for param in module.parameters() for value in param.detach().flatten()]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def by_model(where: sg.Strategy | None, recipe: str, alike: bool) -> list[float]:
    x, y = data(alike)
    more: dict[str, Any] = {"clipped": {"clip_norm": 0.3}, "accumulated": {"accumulate": 2}}
    with where.scope() if where is not None else nullcontext():
        model = sg.Model(network())
        model.compile(adam if recipe == "clipped" else sgd, "cross_entropy", **more.get(recipe, {}))
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return flat(model.module)


def set_precision(name: str) -> None:
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)


def by_keras(where: sg.Strategy | None, recipe: str, alike: bool) -> list[float]:
    everywhere = where.run if where is not None else lambda function, name: function(name)
    everywhere(set_precision, "float64")
    try:
        return keras_in_float64(where, recipe, alike)
    finally:
        everywhere(set_precision, "float32")


def keras_in_float64(where: sg.Strategy | None, recipe: str, alike: bool) -> list[float]:
    x, y = (each.numpy() for each in data(alike))
    dense = keras.layers.Dense
    optimizers = {
        "plain": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01),
        "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.3),
        "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    }
    with where.scope() if where is not None else nullcontext():
        model = keras.Sequential([keras.Input((3,)), dense(4, activation="tanh"), dense(2)])
        model.set_weights([(formula(*w.shape) / 2).numpy() for w in model.get_weights()])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizers[recipe](), loss)
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return [float(value) for weights in model.get_weights() for value in weights.flatten()]


def own_loop(where: sg.Strategy | None, recipe: str, alike: bool) -> list[float]:
    model: Any = network()
    optimizer: Any = (adam if recipe == "clipped" else sgd)(model.parameters())
    loader: Any = DataLoader(TensorDataset(*data(alike)), batch_size=BATCH)
    if where is not None:
        model, optimizer, loader = where.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for a, b in loader:
            F.cross_entropy(model(a), b).backward()
            if recipe == "accumulated":
                F.cross_entropy(model(a / 2), b).backward()
            if recipe == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def by_loop(where: sg.Strategy | None, recipe: str, alike: bool) -> list[float]:
    if where is None:
        return own_loop(None, recipe, alike)
    found: list[list[float]] = where.run(own_loop, where, recipe, alike)
    assert all(each == found[0] for each in found), "replicas have ended with different weights"
    return found[0]


FRONT_ENDS = {"model": by_model, "keras": by_keras, "loop": by_loop}
RECIPES = ("plain", "clipped", "accumulated")
CASES = [f"{kind} {recipe}" for kind in FRONT_ENDS for recipe in RECIPES]


# --- strategies and rules ------------------------------------------------------------------------


def _mirrored(count: int, **options: Any) -> Callable[[], sg.Strategy]:
    return lambda: sg.MirroredStrategy([f"cpu:{i}" for i in range(count)], **options)


def _central(count: int, updates: Any = None) -> Callable[[], sg.Strategy]:
    return lambda: sg.CentralStorageStrategy([f"cpu:{i}" for i in range(count)], updates=updates)


def _servers(workers: int, ps: int, updates: Any, **options: Any) -> Callable[[], sg.Strategy]:
    cluster = sg.LocalCluster(workers=workers, ps=ps)
    return lambda: sg.ParameterServerStrategy(cluster, updates=updates, **options)


_ALL = [sg.LowerRate(), sg.Drop(), sg.ScaleDown(), sg.DelayCompensated(), sg.GapAware()]

STRATEGIES: dict[str, Callable[[], sg.Strategy | None]] = {
    "no strategy": lambda: None,
    "mirrored 1": _mirrored(1),
    "mirrored 2": _mirrored(2),
    "mirrored 3": _mirrored(3),
    "mirrored 2 ring": _mirrored(2, cross_device_ops="ring"),
    "mirrored 2 one device": _mirrored(2, cross_device_ops="one_device"),
    "central 2": _central(2),
    "central 1 asynchronous": _central(1, sg.Asynchronous()),
    "servers synchronous": _servers(2, 1, sg.Synchronous()),
    "2 servers synchronous": _servers(3, 2, sg.Synchronous()),
    "servers spares": _servers(2, 1, sg.Synchronous(spares=1)),
    "servers asynchronous": _servers(1, 1, sg.Asynchronous()),
    "2 servers staleness": _servers(1, 2, sg.Asynchronous(staleness=_ALL, warmup=sg.Ramp(3))),
    "servers buffer": _servers(1, 1, sg.Asynchronous(buffer=2)),
    "servers bound": _servers(1, 1, sg.Asynchronous(bound=1)),
}
#: clusters that `stratagem run` starts: its options, and the strategy that every task makes
LAUNCHED: dict[str, tuple[list[str], Callable[[], sg.Strategy]]] = {
    "2 workers": (["--replicas", "2"], lambda: sg.MultiWorkerMirroredStrategy()),
    "2 workers of 2 devices, a server": (
        ["--workers", "2", "--ps", "1"],
        lambda: sg.ParameterServerStrategy(updates=sg.Synchronous(), devices=["cpu:0", "cpu:1"]),
    ),
}
#: those that a change of anything breaks first
QUICK = {
    "no strategy",
    "mirrored 1",
    "mirrored 2",
    "central 2",
    "servers synchronous",
    "servers asynchronous",
}


def outcomes(name: str) -> dict[str, Outcome]:
    """Of every front end and recipe on this strategy."""
    if name in LAUNCHED:
        return _launch(name)
    where = STRATEGIES[name]()
    found: dict[str, Outcome] = {}
    try:
        for case in CASES:
            try:
                found[case] = _train(case, where, "spares" in name)
            except sg.StratagemError:
                found[case] = "refused"
    finally:
        if where is not None:
            where.close()
    return found


def _train(case: str, where: sg.Strategy | None, alike: bool = False) -> list[float]:
    kind, recipe = case.split()
    return FRONT_ENDS[kind](where, recipe, alike)


def _launch(name: str) -> dict[str, Outcome]:
    """What the chief of a cluster prints; without recipes that some of these strategies refuse."""
    command = [sys.executable, "-m", "stratagem", "run", *LAUNCHED[name][0]]
    command += [str(Path(__file__).with_name("task.py")), name]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=110 * SLOWER,
        check=False,
        env=_environment(),
    )
    marked = re.search(r"golden (\{.*\})", done.stdout)
    assert done.returncode == 0 and marked, done.stdout + done.stderr
    found: dict[str, Outcome] = json.loads(marked[1])
    return found


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def be_a_task(name: str) -> None:
    """What every task of a launched cluster runs."""
    torch.set_num_threads(1)
    where = LAUNCHED[name][1]()
    found = {case: _train(case, where) for case in CASES if "plain" in case or "keras" in case}
    if where.is_chief:
        print("golden", json.dumps(found))


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def written(record: dict[str, dict[str, Outcome]]) -> str:
    """As JSON with a line for each training, so that a change is seen as one."""
    strategies = (
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"{json.dumps(case)}: {json.dumps(values)}" for case, values in found.items())
        + "\n}"
        for name, found in record.items()
    )
    return "{\n" + ",\n".join(strategies) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="replace weights.json")
    parser.add_argument("names", nargs="*", default=[*STRATEGIES, *LAUNCHED])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in asked.names:
        fresh = outcomes(name)
        for case, values in fresh.items():
            before = recorded.get(name, {}).get(case)
            lists = isinstance(values, list) and isinstance(before, list)
            change = apart(values, before) if lists else f"{before!r} before" * (values != before)
            print(f"{name:24}{case:20}{'' if isinstance(values, list) else values:20} {change}")
        recorded[name] = fresh
    if asked.write:
        ordered = {name: recorded[name] for name in (*STRATEGIES, *LAUNCHED) if name in recorded}
        RECORD.write_text(written(ordered))


if __name__ == "__main__":
    main()
