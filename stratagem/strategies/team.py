"""The replicas of one strategy, seen from one process: who they are, and how to run on them.

A process leads the replicas on its own devices: it is the first of them itself and starts the
others (replicas/). With a cluster in the environment, several such processes meet (cluster/) and
all their replicas form one group.

    process of worker 0          process of worker 1
    ├── replica 0  (itself)      ├── replica 2  (itself)
    └── replica 1  (follower)    └── replica 3  (follower)
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stratagem.cluster.membership import Member, Membership, Trouble
from stratagem.cluster.spec import Place
from stratagem.errors import ReplicaError, ReplicaFailed, ReplicaLost, UsageError
from stratagem.replicas import follower
from stratagem.replicas.dice import Dice
from stratagem.replicas.pool import Pool, ZygoteProcess
from stratagem.strategies.agreement import Offer, Party, Patience, agree
from stratagem.strategies.replica import (
    Replica,
    be,
    be_no_more,
    called_replica,
    current_replica,
    set_called,
    turn,
)
from stratagem.strategies.seat import Seat, sit
from stratagem.strategies.settings import Settings


class _Local(Membership):
    """The members on this process's own devices; also hears who has left the cluster."""

    cluster: Membership

    def raise_if_gone(self) -> None:
        super().raise_if_gone()
        self.cluster.raise_if_gone()

    def await_trouble(self, seconds: float) -> Trouble | None:
        until = time.monotonic() + seconds
        while super().await_trouble(0.05) is None and time.monotonic() < until:
            self.cluster.raise_if_gone()
        return self.trouble


class Team:
    """Starts replicas when they are first needed, runs calls on them, ends them."""

    def __init__(
        self,
        devices: Sequence[str],
        settings: Settings,
        place: Place | None,
        patience: Patience,
        *,
        inside: bool = False,
    ) -> None:
        self.devices = tuple(devices)
        self.place = place
        self.patience = patience
        self._party = Party(self.devices, settings, place, patience)
        self.replica: Replica | None = None
        #: the replica that this process is, where it leads no other; until close, failed or not
        self._self: Replica | None = None
        self._pool: Pool | None = None
        self._cluster: Membership | None = None
        self._local: Membership | None = None
        self._offer = Offer()
        self._threads = 0
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self.size = len(self.devices)
        if len(self.devices) > 1 and not inside:
            ZygoteProcess.get()  # imports torch while the caller builds a model
        if place is not None:
            self.start()

    # --- coming together --------------------------------------------------------------------

    def start(self) -> Replica:
        """Bring every replica up, unless they are up. Collective in a cluster."""
        with self._lock:
            self._refuse_if_forked()
            if self.replica is None:
                try:
                    self.replica = self._start()
                except BaseException as error:
                    if not isinstance(error, ReplicaError):
                        self.report("".join(traceback.format_exception(error)))
                    self.close()
                    raise
                if self.place is not None and len(self.devices) == 1:
                    self._become(self.replica)
            return self.replica

    def _refuse_if_forked(self) -> None:
        """What was started belongs to the process that did so; what was not, to this one."""
        if os.getpid() == self._owner:
            return
        if self._cluster is not None and self.size > 1:
            raise forked("replicas")
        self._owner = os.getpid()

    def _become(self, replica: Replica | None) -> None:
        if self._self is not None:
            be_no_more(self._self)
        if replica is not None:
            be(replica)
        self._self = replica

    def _start(self) -> Replica:
        if self._cluster is None:
            self._cluster = self._party.join()
        self._cluster.raise_if_trouble()
        seat, self._offer = agree(self._party, self._cluster)
        self._threads = seat.threads
        others = range(seat.rank + 1, seat.rank + len(self.devices))
        membership = self._cluster
        if others:
            self._pool = Pool([seat.names[rank] for rank in others])
            membership = self._local = self._open_local(seat)
            give_up = self.patience.answer
            self._pool.submit(
                _sit_down, [(seat.of(rank), membership.members, give_up) for rank in others],
                membership.raise_if_trouble,
            )  # fmt: skip
        replica = sit(seat, membership, self._offer.store)
        replica.barrier()  # nobody may let go of what the others are about to map
        if self._pool is not None:
            self._check(self._pool.collect(membership.raise_if_trouble))
        self.size = seat.size
        return replica

    def _open_local(self, seat: Seat) -> Membership:
        assert self._pool is not None and self._cluster is not None
        members = [Member(seat.names[seat.rank], f"{self.devices[0]}, pid {os.getpid()}")]
        sockets: dict[int, socket.socket] = {}
        for i, one in enumerate(self._pool.followers, 1):
            members.append(Member(one.name, f"{self.devices[i]}, pid {one.pid}"))
            sockets[i] = one.member
        local = _Local(members, 0, sockets, self.patience.answer)
        local.cluster = self._cluster
        if len(self._cluster.members) > 1:
            self._cluster.on_trouble(local.announce)
            local.on_trouble(self._cluster.announce)
        return local

    # --- running ----------------------------------------------------------------------------

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...],
        sent: tuple[Any, ...] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Run `function` on every replica of this process; `sent` is what followers get instead."""
        with self._lock, turn():
            if called_replica() is not None:
                raise UsageError(
                    "this code already runs on every replica; strategy.run and fit cannot be "
                    "nested inside it. Use sg.current_replica() there."
                )
            replica = self.start()
            before = set_called(replica)
            threads = torch.get_num_threads()
            try:
                return self._call(replica, function, args, args if sent is None else sent)
            except BaseException as error:
                better = self._fall(error)
                if better is error:
                    raise
                raise better from better.__cause__ or error
            finally:
                set_called(before)
                torch.set_num_threads(threads)

    def _call(
        self, replica: Replica, function: Callable[..., Any], args: tuple[Any, ...],
        sent: tuple[Any, ...],
    ) -> list[Any]:  # fmt: skip
        watch = replica.membership.raise_if_gone
        if self._pool is not None:
            call = (function, sent, torch.get_default_dtype(), Dice.of_caller())
            self._pool.submit(_run, [call] * len(self._pool.followers), watch)
        if self._threads:
            torch.set_num_threads(self._threads)
        mine = function(*args)
        if self._pool is None:
            return [mine]
        return [mine, *self._check(self._pool.collect(watch))]

    def _check(self, answers: list[follower.Answer]) -> list[Any]:
        assert self._pool is not None
        for one, answer in zip(self._pool.followers, answers, strict=True):
            if isinstance(answer.error, ReplicaError):
                raise answer.error  # it only passes on what happened to another
            if answer.failed:
                raise _failure(one.name, answer) from answer.error
        return [answer.value for answer in answers]

    # --- coming apart -----------------------------------------------------------------------

    def _fall(self, error: BaseException) -> BaseException:
        """End everything after a failure; the next call starts afresh. Returns what to raise."""
        if self._cluster is not None and len(self._cluster.members) > 1:
            if not isinstance(error, ReplicaError):
                self.report("".join(traceback.format_exception(error)))
        else:
            self._cluster = None
        local, pool = self._local, self._pool
        trouble = local.trouble if local is not None else None
        one = None
        if trouble is not None and pool is not None and isinstance(error, ReplicaError):
            one = next((f for f in pool.followers if f.name == trouble.member.name), None)
        answer = one.answer(1.0) if one is not None and isinstance(error, ReplicaFailed) else None
        status = self._end()
        if one is not None and answer is not None:
            error = _failure(one.name, answer)
            error.__cause__ = answer.error
        elif one is not None and isinstance(error, ReplicaLost) and error.who == one.name:
            assert trouble is not None
            error = ReplicaLost(_epitaph(trouble.member, status.get(one.pid)), one.name)
        return error

    def report(self, detail: str) -> None:
        """Tell the other tasks of the cluster why this one ends."""
        if os.getpid() == self._owner and self._cluster is not None:
            self._cluster.report_failure(detail)

    def _end(self) -> dict[int, int | None]:
        status: dict[int, int | None] = {}
        if self._pool is not None:
            status = self._pool.end()
            self._pool = None
        if self.replica is not None:
            self.replica.collective.close()
            self.replica = None
        if self._local is not None:
            self._local.leave()
            self._local = None
        self._offer = Offer()
        return status

    def close(self) -> None:
        """End the replicas that this process started, and leave the cluster."""
        if os.getpid() != self._owner:
            return  # a forked child (a DataLoader's worker) must not touch its parent's replicas
        with self._lock:
            if self._cluster is not None:
                self._cluster.leave()  # first, or the others take our followers' end for a death
                self._cluster = None
            self._end()
            self._become(None)


def _epitaph(member: Member, status: int | None) -> str:
    if status is not None and status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
        hint = (
            "If nobody did that on purpose, the machine ran out of memory (see `dmesg`): use "
            "fewer replicas or a smaller batch."
            if status == -signal.SIGKILL
            else "Its last lines of output stand above."
        )
    else:
        how = "ended" if status is None else f"ended with exit code {status}"
        hint = "Its last lines of output stand above."
    return f"{member} {how} while the others were working. {hint} The strategy can be used again."


def _failure(name: str, answer: follower.Answer) -> ReplicaFailed:
    return ReplicaFailed(
        f"{name} raised an exception; the other replicas were stopped. Its traceback:\n\n"
        f"{answer.text}",
        name,
    )


def _sit_down(seat: Seat, members: tuple[Member, ...], give_up: float) -> None:
    """In a follower: connect to the others and keep the place for later calls."""
    desk = follower.desk
    assert desk is not None
    logging.basicConfig(format="%(message)s")
    membership = Membership.spoke(members, seat.rank - seat.leader, desk.sock, give_up=give_up)
    desk.on_failure = membership.report_failure
    if seat.threads:
        torch.set_num_threads(seat.threads)
    desk.things["replica"] = replica = sit(seat, membership)
    replica.barrier()
    set_called(replica)


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype, dice: Dice
) -> Any:
    """In a follower: what the caller runs, with its type of numbers, and dice of one's own."""
    torch.set_default_dtype(dtype)
    dice.throw(current_replica().index)
    return function(*args)


def forked(whom: str) -> UsageError:
    """What a forked child is told that calls those whom its parent has started."""
    return UsageError(
        f"this process was forked from the one that started the {whom} of this strategy, and they "
        "listen to that one only; make a strategy in the child, or use this one in the parent."
    )
