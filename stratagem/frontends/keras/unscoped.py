"""While a plan is made: `fit` of Keras models that belong to no strategy is handed over, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stratagem.frontends.keras.scope import after_import, check
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.strategies.rehearsal import on_rehearsal


@contextmanager
def _open() -> Iterator[None]:
    """Now, if Keras is there, or as soon as it is imported."""
    undo: list[Any] = []
    with after_import(lambda keras: undo.append(_wrap_fit(keras))):
        try:
            yield
        finally:
            for each in undo:
                each()


def _wrap_fit(keras: Any) -> Any:
    home = next(cls for cls in keras.Model.__mro__ if "fit" in cls.__dict__)
    plain = home.fit

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_stratagem" in self.__dict__:
            return plain(self, *args, **kwargs)
        check(keras)
        from stratagem.frontends.keras.rehearse import rehearse

        one = MirroredStrategy(["cuda:0" if torch.cuda.is_available() else "cpu:0"])
        kwargs["verbose"] = 0
        return rehearse(self, one, lambda: plain(self, *args, **kwargs))

    home.fit = fit

    def undo() -> None:
        home.fit = plain

    return undo


on_rehearsal(_open)
