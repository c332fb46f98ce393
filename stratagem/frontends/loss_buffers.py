"""Buffers of a loss that is a module of one's own: a scale that it learns, a moving average.

Each replica writes its own from its own rows. Replicas settle them as they do the model's, when an
epoch ends; workers of servers do not, and refuse.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from stratagem.errors import NotDistributable
from stratagem.frontends.losses import Loss
from stratagem.state.digest import digest
from stratagem.strategies import setup
from stratagem.strategies.replica import Replica


def of(loss: Loss) -> nn.Module | None:
    """The loss, if it is such a module. It may make its buffers later."""
    function = getattr(loss, "function", None)
    return function if loss.own and isinstance(function, nn.Module) else None


def weights(loss: Loss | None) -> list[Tensor]:
    """The parameters of a loss that is a module; what becomes of its buffers, traits tell."""
    function = getattr(loss, "function", None)
    return list(function.parameters()) if isinstance(function, nn.Module) else []


def align(loss: Loss, replica: Replica) -> None:
    """The chief's, everywhere. Collective."""
    if (module := of(loss)) is not None:
        setup.align(module, replica)


def average(loss: Loss, replica: Replica) -> None:
    """As the model's own: the mean over replicas, and a warning for what has none. Collective."""
    if (module := of(loss)) is not None:
        setup.average_buffers(module, replica)


class Unwritten:
    """Looks whether the loss has written into its buffers since this was made."""

    def __init__(self, loss: Loss) -> None:
        self._module = of(loss)
        self._before = self._digests()

    def _digests(self) -> dict[str, Any]:
        if self._module is None:
            return {}
        return {name: digest(buffer) for name, buffer in self._module.named_buffers()}

    def check(self) -> None:
        for name, mark in self._digests().items():
            if self._before.get(name) != mark:
                raise NotDistributable(
                    f"the loss wrote into its buffer {name!r}, of which every worker of servers "
                    "has its own, made from its own rows; keep it in a buffer of the model, which "
                    "is averaged when an epoch ends, or use sg.MirroredStrategy."
                )
