"""Whole shards, as a worker opens, reads and replaces them.

A worker's `Client` is made of three classes, each of which sets the attributes that it declares:

    ServerState    requests about whole shards (this file)
    Transfers      values and gradients of a step, and the threads that carry them
    Client         the fit and its steps

It reaches the servers through `lines` (connections.py) and its parameters through `memory`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stratagem.servers.connections import Connections, Line, LineLost
from stratagem.servers.shard import OF_WORKER
from stratagem.servers.training_plan import TrainingPlan
from stratagem.servers.worker_memory import WorkerMemory
from stratagem.state.partition import cut_values
from stratagem.wire.tree import decode, encode

_NOTHING = object()


class ServerState:
    """The part of a client that deals with whole shards."""

    #: the worker's parameters and gradients in the present fit
    memory: WorkerMemory

    def __init__(self, index: int, lines: Connections) -> None:
        self.index, self.lines = index, lines
        #: of the present fit
        self.plan: TrainingPlan | None = None
        #: how many fits this process has taken part in
        self.fits = 0
        #: the assignment that came with the answer to a push, and when its values came
        self._ahead: Any = None
        self._came = 0.0
        #: which servers hold the shards, as the coordinator counts
        self._generation = 0
        self._snapshots = 0

    def ask(self, request: str, tree: Any = _NOTHING, /, **told: Any) -> tuple[dict[str, Any], Any]:
        """Send the coordinator a request, with a tree if there is one.

        Return the answer, and the tree that came with it.
        """
        body = () if tree is _NOTHING else [encode(tree)]
        frame = self.lines.call(0, {"t": request, **told}, body)
        return frame.header, self.lines.tree(frame, 0)

    def open(
        self,
        fit: int,
        plan: TrainingPlan,
        params: Sequence[Tensor],
        states: Sequence[Any] | None,
        beside: Any = None,
    ) -> None:
        """As the chief: begin a fit with these values, and the optimizer's state by server.

        `beside` is sent to the other workers: among others the tensors that are not trained.
        """
        self.lines.call(0, {"t": "clear"})
        self.plan = plan
        if plan.backups:
            self.lines.call(0, {"t": "hold", "backups": plan.backups})
            self.renew()
        self._everywhere(lambda: self._open(fit, plan, params, states))
        self.lines.call(0, {"t": "begin", "fit": fit}, [encode(beside)])

    def _open(
        self,
        fit: int,
        plan: TrainingPlan,
        params: Sequence[Tensor],
        states: Sequence[Any] | None,
    ) -> None:
        flat = torch.cat([p.detach().reshape(-1).cpu() for p in params])
        for i, extents in enumerate(plan.layout.extents):
            body = [torch.cat([flat[:0], *(flat[e.lo : e.hi] for e in extents)])]
            header: dict[str, Any] = {"t": "open", "fit": fit, "plan": plan.to_json()}
            if states is not None:
                tree = encode(states[i])
                body.append(tree)
                header["states"] = tree.numel()
            self.lines.call_all(i, header, body)

    def put_back(self) -> None:
        """Give the next ticket back to the coordinator."""
        if self._ahead is not None:
            work, self._ahead = self._ahead, None
            self.ask("abandon", serial=work.ticket.serial)

    def assign(self, params: Sequence[Tensor], only: Sequence[int] | None = None) -> None:
        """Write values to the servers; `only` these variables, else all.

        Values that were not changed here may be newer on the servers.
        """
        self.put_back()  # it came with older values
        self._everywhere(lambda: self._assign(params, only), self.fits - 1)

    def assign_states(self, states: Sequence[Any]) -> None:
        """Replace the states of the servers' optimizers."""

        def send() -> None:
            for i, state in enumerate(states):
                self.lines.call_all(i, {"t": "assign states"}, [encode(state)])

        self._everywhere(send, self.fits - 1)

    def _assign(self, params: Sequence[Tensor], only: Sequence[int] | None) -> None:
        assert self.plan is not None
        chosen = set(range(len(params)) if only is None else only)
        for i, extents in enumerate(self.plan.layout.extents):
            pieces = [n for n, e in enumerate(extents) if e.piece.variable in chosen]
            if not pieces:
                continue
            wanted = [extents[n].piece for n in pieces]
            body = [cut_values(params, wanted).to(self.plan.dtype).cpu()]
            self.lines.call_all(i, {"t": "assign", "pieces": pieces}, body)

    def snapshot(self) -> tuple[int, list[Tensor], list[Any]]:
        """Read one version: its number, values, and optimizer states by server."""
        self._snapshots += 1
        number = self._snapshots * (OF_WORKER + 1) + self.index  # unique among workers
        after = int(self.lines.call(0, {"t": "snapshot", "number": number}).header["after"])
        values, states, version = [], [], 0
        assert self.plan is not None
        for i in range(len(self.lines)):
            version, flat, state = self._fetch_snapshot(i, number, after)
            values.append(flat)
            states.append(state)
        self._came = -math.inf  # values that came with a push may be older
        return version, values, states

    def _fetch_snapshot(self, i: int, number: int, after: int) -> tuple[int, Tensor, Any]:
        assert self.plan is not None
        flat = torch.empty(self.plan.layout.loads[i], dtype=self.plan.dtype)
        while True:
            frame = self.lines.call(i, {"t": "snapshot taken", "number": number, "after": after})
            tree = frame.room(int(frame.header["states"]))
            try:
                self.lines.read_into(i, [flat, tree])
            except LineLost:
                continue
            return int(frame.header["version"]), flat, decode(tree)

    # --- which servers hold what ------------------------------------------------------------

    def renew(self, fit: int | None = None) -> list[tuple[int, Line]]:
        """Ask the coordinator which servers hold which shard; take a slot at new holders."""
        lost = self.lines.take_lost()
        told = self.ask("holders", generation=self._generation, lost=lost)[0]
        self._generation = int(told["generation"])
        new = self.lines.renew(told["table"], told["since"], self._generation)
        if fit is not None:
            for i, line in new:
                header = {"t": "attach", "fit": fit, "memory": self.memory.handle}
                for each in self.lines.write_to(i, [line], header):
                    self.lines.finish(*each)
        return new

    def _everywhere(self, send: Callable[[], None], fit: int | None = None) -> None:
        """Call `send`, and call it again if a server has come back meanwhile."""
        send()
        assert self.plan is not None
        while self.plan.backups:
            before = self._generation
            self.renew(fit)
            if self._generation == before:
                return
            send()
