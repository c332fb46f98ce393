"""sg.Model on two replicas of one machine; model_plain.py is the same on one device.

python examples/model_mirrored.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import stratagem as sg

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=15)
args = parser.parse_args()

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.3
y = torch.tensor(digits.target)

torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.Tanh(),
    nn.AvgPool2d(2),
    nn.Flatten(),
    nn.Linear(256, 64),
    nn.Tanh(),
    nn.Linear(64, 10),
)

model = sg.Model(net, sg.MirroredStrategy(["cpu:0", "cpu:1"]))
model.compile(optimizer="adam", loss="cross_entropy", metrics=["accuracy"])
model.fit(
    x[:1437], y[:1437], batch_size=100, epochs=args.epochs, validation_data=(x[1437:], y[1437:])
)
print(model.evaluate(x[1437:], y[1437:]))
