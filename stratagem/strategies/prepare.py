"""One's own training loop, distributed: hooks on the model, shares from the loader."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader

from stratagem.data.loader import Around, shares_of
from stratagem.errors import NotDistributable, UsageError
from stratagem.strategies import likeness, setup, sync_batchnorm
from stratagem.strategies.exchange import GradientExchange
from stratagem.strategies.replica import Replica, Share, be, current_replica
from stratagem.strategies.settings import Settings
from stratagem.strategies.widths import Widths
from stratagem.wire.tree import gather_tree

#: what takes the hooks off a model again, so that it can be prepared anew
_undo: weakref.WeakKeyDictionary[nn.Module, Callable[[], None]] = weakref.WeakKeyDictionary()
#: by module, so that any part of a model will do: what its gradients go through
_kept: weakref.WeakKeyDictionary[nn.Module, list[GradientExchange]] = weakref.WeakKeyDictionary()
#: by replica: models prepared without a loader, in the same order on all replicas
_loaderless: weakref.WeakKeyDictionary[Replica, list[weakref.ref[nn.Module]]] = (
    weakref.WeakKeyDictionary()
)


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
    sums = _is_sum(loss_reduction)
    model.to(replica.device)
    if replica.count == 1:
        _be_here(replica)
        dealt = isinstance(loader, DataLoader)
        loader = _shares(loader, replica, sums, lambda: None) if dealt else loader
        return Prepared(model, optimizer, _on_device(loader, replica))
    look = likeness.of_loader(loader, "the loader")
    join_gradients(replica, settings, model, optimizer, look, sums=sums)
    replica.share.set(1, replica.count, 1.0 if sums else None)
    if loader is None:
        _loaderless.setdefault(replica, []).append(weakref.ref(model))
        return Prepared(model, optimizer, None)

    def at_end() -> None:
        setup.average_buffers(model, replica)
        _average_loaderless(replica)

    shares = _shares(loader, replica, sums, at_end)
    return Prepared(model, optimizer, _on_device(shares, replica))


def join_gradients(
    replica: Replica, settings: Settings, model: nn.Module, optimizer: Optimizer,
    look: likeness.Look, *, sums: bool,
) -> GradientExchange:  # fmt: skip
    """From now on `backward` leaves the gradient of all replicas' shares. Collective."""
    _check_optimizer(model, optimizer)
    setup.refuse_renormed(model)
    look |= likeness.of_module(model) | likeness.of_optimizer(optimizer, settings=True)
    likeness.check(replica, "prepare", look)
    setup.align(model, replica)
    setup.roll_own_dice(replica)
    reducer = setup.choose_reducer(list(model.parameters()), replica, settings)
    part_gradients(model)
    unsync = sync_batchnorm.install(model, replica, settings.sync_batchnorm)
    exchange = GradientExchange(
        list(model.named_parameters()), replica, reducer, every_backward=True, sums=sums
    )
    _undo[model] = partial(_take_away, exchange, unsync)
    for part in model.modules():
        _kept.setdefault(part, []).append(exchange)
    return exchange


def part_gradients(model: nn.Module) -> None:
    """From now on `backward` leaves what it leaves on one device."""
    _undo.pop(model, lambda: None)()
    for models in _loaderless.values():
        models[:] = [each for each in models if each() is not model]


def _average_loaderless(replica: Replica) -> None:
    """At any loader's end: models without one have an end of their data then, too. Collective.

    A model may be gone on one replica and wait for the garbage collector on another, so they tell
    each other first which are left.
    """
    models = _loaderless.get(replica)
    if not models:
        return
    here = [each() for each in models]
    everybody = gather_tree(replica.collective, [each is not None for each in here])
    left = [all(told) for told in zip(*everybody, strict=True)]
    models[:] = [each for each, is_left in zip(models, left, strict=True) if is_left]
    for model, is_left in zip(here, left, strict=True):
        if model is not None and is_left:
            setup.average_buffers(model, replica)


def prepare_loader(replica: Replica, loader: Any, loss_reduction: str) -> Any:
    """A loader of shares that belongs to no model: for validation, say. Collective."""
    sums = _is_sum(loss_reduction)
    if replica.count == 1:
        _be_here(replica)
    else:
        likeness.check(replica, "prepare", likeness.of_loader(loader, "the loader"))
    shares = _shares(loader, replica, sums, partial(_average_loaderless, replica))
    return _on_device(Interlude(shares, replica.share), replica)


def _be_here(replica: Replica) -> None:
    """A lone replica's loop may stand anywhere in a script: `sg.current_replica()` is it there."""
    current = current_replica()
    if current.count == 1 and current is not replica:
        be(replica)


def _is_sum(loss_reduction: str) -> bool:
    if loss_reduction not in ("mean", "sum"):
        raise UsageError(f'loss_reduction={loss_reduction!r}; it is "mean" or "sum".')
    return loss_reduction == "sum"


def _shares(
    loader: Any, replica: Replica, sums: bool, at_end: Callable[[], None]
) -> Any:
    if not isinstance(loader, DataLoader):
        raise NotDistributable(
            f"prepare takes a torch DataLoader, not a {type(loader).__name__}; wrap the data in "
            "one, or leave it out and give every replica an equal share yourself."
        )

    def announce(examples: int, total: int) -> None:
        replica.share.set(examples, total, float(examples > 0) if sums else None)

    shares = shares_of(loader, replica.collective, announce, at_end)
    widths = Widths(loader)
    if replica.count == 1 or not widths.looking:
        return shares
    return Measured(shares, loader, widths, replica)


def _take_away(exchange: GradientExchange, unsync: Callable[[], None]) -> None:
    exchange.close()
    for exchanges in _kept.values():
        if exchange in exchanges:
            exchanges.remove(exchange)
    unsync()


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(optimizer, LBFGS):
        raise NotDistributable(
            "LBFGS searches along a line by the loss of its own share, so that each replica would "
            "go another way; use another optimizer, or sg.MirroredStrategy of one device."
        )
    own = set(model.parameters())
    for group in optimizer.param_groups:
        if not own.issuperset(group["params"]):
            raise UsageError(
                "the optimizer holds parameters that are not this model's; make it from "
                "model.parameters() of the same model, before prepare. If it trains several models "
                "(an encoder and a decoder), put them into one nn.ModuleList and prepare that."
            )


class DeviceLoader(Around):
    """Moves each batch to the replica's device."""

    def __init__(self, loader: Any, replica: Replica) -> None:
        super().__init__(loader)
        self.device = replica.device

    def __iter__(self) -> Any:
        for batch in self.loader:
            yield to_device(batch, self.device)


class Measured(Around):
    """Looks whether the shares of its first batches are equally wide."""

    def __init__(
        self, shares: Any, source: DataLoader[Any], widths: Widths, replica: Replica
    ) -> None:
        super().__init__(shares)
        self._source, self._widths, self._replica = source, widths, replica

    def __iter__(self) -> Any:
        replica = self._replica
        for batch in self.loader:
            self._widths.look(self._source, batch, replica.share.examples, replica)
            yield batch


class Interlude(Around):
    """A loop that may stand within another: however it is left, the share is what it was."""

    def __init__(self, loader: Any, share: Share) -> None:
        super().__init__(loader)
        self._share = share

    def __iter__(self) -> Any:
        share = self._share
        before = share.examples, share.total, share.weight
        try:
            yield from self.loader
        finally:
            share.set(*before)


def _on_device(loader: Any, replica: Replica) -> Any:
    if loader is None or replica.device.type == "cpu":
        return loader
    return DeviceLoader(loader, replica)


def to_device(tree: Any, device: Any) -> Any:
    """Every tensor of a batch on `device`."""
    if type(tree) is Tensor and tree.device == device:  # as mostly, where data stays there
        return tree
    if hasattr(tree, "to"):
        return tree.to(device, non_blocking=True)
    if isinstance(tree, dict):
        return {key: to_device(value, device) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(to_device(value, device) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(to_device(value, device) for value in tree)
    return tree
