"""Plain PyTorch: a loop written by hand, on one device. digits_mirrored.py is the same, spread.

python examples/digits_plain.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.3
y = torch.tensor(digits.target)


def train(epochs):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.Tanh(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(x[:1437], y[:1437]), batch_size=100, shuffle=True)
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.cpu()


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=15)
args = parser.parse_args()

model = train(args.epochs)

with torch.no_grad():
    accuracy = (model(x[1437:]).argmax(1) == y[1437:]).float().mean()
print(f"test accuracy {accuracy:.4f}, last weight {model[-1].bias[-1]:.6f}")
