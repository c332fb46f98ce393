"""A ps task: keeps one shard of the parameters and serves the workers until the job ends.

The first server is the coordinator, too. Each connection has a thread of its own, and says first
what it is: a worker at work, the heartbeat of a task, or the coordinator with orders.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stratagem.cluster.failure import (
    Member,
    chief_lost,
    error_note,
    error_of,
    failed,
    hangs,
    headline,
    left_behind,
    server_lost,
)
from stratagem.cluster.heartbeat import BEAT
from stratagem.cluster.waiting import FIRST, Wait
from stratagem.errors import (
    ReplicaError,
    ReplicaMissing,
    ReplicaStalled,
    StratagemError,
    UsageError,
)
from stratagem.servers import coordinator_requests  # noqa: F401  (fills the table of requests)
from stratagem.servers.coordinator import Coordinator
from stratagem.servers.holders import Holders
from stratagem.servers.peers import KNOWS_BETTER, Peers, TaskHeartbeat
from stratagem.servers.requests import Peer, answer
from stratagem.servers.server_figures import ServerFigures
from stratagem.servers.shard import Shard, shares_memory
from stratagem.servers.shard_copy import HeldHere
from stratagem.servers.takeover import Takeover
from stratagem.servers.training_plan import goes_back
from stratagem.training.agreement import Patience
from stratagem.wire import lateness
from stratagem.wire.segment import host_identity
from stratagem.wire.send_queue import SendQueue
from stratagem.wire.tcp import Connection, Listener, connect_all
from stratagem.wire.tree import TREE_LIMIT

log = logging.getLogger("stratagem")

LINGER = 10.0  # seconds that the others may take to leave after a failure
_LEAVES = 2.0  # seconds until threads have noticed that their connections are closed


@dataclass
class Server:
    """One ps task of a job."""

    index: int
    addresses: Sequence[str]
    secret: bytes
    patience: Patience = field(default_factory=Patience)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    #: processors for an update that all wait for; None: torch's threads are left as they are
    cores: int | None = None

    def __post_init__(self) -> None:
        self.name = f"ps {self.index}"
        self.shard = Shard(self.index, self.device, self.cores)
        #: by number: its own, and those that it holds for others
        self.shards = HeldHere(self.shard, self.secret, self.patience.arrive, self.cores)
        self.coordinator: Coordinator | None = None
        self.failure: ReplicaError | None = None
        self._takeover: Takeover | None = None
        self._heartbeat: TaskHeartbeat | None = None
        self.peers = Peers(self.patience.answer)
        self._ending: float | None = None
        self._fell = threading.Event()
        self._chief_came = self.returning = False  # returning: the job goes to a checkpoint
        self._turns = SendQueue()
        self._lock = threading.Lock()
        #: how late somebody was when that was last said
        self._named = 0.0
        self._figures = ServerFigures(self.name)
        #: called now and then from when the chief has come; from now on servers end with it
        self.on_chief: Callable[[], None] = lambda: None

    # --- the job ------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until the chief says that the job is done; raise why it cannot go on."""
        listener = Listener(self.addresses[self.index], self.secret, self.name, self._welcome)
        try:
            self._meet_the_others()
            self._stay()
        finally:
            listener.close()
            if self._heartbeat is not None:
                self._heartbeat.stop()
            for peer in self.peers.present():
                if peer.server >= 0 and self.failure is None:
                    peer.tell({"over": 1})
                elif peer.role == "evaluator" and goes_back(
                    self.shard.plan, self.failure, returning=self.returning
                ):
                    peer.tell({"again": 1})
                peer.hang_up()
            if self._takeover is not None:
                self._takeover.holders.close()
            # Python does not survive a thread that still frees tensors while the interpreter ends.
            until = time.monotonic() + _LEAVES
            while self.peers.present() and time.monotonic() < until:
                time.sleep(0.01)
            self.peers.close()
        if self.failure is not None:
            raise self.failure

    def _meet_the_others(self) -> None:
        """Connect: the coordinator to the other servers for orders, they to it for heartbeats."""
        limit = self.patience.arrive
        if self.index == 0:
            holders, peers = Holders(self.addresses, self.secret, limit), self.peers
            self._takeover = Takeover(holders, peers, self._fail, self.shard.changed)
            far = holders.meet()
            coordinator = Coordinator(
                self.shard, far, self._fail, alive=peers.heard_workers, dismiss=peers.dismiss
            )
            coordinator.holders, self.coordinator = holders, coordinator
            return
        hello = {"hello": "heartbeat", "name": self.name, "server": self.index, "token": self.name}
        (beats,) = connect_all([Member("ps 0", self.addresses[0])], self.secret, hello, limit)
        self._heartbeat = TaskHeartbeat(beats, self.patience.answer, self._fail)
        self._heartbeat.on_over = self._end

    def _stay(self) -> None:
        waiting = Wait(self.patience.arrive, FIRST)
        while not self._over():
            time.sleep(BEAT / 2)
            self._figures.look(self.shard, self.coordinator)
            if self._chief_came:
                self.on_chief()
            else:
                self._await_chief(waiting)
            if self.coordinator is not None and self._ending is None:
                self.peers.look(self._give_up)
                self._look_at_work(self.coordinator)

    def _await_chief(self, waiting: Wait) -> None:
        text = (
            f"the chief has not come to {self.name} within {waiting.waited:.0f} s; start it with "
            "the same cluster and the same STRATAGEM_SECRET."
        )
        if waiting.over:
            self._fail(ReplicaMissing(text, "chief"))
        elif waiting.due() and self.coordinator is not None:
            self.peers.tell({"say": f"waiting for the chief, {waiting.waited:.0f} s"})

    def _over(self) -> bool:
        if self._ending is None:
            return False
        left = [
            peer
            for peer in self.peers.present("worker")
            if not (peer.participant and peer.participant.silent)
        ]
        linger = LINGER if self.failure is not None else max(LINGER, self.patience.answer)
        return not left or time.monotonic() > self._ending + linger

    def _end(self) -> None:
        """End the job well, also where the chief has not come back to this server."""
        with self._lock:
            self._ending = self._ending or time.monotonic()

    def _fail(self, failure: ReplicaError) -> None:
        """Tell all peers why the job cannot go on, and end."""
        with self._lock:
            if self._ending is not None:
                return
            self._ending = time.monotonic()
        self.failure = failure
        self.shards.fail(failure)
        self._fell.set()
        if not goes_back(self.shard.plan, failure, returning=self.returning):
            log.warning("%s", headline(failure))
        if self._heartbeat is not None:
            self._heartbeat.last_words(failure)
        if self.coordinator is not None:
            self.coordinator.failure = failure
            self.peers.tell(error_note(failure))
            assert self._takeover is not None
            self._takeover.holders.close()  # wakes a thread that waits for one, lock in hand
            self.coordinator.fail(failure)

    # --- peers --------------------------------------------------------------------------------

    def _welcome(self, connection: Connection) -> None:
        """In a thread of its own: read who the peer is, then serve it until it goes."""
        try:
            frame = connection.receive()
        except OSError as problem:
            log.info("%s has hung up: %s", connection.peer, problem)
            return
        if frame is None or self._ending is not None:  # who comes now wants the next server here
            connection.close()
            return
        peer = Peer.of(connection, frame.header, self.index)
        serve = {
            "worker": self._work,
            "heartbeat": self._beat,
            "coordinator": self._follow,
            "visitor": self._answer,
            "copy": self._answer,
            "source": self._receive_copy,
            "evaluator": self._let_watch,
        }.get(peer.role)
        if serve is None:
            raise UsageError(f"{connection.peer} says that it is a {peer.role!r}")
        while self.index == 0 and self.coordinator is None:
            time.sleep(0.01)  # the other servers are still being reached
        self._chief_came = self._chief_came or peer.chief
        self.returning = self.returning or (peer.chief and peer.returns)
        try:
            if frame.header.get("greets"):
                connection.send({"welcome": host_identity()})  # before anything else is told
            self.peers.add(peer)
            serve(peer)
        except OSError as problem:
            log.info("%s has hung up: %s", peer.name, problem)
        except Exception:  # a mistake of ours: nobody may wait for what will not come
            self._fail(failed(self.name, traceback.format_exc()))
        finally:
            self.peers.remove(peer)

    def _answer(self, peer: Peer) -> None:
        """Answer requests one by one."""
        connection = peer.connection
        parts: dict[str, Any] = {"shard": self.shards.of(peer.shard)}
        if self.coordinator is not None:
            parts["coordinator"] = self.coordinator
        while not peer.said_bye and (frame := connection.receive()) is not None:
            try:
                header, body = answer(parts, peer, frame)
            except StratagemError as error:
                connection.skip(TREE_LIMIT)  # what came with a request that is refused
                header, body = error_note(error), ()
            plan = self.shard.plan
            self._turns.at_once = 1 if plan is None else plan.at_once
            connection.send_in_turn(self._turns, header, body)

    def _work(self, peer: Peer) -> None:
        """Answer a worker's requests, until it goes."""
        why = "its connection closed without a goodbye"
        try:
            self._answer(peer)
        except OSError as problem:
            why = str(problem)
        self._gone(peer, why)

    def _gone(self, peer: Peer, why: str) -> None:
        """Take out a worker whose connection has ended, or ought to have."""
        coordinator = self.coordinator
        if coordinator is not None and peer.participant is not None:
            coordinator.leave(peer.participant, dead=not peer.said_bye)
        if peer.said_bye:
            if peer.chief:
                self._end()
                if coordinator is not None:
                    with coordinator.changed:
                        coordinator.closed, coordinator.running = True, False
                        coordinator.changed.notify_all()
        elif peer.chief and peer.returns and self.shard.plan is None:
            self._chief_came = False  # a server that it needs was not back yet; it tries again
        elif peer.chief:
            # It may have noticed before us that another has gone; the coordinator asks first.
            self._fell.wait(KNOWS_BETTER * (0.5 if coordinator is not None else 1.0))
            self._fail(chief_lost(peer.name, why))
        elif coordinator is not None and self._ending is None and not peer.dismissed:
            peer.dismissed = True
            self.peers.say(f"{peer.name} is gone ({why}); the others go on without it")

    def _let_watch(self, peer: Peer) -> None:
        """Keep the evaluator's connection until the job is over; its end says so."""
        while peer.connection.receive() is not None:
            continue

    def _follow(self, peer: Peer) -> None:
        """Carry out the coordinator's orders for one shard."""
        shard = self.shards.of(peer.shard)
        try:
            while (frame := peer.connection.receive()) is not None:
                if "order" not in frame.header:
                    self._hand_on(peer.shard, frame.header)
                    continue
                order = frame.header["order"]
                value = shard.obey(order)
                if order[0] == "bury":
                    self.peers.dismiss(order[1])
                if value is not None:
                    peer.connection.send({"value": value})
        except OSError as problem:
            log.info("the coordinator does not command any more: %s", problem)
        if self._ending is None and self._heartbeat is not None:
            self._fail(self._heartbeat.explain() or server_lost("ps 0"))

    def _hand_on(self, shard: int, told: Mapping[str, Any]) -> None:
        """Between two orders: send a copy of a shard to a server, or wait for one."""
        if "copy" in told:
            self.shards.send_copy(shard, str(told["copy"]))
        else:
            self.shards.await_copy(shard, lambda: self._ending is not None)
            if self._heartbeat is not None:
                self._heartbeat.tell({"holds": shard})

    def _receive_copy(self, peer: Peer) -> None:
        """Take another holder's copy of a shard."""
        self.shards.receive_copy(peer.shard, peer.connection)

    # --- heartbeats ---------------------------------------------------------------------------

    def _beat(self, peer: Peer) -> None:
        """Serve a task's heartbeat, until the task goes."""
        self.peers.listen_to(peer)
        if peer.server >= 0 and self._takeover is not None:
            self._takeover.heartbeat(peer.server)
        while (note := peer.notes.get()) is not None:
            if note.get("bye"):
                return
            if "holds" in note and self._takeover is not None:
                self._takeover.is_ready(peer.server, int(note["holds"]))
            words = error_of(note["dying"]) if "dying" in note else None
            if isinstance(words, ReplicaError) and not peer.dismissed:
                self._fail(words)  # at once: others will only see that it hangs up
            if isinstance(figures := note.get("figures"), dict):
                self.peers.tell({"figures": figures}, chief=True)
        peer.silent = False  # it is dead, or was dismissed
        if self._ending is not None:
            return
        if peer.worker < 0:
            if self._takeover is not None and not peer.dismissed:
                self._takeover.lose(peer.server)
            return
        for other in self.peers.present("worker", peer.token):
            self._gone(other, "its process has ended")
            other.hang_up()

    def _look_at_work(self, coordinator: Coordinator) -> None:
        """Name live workers that keep others waiting; give up those that do so too long."""
        limit, late = self.patience.step, coordinator.held_up()
        for participant, seconds in late:
            if seconds >= limit:
                for heartbeat in self.peers.present("heartbeat", participant.placement):
                    self._give_up(heartbeat, f"has kept the others waiting for {seconds:.0f} s")
        longest = max((seconds for _, seconds in late), default=0.0)
        if longest < min(lateness.FIRST, limit / 2):
            self._named = 0.0
        elif longest >= self._named + lateness.AGAIN or not self._named:
            self._named = longest
            names = ", ".join(participant.name for participant, _ in late)
            self.peers.say(lateness.late_line(names, longest))

    def _give_up(self, heartbeat: Peer, what: str) -> None:
        text = f"{heartbeat.name} {what} and is given up"
        # One that wakes again may still write into memory that it shares.
        takeover = None if shares_memory(self.shard) else self._takeover
        if takeover is not None and takeover.can_lose(heartbeat.server):
            takeover.lose(heartbeat.server)
            return
        if heartbeat.worker < 0 or heartbeat.chief:
            self._fail(hangs(heartbeat.name, f"{text}, so the job ends"))
            return
        why = left_behind(heartbeat.name, f"{text};", ReplicaStalled)
        self.peers.dismiss(heartbeat.token, why)
        self.peers.say(f"{text}; the others do its work", {"given up": heartbeat.name})
