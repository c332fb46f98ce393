"""One script, any way to run it: no launcher, no `if __name__` guard, notebooks too.

Each test is an interpreter of its own. Were `__main__` imported again anywhere, "started" would
be printed twice, or the script would start itself without end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.clock import SLOWER
from tests.replicas.scripts import ROOT, runs, wait_for

pytestmark = pytest.mark.timeout(120)

SCRIPT = '''
import copy, os, sys, time
import torch
import torch.nn.functional as F
from torch import nn
import stratagem as sg

torch.set_num_threads(1)
print("started")

class Net(nn.Module):
    """Defined in __main__, so it cannot be imported by anybody."""
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
    def forward(self, x):
        return self.layer(torch.tanh(x))

class Visit:
    def __init__(self, index, value):
        self.index, self.value, self.pid = index, value, os.getpid()

def double(x):
    return 2 * x

def visit(x):
    replica = sg.current_replica()
    print("hello from", replica.index)
    return Visit(replica.index, double(x))

strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
visits = strategy.run(visit, 21)
assert all(type(each) is Visit for each in visits), visits
assert [(each.index, each.value) for each in visits] == [(0, 42), (1, 42)]
assert visits[0].pid == os.getpid() != visits[1].pid

torch.manual_seed(0)
x, y = torch.randn(50, 6), torch.randint(0, 4, (50,))
start = Net()
alone = copy.deepcopy(start)
optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
for _ in range(3):
    for i in range(0, 50, 16):
        F.cross_entropy(alone(x[i:i + 16]), y[i:i + 16]).backward()
        optimizer.step()
        optimizer.zero_grad()

def loss(output, target):  # another object of __main__ that travels
    return F.cross_entropy(output, target)

with strategy.scope():
    model = sg.Model(copy.deepcopy(start))
    model.compile(optimizer=lambda p: torch.optim.SGD(p, lr=0.5), loss=loss)
model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)

def distance(a, b):
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters()))

assert distance(start, alone) > 1e-2
assert distance(model.module, alone) < 1e-6, distance(model.module, alone)
print("all is well")
'''


def run(*arguments: str, where: Path, stdin: str | None = None) -> str:
    """What an interpreter prints; it must end well and say nothing on stderr."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=where,
        input=stdin,
        text=True,
        capture_output=True,
        timeout=100 * SLOWER,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout


def check(said: str) -> None:
    lines = said.splitlines()
    assert lines.count("started") == 1
    assert "[replica 1] hello from 1\n" in said
    assert lines[-1] == "all is well"


@pytest.mark.slow
def test_a_plain_script_and_a_module_beside_it(tmp_path: Path) -> None:
    """The module is found by followers though neither is installed; sys.path may hold a Path."""
    (tmp_path / "beside.py").write_text(
        "import torch\n"
        "class Shift(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x + 1\n"
        "def thrice(x):\n"
        "    return 3 * x\n"
    )
    (tmp_path / "train.py").write_text(
        "import pathlib, sys\nsys.path.append(pathlib.Path('/nowhere'))\nimport beside\n"
        + SCRIPT
        + "assert strategy.run(beside.thrice, 5) == [15, 15]\n"
        "net = nn.Sequential(beside.Shift(), Net())\n"
        "with strategy.scope():\n"
        "    model = sg.Model(net)\n"
        "    model.compile('sgd', 'cross_entropy')\n"
        "model.fit(x, y, batch_size=16, verbose=0)\n"
        "assert strategy.run(lambda: sys.argv) == [sys.argv] * 2\n"
        "print('all is well')\n"
    )
    check(run("train.py", "--rate", "1", where=tmp_path))


@pytest.mark.slow
def test_a_script_from_standard_input(tmp_path: Path) -> None:
    """The interpreter reads it line by line: nobody else may take a byte of it."""
    check(run("-", where=tmp_path, stdin=SCRIPT))


@pytest.mark.slow
def test_a_script_on_the_command_line(tmp_path: Path) -> None:
    check(run("-c", SCRIPT, where=tmp_path))


OPERATORS = """
import types
import torch
import stratagem as sg
from torch.backends import cudnn

ops, aten, add, exact = torch.ops, torch.ops.aten, torch.ops.aten.add, torch.ops.aten.add.Tensor

def switches():
    cudnn.benchmark, torch.backends.mkldnn.enabled, torch.backends.opt_einsum.enabled
    return [cudnn is torch.backends.cudnn, torch.classes is not None, ops is torch.ops]

def sums():
    one = torch.ones(1)
    parts = ops.aten.add(one, 1), aten.add(one, 1), add(one, 1), exact(one, one)
    return [float(each) for each in parts], torch.ops.aten.mul(one, 3).item()

strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
assert strategy.run(switches) == [[True] * 3] * 2
assert strategy.run(sums) == [([2.0] * 4, 3.0)] * 2

made_up = type("MadeUp", (types.ModuleType,), {})("nowhere")
try:
    strategy.run(lambda: made_up)
except sg.UsageError as error:
    print(error)
"""


@pytest.mark.slow
def test_functions_may_mention_what_torch_calls_modules(tmp_path: Path) -> None:
    """`torch.backends.cudnn`, `torch.ops` and their like are objects that only look so."""
    assert "cannot pickle 'MadeUp' object" in run("-c", OPERATORS, where=tmp_path)


CELLS = [
    """
import os, time
import torch
from torch import nn
import stratagem as sg
torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, x):
        if self.training and sg.current_replica().index:
            print("forward of", type(self).__name__)
        return self.layer(x)

def greet(word):
    print(word, "from", sg.current_replica().index)
    time.sleep(0.5)  # long enough that the line travels by itself, not with the answer
    return os.getpid()

strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
print("pids", *strategy.run(greet, "one"))
""",
    """
torch.manual_seed(0)
x, y = torch.randn(32, 4), torch.randn(32, 2)
with strategy.scope():
    model = sg.Model(Net())
    model.compile("sgd", "mse")
first = model.fit(x, y, batch_size=16, epochs=2, verbose=2).history["loss"]
print("epochs", len(first))
""",
    """
print("pids", *strategy.run(greet, "three"))
second = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history["loss"]
print("falls", second[-1] < first[0])
""",
    """
class Odd(Exception):
    pass

def fail():
    if sg.current_replica().index == 1:
        raise Odd("in a cell")
    sg.current_replica().barrier()

try:
    strategy.run(fail)
except sg.ReplicaFailed as error:
    print("failed:", error.who, type(error.__cause__) is Odd)
print("pids", *strategy.run(greet, "four"))
""",
    """
from typing import NamedTuple
from torch.utils.data import DataLoader, Dataset

for latest in ("old", "new"):
    class Row(NamedTuple):
        number: torch.Tensor
        word: str = latest

    class Rows(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, i):
            return Row(torch.tensor(i))

    def sums():
        rows = list(DataLoader(Rows(), 2, num_workers=1))
        return [int(row.number.sum()) for row in rows], rows[0].word, type(rows[0]) is Row

    print("rows", *strategy.run(sums))
""",
]


@pytest.mark.slow
def test_a_notebook(tmp_path: Path) -> None:
    """A real kernel: classes of a cell travel, followers print into the cell that runs."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    client = NotebookClient(notebook, timeout=60, kernel_name="python3")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        client.execute(cwd=str(tmp_path))
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    one, two, three, four, five = (_shown(cell) for cell in notebook.cells)
    assert "[replica 1] one from 1" in one
    assert "[replica 1] forward of Net" in two and "epoch 2/2" in two and "epochs 2" in two
    assert "[replica 1] three from 1" in three and "falls True" in three
    assert "[replica 1] three" not in one + two, "a line of cell three in another's output"
    assert "failed: replica 1 True" in four and "[replica 1] four from 1" in four
    for word in ("old", "new"):
        row = ([1, 5], (word, word), True)
        assert f"rows {row} {row}\n" in five, "workers send the classes of the latest cell"
    pids = [int(n) for text in (one, three, four) for n in re.findall(r"pids (\d+) (\d+)", text)[0]]
    assert pids[1] == pids[3] != pids[5], "followers live on between cells, not after a failure"
    wait_for(lambda: not any(runs(pid) for pid in pids), 10, "for the kernel's replicas to end")


def _shown(cell: nbformat.NotebookNode) -> str:
    """Everything in the output of a cell."""
    texts = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs]
    return "\n".join(texts)
