"""Stands before a model's methods: Keras' own loop calls these, and they call the model's.

    Overlay            what every way of distributing a model has in common
    Conductor          replicas that play each step together
    ServedConductor    workers of parameter servers
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from stratagem.data.loader import check_sampler
from stratagem.errors import NotDistributable
from stratagem.frontends.keras import fused
from stratagem.frontends.keras.attributes import Attributes
from stratagem.frontends.keras.needs import ONE_STEP, Needs
from stratagem.frontends.keras.rehearse import rehearse
from stratagem.frontends.keras.results import public_names
from stratagem.frontends.keras.seats import number_of
from stratagem.strategies import rehearsal
from stratagem.strategies.strategy import Strategy

TRAINS = ("fit", "train_on_batch")
#: the one whose call is under way in this process
_leader: Overlay | None = None


class Overlay:
    """Takes the place of one model's methods."""

    overlaid = (
        "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch",
        "train_step", "test_step", "predict_step", "reset_metrics", "get_metrics_result", "save",
        "save_weights", "get_weights", "get_compile_config",
    )  # fmt: skip

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self.model, self.strategy, self.number = model, strategy, number_of(model)
        self._leading = self._in_step = False
        #: what the running call needs to know of single steps
        self._needs = Needs()
        self._attributes: Attributes | None = None
        self._calls = 0

    def lay_over(self) -> None:
        """Take the place of the model's methods, on this instance only."""
        taken = self.model.__dict__.get("_stratagem")
        for name in self.overlaid:
            if taken is None and name in self.model.__dict__:
                raise NotDistributable(
                    f"{name} was set on this model alone, where replicas do not see it; define it "
                    "in a subclass of keras.Model."
                )
            self.model.__dict__[name] = getattr(self, name)
        self.model.__dict__["_stratagem"] = self
        fused.install(self.model)

    def recompiled(self) -> None:
        """The model was compiled again."""

    def _own(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(type(self.model), name).__get__(self.model)
        return method

    # --- calls ------------------------------------------------------------------------------

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        if rehearsal.wanted():
            kwargs["verbose"] = 0
            rehearse(self.model, self.strategy, lambda: self._own("fit")(*args, **kwargs))
        return self._lead("fit", args, kwargs, self._needs_of("fit", args, kwargs))

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self._lead("evaluate", args, kwargs, self._needs_of("evaluate", args, kwargs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return self._lead("predict", args, kwargs, self._needs_of("predict", args, kwargs))

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._lead("train_on_batch", args, kwargs, ONE_STEP, again=True)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._lead("test_on_batch", args, kwargs, ONE_STEP, again=True)

    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._lead("predict_on_batch", args, kwargs, ONE_STEP, again=True)

    def _needs_of(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Needs:
        given = inspect.signature(self._own(name)).bind_partial(*args, **kwargs).arguments
        for loader in given.values():
            if isinstance(loader, DataLoader):
                check_sampler(loader)
        return Needs.of(given.get("callbacks"))

    def _lead(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], needs: Needs, *,
        again: bool = False,
    ) -> Any:  # fmt: skip
        """Call the model's own method, while others take part."""
        raise NotImplementedError

    def _refuse(self) -> None:
        if self.model.compiled and self.model.jit_compile is True:
            raise NotDistributable(
                "jit_compile=True compiles a step that replicas cannot take part in; compile the "
                "model with jit_compile=False."
            )
        if any(isinstance(p, DTensor) for p in self.model.parameters()):
            raise NotDistributable(
                "the model's parameters were sharded by torch (fully_shard, or a tensor-parallel "
                "plan), which Keras' variables do not follow: it would train wrongly. Leave that "
                "out; the strategy distributes the model."
            )
        for layer in self.model._flatten_layers():
            if getattr(layer, "stateful", False):
                raise NotDistributable(
                    f"layer {layer.name!r} is stateful: it keeps a state for each row of the "
                    "batch, and replicas see other rows; use stateful=False, or one replica."
                )

    @contextmanager
    def leads(self, needs: Needs) -> Iterator[None]:
        """While its own call is under way."""
        global _leader
        self._leading, self._needs, _leader = True, needs, self
        try:
            yield
        finally:
            self._leading, _leader = False, None

    # --- steps and reading: for those above ---------------------------------------------------

    def _gather_statistics(self) -> None:
        """Something is saved: what others have counted or updated is brought here."""
        raise NotImplementedError

    def save(self, *args: Any, **kwargs: Any) -> Any:
        self._gather_statistics()
        return self._own("save")(*args, **kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        self._gather_statistics()
        return self._own("save_weights")(*args, **kwargs)

    def get_compile_config(self) -> Any:
        """Name the optimizer as every backend knows it, so that any of them opens the file."""
        self._gather_statistics()  # keras.saving.save_model comes by here and not by `save`
        return public_names(self._own("get_compile_config")())

    def _watched(self) -> Attributes:
        assert self._attributes is not None
        return self._attributes

    def _seed(self) -> int:
        """Follows from the state of this process' dice without rolling them."""
        self._calls += 1
        state = torch.get_rng_state().numpy().tobytes()
        return zlib.crc32(state + self._calls.to_bytes(8, "big"))


def busy() -> bool:
    """Whether a conductor's call is under way in this process."""
    return _leader is not None
