"""The outer optimizer of replicas that synchronise only every few updates, or mix weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from stratagem.codecs.layout import Layout, layout
from stratagem.codecs.reducer import Reducer
from stratagem.rules.cadence import Gossip
from stratagem.wire.collective import Collective, Pending

_HALF = (torch.float16, torch.bfloat16)


class OuterPart:
    """Parameters of one type: as they were when replicas met, and the outer momentum.

    The mean over replicas of old - new, D, is a gradient:  b = mu b + D;  x = old - lr (D + mu b).
    With lr 1 and mu 0 that is the mean of the parameters. Training may go on while D is reduced:
    then parameters keep a share of their new values, and the next D still counts from x.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        reducer: Reducer,
        lr: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        self.params = [p for _, p in named]
        self._lr, self._mu, self._reducer = lr, momentum, reducer
        first = self.params[0]
        dtype = torch.float32 if first.dtype in _HALF else first.dtype
        self.layout: Layout = layout([name for name, _ in named], self.params)
        #: the buffer that is reduced
        self.flat = reducer.buffer(sum(p.numel() for p in self.params), dtype, first.device)
        reducer.lay_out(self.flat, self.layout)
        self._old = torch.zeros_like(self.flat)
        self.momentum = torch.zeros_like(self.flat) if momentum else None

    def begin(self) -> None:
        """Remember the parameters, which are the same on all replicas now."""
        self._read(self._old)

    def send(self, weight: float) -> Pending:
        """Begin to average D over replicas. Collective."""
        self._read(self.flat)
        torch.sub(self._old, self.flat, out=self.flat)
        return self._reducer.reduce(self.flat, weight)

    def step(self, mix: float) -> None:
        """Take the outer step with the reduced D; parameters keep the share `mix` of their present
        values, and are the same on all replicas if that is 0."""
        if self.momentum is not None:
            self.momentum.mul_(self._mu).add_(self.flat)
            self.flat.add_(self.momentum, alpha=self._mu)
        self._old.sub_(self.flat, alpha=self._lr)
        if mix:
            self.write(self.read().mul_(mix).add_(self._old, alpha=1.0 - mix))
            return
        self.write(self._old)
        self.begin()  # rounded as the parameters are

    def read(self) -> Tensor:
        """Return this replica's parameters as one flat tensor."""
        self._read(self.flat)
        return self.flat

    def _read(self, into: Tensor) -> None:
        for piece, param in zip(torch.split(into, self.layout.counts), self.params, strict=True):
            piece.copy_(param.detach().reshape(-1))

    def write(self, flat: Tensor) -> None:
        for piece, param in zip(torch.split(flat, self.layout.counts), self.params, strict=True):
            param.detach().copy_(piece.view(param.shape))

    def old(self) -> dict[str, Tensor]:
        """Copy the parameters as they were when replicas met."""
        return self.layout.split(self._old)

    def now(self) -> dict[str, Tensor]:
        """Copy this replica's present parameters."""
        both = zip(self.layout.names, self.params, strict=True)
        return {name: p.detach().cpu().clone() for name, p in both}

    def take(self, named: Mapping[str, Tensor]) -> None:
        """Write values to the parameters."""
        self.layout.join(dict(named), self.flat)
        self.write(self.flat)

    def saved(self) -> dict[str, Tensor]:
        return {} if self.momentum is None else self.layout.split(self.momentum)

    def restore(self, momenta: Mapping[str, Tensor]) -> None:
        if self.momentum is not None:
            self.layout.join(dict(momenta), self.momentum)


class OuterFragment:
    """A part of the model that is synchronised at once; parameters may have several types."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        reducer: Reducer,
        lr: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        self.reducer = reducer
        self._under_way: list[Pending] = []
        kinds = dict.fromkeys(p.dtype for _, p in named)
        self.parts = [
            OuterPart([(n, p) for n, p in named if p.dtype is kind], reducer, lr, momentum)
            for kind in kinds
        ]

    @property
    def names(self) -> list[str]:
        return [name for part in self.parts for name in part.layout.names]

    def begin(self) -> None:
        for part in self.parts:
            part.begin()

    def send(self, weight: float) -> None:
        """Begin a meeting; training may go on until it ends. Collective."""
        self._under_way = [part.send(weight) for part in self.parts]

    def end(self, mix: float = 0.0) -> None:
        """Wait for the reduction, and take the outer step."""
        for pending in self._under_way:
            pending.wait()
        self.reducer.end_step()
        for part in self.parts:
            part.step(mix)


def fragmented(
    named: Sequence[tuple[str, nn.Parameter]], parts: int
) -> list[list[tuple[str, nn.Parameter]]]:
    """Split parameters into runs of nearly the same size, none of them empty if possible."""
    total, at = sum(p.numel() for _, p in named), 0
    found: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(parts)]
    for left, (name, param) in zip(range(len(named), 0, -1), named, strict=True):
        middle = (at + param.numel() / 2) / max(total, 1)
        latest = next((i for i in reversed(range(parts)) if found[i]), -1)
        place = min(int(middle * parts), parts - 1, latest + 1)
        place = max(place, latest, parts - left)
        found[place].append((name, param))
        at += param.numel()
    return [each for each in found if each]


# --- Mixing weights with the neighbours (`sync=sg.Gossip()`) --------------------------------------


def mix(parts: Sequence[OuterPart], collective: Collective, gossip: Gossip, turn: int) -> None:
    """Mix the weights with the neighbours' weights. Collective."""
    rank, size = collective.rank, collective.size
    weights = gossip.weights(rank, size, turn)
    receivers = gossip.receivers(rank, size, turn)
    senders = [other for other in weights if other != rank]
    for part in parts:
        mixed = part.read()
        received = collective.trade(mixed, receivers, senders)
        mixed.mul_(weights[rank])
        for other, values in zip(senders, received, strict=True):
            mixed.add_(values, alpha=weights[other])
        part.write(mixed)


def take_neighbours(
    parts: Sequence[OuterPart], collective: Collective, here: Sequence[bool]
) -> None:
    """Have each new replica take the weights of the last old one before it. Collective."""
    source = {
        rank: max(other for other in range(rank) if here[other])
        for rank, was_here in enumerate(here)
        if not was_here
    }
    if not source:
        return
    receivers = [rank for rank, other in source.items() if other == collective.rank]
    senders = [source[collective.rank]] if collective.rank in source else []
    for part in parts:
        for values in collective.trade(part.read(), receivers, senders):
            part.write(values)
