"""Models compiled inside a strategy's scope belong to it; nothing else of Keras is touched.

While a plan is made, `fit` of models that belong to no strategy is handed over, too.
"""

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

from stratagem.capabilities import sentence
from stratagem.errors import NotDistributable, UsageError
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.strategies.strategy import Strategy, get_strategy, on_scope
from stratagem.training.dry_run import on_dry_run
from stratagem.wire.device_kinds import KINDS

_OLDEST = (3, 12)


@contextmanager
def _open(strategy: Strategy) -> Iterator[None]:
    """Patch Keras while a scope is open, now or when it is imported."""
    with after_import(follow):
        keras = sys.modules.get("keras")
        with keras.device(_first_device(strategy)) if keras is not None else nullcontext():
            yield


@contextmanager
def after_import(then: Callable[[Any], object]) -> Iterator[None]:
    """Call `then(keras)` now, or when Keras is imported in the block."""
    keras = sys.modules.get("keras")
    if keras is not None:
        then(keras)
        yield
        return
    watcher = _ImportWatcher(then)
    sys.meta_path.insert(0, watcher)
    try:
        yield
    finally:
        if watcher in sys.meta_path:
            sys.meta_path.remove(watcher)


class _ImportWatcher(MetaPathFinder):
    """Notices when Keras is imported inside a scope."""

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
    """Have every `compile` check for an open scope."""
    check(keras)
    _wrap_compile(keras)
    _leave_to_us(keras)


def check(keras: Any) -> None:
    """Raise if this Keras cannot be distributed."""
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
    name = strategy.replica_group.devices[0]
    return "cpu" if name.startswith("cpu") else name


def _wrap_compile(keras: Any) -> None:
    """Patch `compile` once a process, in the class that defines it: Keras must see no override."""
    home = next(cls for cls in keras.Model.__mro__ if "compile" in cls.__dict__)
    plain = home.compile
    if getattr(plain, "stratagem", False):
        return

    @functools.wraps(plain)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        strategy = get_strategy()
        driver = self.__dict__.get("_stratagem")
        if strategy is not None:
            _distribute(self, strategy)
        elif driver is not None:
            driver.recompiled()
        return result

    compile.stratagem = True  # type: ignore[attr-defined]
    home.compile = compile


def _leave_to_us(keras: Any) -> None:
    """Keep Keras' own data parallelism (3.16 and newer) from models of a scope and their copies:
    where the script has made torch's process group, it would reduce gradients and metrics again."""
    home = next((cls for cls in keras.Model.__mro__ if "_initialize_ddp" in cls.__dict__), None)
    if home is None or hasattr(home._initialize_ddp, "stratagem"):
        return
    wrap, results = home._initialize_ddp, home.get_metrics_result

    def _initialize_ddp(self: Any) -> None:
        if "_stratagem" not in self.__dict__:
            wrap(self)

    def get_metrics_result(self: Any) -> Any:
        ours = "_stratagem" in self.__dict__
        return super(home, self).get_metrics_result() if ours else results(self)

    _initialize_ddp.stratagem = True  # type: ignore[attr-defined]
    home._initialize_ddp, home.get_metrics_result = _initialize_ddp, get_metrics_result


def _distribute(model: Any, strategy: Strategy) -> None:
    if strategy.settings.tensor is not None:
        raise NotDistributable(sentence("divided", "Keras"))
    from stratagem.frontends.keras.driver import Driver
    from stratagem.frontends.keras.elastic_replicas import ElasticReplicas
    from stratagem.frontends.keras.evaluator import EvaluatorDriver
    from stratagem.frontends.keras.on_replicas import OnReplicas
    from stratagem.frontends.keras.on_servers import OnServers
    from stratagem.frontends.keras.on_shards import OnShards
    from stratagem.frontends.keras.on_stages import OnStages
    from stratagem.frontends.keras.refusals import refuse_distribution

    refuse_distribution()
    if strategy.audience is not None:
        EvaluatorDriver(model, strategy, OnReplicas).lay_over()
    else:
        mirrored = ElasticReplicas if strategy.settings.elastic else OnReplicas
        mirrored = OnStages if strategy.settings.pipeline is not None else mirrored
        mirrored = OnShards if strategy.settings.sharded else mirrored
        side = mirrored if strategy.settings.served is None else OnServers
        Driver(model, strategy, side).lay_over()


# --- while a plan is made -------------------------------------------------------------------------


@contextmanager
def _open_dry_run() -> Iterator[None]:
    """Patch `fit` now, or when Keras is imported."""
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
        from stratagem.frontends.keras.dry_run_fit import rehearse

        one = MirroredStrategy(["cuda:0" if KINDS["cuda"].count() else "cpu:0"])
        kwargs["verbose"] = 0
        return rehearse(self, one, lambda: plain(self, *args, **kwargs))

    home.fit = fit

    def undo() -> None:
        home.fit = plain

    return undo


on_scope(_open)
on_dry_run(_open_dry_run)
