"""What a call returns and what a file holds, in the form in which others can read it."""

from __future__ import annotations

from typing import Any

import keras
import torch

from stratagem.frontends import books


def portable(result: Any) -> Any:
    """A call's result for the other workers of a cluster."""
    if isinstance(result, keras.callbacks.History):
        numbers = {k: v for k, v in result.history.items() if not _detailed(v)}
        floats = {k: [float(v) for v in values] for k, values in numbers.items()}
        rest = {k: v for k, v in result.history.items() if k not in numbers}
        details = [books.portable(dict(zip(rest, each, strict=True)))
                   for each in zip(*rest.values(), strict=True)]  # fmt: skip
        epochs = [int(e) for e in result.epoch]
        return {"history": floats, "details": details, "epoch": epochs}
    return {"result": keras.tree.map_structure(_plain, result)}


def _detailed(values: list[Any]) -> bool:
    """Whether they are the details that servers give, and not numbers."""
    return bool(values) and isinstance(values[0], dict)


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, bool | int | float | str) or leaf is None:
        return leaf
    value = torch.as_tensor(leaf)
    return value if value.dim() else value.item()


def from_chief(told: Any, model: Any) -> Any:
    """The chief's result, on another worker."""
    if told is None:
        return None
    if "history" in told:
        history = keras.callbacks.History()
        history.set_model(model)
        history.history, history.epoch = told["history"], told["epoch"]
        for details in told["details"]:
            books.enter(history.history, books.numbered(details))
        model.history = history
        return history
    return keras.tree.map_structure(
        lambda leaf: leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf, told["result"]
    )


def public_names(config: Any) -> Any:
    """A compile config in which optimizers, those inside of others too, have public names."""
    if isinstance(config, dict):
        config = {key: public_names(value) for key, value in config.items()}
        private = str(config.get("module", "")).startswith("keras.src.backend.torch.optimizers")
        if private and config.get("class_name") in dir(keras.optimizers):
            config["module"], config["registered_name"] = "keras.optimizers", None
    elif isinstance(config, list | tuple):
        config = type(config)(public_names(value) for value in config)
    return config
