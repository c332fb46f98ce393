"""Keras' loop over batches without work that has no effect, in a `fit` of a single replica.

    callbacks    are not called for a batch if none of them has a method for batches; nobody reads
                 the logs of a step then, so captured steps may run several at once
    batches      of arrays are sliced several at once, in the order in which Keras draws them

Four methods of Keras are patched, once a process. In an epoch they are called in this order:

    CallbackList.on_epoch_begin             the next loader that is asked for is the epoch's own
    ArrayDataAdapter.get_torch_dataloader   returns that loader as `SlicedBatches`
    CallbackList.on_train_batch_begin       decides whether this batch is idle: its logs are unread
    (the step asks `logs_are_unread`, then for `following` batches)
    CallbackList.on_train_batch_end         skips the callbacks of an idle batch

Outside of a `quiet_loop` each of them is Keras' own.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import keras
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from stratagem.compat.keras_names import array_adapter
from stratagem.data.streams import RngStates, generator_states, set_beside_torch
from stratagem.frontends.keras.callback_needs import overrides

#: batches that are sliced at once, and bytes of them
_AT_ONCE, _BYTES = 32, 1 << 22
_BATCH_METHODS = tuple(
    f"on_{kind}batch_{when}" for kind in ("train_", "") for when in ("begin", "end")
)


class _Here(threading.local):
    """The state of the quiet loop of one thread."""

    #: the model that is trained, and whether its batches may be sliced ahead
    model: Any = None
    slices = False
    #: from the begin of an epoch until its loader is made: the number of batches in it
    steps: int | None = None
    #: in an idle batch, until the step has asked: the model
    unread: Any = None
    #: the batches of the last slice
    cut: Sequence[Any] = ()


_here = _Here()


@contextmanager
def quiet_loop(model: Any, *, slices: bool = False) -> Iterator[None]:
    """Patch Keras' loop during a fit of this model; None: during another call.

    `slices`: no code but Keras' own sees the data between two steps."""
    _install()
    before = _here.model, _here.slices
    _here.model, _here.slices = model, slices
    _here.steps, _here.unread, _here.cut = None, None, ()
    try:
        yield
    finally:
        _here.model, _here.slices = before
        _here.steps, _here.unread, _here.cut = None, None, ()


def logs_are_unread(model: Any) -> bool:
    """Whether no callback reads the logs of the step of this model that runs; asked once a step."""
    unread, _here.unread = _here.unread, None
    return model is not None and unread is model


def following(batch: Any) -> Sequence[Any]:
    """The batches after this one in its slice; nothing runs between their steps."""
    cut = _here.cut
    return next((cut[i + 1 :] for i, each in enumerate(cut) if each is batch), ())


def _install() -> None:
    """Patch Keras' four methods, once a process."""
    kind, adapter = keras.callbacks.CallbackList, array_adapter()
    begin, end = kind.on_train_batch_begin, kind.on_train_batch_end
    epoch_begin, loader = kind.on_epoch_begin, adapter.get_torch_dataloader
    if hasattr(begin, "plain"):
        return

    def on_epoch_begin(self: Any, epoch: int, logs: Any = None) -> None:
        epoch_begin(self, epoch, logs)
        ours = _here.slices and _is_here(self)
        _here.steps = self.params.get("steps") if ours else None

    def on_train_batch_begin(self: Any, batch: int, logs: Any = None) -> None:
        # kept in the list, not in `_here`: a step may run another loop before the batch ends
        idle = self._stratagem_idle = _is_here(self) and _is_idle(self)
        _here.steps, _here.unread = None, self.model if idle else None
        if not idle:
            begin(self, batch, logs)

    def on_train_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        _here.unread = None
        if not getattr(self, "_stratagem_idle", False):
            end(self, batch, logs)

    def get_torch_dataloader(self: Any) -> Any:
        found, steps, _here.steps = loader(self), _here.steps, None
        # with other steps than batches one slice may be for two epochs
        return SlicedBatches(found) if len(found) == steps and _in_order(found) else found

    on_train_batch_begin.plain = begin  # type: ignore[attr-defined]
    kind.on_train_batch_begin, kind.on_train_batch_end = on_train_batch_begin, on_train_batch_end
    kind.on_epoch_begin, adapter.get_torch_dataloader = on_epoch_begin, get_torch_dataloader


def _is_here(callbacks: Any) -> bool:
    return _here.model is not None and callbacks.model is _here.model


def _is_idle(callbacks: Any) -> bool:
    plain = type(callbacks) is keras.callbacks.CallbackList
    return plain and not any(overrides(each, *_BATCH_METHODS) for each in callbacks.callbacks)


def _in_order(loader: Any) -> bool:
    """Whether a loader draws its whole order with the first batch: then slicing ahead draws no
    random number too early."""
    batches = loader.batch_sampler
    if type(batches) is BatchSampler:
        return type(batches.sampler) in (RandomSampler, SequentialSampler, range)
    return _draws_apart(type(batches).__iter__.__code__, batches)


#: by the code of a sampler's `__iter__`: whether it leaves the global generators alone
_apart: dict[Any, bool] = {}


def _draws_apart(code: Any, sampler: Any) -> bool:
    """Try once, on a copy, whether a sampler that we do not know draws from no global generator
    after its first batch."""
    if code not in _apart:
        before = generator_states()
        try:
            batches = iter(copy.deepcopy(sampler))
            next(batches, None)
            first = RngStates.of_caller()
            for _ in batches:
                pass
            _apart[code] = first == RngStates.of_caller()
        except (TypeError, RuntimeError):  # it cannot be copied
            _apart[code] = False
        finally:
            torch.set_rng_state(before["torch"])
            set_beside_torch(before)
    return _apart[code]


class SlicedBatches:
    """The batches of a DataLoader over arrays, several of them views of one slice."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        iter(self._loader)  # draws the seed of loader workers, as Keras' loop would
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        order, rows_of = iter(self._loader.batch_sampler), self._loader.dataset.__getitems__
        at_once = 0
        for first in order:
            several = [first, *islice(order, at_once and at_once - 1)]
            found = rows_of([row for batch in several for row in batch])
            at_once = at_once or max(1, min(_AT_ONCE, _BYTES // max(1, _size(found))))
            _here.cut = [found] if len(several) == 1 else _cut(found, len(first))
            yield from _here.cut


def _size(batch: Any) -> int:
    """The bytes of a batch; `_BYTES` if it is not made of tensors in tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        return batch.nbytes
    if type(batch) not in (tuple, list, dict):
        return _BYTES
    return sum(map(_size, batch.values() if isinstance(batch, dict) else batch))


def _cut(batches: Any, rows: int) -> Sequence[Any]:
    """Cut a slice into batches of so many rows; the last one may have fewer."""
    if isinstance(batches, Tensor):
        return torch.split(batches, rows)
    if isinstance(batches, dict):
        cut = zip(*(_cut(part, rows) for part in batches.values()), strict=True)
        return [dict(zip(batches, each, strict=True)) for each in cut]
    return [type(batches)(e) for e in zip(*(_cut(p, rows) for p in batches), strict=True)]
