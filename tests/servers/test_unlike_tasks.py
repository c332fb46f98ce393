"""Tasks of one cluster whose strategies differ, where at least one has servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.served_support import launch

pytestmark = pytest.mark.timeout(140)

SCRIPT = """
role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
made = {CHIEF} if first or role == "ps" else {OTHER}

def train():
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(x, y)
    model, sgd, loader = made.prepare(model, sgd, torch.utils.data.DataLoader(data, 100))
    for a, b in loader:
        torch.nn.functional.cross_entropy(model(a), b).backward()
        sgd.step()
        sgd.zero_grad()

made.run(train)
"""

SERVED = "sg.ParameterServerStrategy()"
MIRRORED = f"sg.MultiWorkerMirroredStrategy() if role != 'ps' else {SERVED}"


@pytest.mark.parametrize(
    ("chief", "other", "said"),
    [
        (MIRRORED, SERVED, "give every task the same strategy: ps 0 at"),
        (SERVED, MIRRORED, "give every task the same strategy: ps 0 at"),
        (
            SERVED,
            "sg.ParameterServerStrategy(updates=sg.Synchronous())",
            "with another updates of the strategy than the chief: Synchronous(",
        ),
        (
            SERVED,
            "sg.ParameterServerStrategy(wire='bfloat16')",
            "with another wire of the strategy than the chief: 'bfloat16'",
        ),
    ],
    ids=["the chief has replicas", "a worker has replicas", "updates", "wire"],
)
def test_unlike_strategies_are_told(chief: str, other: str, said: str, tmp_path: Path) -> None:
    """Long before the 300 seconds that tasks wait for each other."""
    script = SCRIPT.replace("{CHIEF}", f"({chief})").replace("{OTHER}", f"({other})")
    assert said in launch(script, 2, tmp_path, code=1)
