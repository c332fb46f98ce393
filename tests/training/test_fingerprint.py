"""Workers that run the script by themselves are told where they were not given the same.

Two processes try one case after another; what each is told is compared with what it did.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import stratagem as sg
from stratagem.training import fingerprint
from tests.ports import free_ports
from tests.replicas.scripts import Nursery, Script, nursery
from tests.support import by_hand, data, distance, mlp, strategy

pytestmark = pytest.mark.timeout(120)

HEAD = """
import json, os, random
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split
import stratagem as sg
from tests.support import data, mlp

me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
strategy = sg.MultiWorkerMirroredStrategy()
x, y = data(40)
ordinary = dict(batch_size=8, verbose=0)

def model(module=None, optimizer="sgd", loss="cross_entropy", **options):
    made = sg.Model(mlp() if module is None else module, strategy)
    made.compile(optimizer, loss, **options)
    return made

def told(name, call):
    try:
        call()
        error = "nothing"
    except sg.UsageError as raised:
        error = str(raised)
    print(name, "=", json.dumps(error))

class Own(Dataset):
    def __init__(self, seed=0, noise=0.0):
        self.x, self.y = data(40, seed=seed)
        self.noise = noise
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        return self.x[i] + self.noise * noise, self.y[i]

class Stream(IterableDataset):
    def __iter__(self):
        assert me == 0, "only the chief reads"
        return iter(zip(x, y))

def drawn(rows):
    torch.seed()
    return torch.randn(rows, 6)

def unseeded():
    torch.seed()
    return random_split(TensorDataset(x, y), [30, 10])[0]

def seeded():
    dice = torch.Generator().manual_seed(1)
    return random_split(TensorDataset(x, y), [30, 10], generator=dice)[0]

def loop(dataset=None, lr=0.1, module=None, alone=False):
    net = module or mlp()
    loader = DataLoader(dataset or seeded(), batch_size=8, shuffle=True)
    if alone:
        return strategy.prepare(loader)
    return strategy.prepare(net, torch.optim.SGD(net.parameters(), lr=lr), loader)
"""


class Pair:
    """Two workers on ports of 127.0.0.1."""

    def __init__(self, scripts: Nursery, where: Path) -> None:
        self._scripts, self._where = scripts, where
        self._workers = [f"127.0.0.1:{port}" for port in free_ports(2)]

    def run(self, source: str) -> list[Script]:
        everybody = []
        for index in range(2):
            task = {"type": "worker", "index": index}
            config = {"cluster": {"worker": self._workers}, "task": task}
            everybody.append(
                self._scripts.start(
                    self._where,
                    HEAD + textwrap.dedent(source),
                    f"worker{index}",
                    TF_CONFIG=json.dumps(config),
                )
            )
        for script in everybody:
            assert script.ends(50) == 0, script
        return everybody


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    yield Pair(nursery(), tmp_path)
    nursery().clear()


#: what each worker, `me`, does, and words of the sentence that both are told
UNLIKE = [
    ("model().fit(drawn(40), y, **ordinary)", "other values in x of the data"),
    ("model().fit(x, y if me else 3 - y, **ordinary)", "other values in y of the data"),
    ("model().fit(x[me::2], y[me::2], **ordinary)", "other values in x of the data than"),
    (
        "model().fit(x[: 40 - 2 * me], y[: 40 - 2 * me], **ordinary)",
        "number of rows in the data than worker 0: 38, not 40",
    ),
    (
        "model().fit(x, y, shuffle=not me, **ordinary)",
        "shuffle for the data than worker 0: False, not True",
    ),
    ("model().fit(x, y, batch_size=8 + me)", "batch_size for the data than worker 0: 9, not 8"),
    ("model().fit(x, y, epochs=1 + me, **ordinary)", "number of epochs"),
    (
        "model(loss=['cross_entropy', 'multi_margin_loss'][me]).fit(x, y, **ordinary)",
        "another loss",
    ),
    ("model(optimizer=['sgd', 'adam'][me]).fit(x, y)", "another optimizer than worker 0: Adam"),
    ("model(mlp(6, 4 + me)).fit(x, y, **ordinary)", "another module"),
    ("model(metrics=['accuracy'][me:]).evaluate(x, y)", "list of metrics"),
    (
        "model().fit(x, y, validation_data=[None, (x, y)][me], **ordinary)",
        "kind of validation_data",
    ),
    (
        "model().fit(x, y, validation_data=(x[me:], y[me:]), **ordinary)",
        "number of rows in validation_data",
    ),
    ("model().evaluate(x[me:], y[me:])", "number of rows in the data than worker 0: 39, not 40"),
    ("model().predict(x[20 * me:])", "number of rows in the data than worker 0: 20, not 40"),
    (
        "model().predict(x) if me else model().evaluate(x, y)",
        "calls predict while worker 0 calls evaluate",
    ),
    ("model().fit(unseeded(), **ordinary)", "another subset for the data"),
    ("model().fit(Own(seed=me), **ordinary)", "other values in the data than"),
    ("model().fit(*([x, y] if me else [Stream()]))", "kind of the data"),
    ("loop(unseeded())", "another subset for the loader"),
    ("loop(unseeded(), alone=True)", "another subset for the loader"),
    ("loop(TensorDataset(drawn(8), y[:8]), alone=True)", "other values in the loader"),
    ("loop(Own(seed=me))", "other values in the loader than"),
    ("loop(lr=0.1 + me)", "another lr of the optimizer than worker 0: 1.1, not 0.1"),
    (
        "loop(module=mlp(6, 4 + me))",
        "calls prepare with another module than worker 0: its first other tensor is 2.weight "
        "([5, 16], float32, trained), not 2.weight ([4, 16], float32, trained).",
    ),
]


def test_what_differs_is_named(pair: Pair) -> None:
    source = "\n".join(
        f"told('case{number}', lambda: {code})" for number, (code, _) in enumerate(UNLIKE)
    )
    for script in pair.run(source):
        for number, (_, words) in enumerate(UNLIKE):
            sentence = str(script.noted(f"case{number}"))
            assert sentence.startswith("worker 1 calls"), (words, sentence)
            assert words in sentence and "give all of them the same" in sentence, words


#: what workers may well have of their own
ALIKE = {
    "weights and rates": "model(torch.nn.Linear(6, 4), torch.optim.SGD).fit(x, y, **ordinary)",
    "rate": "model(optimizer=lambda p: torch.optim.SGD(p, lr=0.1 + me)).fit(x, y, **ordinary)",
    "callbacks": "model().fit(x, y, callbacks=[sg.callbacks.EarlyStopping('loss')][me:])",
    "a stream": "model().fit(Stream(), batch_size=8)",
    "a generator": "model().fit(iter([] if me else [(x, y)]), verbose=0)",
    "augmented": "model().fit(Own(noise=1.0), **ordinary)",
    "rounded": "model().fit(x + 1e-7 * me, y, **ordinary)",
    "a split with a seed": "model().fit(seeded(), validation_data=seeded(), **ordinary)",
    "lambda": "model(loss=lambda o, t: F.cross_entropy(o, t, reduction='none')).fit(x, y)",
    "the chief's order": "model().fit(DataLoader(Own(), batch_size=8 + me, shuffle=not me))",
    "a loop": "loop(Own(noise=1.0))",
    "its loader": "loop(Own(), alone=True)",
    "predict": "model().predict(x)",
}


def test_what_may_differ_and_dice_are_left_alone(pair: Pair, tmp_path: Path) -> None:
    """The weights are those of one device; comparing fingerprints draws no random numbers."""
    cases = "\n".join(
        f"told('case{number}', lambda: {code})" for number, code in enumerate(ALIKE.values())
    )
    source = f"""
{cases}
class Dice(Dataset):
    def __len__(self):
        return 3
    def __getitem__(self, i):
        return torch.rand(()), random.random(), np.random.rand()

from stratagem.training.fingerprint import of_dataset
def throw():
    return torch.rand(()).item(), random.random(), np.random.rand()
drawn = []
for look in (False, True):
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    of_dataset(Dice(), "it", read=look)
    drawn.append(throw())
print("dice =", json.dumps(drawn[0] == drawn[1]))
last = model(optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
last.fit(x, y, shuffle=False, **ordinary)
torch.save(last.module.state_dict(), f"weights{{me}}.pt")
"""
    for index, script in enumerate(pair.run(source)):
        for number, name in enumerate(ALIKE):
            assert script.noted(f"case{number}") == "nothing", name
        assert script.noted("dice") is True
        module = mlp()
        module.load_state_dict(torch.load(tmp_path / f"weights{index}.pt", weights_only=True))
        assert distance(module, trained()) < 1e-6


def trained() -> nn.Module:
    x, y = data(40)
    return by_hand(
        mlp(),
        lambda params: torch.optim.SGD(params, lr=0.1),
        F.cross_entropy,
        x,
        y,
        batch=8,
        epochs=1,
    )


def test_replicas_of_a_function_of_ones_own() -> None:
    """Replicas that run a function make their own data, too."""

    def train() -> None:
        split = random_split(TensorDataset(*data(40)), [30, 10])[0]
        net = mlp()
        made.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(split))

    made = strategy(2)
    words = "replica 1 calls prepare with another subset for the loader than replica 0: 30 rows"
    with pytest.raises(sg.UsageError, match=words):
        made.run(train)
    made.close()


def test_names_that_keras_counts_up_are_alike() -> None:
    """As in a notebook, whose process has made other models before."""
    keras = pytest.importorskip("keras")

    def made(units: int = 2) -> fingerprint.Look:
        dense = [keras.layers.Dense(n) for n in (units, 2)]
        model = keras.Sequential([keras.Input((3,)), *dense, keras.layers.BatchNormalization()])
        return fingerprint.of_module(model)

    def compare(theirs: fingerprint.Look) -> None:
        fingerprint.compare("prepare", [["worker 0", "prepare", first], ["b", "prepare", theirs]])

    first = made()
    compare(made())
    with pytest.raises(sg.UsageError, match=r"dense/bias \(\[4\], .*not .*dense/bias \(\[2\]"):
        compare(made(4))
