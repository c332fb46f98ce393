"""Gradients of parameters that several devices of a pipeline use, added up where they are owned.

The first device that uses a parameter owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.wire.shared_memory import SharedMemoryCollective
from stratagem.wire.slots import SlotChannel, channel_words


def devices_of(users: Sequence[Iterable[Tensor]]) -> dict[Tensor, list[int]]:
    """By tensor, the devices that use it, of what each device uses."""
    used: dict[Tensor, list[int]] = {}
    for device, tensors in enumerate(users):
        for tensor in tensors:
            used.setdefault(tensor, []).append(device)
    return used


class TiedGradients:
    """Channels from those that use a parameter to its owner. Made collectively."""

    def __init__(
        self,
        collective: SharedMemoryCollective,
        params: Sequence[Tensor],
        used: dict[Tensor, list[int]],
    ) -> None:
        self._rank = collective.rank
        tied = [(p, used[p]) for p in params if len(used.get(p, ())) > 1]
        pairs = sorted({(user, users[0]) for _, users in tied for user in users[1:]})
        size = channel_words(2)
        words = collective.table(max(len(pairs), 1) * size, torch.int64, rows=1).words()[0]
        self._ties: list[tuple[SlotChannel, list[Tensor]]] = []
        for i, (user, owner) in enumerate(pairs):
            theirs = [p for p, users in tied if users[0] == owner and user in users]
            if self._rank in (user, owner):
                block = words[i * size : (i + 1) * size]
                self._ties.append((SlotChannel(collective, block, user, owner, 2), theirs))

    def send(self) -> None:
        """Have every owner add up what the others have."""
        for channel, params in self._ties:
            if channel.sender == self._rank:
                channel.post([p.grad for p in params])
                for param in params:
                    param.grad = None
        for channel, params in self._ties:
            if channel.receiver == self._rank:
                for param, gradient in zip(params, channel.take(), strict=True):
                    if gradient is not None:
                        gradient = gradient.clone()
                        param.grad = gradient if param.grad is None else param.grad + gradient
                channel.release()


def refuse_strays(params: Mapping[str, Tensor], owned: Set[Tensor], who: str) -> None:
    """Refuse a gradient that would be lost, of a parameter that no layer of this device has."""
    for name, param in params.items():
        if param.grad is not None and param not in owned:
            raise NotDistributable(
                f"parameter {name!r} has a gradient on {who}, where no layer has it: some layer "
                "reaches for another's parameters; register them in it, too (self.shared = other), "
                "so that they are known to be shared."
            )
