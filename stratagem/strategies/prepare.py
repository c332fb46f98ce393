"""One's own training loop, distributed: hooks on the model, shares from the loader."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stratagem.data.loader import ShareLoader
from stratagem.errors import NotDistributable, UsageError
from stratagem.strategies import setup, sync_batchnorm
from stratagem.strategies.exchange import GradientExchange
from stratagem.strategies.replica import Replica
from stratagem.strategies.settings import Settings

#: what takes the hooks off a model again, so that it can be prepared anew
_undo: weakref.WeakKeyDictionary[nn.Module, Callable[[], None]] = weakref.WeakKeyDictionary()


class Prepared(NamedTuple):
    """The same model and optimizer, and a loader of this replica's shares."""

    model: nn.Module
    optimizer: Optimizer
    loader: Any


def prepare(
    replica: Replica, settings: Settings, model: nn.Module, optimizer: Optimizer,
    loader: Any, loss_reduction: str,
) -> Prepared:  # fmt: skip
    """Make `backward` leave the global gradient, and the loader deal out shares. Collective."""
    if loss_reduction not in ("mean", "sum"):
        raise UsageError(f'loss_reduction={loss_reduction!r}; it is "mean" or "sum".')
    model.to(replica.device)
    if replica.count == 1:
        return Prepared(model, optimizer, _on_device(loader, replica))
    _check_optimizer(model, optimizer)
    setup.align(model, replica)
    setup.roll_own_dice(replica)
    reducer = setup.choose_reducer(list(model.parameters()), replica, settings)
    sums = loss_reduction == "sum"
    _undo.pop(model, lambda: None)()
    unsync = sync_batchnorm.install(model, replica) if settings.sync_batchnorm else None
    exchange = GradientExchange(
        list(model.named_parameters()), replica, reducer, every_backward=True, sums=sums
    )
    _undo[model] = partial(_take_away, exchange, unsync)
    share = replica.share
    share.set(1, replica.count, 1.0 if sums else None)
    if loader is None:
        return Prepared(model, optimizer, None)

    def announce(examples: int, total: int) -> None:
        share.set(examples, total, float(examples > 0) if sums else None)

    def at_end() -> None:
        setup.average_buffers(model, replica)

    if not isinstance(loader, DataLoader):
        raise NotDistributable(
            f"prepare takes a torch DataLoader, not a {type(loader).__name__}; wrap the data in "
            "one, or leave it out and give every replica an equal share yourself."
        )
    shares = ShareLoader(loader, replica.collective, announce, at_end)
    return Prepared(model, optimizer, _on_device(shares, replica))


def _take_away(exchange: GradientExchange, unsync: Callable[[], None] | None) -> None:
    exchange.close()
    if unsync is not None:
        unsync()


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    own = set(model.parameters())
    for group in optimizer.param_groups:
        if not own.issuperset(group["params"]):
            raise UsageError(
                "the optimizer holds parameters that are not this model's; make it from "
                "model.parameters() of the same model, before prepare."
            )


class DeviceLoader:
    """Moves each batch to the replica's device."""

    def __init__(self, loader: Any, replica: Replica) -> None:
        self.loader = loader
        self.device = replica.device

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        for batch in self.loader:
            yield to_device(batch, self.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def _on_device(loader: Any, replica: Replica) -> Any:
    if loader is None or replica.device.type == "cpu":
        return loader
    return DeviceLoader(loader, replica)


def to_device(tree: Any, device: Any) -> Any:
    """Every tensor of a batch on `device`."""
    if hasattr(tree, "to"):
        return tree.to(device, non_blocking=True)
    if isinstance(tree, dict):
        return {key: to_device(value, device) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(to_device(value, device) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(to_device(value, device) for value in tree)
    return tree
