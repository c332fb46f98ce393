"""Standbys: processes that follow a call of the followers, and replace a follower that dies.

Each follower has one, which has built the model and follows the place in the data
(wire/standby.py). Where none is ready, or the follower died in mid-update, the group forms again.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any

import torch

from stratagem.cluster.membership import Failure, Member, Membership
from stratagem.errors import ReplicaLost
from stratagem.figures.meter import METER
from stratagem.figures.recorder import event
from stratagem.replicas import follower, graph_pickle
from stratagem.replicas.pool import Follower, Pool
from stratagem.replicas.zygote import ZygoteProcess
from stratagem.training.cross_device import CrossDeviceOps
from stratagem.training.devices import place
from stratagem.training.group_followers import LocalMembership, how_it_died, record_fault
from stratagem.training.placement import Placement, WaitWatcher
from stratagem.training.replica import Replica, set_called
from stratagem.wire.collective import Collective
from stratagem.wire.collective_log import CollectiveLog, LogFollower, is_ready
from stratagem.wire.lateness import Limit
from stratagem.wire.segment import Segment
from stratagem.wire.shared_memory import SharedMemoryCollective, Watch, sharing
from stratagem.wire.standby import StandbyCollective

log = logging.getLogger("stratagem")

_FIRST = 0.3  # seconds that a call must last to be worth starting standbys
_LOOK = 0.05  # seconds between two checks for a missing standby
_GLANCE = 0.0005  # seconds between two checks whether the first replica has come to a step


class Standbys:
    """The standbys of one process's followers, which are all replicas but itself."""

    def __init__(
        self,
        collective: SharedMemoryCollective,
        placement: Placement,
        membership: LocalMembership,
        pool: Pool,
        give_up: float,
    ) -> None:
        self._collective = collective
        self._placement, self._membership, self._pool = placement, membership, pool
        self._give_up = give_up
        self._lock = threading.Lock()
        self._waiting: dict[int, Follower] = {}
        #: by rank, the turn of its last replacement, and the segment of the order
        self._replaced: dict[int, tuple[int, Segment]] = {}
        self._over = threading.Event()
        membership.stand_in = self._stand_in

    @staticmethod
    def of(replica: Replica, placement: Placement, pool: Pool, give_up: float) -> Standbys | None:
        """Make the standbys of replicas that share memory and belong to this process; else None."""
        collective, membership = replica.collective, replica.membership
        if not collective.shares_memory or sys.platform != "linux":
            return None
        assert isinstance(membership, LocalMembership)
        if len(membership.cluster.members) > 1:
            return None
        return Standbys(sharing(collective), placement, membership, pool, give_up)

    def begin(self) -> None:
        """Begin a call that can survive the death of replicas."""
        self.rest()
        with self._lock:
            self._over, self._waiting = threading.Event(), {}
        self._collective.log = made = CollectiveLog(*self._collective.position)
        arguments = (made, self._over, self._waiting)
        threading.Thread(target=self._keep_ready, args=arguments, daemon=True).start()

    def rest(self) -> None:
        """End the call; its standbys end in the background."""
        with self._lock:  # a standby has taken a place by now, or never does
            self._over.set()
        self._collective.log, self._waiting = None, {}
        self._replaced.clear()

    def _keep_ready(
        self, made: CollectiveLog, over: threading.Event, waiting: dict[int, Follower]
    ) -> None:
        ranks = range(1, len(self._pool.followers) + 1)
        seconds = _FIRST
        while not over.wait(seconds) and not made.broken:
            seconds = _LOOK
            for rank in ranks:
                if made.state is not None and rank not in waiting and not over.is_set():
                    self._start(rank, made, waiting)
        with self._lock:
            left = list(waiting.values())
            waiting.clear()
        _end(left)

    def _start(self, rank: int, made: CollectiveLog, waiting: dict[int, Follower]) -> None:
        members, call = self._membership.members, self._pool.call
        if call is None:
            return
        try:
            one = Follower(self._pool.followers[rank - 1].name)
        except (OSError, ReplicaLost):
            return  # the next look tries again
        seat = (self._placement.of(self._placement.leader + rank), members, self._give_up)
        data, _ = graph_pickle.dumps((stand_by, (*seat, made.handle, made.start, call), {}))
        with self._lock:
            waiting[rank] = one
        try:
            one.send(data, lambda: None)
        except (OSError, ValueError):  # the process has ended, or too many files for `select`
            self._drop(rank, one, waiting)

    def _drop(self, rank: int, one: Follower, waiting: dict[int, Follower]) -> None:
        """End a standby that waits in this call; if the call is over, all of them are ended."""
        with self._lock:
            known = waiting.get(rank) is one
            if known:
                del waiting[rank]
        if known:
            threading.Thread(target=_end, args=([one],), daemon=True).start()

    # --- replacing a follower -------------------------------------------------------------------

    def _stand_in(self, trouble: Failure) -> bool:
        """Whether a standby may replace a follower that died; a thread of its own does that."""
        rank = trouble.rank
        with self._lock:  # both of the same call
            waiting, over = self._waiting, self._over
        one = waiting.get(rank)
        if one is None or over.is_set():
            return False
        if not one.waits() or not is_ready(one.member):
            self._drop(rank, one, waiting)
            return False
        arguments = (trouble, one, waiting, over)
        threading.Thread(target=self._take_place, args=arguments, daemon=True).start()
        return True

    def _take_place(
        self,
        trouble: Failure,
        one: Follower,
        waiting: dict[int, Follower],
        over: threading.Event,
    ) -> None:
        rank, dead = trouble.rank, None
        try:
            taken = self._send_into_step(rank, one, over)
        except Exception:  # state that cannot be sent, no memory: peers must learn who has died
            log.exception("the standby of %s cannot take its place", trouble.member)
            taken = False
        device = self._placement.devices[self._placement.leader + rank]
        with self._lock:
            if taken and not over.is_set():  # else the group ends, and the standby would be left
                waiting.pop(rank, None)
                member = Member(one.name, f"{device}, pid {one.pid}")
                self._membership.replace(rank, member, one)
                dead = self._pool.replace(rank - 1, one)
        if dead is None:
            self._drop(rank, one, waiting)
            self._membership.give_up_on(trouble)
            return
        status = ZygoteProcess.get().end([dead]).get(dead)
        log.warning("%s", how_it_died(trouble.member, status, "Its standby goes on."))
        record_fault(trouble)
        event("join", "its standby has taken its place", about=one.name)

    def _send_into_step(self, rank: int, one: Follower, over: threading.Event) -> bool:
        """Order the standby to do the step in which a follower has died; whether that worked."""
        made = self._collective.log
        turn = self._collective.turn_of(rank)
        known = self._replaced.get(rank)
        again = known is not None and known[0] == turn  # the step itself kills it
        if made is None or again or not self._is_in_step(made, turn, over):
            return False
        order, segment = made.order(turn)
        self._replaced[rank] = turn, segment
        try:
            one.member.recv(1)  # its sign that it is ready
            one.member.sendall(order)
        except OSError:  # the standby has died, too, or the call is over
            return False
        return True

    def _is_in_step(self, made: CollectiveLog, turn: int, over: threading.Event) -> bool:
        """Wait until this process is in the step in which a follower died; False if it cannot be:
        the dead follower had exchanged something in it. All other replicas wait for this process
        meanwhile, so no time is lost.
        """
        while not over.is_set() and not made.broken:
            opened = made.opened
            if opened == turn:
                return made.state is not None
            if opened is not None or self._collective.position[0] > turn:
                return False
            time.sleep(_GLANCE)
        return False


def _end(them: list[Follower]) -> None:
    if them:
        ZygoteProcess.get().end([one.pid for one in them])
    for one in them:
        one.close(pipes=True)


# --- in the standby itself ------------------------------------------------------------------------


def stand_by(
    placement: Placement,
    members: tuple[Member, ...],
    give_up: float,
    handle: str,
    start: tuple[int, int],
    call: bytes,
) -> Any:
    """Run a call that the followers are in, skipping its steps until one of them dies."""
    state = follower.state
    assert state is not None and placement.segment is not None
    logging.basicConfig(format="%(message)s")
    rank = placement.rank

    def join_group() -> Watch:
        made = Membership.spoke(members, rank - placement.leader, state.sock, give_up=give_up)
        state.on_failure, replica.membership = made.report_failure, made
        METER.generation = placement.generation
        return WaitWatcher(made, placement.names, Limit(made, placement.step))

    if placement.threads:
        torch.set_num_threads(placement.threads)
    control = Segment.attach(placement.segment)
    reader = LogFollower(handle, state.sock)
    own = (rank, placement.size, control, placement.names, reader, start, join_group)
    replica = Replica(
        rank,
        placement.size,
        place(placement.devices[rank]),
        placement.names[rank],
        StandbyCollective(*own),
        Membership.alone(),
        _connect_nothing,
        local_index=rank - placement.leader,
        ops=placement.candidates(),
    )
    set_called(replica)
    function, arguments, _ = graph_pickle.loads_call(call)
    return function(*arguments)


def _connect_nothing(name: str, op: CrossDeviceOps) -> Collective:
    raise RuntimeError(f"a standby cannot open {name}")
