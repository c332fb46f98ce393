"""Rows of pipelines: each takes a share of every batch, and gradients are added up over the rows.

             stage 0    stage 1
    row 0  [ replica 0, replica 1 ]   a pipeline with one set of parameters
    row 1  [ replica 2, replica 3 ]   another
              column     column       add gradients up when their backward is done

A column waits for its own stages only, so the last stage's gradients are added up while the first
ones are still in their backward. All rows make the same update of the same sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stratagem.data.shares import share
from stratagem.errors import NotDistributable
from stratagem.state.parted_model import open_ties
from stratagem.training.layer_graph import LayerGraph
from stratagem.training.replica import Replica
from stratagem.training.stage import Stage, StageChannels, cut, tensors_of
from stratagem.wire.collective import Collective
from stratagem.wire.shared_memory import sharing
from stratagem.wire.shared_scratch import SharedScratch
from stratagem.wire.subgroup import subgroup


class MeshGrid:
    """The place of one replica in the rows; a plain pipeline is one row. Made collectively."""

    def __init__(self, replica: Replica, count: int) -> None:
        self.everybody, self.count = replica.collective, count
        stages = replica.count // count
        self.row, stage = divmod(replica.index, stages)
        replica.stage = stage
        #: this replica among the stages of its row
        self.place = replica
        self._column: Collective | None = None
        self._scratch: SharedScratch | None = None
        if self.has_rows:
            grid = [[row * stages + s for s in range(stages)] for row in range(count)]
            row = subgroup(self.everybody, grid)
            self._column = subgroup(self.everybody, list(zip(*grid, strict=True)))
            if self._column.shares_memory:
                self._scratch = SharedScratch(sharing(self._column))
            device, name = replica.device, replica.name
            self.place = Replica(stage, stages, device, name, row, replica.membership)
            self.place.stage = stage

    @property
    def has_rows(self) -> bool:
        """Whether there is more than one row, so that replicas have shares of a batch."""
        return self.count > 1

    def share(self, total: int) -> tuple[int, int]:
        """First and one-past-last example of the share of a batch that this row takes."""
        return share(total, self.count, self.row)

    def ranks(self, stage: int) -> list[int]:
        """The replicas that have this stage, one in each row."""
        return [row * self.place.count + stage for row in range(self.count)]

    def own(self, gathered: Sequence[Any]) -> Sequence[Any]:
        """The part of a gathered list that is from the stages of this row."""
        first = self.row * self.place.count
        return gathered[first : first + self.place.count]

    def add_up(self, params: Iterable[Tensor]) -> None:
        """All-reduce gradients over the rows."""
        if self._column is None:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for param in params:
            if param.requires_grad:
                by_type.setdefault(param.dtype, []).append(param)
        for group in by_type.values():
            self._add_up(self._column, group)

    def _add_up(self, column: Collective, params: list[Tensor]) -> None:
        """Gradients of one type; a parameter without gradient on all rows keeps none."""
        grads = [p.grad for p in params]
        has = [float(grad is not None) for grad in grads]
        flat = [
            torch.zeros_like(p) if grad is None else grad
            for p, grad in zip(params, grads, strict=True)
        ]
        sizes = [p.numel() for p in params]
        summed = torch.cat([*(grad.reshape(-1) for grad in flat), flat[0].new_tensor(has)])
        if self._scratch is not None:
            summed = self._scratch.sum(summed)
        else:
            column.all_reduce(summed).wait()
        *sums, counts = torch.split(summed, [*sizes, len(params)])
        for param, total, count in zip(params, sums, counts.tolist(), strict=True):
            param.grad = total.view(param.shape) if count else None


# --- gradients of parameters that several devices use ---------------------------------------------
#
# The first device that uses a parameter owns it.


def devices_of(users: Sequence[Iterable[Tensor]]) -> dict[Tensor, list[int]]:
    """By tensor, the devices that use it; `users` has the tensors of each device."""
    used: dict[Tensor, list[int]] = {}
    for device, tensors in enumerate(users):
        for tensor in tensors:
            used.setdefault(tensor, []).append(device)
    return used


class OpenStage:
    """The stage of one device, and the parameters that it owns. Made collectively."""

    def __init__(
        self,
        stage: Any,
        users: Sequence[set[Tensor]],
        last: int,
        place: Replica,
        params: Sequence[Tensor],
    ) -> None:
        """`users`: the tensors that each device uses; `last`: the device that has the output."""
        self.stage, self.last, self.is_last = stage, last, last == place.index
        #: by tensor, the devices that use it
        self.used = devices_of(users)
        owners = {p: self.used.get(p, [0])[0] for p in params}
        self.owned = {p for p in params if owners[p] == place.index}
        self.ties = TiedGradients(place.collective, params, self.used)


def open_stages(
    graph: LayerGraph,
    firsts: Sequence[int],
    place: Replica,
    params: Sequence[Tensor],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    in_loss: Iterable[Tensor] = (),
) -> OpenStage:
    """Cut a model before the layers `firsts`, and connect the devices. `in_loss`: parameters of the
    loss, which the last device uses. Collective."""
    parts, count = cut(graph, firsts), place.count
    last = (len(parts) - 1) % count
    users: list[set[Tensor]] = [set() for _ in range(count)]
    for part in parts:
        users[part.index % count] |= tensors_of(graph, part)
    users[last] |= set(in_loss)
    channels = StageChannels(parts, count, place.collective)
    stage = Stage(graph, parts, place.index, channels, autocast, place.device)
    return OpenStage(stage, users, last, place, params)


class TiedGradients:
    """Channels for gradients of shared parameters, from users to owners. Made collectively."""

    def __init__(
        self,
        collective: Collective,
        params: Sequence[Tensor],
        used: dict[Tensor, list[int]],
    ) -> None:
        self._rank = collective.rank
        known = {p: used[p] for p in params if p in used}
        self._ties = open_ties(known, collective, to_owner=True)

    def send(self) -> None:
        """Send gradients to the owners, which add them up."""
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
