"""Keras on one device; keras_mirrored.py is the same on two replicas.

KERAS_BACKEND=torch python examples/keras_plain.py
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=15)
args = parser.parse_args()

digits = load_digits()
x, y = digits.images[..., None].astype("float32") / 16 - 0.3, digits.target

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="tanh"),
        keras.layers.AveragePooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="tanh"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(
    x[:1437],
    y[:1437],
    batch_size=100,
    epochs=args.epochs,
    validation_data=(x[1437:], y[1437:]),
    verbose=2,
)
loss, accuracy = model.evaluate(x[1437:], y[1437:], verbose=0)
print(f"test loss {loss:.4f}, accuracy {accuracy:.4f}")
