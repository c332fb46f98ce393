"""The servers that hold each shard, as the coordinator commands them.

With backups a shard has several holders: its own server, and the next ones in the ring. All of them
get the same gradients from the workers and the same orders from the coordinator, in the same
sequence, so they hold the same bits; values are fetched from the first that lives. Only the
coordinator holds shard 0: the job cannot lose it.

    backups=1       ps 0             ps 1      ps 2
                    0 (coordinator)  1         2
                    2'               -         1'

`generation` counts the servers that have come back. A push names the generation whose holders have
its gradient; a worker that does not know a holder yet is told to send the gradient there, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from stratagem.cluster.failure import Member, left_behind, server_lost
from stratagem.errors import ReplicaError, ReplicaLost
from stratagem.servers.peers import Peers
from stratagem.servers.shard import Order
from stratagem.servers.training_plan import holders_of
from stratagem.wire.tcp import Connection, connect_all

log = logging.getLogger("stratagem")

_T = TypeVar("_T")

#: orders that holders answer with a number
ASKS = frozenset({"norm", "distance", "step", "flush"})


@dataclass(eq=False)
class FarServer:
    """Another server's copy of a shard, as the coordinator commands it."""

    server: int
    connection: Connection
    #: whether it has the shard; a server that came back gets a copy from another holder
    ready: bool = True
    #: answers that are due and were not read
    owed: int = 0

    def order(self, order: Order) -> None:
        self.connection.send({"order": order})
        self.owed += order[0] in ASKS

    def answer(self) -> float:
        """Return the number that the last order asked for."""
        value = 0.0
        while self.owed:
            value = self._read()
        return value

    def catch_up(self) -> None:
        """Read answers that came later than another holder's."""
        while self.owed and self.connection.readable():
            self._read()

    def _read(self) -> float:
        frame = self.connection.receive()
        if frame is None:
            raise ConnectionResetError("it hung up")
        self.owed -= 1
        return float(frame.header["value"])


class HeldShard:
    """One shard on all servers that hold it; commanded under the coordinator's lock."""

    def __init__(self, holder: FarServer, lose: Callable[[int], bool]) -> None:
        """`lose` is called with a server found dead; it returns whether the job goes on."""
        self.holders = [holder]
        self._lose = lose

    def order(self, order: Order) -> None:
        """Send an order to every holder."""
        for holder in list(self.holders):
            self._try(holder, partial(holder.order, order))

    def answer(self) -> float:
        """Return the number that the last order asked for, from the first holder that answers."""
        for holder in [each for each in self.holders if each.ready]:
            found = self._try(holder, holder.answer)
            if found is not None:
                for other in list(self.holders):
                    self._try(other, other.catch_up)
                return found
        raise server_lost(f"ps {self.holders[0].server}")

    def _try(self, holder: FarServer, act: Callable[[], _T]) -> _T | None:
        try:
            return act()
        except OSError as problem:
            if not self._lose(holder.server):
                raise server_lost(f"ps {holder.server}") from problem
            return None

    def without(self, server: int) -> list[FarServer]:
        """Return the holders but one."""
        return [each for each in self.holders if each.server != server]


class Holders:
    """The holders of all shards but the coordinator's own: servers that die, and come back.

    `changed` is the coordinator's lock. Methods that say so take it; the rest is called under it.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        secret: bytes,
        limit: float,
        peers: Peers,
        end_job: Callable[[ReplicaError], None],
        changed: threading.Condition,
    ) -> None:
        self.addresses, self.secret, self.limit = addresses, secret, limit
        self._peers, self._end_job, self._changed = peers, end_job, changed
        self.shards: dict[int, HeldShard] = {}
        self.gone: set[int] = set()
        self.generation = 0
        #: by server: the generation that it came back in
        self.since = [0] * len(addresses)
        self.backups = 0
        self._one_by_one = threading.Lock()

    def meet(self) -> list[HeldShard]:
        """Connect to the other servers, each with its own shard."""
        found = self._reach([(i, i) for i in range(1, len(self.addresses))])
        self.shards = {far.server: HeldShard(far, self.lose) for far in found}
        return list(self.shards.values())

    def _reach(self, wanted: Sequence[tuple[int, int]]) -> list[FarServer]:
        """Connect to each (server, shard): the server makes room for the shard if it lacks it."""
        found = []
        for server, shard in wanted:
            task = Member(f"ps {server}", self.addresses[server])
            hello = {"hello": "coordinator", "name": "ps 0", "shard": shard}
            (connection,) = connect_all([task], self.secret, hello, self.limit)
            found.append(FarServer(server, connection))
        return found

    def cover(self, backups: int) -> None:
        """Before a fit: have `backups` other servers hold each shard."""
        self.backups = max(self.backups, backups)
        for shard, held in self.shards.items():
            have = {each.server for each in held.holders} | self.gone
            ring = holders_of(shard, len(self.addresses), self.backups)
            held.holders += self._reach([(server, shard) for server in ring if server not in have])

    def table(self) -> list[list[int]]:
        """Return for each shard its servers, the one to read from first."""
        held = [[each.server for each in held.holders] for held in self.shards.values()]
        return [[0], *held]

    def agreed(self, generation: int | None, lost: Sequence[int]) -> bool:
        """Drop the servers that a worker does not reach; return whether it knows all holders.

        A worker of an earlier generation does not, and its lost servers may have come back.
        """
        if generation is not None and generation != self.generation:
            return False
        for server in lost:
            self.lose(server)
        return True

    def hang_up(self, server: int | None = None) -> None:
        """Close the connections to a server, or to all, which wakes a thread that waits for it."""
        for held in self.shards.values():
            for each in list(held.holders):
                if server in (None, each.server):
                    each.connection.close()

    # --- loss -----------------------------------------------------------------------------------

    def _only_on(self, server: int) -> bool:
        """Whether no other server holds some shard."""
        shards = self.shards.values()
        return not all(any(each.ready for each in held.without(server)) for held in shards)

    def can_lose(self, server: int) -> bool:
        """Return whether every shard of a server is held by another one, too."""
        return server in self.gone or (server > 0 and not self._only_on(server))

    def lose(self, server: int) -> bool:
        """Drop a server if others hold its shards, else end the job; return whether it goes on.

        Takes the lock.
        """
        name = f"ps {server}"
        if server not in self.gone:
            self.hang_up(server)  # a thread may wait for it with the lock
        with self._changed:
            if server in self.gone:
                return True
            self.gone.add(server)
            if self._only_on(server):
                self._end_job(server_lost(name))
                return False
            heirs = set()
            for held in self.shards.values():
                if (left := held.without(server)) != held.holders:
                    held.holders = left
                    heirs.add(f"ps {left[0].server}")
        text = f"{name} was not reached any more, and"
        self._peers.dismiss(name, left_behind(name, text, ReplicaLost))
        self._peers.say(
            f"{name} is gone; what it held is on {' and '.join(sorted(heirs))}, too, and training "
            f"goes on with that. Start {name} again: until it is back, the death of another ps may "
            "end the job"
        )
        return True

    # --- return ---------------------------------------------------------------------------------

    def heartbeat(self, server: int) -> None:
        """Note a server's new heartbeat, at the start of the job or after a restart. Takes the
        lock."""
        here = [peer for peer in self._peers.present("heartbeat") if peer.server == server]
        if len(here) > 1:  # the process before is dead
            self.lose(server)
        if server in self.gone:
            threading.Thread(
                target=self._come_back, args=(server,), name="stratagem-come-back", daemon=True
            ).start()

    def _come_back(self, server: int) -> None:
        """Connect to a server that has come back, and have it hold its shards again."""
        with self._one_by_one:  # it may have died and come back again meanwhile
            if server not in self.gone:
                return
            count = len(self.addresses)
            mine = [s for s in self.shards if server in holders_of(s, count, self.backups)]
            try:
                lines = self._reach([(server, shard) for shard in mine])
            except (OSError, ReplicaError) as problem:
                log.info("ps %d is gone again: %s", server, problem)
                return
            with self._changed:
                self._take_back(server, dict(zip(mine, lines, strict=True)))
        self._peers.say(f"ps {server} is back, and gets its share of the parameters")

    def _take_back(self, server: int, lines: dict[int, FarServer]) -> None:
        """Have a server hold its shards again, as copies from the other holders.

        The server gets every later order, and carries it out once it has the copy.
        """
        for shard, far in lines.items():
            held = self.shards[shard]
            source = next(each for each in held.holders if each.ready)
            try:
                source.connection.send({"copy": self.addresses[server]})
                far.connection.send({"await copy": True})
            except OSError:
                continue  # one of the two is gone again, as its heartbeat will show
            far.ready = False
            held.holders.append(far)
        self.gone.discard(server)
        self.generation += 1
        self.since[server] = self.generation

    def is_ready(self, server: int, shard: int) -> None:
        """Note that a server which came back has a shard. Takes the lock."""
        with self._changed:
            for each in self.shards[shard].holders:
                if each.server == server:
                    each.ready = True
