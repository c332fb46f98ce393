"""The measured half: one model on real servers, sparse and dense; run by itself in a process.

python real.py '["sockets", 0, true]'     the way, the number of the round, whether it is small
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from size import KINDS, SMALL, Size, chances
from torch import nn

import stratagem as sg
from stratagem.state.optimizer_recipe import describe
from stratagem.state.partition import partition
from stratagem.state.store import Store


def examples_of(size: Size, count: int) -> tuple[Any, Any]:
    """Bags of words; each word has a hidden weight, and the label is the sign of their sum."""
    random = np.random.default_rng(5)
    meaning = random.permutation(size.rows)  # frequent words lie anywhere in the table
    weights = random.normal(size=size.rows)
    ids = meaning[random.choice(size.rows, (count, size.words), p=chances(size))]
    return torch.tensor(ids), torch.tensor((weights[ids].sum(1) > 0).astype(np.int64))


def net(size: Size, kind: str) -> Any:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(size.rows, size.width, mode="sum", sparse=kind == "sparse")
    with torch.no_grad():
        bag.weight.mul_(0.1)
    return nn.Sequential(bag, nn.Linear(size.width, 32), nn.Tanh(), nn.Linear(32, 2))


def train(size: Size, kind: str, strategy: Any, data: Any) -> tuple[Any, float]:
    """The trained module, and updates a second in the middle one of the epochs."""
    model = sg.Model(net(size, kind), strategy)
    model.compile(lambda p: torch.optim.SGD(p, lr=size.rate), "cross_entropy")
    clock: list[float] = []
    watch = sg.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs=None: clock.append(time.perf_counter()),
        on_epoch_end=lambda epoch, logs=None: clock.append(time.perf_counter()),
    )
    torch.manual_seed(1)
    model.fit(*data, batch_size=size.batch, epochs=size.epochs, callbacks=[watch], verbose=0)
    seconds = [end - begin for begin, end in zip(clock[::2], clock[1::2], strict=True)]
    return model.module, size.steps / statistics.median(seconds)


def measure(size: Size, way: str, turn: int) -> dict[str, Any]:
    """Every combination once, in this process and those that it starts."""
    torch.set_num_threads(1)
    count = size.batch * size.steps
    x, y = examples_of(size, count + 2000)
    data, test = (x[:count], y[:count]), (x[count:], y[count:])
    plain = {kind: train(size, kind, None, data)[0] for kind in KINDS}
    alone = {kind: compute_seconds(size, kind, x, y) for kind in KINDS}
    server = {kind: server_seconds(size, kind, x) for kind in KINDS}
    rules = {"asynchronous": sg.Asynchronous(), "synchronous": sg.Synchronous()}
    arms = [(w, s, r) for w in size.workers for s in size.servers for r in rules]
    found = []
    for workers, servers, rule in arms[:: 1 if turn % 2 == 0 else -1]:
        cluster = sg.LocalCluster(workers=workers, ps=servers)
        strategy = sg.ParameterServerStrategy(cluster, updates=rules[rule])
        try:
            for kind in KINDS[:: 1 if turn % 2 == 0 else -1]:
                module, speed = train(size, kind, strategy, data)
                found.append(
                    {
                        "kind": kind,
                        "way": way,
                        "rule": rule,
                        "workers": workers,
                        "servers": servers,
                        "updates_per_s": speed,
                        "accuracy": accuracy(module, *test),
                        "apart": apart(module, plain["dense"]),
                    }
                )
        finally:
            strategy.close()
    one = {kind: accuracy(module, *test) for kind, module in plain.items()}
    return {
        "arms": found,
        "alone": alone,
        "server": server,
        "one device": one,
        "tables": other_tables(size, way),
    }


def other_tables(size: Size, way: str) -> list[dict[str, Any]]:
    """One asynchronous worker on one server, with larger and smaller tables."""
    found: list[dict[str, Any]] = []
    strategy = sg.ParameterServerStrategy(sg.LocalCluster(workers=1, ps=1))
    try:
        for rows in size.tables:
            other = replace(size, rows=rows)
            data = examples_of(other, size.batch * size.steps)
            for kind in KINDS:
                speed = train(other, kind, strategy, data)[1]
                found.append({"way": way, "rows": rows, "kind": kind, "updates_per_s": speed})
    finally:
        strategy.close()
    return found


def compute_seconds(size: Size, kind: str, x: Any, y: Any) -> dict[str, float]:
    """Of forward and backward on one device, by the number of examples."""
    module, found = net(size, kind), {}
    for rows in (size.batch, size.batch // 2):
        took = []
        for _ in range(12):
            begin = time.perf_counter()
            module.zero_grad()
            nn.functional.cross_entropy(module(x[:rows]), y[:rows]).backward()
            took.append(time.perf_counter() - begin)
        found[str(rows)] = statistics.median(took[2:])
    return found


def server_seconds(size: Size, kind: str, x: Any) -> dict[str, float]:
    """At one server: of adding a gradient, of the step itself, and of getting the values out."""
    params = list(net(size, kind).parameters())
    shapes = [tuple(p.shape) for p in params]
    recipe = describe(torch.optim.SGD(params, lr=size.rate), params)
    pieces = partition(shapes, 1, 1)
    store = Store(pieces, shapes, torch.float32, recipe)
    rows = x[: size.batch].unique()
    values, dense = torch.zeros(len(rows), size.width), torch.zeros(store.count)
    used = [kind == "dense" or p.variable != 0 for p in pieces]
    given = dense if kind == "dense" else dense[: store.count - size.rows * size.width]
    clock: dict[str, list[float]] = {"add": [], "step": []}
    for _ in range(12):
        begin, version = time.perf_counter(), store.version
        store.add(given, 1.0, used)
        if kind == "sparse":
            store.add_rows([p.variable for p in pieces].index(0), rows, values, 1.0)
        added = time.perf_counter()
        store.apply(1.0)
        for change in store.changed_since(version):
            store.values_of(change).clone()
        clock["add"].append(added - begin)
        clock["step"].append(time.perf_counter() - added)
    return {name: statistics.median(took[2:]) for name, took in clock.items()}


def accuracy(module: Any, x: Any, y: Any) -> float:
    with torch.no_grad():
        return float((module(x).argmax(1) == y).float().mean())


def apart(a: Any, b: Any) -> float:
    """The largest difference between any two weights."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


if __name__ == "__main__":
    way, turn, small = json.loads(sys.argv[1])
    print(json.dumps(measure(SMALL if small else Size(), way, turn)))
