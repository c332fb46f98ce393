"""The followers of one process's replica group: their membership, and the calls that they run."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from stratagem.cluster.failure import pass_on
from stratagem.cluster.membership import Failure, Member, Membership
from stratagem.data.streams import RngStates
from stratagem.errors import (
    ReplicaError,
    ReplicaFailed,
    ReplicaLost,
    StratagemError,
    UsageError,
)
from stratagem.figures.recorder import event
from stratagem.replicas import follower
from stratagem.replicas.pool import Follower, Pool
from stratagem.replicas.zygote import how_it_ended
from stratagem.training.placement import Placement, connect_replica
from stratagem.training.replica import current_replica, set_called

log = logging.getLogger("stratagem")


class LocalMembership(Membership):
    """The members on this process's own devices; also follows who has left the cluster."""

    cluster: Membership
    #: replaces a process that has died; returns whether that is possible
    stand_in: Callable[[Failure], bool] | None = None

    def _become(self, trouble: Failure) -> None:
        first = self.trouble is None and trouble.kind == "died" and trouble.rank > 0
        if not first or not self._is_replaced(trouble):
            super()._become(trouble)

    def _is_replaced(self, trouble: Failure) -> bool:
        try:
            return self.stand_in is not None and self.stand_in(trouble)
        except Exception:  # whatever it is, peers must learn who has died
            log.exception("%s has no standby", trouble.member)
            return False

    def give_up_on(self, trouble: Failure) -> None:
        """Report a death, since no process could replace the dead one."""
        super()._become(trouble)

    def replace(self, rank: int, member: Member, one: Follower) -> None:
        """Put another process in the place of one that died."""
        assert self._star is not None
        self.members = (*self.members[:rank], member, *self.members[rank + 1 :])
        self._star.call(partial(self._router.expect, rank))
        self._star.add(rank, one.member)
        self.watch(rank, one)

    def watch(self, rank: int, one: Follower) -> None:
        """Learn of this process's death before its socket closes, once it has answered."""
        life, pid, sock = one.life, one.pid, weakref.ref(one.member)
        if life is None:
            return  # the socket closes
        me = weakref.ref(self)  # a thread that waits must not keep a dropped group alive

        def await_end() -> None:
            if life.await_end(pid) and (here := me()) is not None and (link := sock()) is not None:
                here.has_ended(rank, link)

        threading.Thread(target=await_end, daemon=True).start()

    def has_ended(self, rank: int, link: socket.socket) -> None:
        """Note that the process at the other end has died."""
        if self._star is not None:
            self._star.call(partial(self._star.end, rank, link))

    def raise_if_gone(self) -> None:
        super().raise_if_gone()
        self.cluster.raise_if_gone()

    def await_trouble(self, seconds: float) -> Failure | None:
        until = time.monotonic() + seconds
        while super().await_trouble(0.05) is None and time.monotonic() < until:
            self.cluster.raise_if_gone()
        return self.trouble


def open_local(
    pool: Pool,
    placement: Placement,
    devices: Sequence[str],
    cluster: Membership,
    give_up: float,
) -> LocalMembership:
    """Open the membership of this process's own replicas, which passes notes on to the cluster."""
    members = [Member(placement.names[placement.rank], f"{devices[0]}, pid {os.getpid()}")]
    sockets: dict[int, socket.socket] = {}
    for i, one in enumerate(pool.followers, 1):
        members.append(Member(one.name, f"{devices[i]}, pid {one.pid}"))
        sockets[i] = one.member
    local = LocalMembership(members, 0, sockets, give_up)
    local.cluster, local.to_hub = cluster, cluster.to_hub
    local.board.on_word(cluster.publish)
    cluster.board.on_word(local.publish)
    if len(cluster.members) > 1:
        cluster.on_trouble(local.announce)
        local.on_trouble(cluster.announce)
    return local


def watch_lives(local: Membership, pool: Pool) -> None:
    """Learn at once of the death of followers, all of which have answered by now."""
    assert isinstance(local, LocalMembership)
    for rank, one in enumerate(pool.followers, 1):
        local.watch(rank, one)


def join_group(placement: Placement, members: tuple[Member, ...], give_up: float) -> None:
    """In a follower: connect to the other replicas, for all calls to come."""
    state = follower.state
    assert state is not None
    logging.basicConfig(format="%(message)s")
    membership = Membership.spoke(
        members, placement.rank - placement.leader, state.sock, give_up=give_up
    )
    state.on_failure = membership.report_failure
    if placement.threads:
        torch.set_num_threads(placement.threads)
    state.things["replica"] = replica = connect_replica(placement, membership)
    if placement.segment is not None:
        replica.barrier()
    set_called(replica)


def run_call(
    function: Callable[..., Any], args: tuple[Any, ...], dtype: torch.dtype, rng_states: RngStates
) -> Any:
    """In a follower: run what the caller runs, with its default type and own random numbers."""
    torch.set_default_dtype(dtype)
    rng_states.seed(current_replica().index)
    return function(*args)


def how_it_died(
    member: Member, status: int | None, then: str = "The strategy can be used again."
) -> str:
    """Return the sentence about a follower that ended with this status."""
    how, hint = how_it_ended(status)
    return f"{member} {how} while the others were working. {hint} {then}"


class Cause:
    """The cause of a failure, collected before the followers are ended."""

    def __init__(self, error: BaseException, local: Membership | None, pool: Pool | None) -> None:
        self._error, answer = error, None
        #: the follower that failed
        self.one: Follower | None = None
        self._trouble = trouble = local.trouble if local is not None else None
        if trouble is not None and pool is not None and isinstance(error, ReplicaError):
            name = trouble.member.name
            self.one = next((f for f in pool.followers if f.name == name), None)
        if self.one is not None and isinstance(error, ReplicaFailed):
            answer = self.one.answer(1.0)
        self._answer = answer
        self._orphaned = pool.orphaned() if pool is not None else None

    def say(self, then: str, status: Mapping[int, int | None] = MappingProxyType({})) -> None:
        """Log the cause and `then`, once followers have ended with these statuses."""
        text = str(self.error(status)).removesuffix(" Then start the job again.")
        log.warning("%s %s", text, then)

    def error(self, status: Mapping[int, int | None] = MappingProxyType({})) -> BaseException:
        """Return the error to raise once followers have ended with these statuses."""
        error, one, answer = self._error, self.one, self._answer
        if self._orphaned is not None and isinstance(error, ReplicaLost | OSError):
            return self._orphaned
        if one is not None and answer is not None:
            error = failure(one.name, answer)
            error.__cause__ = answer.error
        elif one is not None and isinstance(error, ReplicaLost) and error.who == one.name:
            assert self._trouble is not None
            return ReplicaLost(how_it_died(self._trouble.member, status.get(one.pid)), one.name)
        return error


class Endings:
    """Threads that end followers in the background, and log how each ended."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def begin(self, pool: Pool | None, cause: Cause, then: str) -> None:
        """Kill the followers; they write nothing from now on."""
        if cause.one is None:
            cause.say(then)
        if pool is None:
            return
        pool.kill()
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(
            threading.Thread(target=_see_off, args=(pool, cause, then), daemon=True)
        )
        self._threads[-1].start()

    def wait(self) -> None:
        """Wait until every end was logged."""
        for each in self._threads:
            each.join()


def _see_off(pool: Pool, cause: Cause, then: str) -> None:
    status = pool.end()
    if cause.one is not None:
        cause.say(then, status)


def failure(name: str, answer: follower.CallResult) -> ReplicaFailed:
    """Return the error to raise where a follower has raised one."""
    return ReplicaFailed(
        f"{name} raised an exception; the other replicas were stopped. Its traceback:\n\n"
        f"{answer.text}",
        name,
    )


def collected(pool: Pool, watch: Callable[[], None]) -> list[Any]:
    """Wait for the result of a call on each follower; raise the first failure."""
    answers = pool.collect(watch)
    for one, answer in zip(pool.followers, answers, strict=True):
        if isinstance(answer.error, StratagemError):
            raise pass_on(answer.error, one.name)
        if answer.failed:
            raise failure(one.name, answer) from answer.error
    return [answer.value for answer in answers]


def explained(error: BaseException, cluster: Membership | None) -> BaseException:
    """Return the failure behind an OSError: memory that the chief offers vanishes a moment before
    its death is known."""
    known = cluster.await_trouble(1.0) if cluster and isinstance(error, OSError) else None
    return error if known is None else known.error()


def record_fault(trouble: Failure) -> None:
    """Write a member's failure into the run's folder."""
    if trouble.kind != "joined":
        event("fault", str(trouble.error()), about=trouble.member.name)


def forked(whom: str) -> UsageError:
    """Return the error for a forked child that calls processes of its parent."""
    return UsageError(
        f"this process was forked from the one that started the {whom} of this strategy, and they "
        "listen to that one only; make a strategy in the child, or use this one in the parent."
    )
