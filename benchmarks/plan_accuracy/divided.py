"""A small net whose training the planner predicts under every strategy, and then really runs.

    stratagem plan --validate --hosts 1 benchmarks/plan_accuracy/divided.py
    stratagem plan --validate --hosts 1 benchmarks/plan_accuracy/divided.py --recurrent

Eight linear layers of 512, Adam, 128 rows a replica: stages of a pipeline (every schedule), rows of
pipelines (from four cores on), divided layers and sharded replicas are among what is compared. With
--recurrent it is four LSTM layers of 128 over 64 steps, 16 rows a replica: also chunks of time.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import stratagem as sg

WIDTH, LAYERS, BATCH = 512, 8, 128


class Recurrent(nn.Module):
    """A stack of LSTM layers and a linear layer over its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.LSTM(128, 128, 4, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.stack(x)[0][:, -1])
        return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recurrent", action="store_true")
    recurrent = parser.parse_args().recurrent
    torch.manual_seed(0)
    if recurrent:
        net: nn.Module = Recurrent()
        batch, x = 16, torch.randn(32 * 16, 64, 128)
    else:
        hidden = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        net = nn.Sequential(*hidden, nn.Linear(WIDTH, 10))
        batch, x = BATCH, torch.randn(32 * BATCH, WIDTH)
    with sg.MirroredStrategy(["cpu:0"]).scope():
        model = sg.Model(net)
        model.compile("adam", "cross_entropy")
    model.fit(x, torch.randint(0, 10, (len(x),)), batch_size=batch, epochs=1)


if __name__ == "__main__":
    main()
