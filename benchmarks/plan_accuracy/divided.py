"""A small net whose training the planner predicts under every strategy, and then really runs.

    stratagem plan --validate --hosts 1 benchmarks/plan_accuracy/divided.py

Eight linear layers of 512, Adam, 128 rows a replica: stages of a pipeline (every schedule) and
sharded replicas are among what is compared.
"""

from __future__ import annotations

import torch
from torch import nn

import stratagem as sg

WIDTH, LAYERS, BATCH = 512, 8, 128


def main() -> None:
    torch.manual_seed(0)
    hidden = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    x, y = torch.randn(32 * BATCH, WIDTH), torch.randint(0, 10, (32 * BATCH,))
    with sg.MirroredStrategy(["cpu:0"]).scope():
        model = sg.Model(nn.Sequential(*hidden, nn.Linear(WIDTH, 10)))
        model.compile("adam", "cross_entropy")
    model.fit(x, y, batch_size=BATCH, epochs=1)


if __name__ == "__main__":
    main()
