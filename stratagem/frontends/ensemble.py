"""`sg.Ensemble`: several classifiers that predict together, by mean probability or by vote.

ensemble/ensemble.json           the settings, and the members' files
ensemble/member-0.safetensors    a member, as `sg.Model.save` writes it; or member-0.keras
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stratagem.errors import UsageError
from stratagem.figures.trial_record import MODEL
from stratagem.frontends.ensemble_member import (
    EnsembleMember,
    KerasMember,
    TorchMember,
    check_devices,
    member_of,
    side_by_side,
)
from stratagem.strategies.strategy import Strategy

_FILE = "ensemble.json"

Build = Callable[[Mapping[str, str]], nn.Module]


class Ensemble:
    """Classifiers of the same classes, on the devices of their own strategies or of a common one.

    >>> ensemble = sg.Ensemble([first, second, third])
    >>> ensemble.predict(x)                     # the mean of their probabilities
    >>> print(ensemble.evaluate(x, y))          # beside its members: it can be worse
    """

    def __init__(
        self,
        models: Sequence[Any],
        vote: bool = False,
        from_logits: bool | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        """Take models of sg.Model, nn.Module or Keras.

        Args:
            vote: each member votes for its likeliest class; by default, the probabilities are
                averaged.
            from_logits: whether the members' outputs are logits; known for models compiled
                with a loss of torch's or Keras' own.
            strategy: its devices divide the members and run in parallel: with two devices, the
                first, third, ... members run on one, the rest on the other. Without it, members
                run in turn, each on all devices of its own strategy.
        """
        if not isinstance(models, list | tuple) or not models:
            raise UsageError("sg.Ensemble takes a list of models: sg.Ensemble([first, second]).")
        self.vote, self.strategy = vote, strategy
        if strategy is not None:
            check_devices(strategy)
        self.members: list[EnsembleMember] = [
            member_of(model, number, from_logits) for number, model in enumerate(models)
        ]

    def __len__(self) -> int:
        return len(self.members)

    def predict(self, x: Any, *, batch_size: int | None = None) -> NDArray[Any]:
        """Return the probabilities for every example; with `vote`, the fractions of the votes."""
        return self._join(self._each(x, batch_size))

    def evaluate(self, x: Any, y: Any, *, batch_size: int | None = None) -> EnsembleReport:
        """Return loss and accuracy of the ensemble and of its members; y has class numbers."""
        each = self._each(x, batch_size)
        target = np.asarray(torch.as_tensor(y).cpu() if isinstance(y, torch.Tensor) else y)
        members = [scores(probabilities, target) for probabilities in each]
        own = scores(self._join(each), target)
        if self.vote:
            del own["loss"]  # shares of votes are no probabilities
        return EnsembleReport(own, members)

    def _each(self, x: Any, batch_size: int | None) -> list[NDArray[Any]]:
        if self.strategy is None:
            outputs = [member.predict(x, batch_size) for member in self.members]
        else:
            outputs = side_by_side(self.strategy, self.members, x, batch_size)
        pairs = zip(self.members, outputs, strict=True)
        found = [member.probabilities(output) for member, output in pairs]
        for number, each in enumerate(found[1:], 1):
            if each.shape != found[0].shape:
                raise UsageError(
                    f"member 0 of the ensemble answers with {_shape(found[0])} and member {number} "
                    f"with {_shape(each)}; only models of the same classes can be joined."
                )
        return found

    def _join(self, each: Sequence[NDArray[Any]]) -> NDArray[Any]:
        stacked = np.stack([_votes(p) for p in each] if self.vote else list(each))
        joined: NDArray[Any] = np.mean(stacked, axis=0)
        return joined

    # --- files ----------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write all members into a folder, and return its path."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        files = [member.save(path, f"member-{n}") for n, member in enumerate(self.members)]
        logits = [member.from_logits for member in self.members]
        about = {"vote": self.vote, "members": files, "from_logits": logits}
        (path / _FILE).write_text(json.dumps(about, indent=2) + "\n")
        return path

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        modules: Sequence[nn.Module] | None = None,
        strategy: Strategy | None = None,
    ) -> Ensemble:
        """Load the folder of `save`; `modules` receive the weights of the torch members."""
        path = Path(folder) / _FILE
        if not path.is_file():
            raise UsageError(f"{folder} is no ensemble's folder: it has no {_FILE}.")
        about = json.loads(path.read_text())
        found = [path.parent / name for name in about["members"]]
        left = list(modules or ())
        torch_files = [file for file in found if file.suffix != ".keras"]
        if len(left) != len(torch_files):
            raise UsageError(
                f"{folder} has the weights of {len(torch_files)} torch modules, and {len(left)} "
                "modules are given for them: Ensemble.load(folder, [Net(), ...])."
            )
        models = [_read(file, None if file.suffix == ".keras" else left.pop(0)) for file in found]
        made = cls(models, about["vote"], from_logits=False, strategy=strategy)
        for member, logits in zip(made.members, about["from_logits"], strict=True):
            member.from_logits = logits
        return made

    @classmethod
    def from_sweep(
        cls,
        folder: str | os.PathLike[str],
        build: Build | None = None,
        vote: bool = False,
        from_logits: bool | None = None,
        strategy: Strategy | None = None,
    ) -> Ensemble:
        """Load the models that a sweep has kept, in the order of their trials.

        `build` makes a module from a trial's flags, {"units": "64"}, for weights of torch; Keras
        models do not need it.
        """
        files = kept_models(Path(folder))
        if not files:
            raise UsageError(f"{folder} has no trial with a model; is it the folder of a sweep?")
        if build is None and any(file.suffix != ".keras" for file in files):
            raise UsageError(
                f"the trials in {folder} have weights only, and a module to put them into is made "
                'by you: Ensemble.from_sweep(folder, lambda flags: Net(int(flags["units"]))).'
            )
        models = [
            _read(file, None if build is None or file.suffix == ".keras" else build(flags_of(file)))
            for file in files
        ]
        return cls(models, vote, from_logits, strategy)


def kept_models(sweep: Path) -> list[Path]:
    """Return the files of the models that a sweep has kept."""
    endings = ("safetensors", "keras")
    return sorted(file for end in endings for file in sweep.glob(f"trial-*/{MODEL}.{end}"))


def flags_of(file: Path) -> dict[str, str]:
    """Return the command-line flags of the trial that made a model file."""
    flags: dict[str, str] = json.loads((file.parent / "args.json").read_text())["flags"]
    return {flag.lstrip("-").replace("-", "_"): value for flag, value in flags.items()}


def _read(file: Path, module: nn.Module | None) -> Any:
    if module is None:
        return KerasMember.load(file)
    return TorchMember.load(file, module)


def _votes(probabilities: NDArray[Any]) -> NDArray[Any]:
    """Return 1 for the likeliest class of each row (the first of equal ones), and 0 elsewhere."""
    if probabilities.ndim == 1 or probabilities.shape[1] == 1:
        return (probabilities >= 0.5).astype(probabilities.dtype)
    votes = np.zeros_like(probabilities)
    votes[np.arange(len(votes)), probabilities.argmax(axis=1)] = 1
    return votes


def _shape(probabilities: NDArray[Any]) -> str:
    classes = 2 if probabilities.ndim == 1 else probabilities.shape[1]
    return f"{len(probabilities)} rows of {classes} classes"


_LEAST = 1e-7  # a probability of 0 would make the loss infinite


@dataclass(frozen=True)
class EnsembleReport:
    """Loss and accuracy of an ensemble and its members; `str` is a table."""

    ensemble: dict[str, float]
    members: list[dict[str, float]]

    @property
    def better(self) -> bool:
        """Whether the ensemble's accuracy is higher than that of every member."""
        return self.ensemble["accuracy"] > max(each["accuracy"] for each in self.members)

    def __str__(self) -> str:
        rows = [(f"member {number}", each) for number, each in enumerate(self.members)]
        lines = [f"{'':10}  accuracy    loss"]
        lines += [_line(name, each) for name, each in [*rows, ("ensemble", self.ensemble)]]
        best = max(each["accuracy"] for each in self.members)
        if self.ensemble["accuracy"] < best:
            lines.append("The ensemble is worse than its best member.")
        return "\n".join(lines)


def _line(name: str, found: dict[str, float]) -> str:
    loss = f"{found['loss']:8.4f}" if "loss" in found else f"{'':8}"
    return f"{name:10}  {found['accuracy']:8.4f}{loss}".rstrip()


def scores(probabilities: NDArray[Any], target: NDArray[Any]) -> dict[str, float]:
    """Return the accuracy and the mean cross entropy, for class numbers as targets."""
    if probabilities.ndim == 1 or probabilities.shape[1] == 1:
        second = probabilities.reshape(-1)
        answers = (second >= 0.5).astype(int)
        probabilities = np.stack([1 - second, second], axis=1)
    else:
        answers = probabilities.argmax(axis=1)
    _check(probabilities, target)
    wanted = target.reshape(-1).astype(int)
    chances = probabilities[np.arange(len(wanted)), wanted].astype(float)
    loss = -np.log(np.clip(chances, _LEAST, 1.0)).mean()
    return {"accuracy": float((answers == wanted).mean()), "loss": float(loss)}


def _check(probabilities: NDArray[Any], target: NDArray[Any]) -> None:
    rows, classes = probabilities.shape
    if target.size != rows or rows == 0:
        raise UsageError(f"there are {rows} examples and {target.size} targets; one for each.")
    if (
        target.min() < 0
        or target.max() >= classes
        or not np.array_equal(target, target.astype(int))
    ):
        raise UsageError(f"the targets are no class numbers from 0 to {classes - 1}.")
