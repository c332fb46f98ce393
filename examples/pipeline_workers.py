"""A network split by layers over the workers of a cluster, one stage each; torch or Keras.

Two workers on this machine, for trying:

    stratagem run --workers 2 examples/pipeline_workers.py
    stratagem run --workers 2 examples/pipeline_workers.py --keras

On two hosts, the same script on both; they wait for each other, and say for whom:

    export STRATAGEM_SECRET=...    # the same long random text on both
    export CLUSTER='{"worker": ["host-a:2222", "host-b:2222"]}'
    TF_CONFIG='{"cluster": '$CLUSTER', "task": {"type": "worker", "index": 0}}' \
        python examples/pipeline_workers.py      # on host-b: index 1
"""

import argparse
import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras
import torch
from sklearn.datasets import load_digits
from torch import nn

import stratagem as sg

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--keras", action="store_true")
parser.add_argument("--save", help="where the chief writes the trained model")
args = parser.parse_args()

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16 - 0.3
y = torch.tensor(digits.target)

strategy = sg.PipelineStrategy(microbatches=4)
with strategy.scope():
    model: Any
    if args.keras:
        keras.utils.set_random_seed(42)
        dense = keras.layers.Dense
        inner = [dense(128, activation="tanh") for _ in range(4)]
        model = keras.Sequential([keras.Input((64,)), *inner, dense(10)])
        loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    else:
        torch.manual_seed(42)
        pairs = [(nn.Linear(128, 128), nn.Tanh()) for _ in range(3)]
        layers = [layer for pair in pairs for layer in pair]
        model = sg.Model(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), *layers, nn.Linear(128, 10)))
        loss = "cross_entropy"
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])

model.fit(x[:1437], y[:1437], batch_size=100, epochs=args.epochs, verbose=0)
results = model.evaluate(x[1437:], y[1437:], verbose=0, return_dict=True)
if args.save and strategy.is_chief:
    model.save(args.save)
strategy.print(f"test accuracy {results['accuracy']:.4f}")
