"""What a script defines has its name on replicas, too: workers of a DataLoader send by name."""

from __future__ import annotations

import pytest

from tests.replicas.scripts import nursery

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

COMMON = """
import dataclasses, pickle
from typing import NamedTuple
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
import stratagem as sg

class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor

class Outer:
    @dataclasses.dataclass
    class Batch:
        pair: Pair
        y: torch.Tensor

torch.manual_seed(0)
X, Y = torch.randn(22, 5), torch.randint(0, 3, (22,))

class Rows(Dataset):
    def __len__(self):
        return 22
    def __getitem__(self, i):
        return Pair(X[i], 2 * X[i]), Y[i]

def together(items):
    pair = Pair(torch.stack([p.a for p, _ in items]), torch.stack([p.b for p, _ in items]))
    return Outer.Batch(pair, torch.stack([y for _, y in items]))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(5, 3)
    def forward(self, pair):
        return self.layer(pair.a + pair.b)

def sgd(params):
    return torch.optim.SGD(params, 0.1)

def alone():
    net = Net()
    optimizer = sgd(net.parameters())
    for pair, y in DataLoader(Rows(), 8):
        optimizer.zero_grad()
        F.cross_entropy(net(pair), y).backward()
        optimizer.step()
    return net

def distance(a, b):
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters()))

strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
"""

TRAIN = """
model = sg.Model(Net(), strategy)
model.compile(sgd, "cross_entropy")
model.fit(DataLoader(Rows(), 8, num_workers=1), verbose=0)
assert distance(model.module, alone()) < 1e-6

def train():
    net, optimizer, loader = strategy.prepare(
        net := Net(), sgd(net.parameters()),
        DataLoader(Rows(), 8, num_workers=1, collate_fn=together),
    )
    for batch in loader:
        assert type(batch) is Outer.Batch and type(batch.pair) is Pair
        optimizer.zero_grad()
        F.cross_entropy(net(batch.pair), batch.y).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]

for parameters in strategy.run(train):
    for there, here in zip(parameters, alone().parameters()):
        assert (there - here).abs().max() < 1e-6
print("as on one device")
"""

RAISE = """
class Bad(Exception):
    pass

class Broken(Rows):
    def __getitem__(self, i):
        if i == 5:
            raise Bad("row 5")
        return super().__getitem__(i)

model = sg.Model(Net(), strategy)
model.compile(sgd, "cross_entropy")
try:
    model.fit(DataLoader(Broken(), 8, num_workers=1), verbose=0)
except (Bad, sg.ReplicaFailed) as error:
    print(type(error).__name__, "row 5" in str(error))
"""

AGAIN = """
def by_name(thing):
    return pickle.loads(pickle.dumps(thing)) is thing

def main():
    return [by_name(each) for each in (Pair, Outer.Batch, main, sgd)]

assert strategy.run(main) == [[True] * 4] * 2

old = Pair

class Pair(NamedTuple):
    c: torch.Tensor

def which(pair):
    assert by_name(Pair) and Pair._fields == ("c",) and not hasattr(pair, "c")
    try:
        by_name(type(pair))
    except pickle.PicklingError as error:
        return "not the same object" in str(error)

assert strategy.run(which, old(1, 2)) == [True, True]
print("found by name")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one script prints that does it all: the replicas of several would take longer."""
    script = nursery().start(tmp_path_factory.mktemp("main"), COMMON + TRAIN + RAISE + AGAIN)
    assert script.ends(50) == 0, script
    return script.out.splitlines()


def test_batches_of_the_scripts_own_classes_come_from_workers(said: list[str]) -> None:
    assert "as on one device" in said


def test_an_exception_of_the_script_in_a_worker_is_raised(said: list[str]) -> None:
    assert "Bad True" in said or "ReplicaFailed True" in said


def test_the_name_is_that_of_the_latest_class(said: list[str]) -> None:
    """As in a notebook whose cell runs again; `main` is a name of the script's own, too."""
    assert said[-1] == "found by name"
