"""Scripts of tasks that are stages of a pipeline, and compare their result with one device."""

HEAD = """
import os, signal
import torch
import torch.nn.functional as F
import stratagem as sg
from tests.strategies.test_pipeline import adam, deep, doubles, fitted
from tests.support import by_hand, distance
"""

#: any rows, a last batch of one; both tasks have the model in the end, the chief has the history
TRAIN = """
x, y = doubles(22)
one = by_hand(deep(), adam, F.cross_entropy, x, y, batch=7)
model = fitted(strategy, deep(), x, y, optimizer=adam, batch=7, metrics=["accuracy"])
far = distance(one, model.module)
scores = model.evaluate(x, y, verbose=0)
loss = float(F.cross_entropy(one(x), y).detach())
guessed = torch.equal(model.predict(x).argmax(1), one(x).argmax(1))
close = abs(scores["loss"] - loss) < 1e-9 and guessed
print("exact", far < 1e-12, close, len(model.history.history["loss"]), flush=True)
"""
