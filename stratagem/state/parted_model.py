"""A model of which every process has only its own layers, without shared memory.

    at home     all processes have all parameters and buffers, the first one all optimizer state:
                before training, at the end of an epoch, whenever the model is to be read
    else        each has the tensors that its layers use and the state of those it owns

A tensor that several processes use is updated by its owner, which sends it to the other ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from stratagem.errors import NotDistributable
from stratagem.state.optimizer_state import params_of, take_state
from stratagem.wire.collective import Collective
from stratagem.wire.tree import broadcast_tree
from stratagem.wire.tree_channel import TreeChannel, open_channels

log = logging.getLogger("stratagem")


class PartedTensors:
    """Parameters, buffers and the like, at first the same everywhere. Made collectively."""

    def __init__(self, given: Iterable[Tensor], collective: Collective) -> None:
        self._collective = collective
        self._tensors = list(dict.fromkeys(given))
        self._shapes = [t.shape for t in self._tensors]
        self._users: list[Sequence[int]] = [range(collective.size)] * len(self._tensors)
        self._ties: list[tuple[TreeChannel, list[Tensor]]] = []
        self.at_home = True

    def own(self, used: dict[Tensor, list[int]]) -> None:
        """Set which processes use each tensor, its owner first. At home. Collective."""
        everybody = range(self._collective.size)
        self._users = [used.get(t, everybody) for t in self._tensors]
        known = {t: used[t] for t in self._tensors if t in used}
        self._ties = open_ties(known, self._collective, to_owner=False)
        self._mark()

    def _mark(self) -> None:
        self._versions = [[t._version for t in tied] for _, tied in self._ties]

    @torch.no_grad()
    def updated(self) -> None:
        """After an update: send tensors from their owners to the other processes that use them."""
        rank, ties = self._collective.rank, list(zip(self._ties, self._versions, strict=True))
        for (channel, tied), before in ties:
            if channel.sender == rank:
                pairs = zip(tied, before, strict=True)
                kept = [not t.requires_grad and t._version == version for t, version in pairs]
                both = zip(tied, kept, strict=True)
                channel.post([None if same else t.detach() for t, same in both])
        for (channel, tied), before in ties:
            if channel.receiver == rank:
                for tensor, version, value in zip(tied, before, channel.take(), strict=True):
                    _refuse_two_writers(tensor, version)
                    if value is not None:
                        tensor.copy_(value)
                channel.release()
        self._mark()

    def leave_home(self) -> bool:
        """Free the tensors that no layer here uses; return whether they were here."""
        left, self.at_home = self.at_home, False
        if left:
            for tensor, users in zip(self._tensors, self._users, strict=True):
                if self._collective.rank not in users:
                    tensor.data = tensor.data.new_empty(0)
        return left

    @torch.no_grad()
    def bring_home(self) -> bool:
        """Give all processes all tensors; return False if they had them. Collective."""
        if self.at_home:
            return False
        rank, self.at_home = self._collective.rank, True
        for owner in range(self._collective.size):
            theirs = [
                t for t, users in zip(self._tensors, self._users, strict=True) if users[0] == owner
            ]
            mine = [t.detach() for t in theirs] if owner == rank else None
            values = broadcast_tree(self._collective, mine, owner)
            if owner != rank:
                for tensor, value in zip(theirs, values, strict=True):
                    if tensor.shape == value.shape:
                        tensor.copy_(value)
                    else:
                        tensor.data = value.to(tensor.device)
        self._mark()
        return True

    def leave(self) -> None:
        """After a failure, without the other processes: their tensors are lost."""
        if self.at_home:
            return
        self.at_home = True
        for tensor, shape, users in zip(self._tensors, self._shapes, self._users, strict=True):
            if self._collective.rank not in users:
                unknown = float("nan") if tensor.is_floating_point() else 0
                tensor.data = tensor.data.new_full(shape, unknown)
        log.error(
            "the training ended while every stage had its own layers only, so those of the other "
            "stages are lost here (their parameters are NaN); go on from a checkpoint: fit(..., "
            "checkpoint=, resume=True), or model.load."
        )


def _refuse_two_writers(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise NotDistributable(
            f"a state of shape {tuple(tensor.shape)} is written by layers of two stages, which "
            "have it each for itself; have these layers on one stage (split=[...])."
        )


def open_ties(
    used: Mapping[Tensor, Sequence[int]], collective: Collective, *, to_owner: bool
) -> list[tuple[TreeChannel, list[Tensor]]]:
    """Open channels between each tensor's owner, which is the first process that uses it, and its
    other users; return this process' channels, each with its tensors. Collective."""
    tied = [(tensor, users) for tensor, users in used.items() if len(users) > 1]
    pairs = sorted({(users[0], user) for _, users in tied for user in users[1:]})
    ways = [pair[::-1] if to_owner else pair for pair in pairs]
    return [
        (channel, [t for t, users in tied if users[0] == owner and user in users])
        for (owner, user), channel in zip(pairs, open_channels(collective, ways, 2), strict=True)
        if collective.rank in (owner, user)
    ]


class PartedModel:
    """A module's tensors and the state of its optimizer. Made collectively."""

    def __init__(
        self, tensors: Iterable[Tensor], optimizer: Optimizer, collective: Collective
    ) -> None:
        self._tensors = PartedTensors(tensors, collective)
        self._optimizer, self._leads = optimizer, collective.rank == 0
        self._params = params_of(optimizer)
        self._owned: set[Tensor] = set()
        others = [(rank, 0) for rank in range(1, collective.size)]
        channels = open_channels(collective, others, 2)
        self._channels = [c for c in channels if self._leads or c.sender == collective.rank]

    def own(self, owned: set[Tensor], used: dict[Tensor, list[int]]) -> None:
        """Set the parameters stepped here, and the processes that use each tensor, its owner first.
        At home. Collective."""
        self._owned = owned
        self._tensors.own(used)

    def updated(self) -> None:
        """Send updated tensors to the processes that use them. Collective."""
        self._tensors.updated()

    def leave_home(self) -> None:
        """Free the tensors and states that this process does not use."""
        if self._tensors.leave_home():
            for param in self._params:
                if param not in self._owned:
                    self._optimizer.state.pop(param, None)

    def bring_home(self) -> None:
        """Collect the tensors on all processes, optimizer state on the first. Collective."""
        if not self._tensors.bring_home():
            return
        for channel in self._channels:
            if not self._leads:
                channel.post(self._own_state())
                continue
            for index, state in channel.take():
                take_state(self._optimizer, self._params[index], state)
            channel.release()

    def _own_state(self) -> list[Any]:
        state = self._optimizer.state
        return [
            (i, dict(state[p]))
            for i, p in enumerate(self._params)
            if p in self._owned and p in state
        ]

    def take_back(self) -> None:
        """Do nothing: weights changed at home are already in place."""

    def close(self) -> None:
        """Collect everything. Collective."""
        self.bring_home()

    def leave(self) -> None:
        """Close after a failure, without the other processes."""
        self._tensors.leave()
