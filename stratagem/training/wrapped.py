"""What another library has distributed already, and a strategy would distribute once more."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from stratagem.data.loader import check_sampler
from stratagem.errors import UsageError

#: modules in which libraries have the wrappers that their `prepare` or `setup` returns
_WRAPPERS = ("accelerate.", "lightning.fabric.wrappers", "lightning_fabric.wrappers", "deepspeed.")
#: torch's wrappers of a model, by name, since not every build of torch has them; what is instead
_TORCHS = {
    "DistributedDataParallel": "MirroredStrategy",
    "FullyShardedDataParallel": "ShardedStrategy",
}


def refuse_wrapped(*given: Any) -> None:
    """Refuse a model, an optimizer or a loader that is distributed already."""
    for each in given:
        for part in each.modules() if isinstance(each, nn.Module) else (each,):
            _refuse(part)
        if isinstance(each, nn.Module):
            _refuse_divided(each)
        if isinstance(each, DataLoader):
            check_sampler(each)


def _refuse(part: Any) -> None:
    """Refuse a wrapper. Its class is known by name, so that no library needs to be imported."""
    for kind in type(part).__mro__:
        if kind.__name__ in _TORCHS and kind.__module__.startswith("torch."):
            raise UsageError(
                f"the model is wrapped in {kind.__name__}, which combines gradients by itself, so "
                "they would be combined twice; leave the wrapper out, and give your own module "
                f"to a {_TORCHS[kind.__name__]}."
            )
        if kind.__module__.startswith(_WRAPPERS):
            library = kind.__module__.partition(".")[0]
            raise UsageError(
                f"{type(part).__name__} comes from {library}, which has distributed it already: "
                "rows would be divided twice, and some never read. Leave that call (prepare, "
                "setup) out, and give your own model, optimizer and DataLoader."
            )


def _refuse_divided(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") and hasattr(parameter, "placements"):
            raise UsageError(
                f"parameter {name!r} is a {type(parameter).__name__}, divided already; leave that "
                "call out, and give the plain model to the strategy that divides it: "
                "ShardedStrategy in place of fully_shard, TensorParallelStrategy in place of "
                "parallelize_module."
            )
