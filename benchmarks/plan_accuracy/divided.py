"""A small net whose training the planner predicts under every strategy, and then really runs.

    stratagem plan --validate --hosts 1 benchmarks/plan_accuracy/divided.py
    stratagem plan --validate --hosts 1 benchmarks/plan_accuracy/divided.py --net cnn
    stratagem plan --validate --hosts 1 benchmarks/plan_accuracy/divided.py --net lstm

Eight linear layers of 512, Adam, 128 rows a replica: stages of a pipeline (every schedule), rows of
pipelines (from four cores on) and sharded replicas are among what is compared.
cnn: six convolutions of 16 and 32 channels on 32 x 32 pixels with GroupNorm, 16 rows a replica.
lstm: four LSTM layers of 128 over 64 steps, 16 rows a replica.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

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


def perceptron() -> nn.Module:
    hidden = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, channels in itertools.pairwise((3, 16, 16, 16, 32, 32, 32)):
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU()]
        if before == 16 and channels == 32:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


#: what makes it, rows of a replica, and the shape of a row
NETS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "mlp": (perceptron, BATCH, (WIDTH,)),
    "cnn": (convolutions, 16, (3, 32, 32)),
    "lstm": (Recurrent, 16, (64, 128)),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", choices=sorted(NETS), default="mlp")
    torch.manual_seed(0)
    make, batch, shape = NETS[parser.parse_args().net]
    x = torch.randn(32 * batch, *shape)
    with sg.MirroredStrategy(["cpu:0"]).scope():
        model = sg.Model(make())
        model.compile("adam", "cross_entropy")
    model.fit(x, torch.randint(0, 10, (len(x),)), batch_size=batch, epochs=1)


if __name__ == "__main__":
    main()
