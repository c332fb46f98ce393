"""One classifier of an ensemble, whichever front end it is of: probabilities, and its file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stratagem.errors import UsageError
from stratagem.frontends.losses import Meaning
from stratagem.frontends.model import Model

_CLOSE = 1e-3  # how far the probabilities of a row may be from adding up to 1


class EnsembleMember(Protocol):
    """A model that gives probabilities."""

    from_logits: bool | None

    def probabilities(self, x: Any, batch_size: int | None) -> NDArray[Any]:
        """Of every class, row by row; of the second one where the model has a single output."""

    def save(self, folder: Path, name: str) -> str:
        """Write it under that name; the name of its file."""


class TorchMember:
    """An sg.Model."""

    def __init__(self, model: Model, number: int, from_logits: bool | None) -> None:
        self.model, self._number = model, number
        meaning = Meaning() if model.recipe is None else model.recipe.metrics.meaning
        self.from_logits = meaning.logits if from_logits is None else from_logits
        #: each output may be for itself: not a loss of one class among others
        self._labels = meaning.logits is True and not meaning.classes

    def probabilities(self, x: Any, batch_size: int | None) -> NDArray[Any]:
        output = self.model.predict(x, batch_size=batch_size, verbose=0)
        return normalised(output, self._number, self.from_logits, self._labels)

    def save(self, folder: Path, name: str) -> str:
        return self.model.save(folder / name).name

    @staticmethod
    def load(file: Path, module: nn.Module) -> Model:
        """The module with the weights of that file."""
        model = Model(module)
        model.load(file)
        return model


class KerasMember:
    """A model of Keras."""

    def __init__(self, model: Any, number: int, from_logits: bool | None) -> None:
        self.model, self._number = model, number
        loss = getattr(model, "loss", None)
        known = getattr(loss, "from_logits", False if isinstance(loss, str) else None)
        self.from_logits = known if from_logits is None else from_logits
        named = loss if isinstance(loss, str) else getattr(loss, "name", "")
        self._labels = "binary" in named

    def probabilities(self, x: Any, batch_size: int | None) -> NDArray[Any]:
        output = self.model.predict(x, batch_size=batch_size, verbose=0)
        return normalised(torch.as_tensor(output), self._number, self.from_logits, self._labels)

    def save(self, folder: Path, name: str) -> str:
        self.model.save(folder / f"{name}.keras")
        return f"{name}.keras"

    @staticmethod
    def load(file: Path) -> Any:
        """The model of that file."""
        import keras

        return keras.models.load_model(file)


def member_of(model: Any, number: int, from_logits: bool | None) -> EnsembleMember:
    """What the ensemble does with a model."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.Model):
        return KerasMember(model, number, from_logits)
    if isinstance(model, nn.Module):
        model = Model(model)
    if isinstance(model, Model):
        return TorchMember(model, number, from_logits)
    raise UsageError(
        f"member {number} of the ensemble is a {type(model).__name__}; members are sg.Model, "
        "nn.Module or models of Keras."
    )


def normalised(output: Any, number: int, from_logits: bool | None, labels: bool) -> NDArray[Any]:
    """A model's outputs as probabilities; refused where it is not known that they are."""
    if not isinstance(output, torch.Tensor) or output.dim() not in (1, 2):
        what = f"{output.dim()} axes" if isinstance(output, torch.Tensor) else "several parts"
        raise UsageError(
            f"member {number} of the ensemble answers with {what}; classifiers answer with a row "
            "of classes for each example, or one number."
        )
    single = output.dim() == 1 or output.shape[1] == 1
    if labels and not single:
        raise UsageError(
            f"the loss of member {number} of the ensemble has a chance for each output, and an "
            "ensemble joins classes that exclude each other; if they do, give it the plain module "
            "and from_logits=."
        )
    if from_logits is None:
        raise UsageError(
            f"are the outputs of member {number} of the ensemble logits? Say "
            "sg.Ensemble(models, from_logits=True), or False for probabilities."
        )
    if from_logits:
        output = torch.sigmoid(output) if single else torch.softmax(output, dim=1)
    found: NDArray[Any] = output.detach().cpu().numpy()
    sums = np.ones(1) if single or from_logits else found.sum(axis=1)
    if found.size and (found.min() < 0 or found.max() > 1 + _CLOSE or _far(sums)):
        raise UsageError(
            f"the outputs of member {number} of the ensemble are no probabilities; if they are "
            "logits, or logarithms, say sg.Ensemble(models, from_logits=True)."
        )
    return found


def _far(sums: NDArray[Any]) -> bool:
    return bool(np.abs(sums - 1).max(initial=0.0) > _CLOSE)
