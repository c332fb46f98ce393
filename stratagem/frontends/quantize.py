"""`sg.quantize`: quantises a trained classifier to 8 bits, and compares it with the float model."""

from __future__ import annotations

import copy
import io
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stratagem.errors import UsageError
from stratagem.frontends.model import Model
from stratagem.frontends.onnx_int8 import (
    OnnxModel,
    check_export,
    exported,
    needed,
    quantised,
    quietly,
    torch_predict,
)
from stratagem.frontends.quantize_report import Form, QuantizeReport, compare_forms
from stratagem.strategies.mirrored import single_device
from stratagem.strategies.strategy import Strategy, get_strategy

ONNX, WEIGHTS = "int8", "int8-weights"


@dataclass(frozen=True)
class Quantized:
    """The result of `sg.quantize`: the small model, its file and the report; `str` is a table.

    `model` is an nn.Module, a Keras model, or for ONNX a function of an array.
    """

    model: Any
    report: QuantizeReport
    content: bytes
    suffix: str  # of the file's name

    def __str__(self) -> str:
        return str(self.report)

    def save(self, file: str | os.PathLike[str]) -> Path:
        """Write the file; a name without a suffix gets the right one."""
        path = named(file, self.suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(self.content)
        part.replace(path)
        return path


def quantize(
    model: Any,
    calibration: Any,
    to: str = ONNX,
    *,
    test: tuple[Any, Any] | None = None,
    max_drop: float | None = None,
    out: str | os.PathLike[str] | None = None,
    verbose: int = 1,
) -> Quantized:
    """Quantise a trained classifier to 8 bits, and compare it with the float model.

    >>> sg.quantize(model, x_train[:512], test=(x_test, y_test), max_drop=0.01, out="small.onnx")

    Args:
        model: an sg.Model or nn.Module, or a Keras model, which Keras quantises itself.
        calibration: an array of typical inputs, or a pair (x, y).
        to: "int8" is ONNX for serving, weights and activations in 8 bits; "int8-weights" stays
            in torch, with the weights of Linear layers in 8 bits (torchao).
        test: inputs and class numbers to compare on; default: the calibration set.
        max_drop: the accuracy that may be lost; raises beyond that, and writes nothing.
        out: the file to write.
        verbose: 0 prints no table.
    """
    kinds = (WEIGHTS, ONNX)
    if to not in kinds:
        raise UsageError(f"to={to!r}; choose one of {', '.join(map(repr, sorted(kinds)))}.")
    x, y = _examples(calibration)
    _check_calibration(x)
    at, labels = (x, y) if test is None else _examples(test)
    _check_test(at, labels, max_drop)
    if out is not None:
        named(out, _suffix(model, to))
    made, strategy = _made(model, x, to, at, labels)
    if verbose and strategy.is_chief:
        print(made)
    if max_drop is not None:
        made.report.refuse_worse(max_drop)
    if out is not None and strategy.is_chief:
        made.save(out)
    return made


def named(file: str | os.PathLike[str], suffix: str) -> Path:
    """Return the path with the suffix added; raise if it has another suffix."""
    path = Path(file)
    if path.suffix == "":
        return path.with_name(path.name + suffix)
    if path.suffix != suffix:
        raise UsageError(
            f"{path} is to hold what is read as {suffix}; name it {path.stem}{suffix}."
        )
    return path


def _suffix(model: Any, to: str) -> str:
    return ".keras" if _is_keras(model) else ".pt" if to == WEIGHTS else ".onnx"


def _is_keras(model: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.Model)


def _made(
    model: Any, x: NDArray[Any], to: str, at: NDArray[Any], labels: NDArray[Any] | None
) -> tuple[Quantized, Strategy]:
    if _is_keras(model):
        return _of_keras(model, to, at, labels), get_strategy() or single_device()
    if isinstance(model, nn.Module):
        model = Model(model)
    if not isinstance(model, Model):
        raise UsageError(
            f"sg.quantize takes an sg.Model, an nn.Module or a model of Keras, not a "
            f"{type(model).__name__}."
        )
    module = copy.deepcopy(model.module).cpu().eval()
    if to == WEIGHTS:
        return _weights(module, at, labels), model.strategy
    # workers of servers run training steps only
    served = model.strategy.settings.served is not None
    runs = single_device() if served else model.strategy
    return _onnx(module, x, runs, at, labels), model.strategy


def _onnx(
    module: nn.Module,
    x: NDArray[Any],
    strategy: Strategy,
    at: NDArray[Any],
    labels: NDArray[Any] | None,
) -> Quantized:
    floats = exported(module, x)
    before = OnnxModel(floats)
    check_export(before, module, x)
    small = OnnxModel(quantised(floats, x, strategy))
    forms = {
        "torch float32": _plain(module),
        "ONNX float32": Form(before, len(floats)),
        "ONNX int8": Form(small, len(small.content)),
    }
    return Quantized(small, compare_forms(forms, at, labels, 1), small.content, ".onnx")


def _plain(module: nn.Module) -> Form:
    return Form(lambda rows: torch_predict(module, rows), len(_state(module)))


def _state(module: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    return buffer.getvalue()


def _weights(module: nn.Module, at: NDArray[Any], labels: NDArray[Any] | None) -> Quantized:
    if not any(isinstance(each, nn.Linear) for each in module.modules()):
        raise UsageError(
            "there is nothing to quantise in this model: it has no Linear layer, and "
            'to="int8-weights" leaves all others as they are; to="int8" takes convolutions, too.'
        )
    with quietly():
        torchao = needed("torchao.quantization")
    small = copy.deepcopy(module)
    torchao.quantize_(small, torchao.Int8WeightOnlyConfig())
    content = _state(small)
    forms = {
        "torch float32": _plain(module),
        "torch int8 weights": Form(lambda rows: torch_predict(small, rows), len(content)),
    }
    return Quantized(small, compare_forms(forms, at, labels), content, ".pt")


def _of_keras(model: Any, to: str, at: NDArray[Any], labels: NDArray[Any] | None) -> Quantized:
    if to != ONNX:
        raise UsageError(f'to={to!r} is for torch modules; models of Keras take to="int8".')
    small = int8_copy(model)
    files = {"Keras float32": _saved(plain_copy(model)), "Keras int8": _saved(small)}
    models = {"Keras float32": model, "Keras int8": small}
    forms = {
        name: Form(lambda rows, each=each: answers(each, rows), len(files[name]))  # type: ignore[misc]
        for name, each in models.items()
    }
    return Quantized(small, compare_forms(forms, at, labels), files["Keras int8"], ".keras")


def _saved(model: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder, "m.keras"))
        return Path(folder, "m.keras").read_bytes()


def _examples(given: Any) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return inputs, and labels or None."""
    x, y = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    for each in (x, y):
        if isinstance(each, Mapping | list | tuple) or not (each is None or hasattr(each, "shape")):
            raise UsageError(
                f"examples are an array or tensor of inputs, or a pair (x, y), not a "
                f"{type(each).__name__}; models of several inputs cannot be quantised here."
            )
    return _array(x), None if y is None else _array(y)


def _array(given: Any) -> NDArray[Any]:
    found = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    if found.dtype == np.float64:
        found = found.astype(np.float32)
    return np.ascontiguousarray(found)


def _check_test(at: NDArray[Any], labels: NDArray[Any] | None, max_drop: float | None) -> None:
    """Raise if the test set is empty, or `max_drop` cannot be applied."""
    if not at.size:
        raise UsageError("the test set is empty; give some examples, or leave test out.")
    if max_drop is not None and labels is None:
        raise UsageError(
            "max_drop needs labels to count right answers by: quantize(..., test=(x, y))."
        )
    if max_drop is not None and math.isnan(max_drop):
        raise UsageError("max_drop is NaN, which no drop exceeds; give a number such as 0.01.")


def _check_calibration(x: NDArray[Any]) -> None:
    """Raise if the calibration set is empty, not finite or constant."""
    if x.ndim < 2 or not len(x):
        raise UsageError(
            f"the calibration set has the shape {x.shape}; it is to have a row for each example."
        )
    if not np.isfinite(x).all():
        raise UsageError("the calibration set has numbers that are not finite; leave them out.")
    if x.min() == x.max():
        what = "zeros" if not x.any() else "one number"
        raise UsageError(
            f"the calibration set is all {what}, which says nothing about what the model will "
            "see; take some hundred examples of the training set."
        )


# --- Keras models, quantised by Keras as a copy ---------------------------------------------------


def int8_copy(model: Any) -> Any:
    """Return a copy in which Keras has quantised all layers that it can."""
    made = plain_copy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns for each layer that it cannot quantise
        made.quantize("int8")
    if not any(getattr(layer, "quantization_mode", None) for layer in made._flatten_layers()):
        raise UsageError(
            "there is nothing to quantise in this model: Keras quantises Dense, EinsumDense and "
            "Embedding layers, and it has none."
        )
    return made


def plain_copy(model: Any) -> Any:
    """Return a copy of layers and weights, without the optimizer."""
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
    """Return the model's outputs, computed on one thread of this process."""
    import keras

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            found = model(x, training=False)
    finally:
        torch.set_num_threads(threads)
    return np.asarray(keras.ops.convert_to_numpy(found))
