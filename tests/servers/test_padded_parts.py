"""Custom loops in which each replica, or worker in step, pads its own rows of a batch."""

from __future__ import annotations

import os
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
from tests.sources import ROOT
from tests.support import cpus

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


def train(
    where: sg.Strategy | None, passes: int = 1, every: int = 1, flat: bool = True
) -> dict[str, Tensor]:
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
                output = model(inputs)
                output = output.flatten(0, 1) if flat else output.transpose(1, 2)
                wanted = targets.flatten() if flat else targets
                F.cross_entropy(output, wanted, ignore_index=IGNORED).backward()
            if number % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module", params=["2 workers", "3 workers", "2 replicas"])
def strategy(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    count, kind = int(request.param[0]), request.param[2:]
    made: sg.Strategy = (
        sg.ParameterServerStrategy(sg.LocalCluster(workers=count, ps=1), updates=sg.Synchronous())
        if kind == "workers"
        else sg.MirroredStrategy(cpus(count))
    )
    with closing(made):
        yield made


@pytest.mark.parametrize("passes", [1, 2])
def test_every_token_weighs_the_same(strategy: sg.Strategy, passes: int) -> None:
    alone = train(None, passes)
    assert float((alone["0.weight"] - train(None, passes, every=99)["0.weight"]).abs().max()) > 0.1
    for state in strategy.run(train, strategy, passes):
        for name, value in state.items():
            assert float((value - alone[name]).abs().max()) < 1e-9, name


def one_after_the_other(where: sg.Strategy | None) -> list[dict[str, Tensor]]:
    return [train(where, flat=flat) for flat in (True, False)]


def test_another_model_has_another_kind_of_loss(strategy: sg.Strategy) -> None:
    alone = one_after_the_other(None)
    for results in strategy.run(one_after_the_other, strategy):
        for state, expected in zip(results, alone, strict=True):
            assert max(float((state[k] - expected[k]).abs().max()) for k in expected) < 1e-9


@pytest.mark.parametrize("strategy", ["2 workers"], indirect=True)
def test_added_gradients_are_refused_by_servers(strategy: sg.Strategy) -> None:
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


@pytest.mark.timeout(110)
def test_workers_of_two_devices(tmp_path: Path) -> None:
    """Each one all-reduces first, and divides by what its devices counted: not the user's doing."""
    script = tmp_path / "train.py"
    script.write_text(TWO_DEVICES)
    command = [sys.executable, "-m", "stratagem", "run", "--workers", "2", "--ps", "1", str(script)]
    own = {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=own)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as one device") == 4
    assert "has a hook" not in done.stdout + done.stderr
