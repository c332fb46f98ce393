"""`prepare` with parameter servers: a loader of tickets, an optimizer that pushes."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stratagem.capabilities import sentence
from stratagem.data.loader import check_sampler
from stratagem.errors import NotDistributable, UsageError
from stratagem.servers.batch_source import say_who_reads
from stratagem.servers.client import Client
from stratagem.servers.loop_device_group import GroupLoader, LoopDeviceGroup
from stratagem.servers.loop_session import LoopSession
from stratagem.servers.task_main import in_group
from stratagem.servers.ticket_loop import TicketLoader
from stratagem.training import fingerprint, hints
from stratagem.training.batch_shares import shares_of
from stratagem.training.carrying_loader import CarryingLoader
from stratagem.training.custom_loop import LossReader, read_losses
from stratagem.training.loss_reading import PushWeights
from stratagem.training.prepare import Prepared
from stratagem.training.replica import Replica
from stratagem.training.settings import Settings
from stratagem.training.setup import refuse_frequencies, refuse_renormed


def prepare_served(
    worker: Client | None,
    replica: Replica,
    settings: Settings,
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any,
    loss_reduction: str | None,
) -> Prepared:
    """Have `optimizer.step` push gradients, and the loader deal batches.

    `worker` is None on all devices of a worker but the first.
    """
    _check(model, optimizer, loader)
    reader = read_losses(replica, loss_reduction)
    reader.pushes = PushWeights(grouped=in_group(replica))
    model.to(replica.device)
    if worker is None:
        shares = GroupLoader(replica, model, optimizer, loader)
        return Prepared(model, optimizer, _carrying(shares, model, replica, reader))
    first: TicketLoader | None = worker.prepared
    assert settings.served is not None
    look = fingerprint.of_module(model) | fingerprint.of_optimizer(optimizer, settings=False)
    look |= fingerprint.of_loader(loader, "the loader")
    session = LoopSession(
        worker, model, optimizer, settings.served, wire=settings.wire, look=("prepare", look)
    )
    session.cancels = False  # backward in a custom loop is not interrupted
    if worker.is_chief:
        say_who_reads(loader)
        if session.over is None and session.plan.parts > 1:
            hints.warn_of_batchnorm(
                model, replica, "MirroredStrategy(sync_batchnorm=True) normalises over the batch"
            )
    tickets = TicketLoader(session, loader, replica, reader.pushes)
    reader.prepared.served = weakref.ref(model)
    reader.prepared.is_only_worker = session.plan.workers == 1 and not in_group(replica)
    if in_group(replica):
        tickets.gather_round(LoopDeviceGroup(replica, model, optimizer, loader))
    if session.over is None:
        session.until_end(optimizer.register_step_pre_hook(tickets.hand_in))
        session.until_end(optimizer.register_step_post_hook(tickets.give_back))
        session.until_end(optimizer.register_state_dict_pre_hook(tickets.bring_state))
        if first is not None and first.session.optimizer is not optimizer:
            session.until_end(first.session.optimizer.register_step_pre_hook(_refuse_step))
    worker.prepared, worker.at_end = tickets, tickets.close
    whole = session.over is not None or session.plan.parts == 1
    if whole and not in_group(replica):
        return Prepared(model, optimizer, tickets)
    return Prepared(model, optimizer, _carrying(tickets, model, replica, reader))


def _carrying(
    tickets: TicketLoader | GroupLoader, model: nn.Module, replica: Replica, reader: LossReader
) -> CarryingLoader:
    """Have parts of batches carry what they weigh, for loops that fetch several at a time."""
    shares = shares_of(replica)
    shares.watch(model)
    reader.scale = shares.part_of_latest
    return CarryingLoader(tickets, replica, nested=False)


def _check(model: nn.Module, optimizer: Optimizer, loader: Any) -> None:
    """Refuse models, optimizers and loaders that servers cannot train."""
    if not isinstance(loader, DataLoader):
        raise NotDistributable(
            sentence("servers", "a model without a loader", loader=type(loader).__name__)
        )
    check_sampler(loader)
    _check_optimizer(model, optimizer)
    refuse_renormed(model)
    refuse_frequencies(model)


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse parameters that the optimizer does not have: servers would not update them."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missing = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise NotDistributable(
            sentence("servers", "parameters added in a loop", count=len(missing), first=missing[0])
        )
    hooks = optimizer._optimizer_step_post_hooks.values()
    if any(getattr(hook, "__func__", None) is not TicketLoader.give_back for hook in hooks):
        raise NotDistributable(
            "the optimizer has a hook that runs after step(), and with servers the new values "
            "come with the next batch; do what it does at the beginning of the loop's body, or, if "
            "it writes weights, between two epochs."
        )


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise UsageError(
        "this optimizer's training ended when another one was prepared, and servers train one "
        "model at a time; put models that one loss trains into one nn.Module with one optimizer; "
        "for models that train in turn (a GAN), use MirroredStrategy."
    )
