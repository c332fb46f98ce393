"""One classifier of an ensemble, of torch or Keras: its probabilities and its file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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

_CLOSE = 1e-3  # how far the sum of a row's probabilities may be from 1


#: predicts from x and batch_size, on the calling replica
Answers = Callable[[Any, int | None], Any]


class EnsembleMember:
    """A model that gives probabilities.

    `labels`: whether outputs may be independent labels, and not classes that exclude each other.
    """

    def __init__(self, model: Any, number: int, from_logits: bool | None, labels: bool) -> None:
        self.model, self._number = model, number
        self.from_logits, self._labels = from_logits, labels

    def predict(self, x: Any, batch_size: int | None) -> Any:
        """Return the model's outputs, computed on the devices of its own strategy."""
        return self.model.predict(x, batch_size=batch_size, verbose=0)

    def probabilities(self, output: Any) -> NDArray[Any]:
        """Return the probabilities of all classes, or of the second one for a single output."""
        if isinstance(output, np.ndarray):
            output = torch.from_numpy(output)
        return normalised(output, self._number, self.from_logits, self._labels)

    def sent(self) -> Answers:
        """Return a picklable function that predicts on one device, in another process."""
        raise NotImplementedError

    def save(self, folder: Path, name: str) -> str:
        """Write the model under a name, and return the file's name."""
        raise NotImplementedError


class TorchMember(EnsembleMember):
    """A member that is an sg.Model."""

    def __init__(self, model: Model, number: int, from_logits: bool | None) -> None:
        meaning = Meaning() if model.recipe is None else model.recipe.metrics.meaning
        logits = meaning.logits if from_logits is None else from_logits
        super().__init__(model, number, logits, meaning.logits is True and not meaning.classes)

    def sent(self) -> Answers:
        return partial(_predict_torch, self.model.module, self.model.recipe_to_predict)

    def save(self, folder: Path, name: str) -> str:
        return str(self.model.save(folder / name).name)

    @staticmethod
    def load(file: Path, module: nn.Module) -> Model:
        """Load the weights of a file into a module."""
        model = Model(module)
        model.load(file)
        return model


class KerasMember(EnsembleMember):
    """A member that is a Keras model."""

    def __init__(self, model: Any, number: int, from_logits: bool | None) -> None:
        loss = getattr(model, "loss", None)
        named = loss if isinstance(loss, str) else getattr(loss, "name", "")
        if from_logits is None:
            from_logits = getattr(loss, "from_logits", False if isinstance(loss, str) else None)
        super().__init__(model, number, from_logits, "binary" in named)

    def sent(self) -> Answers:
        from stratagem.frontends.keras.model_pickle import FollowerModel

        return partial(_predict_keras, FollowerModel(0, self.model, Settings()))

    def save(self, folder: Path, name: str) -> str:
        self.model.save(folder / f"{name}.keras")
        return f"{name}.keras"

    @staticmethod
    def load(file: Path) -> Any:
        """Load the model of a file."""
        import keras

        return keras.models.load_model(file)


def _predict_torch(module: nn.Module, recipe: Recipe, x: Any, batch_size: int | None) -> Any:
    source = inputs.source_of(x, batch_size=batch_size)
    return evaluation.predict(evaluation.Evaluation(module, recipe, source))


def _predict_keras(sent: Any, x: Any, batch_size: int | None) -> Any:
    import keras

    from stratagem.frontends.keras.adapter import device_name

    model = sent.unpacked()
    with keras.device(device_name(current_replica())):
        return type(model).predict(model, x, batch_size=batch_size, verbose=0)


def member_of(model: Any, number: int, from_logits: bool | None) -> EnsembleMember:
    """Return a model as a member of an ensemble."""
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
    """Raise if the strategy's devices cannot each hold whole members."""
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
    """Return the members' outputs; each device computes every n-th member, for n devices."""
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
    """Return a model's outputs as probabilities; raise if they may not be."""
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
