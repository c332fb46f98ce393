"""A ps task: holds one shard of the parameters and serves the workers until the job ends.

The first server is the coordinator, too. Each connection has its own thread, and its first message
says what it is for: a worker's requests, a task's heartbeat, the coordinator's orders.
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
from stratagem.servers.training_plan import goes_back
from stratagem.training.agreement import Patience
from stratagem.wire import lateness
from stratagem.wire.segment import host_identity
from stratagem.wire.send_queue import SendQueue
from stratagem.wire.tcp import Connection, Listener, connect_all
from stratagem.wire.tree import TREE_LIMIT

log = logging.getLogger("stratagem")

LINGER = 10.0  # seconds that workers may take to leave after a failure
_LEAVES = 2.0  # seconds that threads may take to notice that their connections are closed


@dataclass
class Server:
    """One ps task of a job."""

    index: int
    addresses: Sequence[str]
    secret: bytes
    patience: Patience = field(default_factory=Patience)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    #: processors for an update that all workers wait for; None leaves torch's threads as they are
    cores: int | None = None

    def __post_init__(self) -> None:
        self.name = f"ps {self.index}"
        self.shard = Shard(self.index, self.device, self.cores)
        #: by number: its own shard, and those that it holds for other servers
        self.shards = HeldHere(self.shard, self.secret, self.patience.arrive, self.cores)
        self.coordinator: Coordinator | None = None
        self.failure: ReplicaError | None = None
        self._holders: Holders | None = None
        self._heartbeat: TaskHeartbeat | None = None
        self.peers = Peers(self.patience.answer)
        self._ending: float | None = None
        self._failed = threading.Event()
        self._chief_came = self.returning = False  # returning: the job goes back to a checkpoint
        self._turns = SendQueue()
        self._lock = threading.Lock()
        #: seconds by which a worker was late when that was last logged
        self._logged_late = 0.0
        self._figures = ServerFigures(self.name)
        #: called now and then once the chief has come: from now on servers end with the job
        self.on_chief: Callable[[], None] = lambda: None

    # --- the job ------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until the chief says that the job is done; raise the error that ends it early."""
        listener = Listener(self.addresses[self.index], self.secret, self.name, self._welcome)
        try:
            self._connect()
            self._wait_for_end()
        finally:
            listener.close()
            if self._heartbeat is not None:
                self._heartbeat.leave()
            for peer in self.peers.present():
                if peer.role == "heartbeat" and self.failure is None:
                    peer.tell({"over": 1})  # else the end of this server looks like its death
                elif peer.role == "evaluator" and goes_back(
                    self.shard.plan, self.failure, returning=self.returning
                ):
                    peer.tell({"again": 1})
                peer.hang_up()
            if self._holders is not None:
                self._holders.hang_up()
            # Python does not survive a thread that still frees tensors while the interpreter ends.
            until = time.monotonic() + _LEAVES
            while self.peers.present() and time.monotonic() < until:
                time.sleep(0.01)
            self.peers.close()
        if self.failure is not None:
            raise self.failure

    def _connect(self) -> None:
        """Connect: the coordinator to the other servers, for orders; they to it, for heartbeats."""
        limit = self.patience.arrive
        if self.index == 0:
            peers, changed = self.peers, self.shard.changed
            holders = Holders(self.addresses, self.secret, limit, peers, self._fail, changed)
            self._holders = holders
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

    def _wait_for_end(self) -> None:
        waiting = Wait(self.patience.arrive, FIRST)
        while not self._over():
            time.sleep(BEAT / 2)
            self._figures.look(self.shard, self.coordinator)
            if self._chief_came:
                self.on_chief()
            else:
                self._await_chief(waiting)
            if self.coordinator is not None and self._ending is None:
                self.peers.check_silence(self._give_up)
                self._check_lateness(self.coordinator)

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
        """End the job without an error, even if the chief has not come back to this server."""
        with self._lock:
            self._ending = self._ending or time.monotonic()

    def _fail(self, failure: ReplicaError) -> None:
        """End the job with an error, and tell it to all peers."""
        with self._lock:
            if self._ending is not None:
                return
            self._ending = time.monotonic()
        self.failure = failure
        self.shards.fail(failure)
        self._failed.set()
        if not goes_back(self.shard.plan, failure, returning=self.returning):
            log.warning("%s", headline(failure))
        if self._heartbeat is not None:
            self._heartbeat.announce(failure)
        if self.coordinator is not None:
            self.coordinator.failure = failure
            self.peers.tell(error_note(failure))
            assert self._holders is not None
            self._holders.hang_up()  # wakes a thread that waits for one and holds the lock
            self.coordinator.fail(failure)

    # --- peers --------------------------------------------------------------------------------

    def _welcome(self, connection: Connection) -> None:
        """Serve one connection until it ends, in its own thread; the first message says whose."""
        try:
            frame = connection.receive()
        except OSError as problem:
            log.info("%s has hung up: %s", connection.peer, problem)
            return
        if frame is None:
            connection.close()
            return
        peer = Peer.of(connection, frame.header, self.index)
        if self._ending is not None and not self.peers.present("worker", peer.token):
            connection.close()  # a new peer waits for the next server here
            return
        serve = {
            "worker": self._serve_worker,
            "heartbeat": self._serve_heartbeat,
            "coordinator": self._obey,
            "visitor": self._answer,
            "copy": self._answer,
            "source": self._receive_copy,
            "evaluator": self._serve_evaluator,
        }.get(peer.role)
        if serve is None:
            raise UsageError(f"{connection.peer} says that it is a {peer.role!r}")
        while self.index == 0 and self.coordinator is None:
            time.sleep(0.01)  # the other servers are still being reached
        self._chief_came = self._chief_came or peer.chief
        self.returning = self.returning or (peer.chief and peer.returns)
        try:
            if frame.header.get("greets"):
                connection.send({"welcome": host_identity()})  # before any note to all peers
            self.peers.add(peer)
            serve(peer)
        except OSError as problem:
            log.info("%s has hung up: %s", peer.name, problem)
        except Exception:  # a defect here must not leave a peer waiting
            self._fail(failed(self.name, traceback.format_exc()))
        finally:
            self.peers.remove(peer)

    def _answer(self, peer: Peer) -> None:
        """Answer a peer's requests in turn until it leaves."""
        connection = peer.connection
        parts: dict[str, Any] = {"shard": self.shards.of(peer.shard)}
        if self.coordinator is not None:
            parts["coordinator"] = self.coordinator
        while not peer.said_bye and (frame := connection.receive()) is not None:
            try:
                header, body = answer(parts, peer, frame)
            except StratagemError as error:
                connection.skip(TREE_LIMIT)  # the body of the refused request
                header, body = error_note(error), ()
            plan = self.shard.plan
            self._turns.at_once = 1 if plan is None else plan.at_once
            connection.send_in_turn(self._turns, header, body)

    def _serve_worker(self, peer: Peer) -> None:
        """Answer a worker's requests until it leaves or is lost."""
        why = "its connection closed without a goodbye"
        try:
            self._answer(peer)
        except OSError as problem:
            why = str(problem)
        self._remove_worker(peer, why)

    def _remove_worker(self, peer: Peer, why: str) -> None:
        """Take out a worker whose connection has ended or is about to be closed."""
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
            # The chief may have seen another task end before this server did: wait for that cause.
            # The coordinator waits for half as long, so that its verdict comes first.
            self._failed.wait(KNOWS_BETTER * (0.5 if coordinator is not None else 1.0))
            self._fail(chief_lost(peer.name, why))
        elif coordinator is not None and self._ending is None and not peer.dismissed:
            peer.dismissed = True
            self.peers.say(f"{peer.name} is gone ({why}); the others go on without it")

    def _serve_evaluator(self, peer: Peer) -> None:
        """Keep the evaluator's connection open until the job is over; closing it says so."""
        while peer.connection.receive() is not None:
            continue

    def _obey(self, peer: Peer) -> None:
        """Execute the coordinator's orders for one shard."""
        shard = self.shards.of(peer.shard)
        try:
            while (frame := peer.connection.receive()) is not None:
                if "order" not in frame.header:
                    self._copy_shard(peer.shard, frame.header)
                    continue
                order = frame.header["order"]
                value = shard.obey(order)
                if order[0] == "remove":
                    self.peers.dismiss(order[1])
                if value is not None:
                    peer.connection.send({"value": value})
        except OSError as problem:
            log.info("the coordinator does not command any more: %s", problem)
        if self._ending is None and self._heartbeat is not None:
            self._fail(self._heartbeat.await_trouble() or server_lost("ps 0"))

    def _copy_shard(self, shard: int, header: Mapping[str, Any]) -> None:
        """Between two orders: send a copy of a shard to another server, or wait for one."""
        if "copy" in header:
            self.shards.send_copy(shard, str(header["copy"]))
        else:
            self.shards.await_copy(shard, lambda: self._ending is not None)
            if self._heartbeat is not None:
                self._heartbeat.tell({"holds": shard})

    def _receive_copy(self, peer: Peer) -> None:
        """Receive another holder's copy of a shard."""
        self.shards.receive_copy(peer.shard, peer.connection)

    # --- heartbeats ---------------------------------------------------------------------------

    def _serve_heartbeat(self, peer: Peer) -> None:
        """Serve a task's heartbeat until the task leaves or is lost."""
        self.peers.listen_to(peer)
        if peer.server >= 0 and self._holders is not None:
            self._holders.heartbeat(peer.server)
        while (note := peer.notes.get()) is not None:
            if note.get("bye"):
                return
            if "holds" in note and self._holders is not None:
                self._holders.is_ready(peer.server, int(note["holds"]))
            error = error_of(note["dying"]) if "dying" in note else None
            if isinstance(error, ReplicaError) and not peer.dismissed:
                self._fail(error)  # at once: other tasks only see that its connections close
            if isinstance(figures := note.get("figures"), dict):
                self.peers.tell({"figures": figures}, chief=True)
        peer.silent = False  # dead or dismissed
        if self._ending is not None:
            return
        if peer.worker < 0:
            if self._holders is not None and not peer.dismissed:
                self._holders.lose(peer.server)
            return
        for other in self.peers.present("worker", peer.token):
            self._remove_worker(other, "its process has ended")
            other.hang_up()

    def _check_lateness(self, coordinator: Coordinator) -> None:
        """Log which workers keep the others waiting; give up those that do so too long."""
        limit, late = self.patience.step, coordinator.held_up()
        for participant, seconds in late:
            if seconds >= limit:
                for heartbeat in self.peers.present("heartbeat", participant.placement):
                    self._give_up(heartbeat, f"has kept the others waiting for {seconds:.0f} s")
        longest = max((seconds for _, seconds in late), default=0.0)
        if longest < min(lateness.FIRST, limit / 2):
            self._logged_late = 0.0
        elif longest >= self._logged_late + lateness.AGAIN or not self._logged_late:
            self._logged_late = longest
            names = ", ".join(participant.name for participant, _ in late)
            self.peers.say(lateness.late_line(names, longest))

    def _give_up(self, heartbeat: Peer, what: str) -> None:
        text = f"{heartbeat.name} {what} and is given up"
        # A server that wakes up again may still write into memory that it shares.
        holders = None if shares_memory(self.shard) else self._holders
        if holders is not None and holders.can_lose(heartbeat.server):
            holders.lose(heartbeat.server)
            return
        if heartbeat.worker < 0 or heartbeat.chief:
            self._fail(hangs(heartbeat.name, f"{text}, so the job ends"))
            return
        why = left_behind(heartbeat.name, f"{text};", ReplicaStalled)
        self.peers.dismiss(heartbeat.token, why)
        self.peers.say(f"{text}; the others do its work", {"given up": heartbeat.name})
