"""Where a step's gradients go: the interface between a training step and a strategy.

    next -> gradients -> commit -> sync -> report

The code that runs a step (`fit`, a Keras model, a custom loop) computes gradients and commits them.
A committer knows where they go: into an all-reduce (`training/exchange.py`), to servers
(`servers/push_committer.py`), or to both, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Commit(NamedTuple):
    """The result of a commit."""

    #: False: the gradient was dropped, and the losses and metrics of these rows do not count
    counted: bool
    #: the numerator and the denominator of the loss, added up over all replicas that committed
    notes: Sequence[float] | Tensor


class Committer(Protocol):
    """Brings the gradients of one step to where the parameters are updated."""

    #: off: the gradients of a backward pass stay here, and the next pass adds to them
    armed: bool

    def commit(self, notes: Sequence[float | Tensor]) -> Commit:
        """After backward: commit this step's gradients, with numerator and denominator of the
        loss. Where the parameters are updated on each replica, every `p.grad` holds the gradient
        of the global batch afterwards."""

    def sync(self) -> None:
        """After the update: fetch the parameters' new values, if they are made elsewhere, or
        hold a meeting of replicas that train by themselves."""

    def close(self) -> None:
        """Take hooks and memory away."""
