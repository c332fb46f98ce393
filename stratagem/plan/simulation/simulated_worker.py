"""A simulated worker: its steps, faults and messages in virtual time.

ask ----> coordinator.offer ----> pull shards ----> compute ----> push ----> coordinator.push
 ^                                                                       |
 +-----------------------------------------------------------------------+
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, Protocol

from stratagem.plan.simulation.scenario import Cut, Event, Pause, Scenario, after, joined
from stratagem.plan.simulation.simulated_server import (
    LinkQueue,
    MessageCosts,
    SimulatedServer,
    Trainer,
)
from stratagem.plan.simulation.spread import Draws
from stratagem.rules.tickets import Push, Ticket
from stratagem.rules.updates import Asynchronous
from stratagem.servers.coordinator import Coordinator
from stratagem.servers.participants import Participant
from stratagem.wire.simulated import Action, Clock, Flow, Network, Route


class SimulatedJob(Protocol):
    """The job that a worker is part of."""

    scenario: Scenario
    trains: Trainer
    clock: Clock
    network: Network
    turns: LinkQueue
    servers: list[SimulatedServer]
    coordinator: Coordinator
    trace: list[Event] | None

    def note(self, what: str, worker: int, *numbers: Any) -> None:
        """Record an event in the trace."""

    def offer(self, worker: SimulatedWorker) -> None:
        """At the coordinator: give the worker a ticket, or let it wait."""

    def changed(self) -> None:
        """The ledger has changed: waiting workers may go on."""

    def leave(self, attendee: Participant) -> None:
        """A worker has left."""


class SimulatedWorker:
    """A worker: at most one process at a time, and its steps."""

    def __init__(self, job: SimulatedJob, number: int) -> None:
        scenario = job.scenario
        self.job, self.number = job, number
        self.host = scenario.topology.host(number)
        #: grows when the process ends or starts, so that events of an earlier process are void
        self.life = 0
        self.alive = False
        self.epoch = 0
        self.asked = 0.0
        self.have: list[int] = []
        self.attendee: Participant
        self._clock = job.clock
        self._draws = Draws(
            scenario.work.compute, scenario.seed, number, scenario.slow.get(number, 1.0)
        )
        #: when this process stalls; until when its host is off the network; when it is silent
        self._stalls: list[Pause] = []
        self._cut_until = 0.0
        self._silences: list[Pause] = []
        self._ticket: Ticket | None = None
        #: grows with each action, so that events of the previous one are void
        self._round = 0
        self._pending = 0
        #: all buckets are ready at the end of a step, so that one event is enough for it
        self._at_once = all(r >= 1.0 for _, r in scenario.work.buckets)
        self._looks_ahead = isinstance(scenario.updates, Asynchronous)
        self._costs = MessageCosts(scenario)
        #: the time of the first fault: before it, two events can be one
        self._first_fault = min((fault.at for fault in scenario.faults), default=inf)
        self._offer = partial(job.offer, self)
        network, coordinator = job.network, job.servers[0].host
        self._request_route = Route(network, [Flow(self.host, coordinator, 0.0, 0.0)])
        self._reply_route = Route(network, [Flow(coordinator, self.host, 0.0, 0.0)])
        self._pulls, self._pushes = _pull_route(job, self.host), _push_routes(job, self.host)

    # --- the process ------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process that joins the training, as soon as its host is on the network."""
        if self.alive or not self.job.coordinator.running:
            return
        until = max(self._cut_until, self._stalls[-1][1] if self._stalls else 0.0)
        if until > self._clock.now:
            self._clock.at(until, self.start)
            return
        self.life += 1
        self.alive, self.epoch, self._ticket = True, 0, None
        self._stalls, self._silences = [], []
        self.have = [-1] * len(self.job.servers)
        name = f"worker {self.number} #{self.life}"
        self.attendee = Participant(self.number, name, name, self._hear, 0)
        self.job.trains.placement(self.number, name)
        self.job.coordinator.join(self.attendee)
        self.job.note("join", self.number)
        self._ask()
        self.job.changed()

    def kill(self, back: float | None) -> None:
        """End the process, if there is one; `back` seconds later start another (None: never).

        The coordinator notices at once that its connection is closed.
        """
        if self.alive:
            self.life += 1
            self.alive = False
            self.job.leave(self.attendee)
            self._stalls = []
            if back is not None:
                self._clock.after(back, self.start)

    def interrupt(self, seconds: float, *, cut: bool) -> None:
        """Stall the process for `seconds`, or take its host off the network (`cut`).

        The process goes on afterwards; no process can join on a host that is cut off. A worker that
        is silent for longer than `patience`, for whatever reasons, is lost.
        """
        now, patience = self._clock.now, self.job.scenario.patience
        if cut:
            self._cut_until = max(self._cut_until, now + seconds)
        elif self.alive or (self._stalls and self._stalls[-1][1] > now):
            joined(self._stalls, now, now + seconds)
        else:
            return
        joined(self._silences, now, now + seconds)
        since, until = self._silences[-1]
        if self.alive and until - since > patience:
            self._clock.at(since + patience, partial(self._given_up, self.life))

    def _given_up(self, life: int) -> None:
        """Drop the process as lost; it joins again when its stalls are over."""
        if life == self.life:
            stalls = self._stalls
            self.kill(None)
            self._stalls = stalls
            self.start()

    # --- a step -----------------------------------------------------------------------------

    def _ask(self) -> None:
        self._round += 1
        self.asked = self._clock.now
        self._request_route.send(self._remote_action(self._offer))

    def take(self, ticket: Ticket, epoch: int, *, asked: bool = True) -> None:
        """Take a ticket, and new values from every server that has some.

        A ticket that was not `asked` for came with the answer to a push.
        """
        job = self.job
        if job.trace is not None:
            job.note("take", self.number, ticket.serial)
        self._ticket, self._ticket_epoch = ticket, epoch
        self._round += 1
        before, fetch, servers = self.have, job.trains.fetch, job.servers
        if len(servers) == 1:
            self.have = [fetch(self.number, 0, before[0])]
        else:
            self.have = [fetch(self.number, i, have) for i, have in enumerate(before)]
        news = self.have != before
        if not self._costs.none:
            self._costs.pull(servers, asked=asked, news=news)
        if self._at_once:
            self._pending = 1 + len(self._pushes)
            seconds = self._costs.received + self._draws.next() + self._costs.sent
            then: Action = partial(self._when_done, self.life, self._round, seconds, self._computed)
        else:
            seconds, then = 0.0, self._busy(0.0, self._arrived)
        free = servers[0].free if len(servers) == 1 else max(server.free for server in servers)
        if free > self._clock.now:
            self._clock.at(free, partial(self._send_values, news, then, seconds))
        else:
            self._send_values(news, then, seconds)

    def _send_values(self, news: bool, then: Action, seconds: float) -> None:
        """At the servers: send the values that changed, or a word that none did."""
        if news:
            self.job.turns.send(self._pulls, then, seconds)
        else:
            self._reply_route.send(then, seconds)

    def _arrived(self) -> None:
        begun, seconds = self._costs.received, self._draws.next()
        self._pending = 1 + len(self._pushes)
        for ready, way in self._pushes:
            if ready < 1.0:
                begin = partial(way.send, self._remote_action(self._sent))
                part = begun + seconds * ready
                self._clock.after(part, self._busy(part, begin))
        whole = begun + seconds + self._costs.sent
        self._clock.after(whole, self._busy(whole, self._computed))

    def _computed(self) -> None:
        assert self._ticket is not None
        self._result = self.job.trains.gradient(self.number, self._ticket_epoch, self._ticket)
        for ready, way in self._pushes:
            if ready >= 1.0:
                way.send(self._remote_action(self._sent))
        self._sent()

    def _sent(self) -> None:
        self._pending -= 1
        if not self._pending:
            self._push()

    def _push(self) -> None:
        """At the coordinator: the whole gradient has arrived."""
        job, ticket = self.job, self._ticket
        assert ticket is not None
        weight, loss, examples = self._result
        if not self._costs.none:
            self._costs.push(job.servers)
        push = Push(self.number, ticket.serial, min(self.have), weight)
        ahead = (self.epoch, self.have[0]) if self._looks_ahead else None
        told, _ = job.coordinator.push(self.attendee, push, (loss, examples), next=ahead)
        if job.trace is not None:
            job.note("push", self.number, ticket.serial, told["tau"], told["kept"])
        self._ticket = None
        self._round += 1
        if "next" in told:
            self.take(told["next"]["ticket"], told["next"]["epoch"], asked=False)
        else:
            self._answered(max(job.servers[0].free, self._clock.now))
        job.changed()

    def _answered(self, at: float) -> None:
        """At the coordinator: answer the push; the worker asks for its next ticket."""
        heard = at + self._reply_route.latency
        if heard + self._request_route.latency >= self._first_fault:
            self._clock.at(heard, self._busy(0.0, self._ask))
        else:  # no fault can come between: one event for the round trip
            self._round += 1
            self.asked = heard
            self._clock.at(heard + self._request_route.latency, self._remote_action(self._offer))

    # --- too late ---------------------------------------------------------------------------

    def _hear(self, news: Any) -> bool:
        """At the coordinator: tell the worker that the step was made without it."""
        if self.job.scenario.cancels and self._ticket is not None:
            self._reply_route.send(self._busy(0.0, self._stop))
        return True

    def _stop(self) -> None:
        """Give the ticket up, tell the coordinator, and ask for another."""
        assert self._ticket is not None
        serial = self._ticket.serial
        self._round += 1
        self._request_route.send(self._remote_action(partial(self._abandoned, serial)))

    def _abandoned(self, serial: int) -> None:
        self.job.coordinator.abandon(self.attendee, serial)
        self.job.note("abandon", self.number, serial)
        self._ticket = None
        self.job.changed()
        self._answered(self._clock.now)

    # --- time -------------------------------------------------------------------------------

    def _remote_action(self, action: Callable[[], None]) -> Action:
        """Return an action at another host, void if process or round have changed by then."""
        return partial(self._if_same, self.life, self._round, action)

    def _if_same(self, life: int, round: int, action: Action) -> None:
        if life == self.life and round == self._round:
            action()

    def _busy(self, seconds: float, action: Callable[[], None]) -> Action:
        """Return an action of this process that takes `seconds` seconds, or more if it stalls."""
        return partial(self._when_done, self.life, self._round, seconds, action)

    def _when_done(
        self, life: int, round: int, seconds: float, action: Action, begun: float | None = None
    ) -> None:
        if life != self.life or round != self._round:
            return
        if self._stalls:
            begun = self._clock.now - seconds if begun is None else begun
            end = after(begun, seconds, self._stalls)
            if end > self._clock.now:
                self._clock.at(end, partial(self._when_done, life, round, seconds, action, begun))
                return
        action()


def _pull_route(job: SimulatedJob, host: int) -> Route:
    """Return the route of new values from all servers to a worker's host."""
    size = job.scenario.work.fetched
    flows = [Flow(there, host, size * out, size * into) for there, out, into in _shares(job)]
    return _route(job, host, flows, size)


def _push_routes(job: SimulatedJob, host: int) -> list[tuple[float, Route]]:
    """Return when each bucket is ready, and its route from a worker's host to all servers."""
    work = job.scenario.work
    return [
        (
            ready,
            _route(
                job,
                host,
                [
                    Flow(host, there, work.push * part * out, work.push * part * into)
                    for there, into, out in _shares(job)
                ],
                work.push,
            ),
        )
        for part, ready in work.buckets
    ]


def _shares(job: SimulatedJob) -> list[tuple[int, float, float]]:
    """Return each server's host, part of the bytes, and part that passes the worker's link."""
    scenario, servers = job.scenario, job.servers
    if scenario.alike:
        return [(servers[0].host, scenario.parts[0], 1.0)]
    return [(s.host, p, p) for s, p in zip(servers, scenario.parts, strict=True)]


def _route(job: SimulatedJob, host: int, flows: list[Flow], size: float) -> Route:
    """Return a route; it does not share the worker's link if that has one message at a time."""
    shape = job.scenario.topology
    if shape.per_host > 1 or shape.per_rack or len(job.scenario.work.buckets) > 1:
        return Route(job.network, flows)
    theirs, mine = (
        [
            flow._replace(out=0.0) if (flow.source == host) == ours else flow._replace(into=0.0)
            for flow in flows
        ]
        for ours in (True, False)
    )
    cuts = [fault.at for fault in job.scenario.faults if isinstance(fault, Cut)]
    least = size / shape.rate
    return Route(job.network, theirs, least, mine if cuts else (), min(cuts, default=inf))
