"""Variables that no optimizer steps and that a training step sets to means over its rows.

A running mean, an augmenter's probability: each replica has set them from its own rows. Weighted by
rows, the mean over replicas is what one device has, if the value is a mean over rows (row_check.py
tries that).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.frontends.keras.captured_step import StepSettings
from stratagem.rules.cadence import Sync
from stratagem.state.change_tracker import TensorTracker, digest
from stratagem.training.isolated_run import replaced
from stratagem.training.replica import Replica
from stratagem.wire.tree import gather_tree


def assignable(model: Any) -> list[Any]:
    """Return the weights but for the statistics of batch norms, which are each replica's."""
    norms = (e for e in model._flatten_layers() if isinstance(e, keras.layers.BatchNormalization))
    statistics = {id(v) for norm in norms for v in norm._non_trainable_variables}
    return [v for v in model.weights if id(v) not in statistics]


class OwnStates:
    """What the training step of one copy may set itself; nothing in a step of Keras' own code.

    The first step tells which of the weights the optimizers step. All others that a step has
    written to are compared; each step needs a message then.
    """

    def __init__(self, model: Any, optimizers: Sequence[Any], sync: Sync | None) -> None:
        self._optimizers, self._sync = optimizers, sync
        self.variables = assignable(model) if StepSettings(model).foreign is not None else []
        self._writes, self._first = TensorTracker(), True
        #: ids of the variables that this step has given to an optimizer, with a gradient
        self._stepped: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what a step writes to, and what the optimizers step."""
        self._writes.mark([v.value for v in self.variables])
        self._stepped = set()
        watched = self._optimizers if any(v.trainable for v in self.variables) else []
        with replaced([(each, "apply", self._noting(each)) for each in watched]):
            yield

    def _noting(self, optimizer: Any) -> Callable[..., Any]:
        plain = optimizer.apply

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            given = optimizer._trainable_variables
            given, grads = trainable_variables or given, list(grads)
            pairs = zip(given, grads, strict=False)
            self._stepped |= {id(v) for v, gradient in pairs if gradient is not None}
            return plain(grads, trainable_variables)

        return apply

    @torch.no_grad()
    def weigh(self, replica: Replica) -> None:
        """Set those that came out differently to their mean over all rows. Collective."""
        if not self.variables:
            return
        states, weight = self.variables, float(replica.share.weight)
        tensors = [v.value.detach() for v in states]
        stepped = [i for i, v in enumerate(states) if id(v) in self._stepped]
        written = set(self._writes.changes()) - set(stepped)
        mine = {i: digest(tensors[i]) for i in sorted(written)} if weight else None
        told = gather_tree(replica.collective, (mine, stepped if self._first else []))
        digests = [each for each, _ in told if each is not None]
        numbers = sorted({i for each in digests for i in each})
        different = [
            i for i in numbers if any(each.get(i) != digests[0].get(i) for each in digests)
        ]
        if different:
            self._refuse([states[i] for i in different])
            parts: list[tuple[float, list[Tensor]]] = gather_tree(
                replica.collective, (weight, [tensors[i] for i in different])
            )
            for place, i in enumerate(different):
                shares = (share * values[place].double() for share, values in parts if share)
                tensors[i].copy_(sum(shares))
        if self._first:
            self._first, chiefs = False, set(told[0][1])
            kept = (v for i, v in enumerate(states) if not v.trainable or i not in chiefs)
            self.variables = list(kept)

    def _refuse(self, states: Sequence[Any]) -> None:
        """Raise if what came out differently has no mean over rows."""
        if self._sync is not None:
            raise NotDistributable(
                f"leave sync={self._sync!r} out, or set {states[0].path!r} in a callback: each "
                "replica has set it from its own rows or weights, before the replicas met."
            )
        for state in states:
            if not state.value.is_floating_point():
                raise NotDistributable(
                    f"train_step set {state.path!r}, of type {state.dtype}, from the rows of the "
                    "batch, of which each replica has others, and whole numbers have no mean; give "
                    "it a float type if it is a mean over rows, or count in a metric "
                    "(keras.metrics)."
                )
