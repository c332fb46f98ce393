"""The ledger under anything that may happen: random workers, work, deaths, late and stray pushes.

At every moment the books balance, no ticket is lost or counted twice, and somebody may act. In
the end what is left is drained, and every ticket of the epoch was applied exactly once.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stratagem.rules.ledger import Ledger
from stratagem.rules.tickets import Push, Ticket, Update
from stratagem.rules.updates import (
    Asynchronous,
    DelayCompensated,
    Drop,
    GapAware,
    LowerRate,
    Ramp,
    ScaleDown,
    Synchronous,
    Updates,
)

WORKERS = st.integers(0, 5)
POLICIES = st.lists(
    st.sampled_from(
        [
            Drop(),
            Drop(0),
            Drop(1),
            ScaleDown(),
            ScaleDown(linear=True),
            LowerRate(),
            LowerRate(0.5),
            DelayCompensated(),
            GapAware(),
        ]
    ),
    max_size=3,
)
RAMPS = st.none() | st.builds(Ramp, st.integers(0, 12))
GATES: dict[str, st.SearchStrategy[Updates]] = {
    "all": st.builds(Synchronous, st.just(0), st.booleans()),
    "spares": st.builds(Synchronous, st.integers(1, 3), st.booleans()),
    "any": st.builds(Asynchronous, POLICIES, RAMPS, st.none(), st.integers(1, 4), st.booleans()),
    "bounded": st.builds(
        Asynchronous, POLICIES, RAMPS, st.integers(0, 3), st.integers(1, 4), st.booleans()
    ),
}


class Books(RuleBasedStateMachine):
    """A ledger, and an independent record of what happens."""

    gate: st.SearchStrategy[Updates]

    @initialize(
        data=st.data(),
        expected=st.integers(0, 5),
        start=st.sampled_from([0, 7]),
        here=st.sets(WORKERS),
        batches=st.integers(0, 20),
        parts=st.integers(1, 4),
    )
    def begin(
        self,
        data: st.DataObject,
        expected: int,
        start: int,
        here: set[int],
        batches: int,
        parts: int,
    ) -> None:
        self.updates = data.draw(self.gate)
        self.spares = getattr(self.updates, "spares", 0)
        self.expected = expected if expected > self.spares else 0
        self.ledger = Ledger(self.updates, start, self.expected)
        self.start = self.version = start
        self.alive: set[int] = set()
        self.tickets: dict[int, Ticket] = {}
        self.dealt = 0
        self.closed = False
        self.pulled: dict[int, int] = {}
        self.sent: list[Push] = []
        self.kept: set[int] = set()
        self.skipped: set[int] = set()
        self.applied: dict[int, int] = {}
        self.refused: dict[int, int] = {}
        self.received = 0
        for worker in sorted(here):
            self.join(worker)
        self.deal(batches, parts)

    def ripe(self) -> None:
        left = self.ledger.states.left
        alive = len(self.alive)
        update = self.ledger.ripe()
        if update is None:
            return
        self.version += 1
        self.check(update, left, alive)
        for push in update.pushes:
            assert push.serial not in self.applied, "a ticket was applied twice"
            assert push.serial in self.kept, "a push was applied that was not kept"
            self.applied[push.serial] = update.version
        assert self.ledger.ripe() is None

    def check(self, update: Update, left: int, alive: int) -> None:
        """Check what an update is made of."""
        assert update.version == self.version == self.ledger.version
        assert update.divisor == sum(push.weight for push in update.pushes)
        assert 0 < update.rate <= 1
        count = len(update.pushes)
        if isinstance(self.updates, Asynchronous):
            number = self.updates.buffer
            assert count == (min(number, left) if self.closed else number)
            return
        assert all(push.version == update.version - 1 for push in update.pushes)
        if self.spares:
            number = max(1, (self.expected or alive) - self.spares)
            # without an expected number, N follows who is here, and may fall below what is kept
            exact = count == (min(number, left) if self.closed else number)
            assert exact or (not self.expected and count > number)
        else:
            batches = {self.tickets[push.serial].first for push in update.pushes}
            assert len(batches) == 1
            if self.updates.requeue:
                first = self.tickets[update.pushes[0].serial].first
                parts = self.tickets[first].parts
                assert count + len(self.skipped & {*range(first, first + parts)}) == parts

    def acted(self, *workers: int) -> None:
        for worker in workers:
            self.refused.pop(worker, None)

    @rule(worker=WORKERS)
    def join(self, worker: int) -> None:
        self.ledger.join(worker)
        self.alive.add(worker)
        self.acted(worker)
        self.ripe()

    @rule(worker=WORKERS)
    def leave(self, worker: int) -> None:
        self.ledger.leave(worker)
        self.alive.discard(worker)
        self.acted(worker)
        self.ripe()

    @precondition(lambda self: not self.closed)
    @rule(batches=st.integers(1, 9), parts=st.integers(1, 4))
    def deal(self, batches: int, parts: int) -> None:
        for batch in range(batches):
            self.ledger.deal(batch, parts)
            for part in range(parts):
                self.tickets[self.dealt] = Ticket(self.dealt, batch, part, parts)
                self.dealt += 1

    @rule()
    def close(self) -> None:
        self.ledger.close_epoch()
        self.closed = True
        self.ripe()

    @precondition(lambda self: self.closed and self.ledger.over)
    @rule()
    def open(self) -> None:
        self.ledger.open_epoch()
        self.closed = False
        self.ripe()

    def take(self, worker: int) -> None:
        before = self.ledger.holds(worker)
        may = self.ledger.offer(worker)
        ticket = self.ledger.take(worker)
        assert may == ticket
        if ticket is None:
            self.refused[worker] = self.ledger.turn
            return
        assert ticket == self.tickets[ticket.serial] and ticket.serial not in self.applied
        assert ticket.serial not in self.skipped
        assert ticket.serial not in self.kept or ticket == before
        assert before is None or before == ticket
        assert not self.ledger.late(worker)
        self.acted(worker)
        if before is None:
            self.pulled[worker] = self.ledger.version

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def one_takes(self, data: st.DataObject) -> None:
        self.take(data.draw(st.sampled_from(sorted(self.alive))))

    @rule()
    def all_take(self) -> None:
        for worker in sorted(self.alive):
            self.take(worker)

    def holders(self) -> list[int]:
        return [worker for worker in sorted(self.alive) if self.ledger.holds(worker)]

    @precondition(lambda self: self.holders())
    @rule(data=st.data(), weight=st.integers(0, 3), wrong=st.sampled_from([0, 1, -1]))
    def one_pushes(self, data: st.DataObject, weight: int, wrong: int) -> None:
        self.push(data.draw(st.sampled_from(self.holders())), weight, wrong)

    @rule(seed=st.integers(0, 2**32))
    def work_long(self, seed: int) -> None:
        self.work(seed, 60)

    def work(self, seed: int, moves: int) -> None:
        """Ordinary work: some workers are quick, some slow, a few give up or fail."""
        chance = random.Random(seed)
        if not self.closed and not self.ledger.states.queue:
            self.deal(chance.randint(1, 15), chance.randint(1, 4))
        weights = [1 / (1 + 3 * chance.random()) ** 3 for _ in range(6)]
        for _ in range(moves):
            worker = chance.choices(range(6), weights)[0]
            ticket = self.ledger.holds(worker)
            if worker not in self.alive or chance.random() < 0.02:
                self.join(worker)
            elif ticket is None:
                if self.ledger.late(worker) and chance.random() < 0.7:
                    self.late_work(worker, chance)
                self.take(worker)
            elif chance.random() < 0.9:
                self.push(worker, chance.randint(0, 3), 0)
            elif chance.random() < 0.3:
                self.skip(worker, ticket.serial)
            elif chance.random() < 0.5:
                self.abandon(worker, ticket.serial)
            else:
                self.leave(worker)
            self.all_is_well()

    @rule(seed=st.integers(0, 2**32))
    def work_on(self, seed: int) -> None:
        self.work(seed, 30)

    def late_work(self, worker: int, chance: random.Random) -> None:
        """A late worker stops, or pushes all the same."""
        serial = self.ledger.states.active_workers.members[worker].revoked
        assert serial is not None
        if chance.random() < 0.5:
            self.abandon(worker, serial)
        else:
            self.stray(Push(worker, serial, self.pulled[worker], 1.0))
        assert not self.ledger.late(worker)

    def push(self, worker: int, weight: int, wrong: int) -> None:
        ticket = self.ledger.holds(worker)
        assert ticket is not None
        version = self.pulled[worker] + wrong
        push = Push(worker, ticket.serial, version, float(weight))
        verdict = self.ledger.push(push)
        self.received += 1
        self.sent.append(push)
        self.acted(worker)
        assert verdict.tau == self.ledger.version - version
        assert verdict.kept == (verdict.why == "")
        if verdict.kept:
            assert verdict.tau >= 0 and 0 < verdict.factor <= 1 and 0 < verdict.rate <= 1
            assert ticket.serial not in self.kept, "a ticket was kept twice"
            self.kept.add(ticket.serial)
        else:
            assert verdict.factor == 0
        assert self.ledger.holds(worker) is None
        if weight == 3:
            self.stray(push)
        self.ripe()

    def stray(self, push: Push) -> None:
        """A push that must be dropped, and change nothing else."""
        left, before = self.ledger.states.left, self.ledger.recorder.stats()
        verdict = self.ledger.push(push)
        self.received += 1
        after = self.ledger.recorder.stats()
        assert not verdict.kept and verdict.why
        assert self.ledger.states.left == left
        assert (after.requeued, after.lost) == (before.requeued, before.lost)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def push_again(self, data: st.DataObject) -> None:
        push = data.draw(st.sampled_from(self.sent))
        held = self.ledger.holds(push.worker)
        if held is None or held.serial != push.serial:
            self.stray(push)
            self.ripe()

    @rule(worker=WORKERS, serial=st.integers(0, 80), version=st.integers(0, 10))
    def push_nonsense(self, worker: int, serial: int, version: int) -> None:
        held = self.ledger.holds(worker)
        if held is None or held.serial != serial:
            self.stray(Push(worker, serial, version, 1.0))
            self.ripe()

    @rule(worker=WORKERS, serial=st.integers(0, 80))
    def abandon(self, worker: int, serial: int) -> None:
        held = self.ledger.holds(worker)
        own = held is not None and held.serial == serial
        late = self.ledger.late(worker)
        before = self.ledger.recorder.stats().abandoned
        self.ledger.abandon(worker, serial)
        if own:
            assert self.ledger.holds(worker) is None
            self.acted(worker)
        elif not late:
            assert self.ledger.recorder.stats().abandoned == before
        self.ripe()

    @precondition(lambda self: self.holders())
    @rule(data=st.data())
    def abandon_own(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.holders()))
        ticket = self.ledger.holds(worker)
        assert ticket is not None
        self.abandon(worker, ticket.serial)

    @rule(worker=WORKERS, serial=st.integers(0, 80))
    def skip(self, worker: int, serial: int) -> None:
        held = self.ledger.holds(worker)
        before = self.ledger.states.left
        self.ledger.skip(worker, serial)
        if held is not None and held.serial == serial:
            assert self.ledger.holds(worker) is None and self.ledger.states.left == before - 1
            self.skipped.add(serial)
            self.acted(worker)
        self.ripe()

    @precondition(lambda self: self.holders())
    @rule(data=st.data())
    def skip_own(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.holders()))
        ticket = self.ledger.holds(worker)
        assert ticket is not None
        self.skip(worker, ticket.serial)

    @invariant()
    def all_is_well(self) -> None:
        self.books_balance()
        self.somebody_may_act()
        self.nobody_is_forgotten()
        self.counts_are_true()

    def books_balance(self) -> None:
        stats = self.ledger.recorder.stats()
        assert stats.received == stats.applied + stats.dropped + stats.buffered == self.received
        assert stats.applied == len(self.applied) and stats.buffered == len(
            self.kept - set(self.applied)
        )
        assert stats.updates == self.version - self.start == self.ledger.version - self.start
        assert sum(stats.staleness.values()) == stats.received
        for line in stats.by_worker.values():
            assert line["received"] == line["applied"] + line["dropped"] + line["buffered"]
        assert stats.skipped == len(self.skipped) and not self.skipped & self.kept
        done = len(self.applied) + len(self.skipped)
        assert self.ledger.states.left == self.dealt - done - stats.lost
        if self.updates.requeue:
            assert not stats.lost

    def somebody_may_act(self) -> None:
        if not self.alive or self.ledger.over:
            return
        if self.closed or self.ledger.states.queue:
            assert any(self.ledger.offer(worker) for worker in self.alive)

    def nobody_is_forgotten(self) -> None:
        for worker, turn in self.refused.items():
            if self.ledger.turn == turn:
                assert not self.ledger.offer(worker), "allowed now, and nobody said so"

    def counts_are_true(self) -> None:
        """Counters equal what a search of the state finds."""
        table = self.ledger.states
        members = list(table.active_workers._order)
        assert {member.worker for member in members} == self.alive
        assert sum(len(hand.members) - 1 for hand in table.held.values()) <= self.spares
        assert table.served == sum(member.stamp == table.version for member in members)
        assert [m.admitted for m in members] == [
            rank < table.active_workers.admitted for rank in range(len(members))
        ]
        for member in members:
            if member.ticket is not None:
                assert member in table.held[member.ticket.serial].members
        clocks = [m.clock for m in members if m.admitted or m.ticket]
        if clocks:
            assert min(clocks) == table.active_workers.clocks.low
            bound = getattr(self.updates, "bound", None)
            assert bound is None or max(clocks) - min(clocks) <= bound + 1
        if isinstance(self.updates, Asynchronous) or not self.spares:
            assert not any(self.ledger.late(worker) for worker in self.alive)

    def teardown(self) -> None:
        """All workers finish the epoch, but for as many as may stand still."""
        if not hasattr(self, "ledger"):
            return
        if not self.alive:
            self.join(0)
        working = sorted(self.alive)[: max(1, len(self.alive) - self.spares)]
        self.close()
        for _ in range(3 * self.dealt + 3):
            if self.ledger.over:
                break
            for worker in working:
                self.take(worker)
                ticket = self.ledger.holds(worker)
                if ticket is not None:
                    verdict = self.ledger.push(
                        Push(worker, ticket.serial, self.ledger.version, 1.0)
                    )
                    assert verdict.kept, verdict.why
                    self.received += 1
                    self.kept.add(ticket.serial)
                    self.ripe()
            if isinstance(self.updates, Asynchronous) or not self.spares:
                working = sorted(self.alive)
        assert self.ledger.over, "the epoch does not end"
        self.books_balance()
        if self.updates.requeue:
            done = sorted([*self.applied, *self.skipped])
            assert done == list(range(self.dealt)), "a ticket was never applied"


@pytest.mark.parametrize("gate", GATES)
def test_anything_may_happen(gate: str) -> None:
    machine: Any = type("Books", (Books,), {"gate": GATES[gate]})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
