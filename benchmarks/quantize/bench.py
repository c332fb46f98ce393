"""A digits CNN in 8 bits against itself in floats, on one thread: accuracy, bytes, time."""

from __future__ import annotations

import platform
import statistics

import torch
from sklearn.datasets import load_digits
from torch import nn

import stratagem as sg

ROUNDS = 5


def cnn() -> nn.Module:
    """156 thousand parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 133),
        nn.ReLU(),
        nn.Linear(133, 10),
    )


def main() -> None:
    torch.set_num_threads(1)
    found = load_digits()
    x = torch.tensor(found.images / 16.0, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    model = sg.Model(cnn())
    model.compile("adam", "cross_entropy")
    model.fit(x[:1437], y[:1437], epochs=10, batch_size=64, verbose=0)
    test = (x[1437:], y[1437:])
    print(f"{platform.machine()}, torch {torch.__version__}, 360 test pictures\n")
    ratios = []
    for number in range(ROUNDS):
        small = sg.quantize(model, x[:512], test=test, verbose=int(number == 0))
        ratios.append(small.report.faster)
    weights = sg.quantize(model, x[:512], "int8-weights", test=test, verbose=0)
    print(f"\n{weights}\n")
    report = small.report
    print(f"agreement {report.agreement:.4f}, goal 0.99 or more")
    print(f"bytes     {report.smaller:.3f} of ONNX float32, goal 0.30 or less")
    print(
        f"speed     {statistics.median(ratios):.2f} times ONNX float32 ({min(ratios):.2f} to "
        f"{max(ratios):.2f} in {ROUNDS} rounds), goal 1.5 or more"
    )


if __name__ == "__main__":
    main()
