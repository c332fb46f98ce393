"""One classifier of an ensemble, whichever front end it is of: probabilities, and its file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stratagem.errors import UsageError
from stratagem.frontends import evaluation, inputs
from stratagem.frontends.losses import Meaning
from stratagem.frontends.model import Model
from stratagem.frontends.recipe import Recipe
from stratagem.strategies.strategy import Strategy, alone_on
from stratagem.training.replica import current_replica
from stratagem.training.settings import Settings

_CLOSE = 1e-3  # how far the probabilities of a row may be from adding up to 1


#: of x and batch_size, on the replica that calls it
Answers = Callable[[Any, int | None], Any]


class EnsembleMember(Protocol):
    """A model that gives probabilities."""

    from_logits: bool | None

    def predict(self, x: Any, batch_size: int | None) -> Any:
        """The model's outputs, from the devices of its own strategy."""

    def sent(self) -> Answers:
        """What gives the same on one device alone, in another process."""

    def probabilities(self, output: Any) -> NDArray[Any]:
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

    def predict(self, x: Any, batch_size: int | None) -> Any:
        return self.model.predict(x, batch_size=batch_size, verbose=0)

    def sent(self) -> Answers:
        return partial(_answers_of_torch, self.model.module, self.model.recipe_to_predict)

    def probabilities(self, output: Any) -> NDArray[Any]:
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

    def predict(self, x: Any, batch_size: int | None) -> Any:
        return self.model.predict(x, batch_size=batch_size, verbose=0)

    def sent(self) -> Answers:
        from stratagem.frontends.keras.model_pickle import FollowerModel

        return partial(_answers_of_keras, FollowerModel(0, self.model, Settings()))

    def probabilities(self, output: Any) -> NDArray[Any]:
        if isinstance(output, np.ndarray):
            output = torch.from_numpy(output)
        return normalised(output, self._number, self.from_logits, self._labels)

    def save(self, folder: Path, name: str) -> str:
        self.model.save(folder / f"{name}.keras")
        return f"{name}.keras"

    @staticmethod
    def load(file: Path) -> Any:
        """The model of that file."""
        import keras

        return keras.models.load_model(file)


def _answers_of_torch(module: nn.Module, recipe: Recipe, x: Any, batch_size: int | None) -> Any:
    source = inputs.source_of(x, batch_size=batch_size)
    return evaluation.predict(evaluation.Evaluation(module, recipe, source))


def _answers_of_keras(sent: Any, x: Any, batch_size: int | None) -> Any:
    import keras

    from stratagem.frontends.keras.adapter import device_name

    model = sent.unpacked()
    with keras.device(device_name(current_replica())):
        return type(model).predict(model, x, batch_size=batch_size, verbose=0)


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


# --- members on several devices -------------------------------------------------------------------


def check_devices(strategy: Strategy) -> None:
    """Refuse a strategy whose devices cannot each have a member of its own."""
    group = strategy.replica_group
    whole = strategy.num_replicas_in_sync == len(strategy.devices)
    if strategy.served or group.place is not None or not whole:
        raise UsageError(
            "the members of an ensemble are shared by the devices of one process, each with whole "
            'models: sg.Ensemble(models, strategy=sg.MirroredStrategy(["cpu:0", "cpu:1"])).'
        )


def side_by_side(
    strategy: Strategy, members: Sequence[EnsembleMember], x: Any, batch_size: int | None
) -> list[Any]:
    """The members' outputs, each from one device, which answers for every so many-th."""
    if inputs.kind_of(x, None) is not inputs.Kind.ARRAYS:
        raise UsageError(
            f"members on several devices each read all of x, and a {type(x).__name__} is no array; "
            "give an array, or leave out strategy= of the ensemble."
        )
    found = strategy.run(_own_members, [member.sent() for member in members], x, batch_size)
    outputs = {number: output for each in found for number, output in each.items()}
    return [outputs[number] for number in range(len(members))]


def _own_members(members: Sequence[Answers], x: Any, batch_size: int | None) -> dict[int, Any]:
    replica = current_replica()
    return {
        number: alone_on(replica.device, members[number], x, batch_size)
        for number in range(replica.index, len(members), replica.count)
    }


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
