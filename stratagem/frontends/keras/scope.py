"""Models compiled inside a strategy's scope belong to it; nothing else of Keras is touched."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from stratagem.errors import UsageError
from stratagem.strategies.strategy import Strategy, get_strategy, on_scope

_OLDEST = (3, 12)


@contextmanager
def _open(strategy: Strategy) -> Iterator[None]:
    """While a scope is open: follow Keras, or wait for it to be imported."""
    with after_import(follow):
        keras = sys.modules.get("keras")
        with keras.device(_first_device(strategy)) if keras is not None else nullcontext():
            yield


@contextmanager
def after_import(then: Callable[[Any], object]) -> Iterator[None]:
    """Have `then(keras)` called: now, or when it is imported while this is open."""
    keras = sys.modules.get("keras")
    if keras is not None:
        then(keras)
        yield
        return
    watcher = _Watcher(then)
    sys.meta_path.insert(0, watcher)
    try:
        yield
    finally:
        if watcher in sys.meta_path:
            sys.meta_path.remove(watcher)


class _Watcher(MetaPathFinder):
    """Sees Keras being imported inside a scope."""

    def __init__(self, then: Callable[[Any], object]) -> None:
        self.then = then

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.then(module)

            loader.exec_module = exec_module
        return spec


def follow(keras: Any) -> None:
    """Have every `compile` look for an open scope."""
    check(keras)
    _wrap_compile(keras)


def check(keras: Any) -> None:
    """One sentence if this Keras cannot be distributed."""
    if not hasattr(keras, "__version__"):
        raise UsageError(
            f"the module keras is {getattr(keras, '__file__', 'not a file')}, which is not Keras; "
            "rename that file, or import Keras before opening the scope."
        )
    version = tuple(int(part) for part in keras.__version__.split(".")[:2])
    if version < _OLDEST:
        raise UsageError(
            f"Keras {keras.__version__} is too old for stratagem; install {_OLDEST[0]}."
            f"{_OLDEST[1]} or newer: pip install -U 'keras>={_OLDEST[0]}.{_OLDEST[1]}'."
        )
    backend = keras.config.backend()
    if backend != "torch":
        raise UsageError(
            f"Keras runs on {backend} here, and stratagem distributes it on torch only; set "
            "KERAS_BACKEND=torch in the environment before keras is imported."
        )


def _first_device(strategy: Strategy) -> str:
    name = strategy.team.devices[0]
    return "cpu" if name.startswith("cpu") else name


def _wrap_compile(keras: Any) -> None:
    """Once a process. The class that defines `compile` is found, so that Keras sees no override."""
    home = next(cls for cls in keras.Model.__mro__ if "compile" in cls.__dict__)
    plain = home.compile
    if getattr(plain, "stratagem", False):
        return

    @functools.wraps(plain)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        strategy = get_strategy()
        conductor = self.__dict__.get("_stratagem")
        if strategy is not None:
            _distribute(self, strategy)
        elif conductor is not None:
            conductor.recompiled()
        return result

    compile.stratagem = True  # type: ignore[attr-defined]
    home.compile = compile


def _distribute(model: Any, strategy: Strategy) -> None:
    from stratagem.frontends.keras.conductor import Conductor
    from stratagem.frontends.keras.served import ServedConductor
    from stratagem.frontends.keras.watcher import Watcher

    kind = Conductor if strategy.settings.served is None else ServedConductor
    if strategy.audience is not None:
        kind = Watcher
    kind(model, strategy).lay_over()


on_scope(_open)
