"""The servers of a simulated job: their computation, their messages, and the time of both.

A server handles requests and orders one after another; each takes some time. The messages of a step
take processor time of the worker and of each server:

push     one message to each server, with its part of the gradient; the coordinator decides on it
values   one from each server but the coordinator, which sends its own with the ticket; the ticket
         is a message of its own unless it came with the answer to the last push

A `Trainer` is the training inside a job: none (`Idle`), or a real one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import count
from math import inf
from typing import Any, Protocol

from torch import Tensor

from stratagem.errors import ReplicaError, UsageError
from stratagem.plan.simulation.scenario import Scenario
from stratagem.rules.tickets import Ticket
from stratagem.servers.commands import OwnShard
from stratagem.servers.shard import Order
from stratagem.servers.training_plan import TrainingPlan
from stratagem.state.optimizer_recipe import OptimizerRecipe
from stratagem.state.partition import Piece
from stratagem.wire.send_queue import STILL, TurnRule, is_overtaken
from stratagem.wire.simulated import Action, Clock, Network, Route


class SimulatedServer:
    """A shard in virtual time: `free` is when all requests are done, `updated` when all orders are.

    update, add   seconds of these orders
    word          seconds of an order's message: the coordinator sends it to all other servers
    """

    def __init__(
        self, clock: Clock, host: int, shard: OwnShard, update: float, add: float, word: float = 0.0
    ) -> None:
        self.host, self.free, self.updated = host, 0.0, 0.0
        self.changed, self.fetch, self.training = shard.changed, shard.fetch, shard.training
        self.failure: ReplicaError | None = None
        self._clock, self._shard = clock, shard
        self._costs = {"one": update + word, "apply": update + word, "add": add + word}
        self._answer = 0.0

    def work(self, seconds: float) -> None:
        """Be busy for `seconds`, after all earlier work."""
        self.free = max(self.free, self._clock.now) + seconds

    def obey(self, order: Order) -> float:
        cost = self._costs.get(order[0])
        if cost:
            self.work(cost)
        self.updated = self.free
        self._answer = float(self._shard.obey(order) or 0.0)
        return self._answer

    def order(self, order: Order) -> None:
        self.obey(order)

    def answer(self) -> float:
        return self._answer


class MessageCosts:
    """Processor seconds of one worker's messages, at the worker and at servers.

    received   the worker's seconds before it computes, for the last ticket and values
    sent       the worker's seconds after it has computed
    """

    def __init__(self, scenario: Scenario) -> None:
        self._costs, self._work, self._parts = scenario.overhead, scenario.work, scenario.parts
        self.none = scenario.overhead.none
        self.received = 0.0
        self.sent = (
            self._worker_seconds(len(self._parts), scenario.work.push) + self._costs.worker_step
        )

    def pull(self, servers: Sequence[SimulatedServer], *, asked: bool, news: bool) -> None:
        """Count a ticket, and new values if there are any (`news`)."""
        size = self._work.fetched if news else 0.0
        self.received = self._worker_seconds(len(servers) - 1 + asked, size)
        for i, (server, part) in enumerate(zip(servers, self._parts, strict=True)):
            server.work(self._server_seconds(asked or i > 0, size * part))

    def push(self, servers: Sequence[SimulatedServer]) -> None:
        """Count a gradient that has arrived at all servers."""
        servers[0].work(self._costs.server_step)
        for server, part in zip(servers, self._parts, strict=True):
            server.work(self._server_seconds(True, self._work.push * part))

    def _worker_seconds(self, messages: int, size: float) -> float:
        return messages * self._costs.worker_message + size * self._costs.worker_byte

    def _server_seconds(self, message: bool, size: float) -> float:
        return message * self._costs.server_message + size * self._costs.server_byte


class LinkQueue(TurnRule):
    """Sends values to a few workers at a time over shared links, by the rule of real servers.

    All answers are of one `size`, and each keeps a server's processor busy for `worked` seconds. A
    worker that is cut off during its turn is overtaken after a while; `overtakes` says whether that
    can happen.
    """

    def __init__(
        self,
        network: Network,
        at_once: float,
        size: float = inf,
        worked: float = 0.0,
        *,
        overtakes: bool = True,
    ) -> None:
        super().__init__(at_once)
        self._network, self._size, self._worked = network, size, worked
        #: whether the beginnings of turns have to be recorded
        self._watches = overtakes or worked > 0
        self._waiting: deque[tuple[Route, Action, float]] = deque()
        self._sending = 0
        #: by number of a turn, its route and when it began
        self._under_way: dict[int, tuple[Route, float]] = {}
        self._number = count()

    def send(self, route: Route, then: Action, later: float = 0.0) -> None:
        """Send over `route` when its turn has come, then call `then`."""
        if not self.waits(self._size):
            route.send(then, later)
        elif self.may_begin(self._sending):
            self._sending += 1
            self._begin(route, then, later)
        else:
            self._waiting.append((route, then, later))

    def _begin(self, route: Route, then: Action, later: float) -> None:
        if not self._watches:
            route.send(then, later, self._next)
            return
        number = next(self._number)
        self._under_way[number] = (route, self._network.clock.now)
        if self._network.cuts:
            self._watch_turn(number)
        route.send(then, later, partial(self._passed, number))

    def _passed(self, number: int) -> None:
        """End a turn whose bytes have passed, unless it was overtaken."""
        if number in self._under_way:
            _, begun = self._under_way.pop(number)
            # a server copies while it sends, so a turn takes at least as long as copying
            self.note(self._size, max(self._worked, self._network.clock.now - begun), self._worked)
            self._next()

    def _next(self) -> None:
        if self._waiting:
            self._begin(*self._waiting.popleft())
        else:
            self._sending -= 1

    def cut(self) -> None:
        """Watch the turns of a host that was cut off."""
        for number in self._under_way:
            self._watch_turn(number)

    def _watch_turn(self, number: int) -> None:
        if self._under_way[number][0].is_cut:
            self._network.clock.after(STILL, partial(self._overtake, number))

    def _overtake(self, number: int) -> None:
        """Overtake a turn whose route is still cut: nothing has arrived."""
        turn = self._under_way.get(number)
        if turn is not None and turn[0].is_cut and is_overtaken(0, STILL):
            del self._under_way[number]
            self._next()


class Trainer(Protocol):
    """The training inside a simulated job."""

    plan: TrainingPlan

    def shards(self) -> Sequence[OwnShard]:
        """The shard of each server, the coordinator's first; only one if all do the same."""

    def placement(self, worker: int, name: str) -> None:
        """A worker has joined under that name."""

    def fetch(self, worker: int, server: int, have: int) -> int:
        """Copy a server's newest values to a worker; returns their version."""

    def gradient(self, worker: int, epoch: int, ticket: Ticket) -> tuple[float, float, int]:
        """Compute a worker's gradient; returns weight, loss and number of examples."""

    def batches(self, epoch: int) -> int:
        """The number of global batches of an epoch; 0 if there is no such epoch."""

    def epoch_over(self, epoch: int, seconds: float) -> None:
        """All batches of an epoch have been applied."""


class _Alone(type(threading.RLock())):  # type: ignore[misc]
    """A condition for one thread, as fast as possible."""

    def notify_all(self) -> None:
        """Do nothing: no thread waits."""


class Weightless:
    """A shard that counts its updates and keeps no values."""

    def __init__(self) -> None:
        self.changed: threading.Condition = _Alone()
        self.failure: ReplicaError | None = None
        self.version = 0

    def training(self) -> TrainingPlan:
        raise UsageError("a shard without values has no plan")

    def obey(self, order: Order) -> float:
        self.version += order[0] in ("one", "apply")
        return 0.0

    def fetch(self, placement: str, have: int, after: int) -> tuple[dict[str, Any], list[Tensor]]:
        return {"version": self.version}, []


class Idle:
    """A training that takes time and computes nothing."""

    def __init__(self, scenario: Scenario) -> None:
        self.plan = timed_plan(scenario)
        self._shards = [Weightless() for _ in range(1 if scenario.alike else scenario.servers)]
        self._steps = scenario.steps

    def shards(self) -> Sequence[OwnShard]:
        return self._shards

    def placement(self, worker: int, name: str) -> None:
        """Do nothing: there are no values."""

    def fetch(self, worker: int, server: int, have: int) -> int:
        return self._shards[server].version

    def gradient(self, worker: int, epoch: int, ticket: Ticket) -> tuple[float, float, int]:
        return 1.0, 0.0, 1

    def batches(self, epoch: int) -> int:
        return self._steps if epoch == 1 else 0

    def epoch_over(self, epoch: int, seconds: float) -> None:
        """Do nothing: there is no score."""


def timed_plan(scenario: Scenario) -> TrainingPlan:
    """The plan of a job without parameters."""
    recipe = OptimizerRecipe("torch", "SGD", ({"lr": 0.1, "variables": [0]},))
    return TrainingPlan(
        ((1,),),
        "float32",
        (Piece(0, 0, 1, 0),),
        recipe,
        scenario.updates,
        scenario.workers,
        scenario.servers,
    )
