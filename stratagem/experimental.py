"""The names of `tf.distribute.experimental`, for code that follows a book."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem import CentralStorageStrategy as CentralStorageStrategy
    from stratagem import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from stratagem import ParameterServerStrategy as ParameterServerStrategy
    from stratagem import TPUStrategy as TPUStrategy
    from stratagem.strategies.mirrored import CollectiveCommunication as CollectiveCommunication

_STRATEGIES = [
    "CentralStorageStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "TPUStrategy",
]
__all__ = ["CollectiveCommunication", *_STRATEGIES]


def __getattr__(name: str) -> Any:
    if name in _STRATEGIES:
        import stratagem

        return getattr(stratagem, name)
    if name == "CollectiveCommunication":
        from stratagem.strategies.mirrored import CollectiveCommunication

        return CollectiveCommunication
    raise AttributeError(f"module 'stratagem.experimental' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
