"""Logits or probabilities: decided by the global batch, of which a replica sees a share.

torchmetrics' classification metrics take values for probabilities where all of an update are
within 0 and 1, and for logits where one is not. A share of a few logits may be within by chance,
while the batch that one device would see is not. So a share that is outside is counted at once
(the batch is outside, too), and one that is within waits until the replicas have told each other
whose shares were outside: after so many batches, and before a value is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torchmetrics
from torch import Tensor
from torchmetrics.classification import (
    MulticlassConfusionMatrix,
    MulticlassExactMatch,
    MulticlassStatScores,
)
from torchmetrics.utilities.compute import normalize_logits_if_needed as by_torchmetrics

from stratagem.strategies.replica import Replica
from stratagem.wire.tree import gather_tree

#: batches after which replicas tell each other: what waits is kept in memory
_PATIENCE = 16
_ASKS = by_torchmetrics.__name__
#: the modules that ask; each has the function under its name
_ASKERS = [
    module for name, module in list(sys.modules.items())
    if name.startswith("torchmetrics.functional.") and hasattr(module, _ASKS)
]  # fmt: skip

#: they look for the largest value of a row, whatever it is
_BY_RANK = (MulticlassConfusionMatrix, MulticlassExactMatch, MulticlassStatScores)

#: of values and "sigmoid" or "softmax": the values as probabilities
Answer = Callable[[Tensor, Any], Tensor]


class _Doubt(Exception):
    """Raised where a metric asks, so that it counts nothing yet."""


class _Share(NamedTuple):
    """What a metric is yet to be given."""

    batch: int
    key: str
    part: torchmetrics.Metric
    args: tuple[Any, ...]
    options: dict[str, Any]


class Doubts:
    """Shares of one model's metrics that wait for a decision."""

    def __init__(self) -> None:
        #: the number of this batch, of those since the replicas last told each other
        self._batch = 0
        self._held: list[_Share] = []
        #: by metric, the batches that are known to be logits
        self._outside: dict[str, list[int]] = {}
        #: those that may ask, once there is a share to ask about
        self._parts: dict[str, torchmetrics.Metric] | None = None
        #: whether it has turned out that no metric asks
        self._idle = False

    def next_batch(self, replica: Replica) -> None:
        """The same batches on every replica, also where its share is empty. Collective."""
        self._batch += 1
        if self._batch == _PATIENCE:
            self.settle(replica)

    @contextmanager
    def watching(self, metrics: Mapping[str, torchmetrics.Metric]) -> Iterator[None]:
        """While the metrics are given a share that is not the whole batch."""
        if self._parts is None:
            self._parts = dict(_asking(metrics))
        parts = self._parts
        plain = {key: part.update for key, part in parts.items()}
        try:
            for key, part in parts.items():
                vars(part)["update"] = partial(self._take, key, part, plain[key])
            yield
        finally:
            for key, part in parts.items():
                vars(part)["update"] = plain[key]

    def _take(
        self, key: str, part: torchmetrics.Metric, update: Callable[..., Any], *args: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        def look(tensor: Tensor, normalization: Any) -> Tensor:
            if not normalization:
                return tensor
            if not _is_outside(tensor):
                raise _Doubt
            self._outside.setdefault(key, []).append(self._batch)
            return by_torchmetrics(tensor, normalization)

        count = part._update_count
        try:
            with _answering(look):
                update(*args, **options)
        except _Doubt:  # asked before anything was counted: they all bring values into form first
            part._update_count = count
            self._held.append(_Share(self._batch, key, part, args, options))

    def settle(self, replica: Replica) -> None:
        """Count what waits, now that it is known what the batches were. Collective."""
        if self._idle:
            return
        asks = None if self._parts is None else bool(self._parts)
        everybody = gather_tree(replica.collective, [asks, self._outside])
        known = [asks for asks, _ in everybody if asks is not None]
        self._idle = bool(known) and not any(known)
        held = self._held
        self.forget()
        for share in held:
            logits = any(share.batch in outside.get(share.key, ()) for _, outside in everybody)
            with _answering(_normalized if logits else _as_it_is):
                share.part.update(*share.args, **share.options)

    def forget(self) -> None:
        """As if there had been no batch."""
        self._batch, self._held, self._outside = 0, [], {}


def _asking(metrics: Mapping[str, torchmetrics.Metric]) -> Iterator[tuple[str, Any]]:
    """Those of torchmetrics' own that may ask, each once."""
    seen: set[int] = set()
    for name, metric in metrics.items():
        for path, part in metric.named_modules():
            own = type(part).__module__.startswith("torchmetrics.classification.")
            if own and not isinstance(part, _BY_RANK) and id(part) not in seen:
                seen.add(id(part))
                yield f"{name}.{path}", part


def may_ask(metrics: Mapping[str, torchmetrics.Metric]) -> bool:
    """Whether one of them is of the kind."""
    return any(True for _ in _asking(metrics))


def _is_outside(values: Tensor) -> bool:
    """As torchmetrics looks: what is no number is outside on the CPU, and within elsewhere."""
    if values.device.type == "cpu":
        return not bool(((values >= 0) & (values <= 1)).all())
    return bool(((values < 0) | (values > 1)).any())


def _normalized(tensor: Tensor, normalization: Any) -> Tensor:
    if not normalization:
        return tensor
    return tensor.sigmoid() if normalization == "sigmoid" else tensor.softmax(dim=1)


def _as_it_is(tensor: Tensor, normalization: Any) -> Tensor:
    return tensor


@contextmanager
def _answering(answer: Answer) -> Iterator[None]:
    """While torchmetrics' question is answered here."""
    try:
        for module in _ASKERS:
            setattr(module, _ASKS, answer)
        yield
    finally:
        for module in _ASKERS:
            setattr(module, _ASKS, by_torchmetrics)
