"""Gradients of parameters that several devices of a pipeline use, added up where they are owned.

The first device that uses a parameter owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from torch import Tensor

from stratagem.errors import NotDistributable
from stratagem.wire.collective import Collective
from stratagem.wire.tree_channel import TreeChannel, open_channels


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
        collective: Collective,
        params: Sequence[Tensor],
        used: dict[Tensor, list[int]],
    ) -> None:
        self._rank = collective.rank
        tied = [(p, used[p]) for p in params if len(used.get(p, ())) > 1]
        pairs = sorted({(user, users[0]) for _, users in tied for user in users[1:]})
        self._ties: list[tuple[TreeChannel, list[Tensor]]] = []
        for channel in open_channels(collective, pairs, 2):
            user, owner = channel.sender, channel.receiver
            theirs = [p for p, users in tied if users[0] == owner and user in users]
            if self._rank in (user, owner):
                self._ties.append((channel, theirs))

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
                        gradient = gradient.to(param.device, copy=True)
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
