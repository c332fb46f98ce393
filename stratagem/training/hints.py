"""Warnings for custom loops, each given once: where a replica differs from one device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from stratagem.compat.torch_names import BatchNorm
from stratagem.errors import StratagemError
from stratagem.training.replica import Replica, current_replica
from stratagem.wire.tree import gather_tree

log = logging.getLogger("stratagem")


def warn_without_loader(replica: Replica, loss: float | None) -> None:
    """Warn at the first step of a loop whose batches are not cut into shares. Collective."""
    losses = gather_tree(replica.collective, loss)
    if not replica.is_chief:
        return
    if loss is not None and all(each == loss for each in losses):
        log.warning(
            "no batch was cut into shares, and all %d replicas have computed the same loss: each "
            "does the whole of the work. Give the DataLoader to strategy.prepare, or take this "
            "replica's rows of each batch: x, y = strategy.rows((x, y)).",
            replica.count,
        )
    else:
        log.warning(
            "no batch was cut into shares, and the losses of %d replicas differ: each has rows of "
            "its own, or all have the same rows and other dropout. If your code cuts every batch "
            "itself, that is right, and a step counts %d batches as one; else give the DataLoader "
            "to strategy.prepare, or take this replica's rows: x, y = strategy.rows((x, y)).",
            replica.count,
            replica.count,
        )


def warn_of_batchnorm(model: nn.Module, replica: Replica, remedy: str) -> None:
    """Warn of layers that normalise over a replica's rows, not over the batch."""
    layer = next((part for part in model.modules() if isinstance(part, BatchNorm)), None)
    if layer is not None and layer.training and replica.is_chief:
        tell_of_batchnorm(layer, remedy)


def tell_of_batchnorm(layer: nn.Module, remedy: str) -> None:
    log.warning(
        "the model has %s layers, and each replica normalises over its own rows, so weights are "
        "not quite those of one device; %s.",
        type(layer).__name__,
        remedy,
    )


def warn_of_hooks(model: nn.Module, replica: Replica, ours: Callable[[Tensor], int]) -> bool:
    """Warn of a user's hook on a parameter's gradient; return whether there is one. `ours` counts
    the library's own hooks on a parameter."""
    for name, p in model.named_parameters():
        own = len(p._post_accumulate_grad_hooks or ()) > ours(p)
        if p.requires_grad and (own or p._backward_hooks):
            if replica.is_chief:
                log.warning(
                    "parameter %r has a hook, which gets the gradient of a replica's rows and not "
                    "that of the batch; a mask or a factor comes out as on one device, clipping "
                    "does not. Change p.grad behind backward(), or in "
                    "optimizer.register_step_pre_hook: there it is that of the batch.",
                    name,
                )
            return True
    return False


def was_read(replica: Replica, mine: int, total: int, uncombined: int) -> None:
    """Note that a loader without a model was read to its end, and nothing was trained. A loop that
    combines something for each batch, and leaves none `uncombined`, has added up as it went."""
    if replica.count > 1 and uncombined > 0 and "unsummed" not in replica.loop.warned:
        replica.loop.unsummed = mine, total, replica.loop.combined, *_fetches_and_passes(replica)


def _fetches_and_passes(replica: Replica) -> tuple[int, int]:
    batches, reader = replica.loop.batches, replica.loop.reader
    return 0 if batches is None else batches.fetches, 0 if reader is None else reader.passes


def warn_unsummed(replica: Replica) -> None:
    """Warn of counts over a loader that were not summed over replicas."""
    loop, found = replica.loop, replica.loop.unsummed
    loop.unsummed = None
    if found is None or "unsummed" in loop.warned or loop.combined > found[2]:
        return
    fetches, passes = _fetches_and_passes(replica)
    if fetches == found[3] and passes > found[4]:
        return  # list(loader): it was trained on afterwards
    loop.warned.add("unsummed")
    if replica.is_chief:
        log.warning(
            "a loader of %d rows was read in shares (%d rows here), and nothing has been combined "
            "since, so what was counted over it is this replica's part only. Add it up: "
            'strategy.reduce("sum", right), before it is divided by the number of rows.',
            found[1],
            found[0],
        )


def explain(error: BaseException) -> None:
    """Add a note to an error that a share of one row may have caused."""
    share = current_replica().share
    if share.announced:
        _explain_share(error, share.examples, share.total)


@contextmanager
def explaining(examples: int, total: int) -> Iterator[None]:
    """Around user code that is given `examples` of a batch's rows: `explain` what it raises."""
    try:
        yield
    except Exception as error:
        _explain_share(error, examples, total)
        raise


def _explain_share(error: BaseException, examples: int, total: int) -> None:
    replica = current_replica()
    if isinstance(error, StratagemError) or not isinstance(error, Exception):
        return
    if replica.count > 1 and examples <= 1 < total:
        note = (
            f"{replica.name} has {examples} of this batch's {total} rows here"
            f"{' and stands in with another one' if not examples else ''}. Code that means "
            "several rows may fail with one: .squeeze() drops the axis of the rows, too (use "
            ".squeeze(1)); a standard deviation needs two, and so does BatchNorm without "
            "sync_batchnorm=True. A larger batch_size or drop_last=True keeps shares larger."
        )
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
