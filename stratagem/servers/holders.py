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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from stratagem.cluster.failure import Member, server_lost
from stratagem.errors import ReplicaLost
from stratagem.servers.shard import Order
from stratagem.servers.training_plan import holders_of
from stratagem.wire.tcp import Connection, connect_all

_T = TypeVar("_T")


@dataclass(eq=False)
class FarServer:
    """Another server's copy of a shard, as the coordinator commands it."""

    server: int
    connection: Connection
    #: whether it has the shard; a server that came back gets a copy from another holder
    ready: bool = True
    #: answers that are due and were not read
    owed: int = 0

    @property
    def name(self) -> str:
        return f"ps {self.server}"

    def order(self, order: Order) -> None:
        try:
            self.connection.send({"order": order})
        except OSError as problem:
            raise server_lost(self.name) from problem

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
        try:
            frame = self.connection.receive()
        except OSError as problem:
            raise server_lost(self.name) from problem
        if frame is None:
            raise server_lost(self.name)
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
            holder.owed += order[0] in ASKS

    def answer(self) -> float:
        """Return the number that the last order asked for, from the first holder that answers."""
        for holder in [each for each in self.holders if each.ready]:
            found = self._try(holder, holder.answer)
            if found is not None:
                for other in list(self.holders):
                    self._try(other, other.catch_up)
                return found
        raise server_lost(self.holders[0].name)

    def _try(self, holder: FarServer, act: Callable[[], _T]) -> _T | None:
        try:
            return act()
        except ReplicaLost:
            if not self._lose(holder.server):
                raise
            return None


#: orders that holders answer with a number
ASKS = frozenset({"norm", "distance", "step", "flush"})


@dataclass
class Holders:
    """The holders of all shards but the coordinator's own. Used under the coordinator's lock."""

    addresses: Sequence[str]
    secret: bytes
    limit: float
    #: called with a server that was found dead; returns whether the job goes on
    lose: Callable[[int], bool] = lambda _: False
    shards: dict[int, HeldShard] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    generation: int = 0
    #: by server: the generation that it came back in
    since: dict[int, int] = field(default_factory=dict)
    backups: int = 0

    def meet(self) -> list[HeldShard]:
        """Connect to the other servers, each with its own shard."""
        others = range(1, len(self.addresses))
        found = self._reach([(i, i) for i in others])
        self.shards = {far.server: HeldShard(far, lambda dead: self.lose(dead)) for far in found}
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

    # --- loss and return ------------------------------------------------------------------------

    def hang_up(self, server: int) -> None:
        """Wake a thread that waits for this server with the lock."""
        for held in self.shards.values():
            for each in list(held.holders):
                if each.server == server:
                    each.connection.close()

    def drop(self, server: int) -> list[int]:
        """Remove a server; return the shards that no server holds any more."""
        self.gone.add(server)
        alone = self.alone(server)
        for shard, held in self.shards.items():
            if shard not in alone:
                held.holders = [each for each in held.holders if each.server != server]
        return alone

    def alone(self, server: int) -> list[int]:
        """Return the shards that no other server holds."""
        return [
            shard
            for shard, held in self.shards.items()
            if not any(each.ready and each.server != server for each in held.holders)
        ]

    def agreed(self, generation: int | None, lost: Sequence[int]) -> bool:
        """Drop the servers that a worker does not reach; return whether it knows all holders.

        A worker of an earlier generation does not, and its lost servers may have come back.
        """
        if generation is not None and generation != self.generation:
            return False
        for server in lost:
            if server not in self.gone:
                self.lose(server)
        return True

    def close(self) -> None:
        """Close the connections to all servers."""
        for server in range(len(self.addresses)):
            self.hang_up(server)

    def heir(self, shard: int) -> str:
        """Return the name of the server that a shard is read from."""
        return self.shards[shard].holders[0].name

    def connect_again(self, server: int) -> dict[int, FarServer]:
        """Connect to a server that has come back, for each shard that it is to hold."""
        count = len(self.addresses)
        mine = [s for s in self.shards if server in holders_of(s, count, self.backups)]
        return dict(zip(mine, self._reach([(server, shard) for shard in mine]), strict=True))

    def take_back(self, server: int, lines: dict[int, FarServer]) -> None:
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
        """Note that a server which came back has its shards."""
        for each in self.shards[shard].holders:
            if each.server == server:
                each.ready = True
