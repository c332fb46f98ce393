"""A simulated worker: what it does next, and when it has done it.

    ask ----> lead.offer ----> pull shards ----> compute ----> push ----> lead.push
     ^                                                                       |
     +-----------------------------------------------------------------------+
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, Protocol

from stratagem.plan.simulation.bill import Bill
from stratagem.plan.simulation.desk import Desk
from stratagem.plan.simulation.faults import Cut, Pause, after, joined
from stratagem.plan.simulation.scenario import Event, Scenario
from stratagem.plan.simulation.spread import Draws
from stratagem.plan.simulation.trains import Trains
from stratagem.rules.push import Push, Ticket
from stratagem.rules.updates import Asynchronous
from stratagem.strategies.parameters.lead import Lead
from stratagem.strategies.parameters.parties import Attendee
from stratagem.wire.simulated import Action, Clock, Flow, Network, Route, Turns


class Job(Protocol):
    """What a worker is part of."""

    scenario: Scenario
    trains: Trains
    clock: Clock
    network: Network
    turns: Turns
    desks: list[Desk]
    lead: Lead
    trace: list[Event] | None

    def note(self, what: str, worker: int, *numbers: Any) -> None:
        """Write into the trace what happened."""

    def offer(self, worker: Worker) -> None:
        """At the lead: give it a ticket, or let it wait."""

    def changed(self) -> None:
        """Something was decided: others may go on."""

    def leave(self, attendee: Attendee) -> None:
        """It is gone."""


class Worker:
    """One process at a time, and its steps."""

    def __init__(self, office: Job, number: int) -> None:
        scenario = office.scenario
        self.office, self.number = office, number
        self.host = scenario.topology.host(number)
        #: grows when its process ends or starts, so that what was meant for the last one is void
        self.life = 0
        self.alive = False
        self.epoch = 0
        self.asked = 0.0
        self.have: list[int] = []
        self.attendee: Attendee
        self._clock = office.clock
        self._draws = Draws(
            scenario.work.compute, scenario.seed, number, scenario.slow.get(number, 1.0)
        )
        #: when this process stands still; when its host is off the network; when it is not heard of
        self._stalls: list[Pause] = []
        self._cut_until = 0.0
        self._silences: list[Pause] = []
        self._ticket: Ticket | None = None
        #: grows with all that it begins, so that what belongs to the last is void
        self._round = 0
        self._pending = 0
        #: nothing happens between the arrival of values and the gradient: one event for both
        self._at_once = all(r >= 1.0 for _, r in scenario.work.buckets)
        #: where the gradient leaves in one piece, its arrival is the push
        self._whole = self._at_once and len(scenario.work.buckets) == 1
        self._looks_ahead = isinstance(scenario.updates, Asynchronous)
        self._bill = Bill(scenario)
        #: until then nothing can come between two things
        self._calm = min((fault.at for fault in scenario.faults), default=inf)
        self._offer = partial(office.offer, self)
        self._lay_routes()

    def _lay_routes(self) -> None:
        office, work = self.office, self.office.scenario.work
        lead = office.desks[0].host
        self._word = Route(office.network, [Flow(self.host, lead, 0.0, 0.0)])
        self._word_back = Route(office.network, [Flow(lead, self.host, 0.0, 0.0)])
        self._pulls = self._route(
            [Flow(host, self.host, work.fetched * theirs, work.fetched * mine)
             for host, theirs, mine in self._shares()], work.fetched,
        )  # fmt: skip
        self._pushes = [
            (ready, self._route(
                [Flow(self.host, host, work.push * part * mine, work.push * part * theirs)
                 for host, theirs, mine in self._shares()], work.push,
            ))
            for part, ready in work.buckets
        ]  # fmt: skip

    def _route(self, flows: list[Flow], size: float) -> Route:
        """Where one message at a time passes this worker's own link, it needs no sharing."""
        office, shape = self.office, self.office.scenario.topology
        if shape.per_host > 1 or shape.per_rack or len(office.scenario.work.buckets) > 1:
            return Route(office.network, flows)
        theirs, mine = (
            [flow._replace(out=0.0) if (flow.source == self.host) == ours
             else flow._replace(into=0.0) for flow in flows]
            for ours in (True, False)
        )  # fmt: skip
        cuts = [fault.at for fault in office.scenario.faults if isinstance(fault, Cut)]
        least = size / shape.rate
        return Route(office.network, theirs, least, mine if cuts else (), min(cuts, default=inf))

    def _shares(self) -> list[tuple[int, float, float]]:
        """By server: its host, its part of the bytes, and how much of them passes this end."""
        scenario, desks = self.office.scenario, self.office.desks
        if scenario.alike:
            return [(desks[0].host, scenario.parts[0], 1.0)]
        return [(d.host, p, p) for d, p in zip(desks, scenario.parts, strict=True)]

    # --- its process ------------------------------------------------------------------------

    def start(self) -> None:
        """A process comes up and joins the training."""
        if self.alive or not self.office.lead.running:
            return
        self.life += 1
        self.alive, self.epoch, self._ticket = True, 0, None
        self._stalls, self._silences = [], []
        self.have = [-1] * len(self.office.desks)
        name = f"worker {self.number} #{self.life}"
        self.attendee = Attendee(self.number, name, name, self._hear, 0)
        self.office.trains.seat(self.number, name)
        self.office.lead.join(self.attendee)
        self.office.note("join", self.number)
        self._ask()
        self.office.changed()

    def die(self) -> None:
        """The process ends; the lead notices at once that its connection is closed."""
        if self.alive:
            self.life += 1
            self.alive = False
            self.office.leave(self.attendee)

    def kill(self, back: float | None) -> None:
        """Its process ends, if there is one; so many seconds later another comes, or none does."""
        if self.alive:
            self.die()
            self._stalls = []
            if back is not None:
                self._clock.after(back, self._come_back)

    def stall(self, seconds: float) -> None:
        """It stands still; whatever it would do is done afterwards."""
        if self.alive or self._stands_still:
            joined(self._stalls, self._clock.now, self._clock.now + seconds)
            self._fall_silent(seconds)

    def cut_off(self, seconds: float) -> None:
        """Its host is off the network; no process there can join before that is over."""
        self._cut_until = max(self._cut_until, self._clock.now + seconds)
        self._fall_silent(seconds)

    def _fall_silent(self, seconds: float) -> None:
        """Who is silent too long, for whatever reasons, is given up."""
        now, patience = self._clock.now, self.office.scenario.patience
        joined(self._silences, now, now + seconds)
        since, until = self._silences[-1]
        if self.alive and until - since > patience:
            self._clock.at(since + patience, partial(self._given_up, self.life))

    def _given_up(self, life: int) -> None:
        """It finds that when it is back, and starts anew."""
        if life == self.life:
            self.die()
            self._come_back()

    def _come_back(self) -> None:
        """Start, as soon as that can be."""
        until = max(self._cut_until, self._stalls[-1][1] if self._stalls else 0.0)
        if until > self._clock.now:
            self._clock.at(until, self._come_back)
        else:
            self.start()

    @property
    def _stands_still(self) -> bool:
        return bool(self._stalls) and self._stalls[-1][1] > self._clock.now

    # --- a step -----------------------------------------------------------------------------

    def _ask(self) -> None:
        self._round += 1
        self.asked = self._clock.now
        self._word.send(self._from_me(self._offer))

    def take(self, ticket: Ticket, epoch: int, *, asked: bool = True) -> None:
        """A ticket, and with it new values from every server that has some.

        Who did not ask for it got it with the answer to a push.
        """
        office = self.office
        if office.trace is not None:
            office.note("take", self.number, ticket.serial)
        self._ticket, self._ticket_epoch = ticket, epoch
        self._round += 1
        before, fetch, desks = self.have, office.trains.fetch, office.desks
        if len(desks) == 1:
            self.have = [fetch(self.number, 0, before[0])]
        else:
            self.have = [fetch(self.number, i, have) for i, have in enumerate(before)]
        news = self.have != before
        if not self._bill.none:
            self._bill.pull(desks, asked=asked, news=news)
        if self._at_once:
            self._pending = 1 + len(self._pushes)
            seconds = self._bill.received + self._draws.next() + self._bill.sent
            then: Action = partial(
                self._when_done, self.life, self._round, seconds, self._computed
            )
        else:
            seconds, then = 0.0, self._mine(self._arrived)
        free = desks[0].free if len(desks) == 1 else max(desk.free for desk in desks)
        if free > self._clock.now:
            self._clock.at(free, partial(self._send_values, news, then, seconds))
        else:
            self._send_values(news, then, seconds)

    def _send_values(self, news: bool, then: Action, seconds: float) -> None:
        """At the servers: what it has not got, or a word that there is nothing new."""
        if news:
            self.office.turns.send(self._pulls, then, seconds)
        else:
            self._word_back.send(then, seconds)

    def _arrived(self) -> None:
        begun, seconds = self._bill.received, self._draws.next()
        self._pending = 1 + len(self._pushes)
        for ready, way in self._pushes:
            if ready < 1.0:
                begin = partial(way.send, self._from_me(self._sent))
                part = begun + seconds * ready
                self._clock.after(part, self._busy(part, begin))
        whole = begun + seconds + self._bill.sent
        self._clock.after(whole, self._busy(whole, self._computed))

    def _computed(self) -> None:
        assert self._ticket is not None
        self._result = self.office.trains.gradient(self.number, self._ticket_epoch, self._ticket)
        if self._whole:
            self._pushes[0][1].send(partial(self._if_same, self.life, self._round, self._push))
            return
        for ready, way in self._pushes:
            if ready >= 1.0:
                way.send(self._from_me(self._sent))
        self._sent()

    def _sent(self) -> None:
        self._pending -= 1
        if not self._pending:
            self._push()

    def _push(self) -> None:
        """At the lead: all of the gradient has come."""
        office, ticket = self.office, self._ticket
        assert ticket is not None
        weight, loss, examples = self._result
        if not self._bill.none:
            self._bill.push(office.desks)
        push = Push(self.number, ticket.serial, min(self.have), weight)
        ahead = (self.epoch, self.have[0]) if self._looks_ahead else None
        told, _ = office.lead.push(self.attendee, push, {"notes": [loss, examples]}, ahead)
        if office.trace is not None:
            office.note("push", self.number, ticket.serial, told["tau"], told["kept"])
        self._ticket = None
        self._round += 1
        if "next" in told:
            self.take(told["next"]["ticket"], told["next"]["epoch"], asked=False)
        else:
            self._answered(max(office.desks[0].free, self._clock.now))
        office.changed()

    def _answered(self, at: float) -> None:
        """At the lead: its word goes to the worker, who asks for more."""
        heard = at + self._word_back.latency
        if heard + self._word.latency >= self._calm:
            self._clock.at(heard, self._mine(self._ask))
        else:  # nothing can come between: there and back in one event
            self._round += 1
            self.asked = heard
            self._clock.at(heard + self._word.latency, self._from_me(self._offer))

    # --- too late ---------------------------------------------------------------------------

    def _hear(self, news: Any) -> bool:
        """At the lead: word is sent that the step was made without this worker."""
        if self.office.scenario.cancels and self._ticket is not None:
            self._word_back.send(self._mine(self._stop))
        return True

    def _stop(self) -> None:
        """Give the ticket up, tell the lead, and ask for another."""
        assert self._ticket is not None
        serial = self._ticket.serial
        self._round += 1
        self._word.send(self._from_me(partial(self._abandoned, serial)))

    def _abandoned(self, serial: int) -> None:
        self.office.lead.abandon(self.attendee, serial)
        self.office.note("abandon", self.number, serial)
        self._ticket = None
        self.office.changed()
        self._answered(self._clock.now)

    # --- time -------------------------------------------------------------------------------

    def _from_me(self, action: Callable[[], None]) -> Action:
        """Happens elsewhere, if this process and its ticket are still the same then."""
        return partial(self._if_same, self.life, self._round, action)

    def _if_same(self, life: int, round: int, action: Action) -> None:
        if life == self.life and round == self._round:
            action()

    def _mine(self, action: Callable[[], None]) -> Action:
        """Happens here: not while the worker stands still."""
        return partial(self._when_awake, self.life, self._round, action)

    def _when_awake(self, life: int, round: int, action: Action) -> None:
        if life != self.life or round != self._round:
            return
        if self._stalls and self._stands_still:
            self._clock.at(self._stalls[-1][1], partial(self._when_awake, life, round, action))
        else:
            action()

    def _busy(self, seconds: float, action: Callable[[], None]) -> Action:
        """Happens here, so many seconds after it has begun: more, if it stands still meanwhile."""
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
                self._clock.at(
                    end, partial(self._when_done, life, round, seconds, action, begun)
                )
                return
        action()
