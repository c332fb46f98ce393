"""A custom training loop, distributed: hooks on the model, shares from the loader."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader

from stratagem.capabilities import sentence
from stratagem.compat.torch_names import show_scaler
from stratagem.data.loader import LoaderWrapper, ShareLoader
from stratagem.data.shares import map_parts, own_rows
from stratagem.errors import NotDistributable, UsageError
from stratagem.training import fingerprint, hints, meetings, setup, sync_batchnorm
from stratagem.training.batch_shares import ROWS, shares_of
from stratagem.training.carrying_loader import CarryingLoader
from stratagem.training.custom_loop import LossReader, check_reduction, read_losses, reader_of
from stratagem.training.exchange import GradientExchange, open_exchange
from stratagem.training.fingerprint import of_arrays
from stratagem.training.lossy_wire import check_optimizer, forbids_scaler, refuse_scaler
from stratagem.training.replica import Replica, be, current_replica
from stratagem.training.row_passes import with_columns
from stratagem.training.settings import Settings
from stratagem.training.sharded_exchange import SharedUpdate, refuse_loop
from stratagem.training.step_figures import figures_of
from stratagem.wire.tree import gather_tree

#: what takes the hooks off a model again, so that it can be prepared anew
_undo: weakref.WeakKeyDictionary[nn.Module, Callable[[], None]] = weakref.WeakKeyDictionary()
#: the exchanges of gradients, by module: any part of a prepared model has them
_exchanges: weakref.WeakKeyDictionary[nn.Module, list[GradientExchange]] = (
    weakref.WeakKeyDictionary()
)


class Prepared(NamedTuple):
    """The same model and optimizer, and a loader of this replica's shares."""

    model: nn.Module
    optimizer: Optimizer
    loader: Any


def prepare(
    replica: Replica,
    settings: Settings,
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any,
    loss_reduction: str | None,
) -> Prepared:
    """Make `backward` leave the global gradient, and the loader return shares. Collective."""
    check_reduction(loss_reduction)
    model.to(replica.device)
    if replica.count == 1:
        part_gradients(model, replica)  # it was shared if the others have left an elastic job
        check_optimizer(settings, optimizer, replica)
        _be_here(replica)
        if loader is None:
            _note_loaderless(replica, model, optimizer)
        dealt = isinstance(loader, DataLoader)
        loader = (
            _CountedLoader(_shares(loader, replica, lambda: None), replica) if dealt else loader
        )
        return Prepared(model, optimizer, _on_device(loader, replica))
    if settings.sharded:
        refuse_loop(replica, optimizer)
    look = fingerprint.of_loader(loader, "the loader")
    if not settings.sync_batchnorm:
        hints.warn_of_batchnorm(model, replica, "sync_batchnorm=True normalises over the batch")
    reader = read_losses(replica, loss_reduction)
    exchange = join_gradients(replica, settings, model, optimizer, look, reader)
    replica.share.forget(replica.count)
    if loader is None:
        _note_loaderless(replica, model, optimizer)
        return Prepared(model, optimizer, None)
    found = weakref.ref(exchange)

    def at_end() -> None:
        if (exchange := found()) is not None:
            exchange.verify()
            exchange.after()
        meetings.meet(replica)
        setup.average_buffers(model, replica)
        _average_loaderless(replica)
        hints.warn_unsummed(replica)
        fingerprint.check_trained(replica, model, optimizer, settings.sync is not None)
        replica.share.forget(replica.count)

    shares = _shares(loader, replica, at_end)
    return Prepared(model, optimizer, _on_device(shares, replica))


def join_gradients(
    replica: Replica,
    settings: Settings,
    model: nn.Module,
    optimizer: Optimizer,
    look: fingerprint.Look,
    reader: LossReader,
) -> GradientExchange:
    """Have `backward` leave the gradient of all replicas' shares. Collective."""
    _check_optimizer(model, optimizer)
    check_optimizer(settings, optimizer, replica)
    setup.refuse_renormed(model)
    setup.refuse_frequencies(model)
    look |= fingerprint.of_module(model) | fingerprint.of_optimizer(optimizer, settings=True)
    fingerprint.check(replica, "prepare", look)
    setup.align(model, replica)
    setup.roll_own_dice(replica)
    part_gradients(model, replica)
    unsync = sync_batchnorm.install(model, replica, settings.sync_batchnorm)
    named = list(model.named_parameters())
    exchange = open_exchange(named, replica, settings, every_backward=True, reader=reader)
    reader.prepared.watch_hooks(model)
    shares_of(replica).watch(model)
    exchange.optimizer = optimizer if settings.sync is not None else None
    undo: list[Callable[[], Any]] = [unsync]
    if settings.sync is not None:
        replica.loop.keepers.append(exchange)
    if forbids_scaler(settings):
        undo.append(partial(show_scaler, optimizer, show_scaler(optimizer)))
        undo.append(optimizer.register_step_pre_hook(partial(_look_for_scaler, settings)).remove)
    if settings.sharded:
        update = SharedUpdate(replica, optimizer)
        exchange.after = update.check
        undo.append(update.close)
    if settings.committer is not None:
        undo.append(optimizer.register_step_post_hook(_synced(weakref.ref(exchange))).remove)
    _undo[model] = partial(_take_away, exchange, undo)
    for part in model.modules():
        _exchanges.setdefault(part, []).append(exchange)
    return exchange


def committer_of(model: nn.Module) -> GradientExchange | None:
    """Return the committer of a prepared model; None where gradients do not travel."""
    exchanges = _exchanges.get(model)
    return exchanges[-1] if exchanges else None


def part_gradients(model: nn.Module, replica: Replica) -> None:
    """Have `backward` leave this replica's own gradient again."""
    _undo.pop(model, lambda: None)()
    known = replica.loop.loaderless
    known[:] = [each for each in known if each[0]() is not model]


def _average_loaderless(replica: Replica) -> None:
    """At the end of any loader, average the buffers of models without a loader. Collective.

    A model may be gone on one replica and wait for the garbage collector on another, so replicas
    first agree on which are left.
    """
    known = replica.loop.loaderless
    if not known:
        return
    here = [model() for model, _ in known]
    everybody = gather_tree(replica.collective, [each is not None for each in here])
    left = [all(each) for each in zip(*everybody, strict=True)]
    known[:] = [each for each, is_left in zip(known, left, strict=True) if is_left]
    for model, is_left in zip(here, left, strict=True):
        if model is not None and is_left:
            setup.average_buffers(model, replica)


def _note_loaderless(replica: Replica, model: nn.Module, optimizer: Optimizer) -> None:
    replica.loop.loaderless.append((weakref.ref(model), weakref.ref(optimizer)))


def loaderless(replica: Replica) -> list[nn.Module | Optimizer]:
    """The models that were prepared without a loader and still exist, and their optimizers."""
    models = [(model(), optimizer()) for model, optimizer in replica.loop.loaderless]
    return [each for pair in models if pair[0] is not None for each in pair if each is not None]


def prepare_loader(replica: Replica, loader: Any) -> Any:
    """Return a loader of shares, without a model: for validation, for example. Collective."""
    if replica.count == 1:
        _be_here(replica)
    else:
        fingerprint.check(replica, "prepare", fingerprint.of_loader(loader, "the loader"))
    shares = _shares(loader, replica, partial(_average_loaderless, replica))
    return _on_device(NestedLoader(shares, replica), replica, nested=True)


def _be_here(replica: Replica) -> None:
    """Have `sg.current_replica()` return a lone replica, whose loop may stand in any code."""
    current = current_replica()
    if current.count == 1 and current is not replica:
        be(replica)


def _shares(loader: Any, replica: Replica, at_end: Callable[[], None]) -> Any:
    if not isinstance(loader, DataLoader):
        raise NotDistributable(
            f"prepare takes a torch DataLoader, not a {type(loader).__name__}; wrap the data in "
            "one, or leave it out and take this replica's rows of each batch: strategy.rows(batch)."
        )
    return ShareLoader(loader, replica.collective, replica.share.set, at_end)


def _synced(found: weakref.ref[GradientExchange]) -> Callable[..., None]:
    def after_step(*_: Any) -> None:
        if (exchange := found()) is not None:
            exchange.sync()

    return after_step


def _look_for_scaler(settings: Settings, optimizer: Any, *_: Any) -> None:
    """Refuse a GradScaler, also where it would skip this step."""
    if getattr(optimizer, "found_inf", None) is not None:
        refuse_scaler(settings, "GradScaler")


def _take_away(exchange: GradientExchange, undo: list[Callable[[], Any]]) -> None:
    exchange.close()
    if exchange in (keepers := exchange.replica.loop.keepers):
        keepers.remove(exchange)
    for exchanges in _exchanges.values():
        if exchange in exchanges:
            exchanges.remove(exchange)
    for each in undo:
        each()


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    if isinstance(optimizer, LBFGS):
        raise NotDistributable(sentence("replicas", "LBFGS"))
    check_parameters(model, optimizer)


def check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer of something else."""
    own = set(model.parameters())
    for group in optimizer.param_groups:
        if not own.issuperset(group["params"]):
            raise UsageError(
                "the optimizer holds parameters that are not this model's; make it from "
                "model.parameters() of the same model, before prepare. If it trains several models "
                "(an encoder and a decoder), put them into one nn.ModuleList and prepare that."
            )


class _CountedLoader(LoaderWrapper):
    """The loader of a lone replica: each batch is a step, since no exchange counts them."""

    def __init__(self, loader: Any, replica: Replica) -> None:
        super().__init__(loader)
        self._replica = replica

    def __iter__(self) -> Any:
        figures = figures_of(self._replica)
        for batch in self.loader:
            yield batch
            figures.step(self._replica.share.examples)


class DeviceLoader(LoaderWrapper):
    """Moves each batch to the replica's device."""

    def __init__(self, loader: Any, replica: Replica) -> None:
        super().__init__(loader)
        self.device = replica.device

    def __iter__(self) -> Any:
        for batch in self.loader:
            yield to_device(batch, self.device)


class NestedLoader(LoaderWrapper):
    """A loader of a loop that may stand within another, whose share is restored at the end."""

    def __init__(self, loader: Any, replica: Replica) -> None:
        super().__init__(loader)
        self._replica = replica

    def __iter__(self) -> Any:
        replica = self._replica
        share, reader = replica.share, reader_of(replica)
        hints.warn_unsummed(replica)
        passes = reader.passes if reader is not None else 0
        before = (share.examples, share.total, share.weight) if share.announced else None
        meetings.meet(replica)
        mine = total = batches = 0
        combined = replica.loop.combined
        try:
            for batch in self.loader:
                mine, total = mine + share.examples, total + share.total
                batches += 1
                yield batch
            if before is None:
                share.forget(replica.count)
            if reader is None or reader.passes == passes:
                hints.was_read(replica, mine, total, combined + batches - replica.loop.combined)
        finally:  # also after next(iter(loader)), whose batch stays in use
            if before is not None:
                share.set(*before)


def _on_device(loader: Any, replica: Replica, *, nested: bool = False) -> Any:
    if loader is None:
        return None
    if replica.device.type != "cpu":
        loader = DeviceLoader(loader, replica)
    return loader if replica.count == 1 else CarryingLoader(loader, replica, nested=nested)


def to_device(tree: Any, device: Any) -> Any:
    """Move every tensor of a batch to `device`."""
    if type(tree) is Tensor and tree.device == device:  # as mostly, where data stays there
        return tree
    if hasattr(tree, "to"):
        return tree.to(device, non_blocking=True)
    return map_parts(lambda part: to_device(part, device), tree)


# --- the calls of a loop to its strategy ----------------------------------------------------------


def backward_counted(
    replica: Replica, loss: Tensor, count: float | Tensor, retain_graph: bool
) -> None:
    """Run a backward pass of a loss that is divided by `count` on this replica."""
    number = float(count)
    if not number >= 0:
        raise UsageError(f"strategy.backward(count={number:g}); the count is not negative.")
    reader = reader_of(replica)
    if reader is None and replica.count > 1:
        raise UsageError("strategy.backward comes after strategy.prepare(model, optimizer, ...).")
    if reader is None:
        torch.autograd.backward(loss, retain_graph=retain_graph)
        return
    with reader.divided_by(number):
        torch.autograd.backward(loss, retain_graph=retain_graph)


def rows_of_share(replica: Replica, batch: Any) -> Any:
    """Return this replica's rows of a global batch; its gradient weighs accordingly."""
    mine, examples, total = own_rows(batch, replica.count, replica.index)
    replica.share.set(examples, total)
    if replica.count > 1:
        mine = with_columns(mine, max(examples, 1))
        shares_of(replica).fetched(mine, ROWS)
    replica.loop.cuts += 1
    cuts = replica.loop.cuts
    if replica.count > 1 and cuts & (cuts - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
        _refuse_unlike(replica, batch)
    return mine


def _refuse_unlike(replica: Replica, batch: Any) -> None:
    look = of_arrays(batch, "batch")
    mine = [[name, value] for name, value in look.items() if value is not None]
    for i, theirs in enumerate(gather_tree(replica.collective, mine)):
        for (name, a), (_, b) in zip(mine, theirs, strict=False):
            if not torch.equal(a, b) if isinstance(a, Tensor) else a != b:
                raise UsageError(
                    f"strategy.rows is given another batch here than on replica {i} ({name} "
                    "differs), so some rows would be trained twice and others never. Shuffle with "
                    "a generator that is seeded alike on all (torch.randperm(n, generator=...)): "
                    "the global one draws other numbers on each replica after prepare, and before "
                    "it, too, where one has drawn more (in `if strategy.is_chief:`, say)."
                )
