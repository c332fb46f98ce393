"""Custom loops with servers in step, where each worker pads the rows of its part by itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import stratagem as sg

pytestmark = pytest.mark.timeout(60)

WORDS, IGNORED = 20, -100


def texts() -> list[Tensor]:
    """23 texts of other lengths, so that the parts of a batch differ in width."""
    dice = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 12, (23,), generator=dice).tolist()
    return [torch.randint(1, WORDS, (n,), generator=dice) for n in lengths]


def padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    inputs = [F.pad(row, (0, width - len(row))) for row in rows]
    targets = [F.pad(row.flip(0), (0, width - len(row)), value=IGNORED) for row in rows]
    return torch.stack(inputs), torch.stack(targets)


def train(where: sg.Strategy | None, passes: int = 1, every: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, WORDS))
    model = model.double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    loader: Any = DataLoader(texts(), batch_size=5, collate_fn=padded)  # type: ignore[arg-type]
    if where is not None:
        model, optimizer, loader = where.prepare(model, optimizer, loader)
    for _ in range(2):
        for number, (inputs, targets) in enumerate(loader, 1):
            if every > 1 and number % every == 0:  # a batch whose targets all count
                whole = (targets != IGNORED).all(0)
                inputs, targets = inputs[:, whole], targets[:, whole]
            for _ in range(passes):
                output = model(inputs).flatten(0, 1)
                F.cross_entropy(output, targets.flatten(), ignore_index=IGNORED).backward()
            if number % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module", params=[2, 3])
def strategy(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    cluster = sg.LocalCluster(workers=request.param, ps=1)
    made = sg.ParameterServerStrategy(cluster, updates=sg.Synchronous())
    with closing(made):
        yield made


@pytest.mark.parametrize("passes", [1, 2])
def test_every_token_weighs_the_same(strategy: sg.Strategy, passes: int) -> None:
    alone = train(None, passes)
    assert float((alone["0.weight"] - train(None, passes, every=99)["0.weight"]).abs().max()) > 0.1
    for state in strategy.run(train, strategy, passes):
        for name, value in state.items():
            assert float((value - alone[name]).abs().max()) < 1e-9, name


def test_added_gradients_are_refused(strategy: sg.Strategy) -> None:
    """Those of one batch need another weight than those of the next."""
    with pytest.raises((sg.NotDistributable, sg.ReplicaFailed), match="step after each batch"):
        strategy.run(train, strategy, 1, 2)


TWO_DEVICES = """
import stratagem as sg
from tests.servers.test_padded_parts import train

strategy = sg.ParameterServerStrategy(updates=sg.Synchronous(), devices=["cpu:0", "cpu:1"])
alone = train(None)
for state in strategy.run(train, strategy):
    assert max(float((state[k] - alone[k]).abs().max()) for k in alone) < 1e-9
    print("as one device")
"""


def test_workers_of_two_devices(tmp_path: Path) -> None:
    """Each one all-reduces first, and divides by what its devices counted: not the user's doing."""
    script = tmp_path / "train.py"
    script.write_text(TWO_DEVICES)
    command = [sys.executable, "-m", "stratagem", "run", "--workers", "2", "--ps", "1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as one device") == 4
    assert "has a hook" not in done.stdout + done.stderr
