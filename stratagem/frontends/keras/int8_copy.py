"""A model of Keras with its dense layers in 8 bits, by Keras itself; the model stays as it is."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stratagem.errors import UsageError


def int8_copy(model: Any) -> Any:
    """A copy with the layers in 8 bits that Keras can quantise."""
    made = plain_copy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one for each layer that stays in floats
        made.quantize("int8")
    if not any(getattr(layer, "quantization_mode", None) for layer in made._flatten_layers()):
        raise UsageError(
            "there is nothing to quantise in this model: Keras quantises Dense, EinsumDense and "
            "Embedding layers, and it has none."
        )
    return made


def plain_copy(model: Any) -> Any:
    """The same layers and weights, not compiled: without the optimizer's state."""
    if not model.built:
        raise UsageError("the model has no weights yet; build it, or fit it, before quantize.")
    try:
        made = type(model).from_config(model.get_config())
        if not made.built:
            made.build_from_config(model.get_build_config())
        made.set_weights(model.get_weights())
    except (TypeError, ValueError, NotImplementedError) as problem:
        raise UsageError(
            f"Keras cannot copy this {type(model).__name__} ({str(problem).splitlines()[0]}); "
            "give it get_config and build, as saving does."
        ) from problem
    return made


def answers(model: Any, x: NDArray[Any]) -> NDArray[Any]:
    """What it answers, on one thread of this process."""
    import keras

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            found = model(x, training=False)
    finally:
        torch.set_num_threads(threads)
    return np.asarray(keras.ops.convert_to_numpy(found))
