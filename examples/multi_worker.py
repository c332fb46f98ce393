"""sg.Model on the workers of a cluster; the cluster comes from the environment.

Two workers on one machine, each in a terminal of its own (on two machines: their addresses
instead of 127.0.0.1). They wait for each other, and say for whom.

    export CLUSTER='{"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}'
    TF_CONFIG='{"cluster": '$CLUSTER', "task": {"type": "worker", "index": 0}}' \
        python examples/multi_worker.py
    TF_CONFIG='{"cluster": '$CLUSTER', "task": {"type": "worker", "index": 1}}' \
        python examples/multi_worker.py

Or let a launcher do all that:

    stratagem run --workers 2 examples/multi_worker.py
    torchrun --nproc-per-node 2 examples/multi_worker.py
    srun --ntasks 2 python examples/multi_worker.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import stratagem as sg

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--save", help="where the chief writes the trained model")
args = parser.parse_args()

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.3
y = torch.tensor(digits.target)

strategy = sg.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = sg.Model(
        nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 64),
            nn.Tanh(),
            nn.Linear(64, 10),
        )
    )
    model.compile(optimizer="adam", loss="cross_entropy", metrics=["accuracy"])

model.fit(x[:1437], y[:1437], batch_size=100, epochs=args.epochs)
results = model.evaluate(x[1437:], y[1437:])
if args.save:
    model.save(args.save)  # on every task: the chief writes, the others do nothing
if strategy.is_chief:
    print(f"{strategy.num_replicas_in_sync} replicas: test accuracy {results['accuracy']:.4f}")
