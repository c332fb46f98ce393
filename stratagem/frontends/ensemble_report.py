"""An ensemble on validation data beside its members, since it can be worse than they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stratagem.errors import UsageError

_LEAST = 1e-7  # a probability of 0 would make the loss infinite


@dataclass(frozen=True)
class EnsembleReport:
    """Loss (of the probabilities) and accuracy; `str` is a table."""

    ensemble: dict[str, float]
    members: list[dict[str, float]]

    @property
    def better(self) -> bool:
        """Whether more of its answers are right than of any member's."""
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
    """Accuracy and mean cross entropy, for class numbers."""
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
