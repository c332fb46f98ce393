"""What a placement cannot do with an option: one table, which errors, docs and tests read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: placement -> option -> the sentence, with its remedy first; {words} are filled in by the error
TABLE: dict[str, dict[str, str]] = {
    "divided": {
        "Keras": (
            "give sg.Model a torch module of the same layers, or use a MirroredStrategy: layers of "
            "torch are divided, and this is a Keras model."
        ),
    },
    "servers": {
        "mean of a loop": (
            "use sg.Model, whose fit reports the loss of the epoch, and let the chief's settings "
            "(its learning rate) count for all: with parameter servers workers do not meet at each "
            "batch, so there is no mean over all of them."
        ),
    },
}


def sentence(placement: str, option: str, **words: object) -> str:
    """Return why the placement refuses the option, and what to do instead."""
    return TABLE[placement][option].format(**words)


def refused(placements: Sequence[str], options: Collection[str]) -> str | None:
    """Return the sentence with which one of the placements refuses an option; None: none does."""
    for placement in placements:
        for option, said in TABLE.get(placement, {}).items():
            if option in options:
                return said
    return None
