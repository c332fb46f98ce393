"""Variables that are not trained and that a step of the user's sets to means over its rows.

A running mean, an augmenter's probability: each replica has set them from its own rows. Weighted by
rows, the mean over replicas is what one device has, if the value is a mean over rows (row_check.py
tries that).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch
from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.state.change_tracker import digest
from stratagem.training.replica import Replica
from stratagem.wire.tree import gather_tree


def own_states(model: Any) -> list[Any]:
    """Return the variables that are not trained and belong to the model itself or to a layer that
    is not Keras' own. Statistics of batch norms are each replica's."""
    found = []
    for layer in model._flatten_layers():
        keras_own = type(layer).__module__.startswith("keras.src.layers.")
        if not keras_own and not isinstance(layer, keras.layers.BatchNormalization):
            found += [*layer._trainable_variables, *layer._non_trainable_variables]
    return list({id(v): v for v in found if not v.trainable}.values())


@torch.no_grad()
def weigh(states: Sequence[Any], written: Sequence[int], replica: Replica) -> None:
    """Set those of the states that came out differently to their mean over all rows. Collective.

    `written`: numbers of the states that this replica's step has written to.
    """
    weight, tensors = float(replica.share.weight), [v.value.detach() for v in states]
    mine = {i: digest(tensors[i]) for i in written} if weight else None
    told = [each for each in gather_tree(replica.collective, mine) if each is not None]
    numbers = sorted({i for each in told for i in each})
    different = [i for i in numbers if any(each.get(i) != told[0].get(i) for each in told)]
    if not different:
        return
    for i in different:
        if not tensors[i].is_floating_point():
            raise NotDistributable(
                f"train_step set {states[i].path!r}, of type {states[i].dtype}, from the rows of "
                "the batch, of which each replica has others, and whole numbers have no mean; give "
                "it a float type if it is a mean over rows, or count in a metric (keras.metrics)."
            )
    parts: list[tuple[float, list[Tensor]]] = gather_tree(
        replica.collective, (weight, [tensors[i] for i in different])
    )
    for place, i in enumerate(different):
        tensors[i].copy_(sum(share * values[place].double() for share, values in parts if share))
