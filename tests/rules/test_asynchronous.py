"""Asynchronous updates: staleness, buffer, bound and warm-up."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.rules.ledger import Ledger
from stratagem.rules.tickets import Push
from stratagem.rules.updates import (
    Asynchronous,
    DelayCompensated,
    Drop,
    GapAware,
    LowerRate,
    Policy,
    Ramp,
    ScaleDown,
)
from tests.rules.drive import drain, ledger, push, take

EVERY: list[Policy] = [
    LowerRate(),
    LowerRate(0.1),
    Drop(),
    Drop(0),
    ScaleDown(),
    ScaleDown(linear=True),
    DelayCompensated(),
    GapAware(),
]


@pytest.mark.parametrize("buffer", [1, 3])
def test_a_worker_alone_is_plain_sgd_under_every_policy(buffer: int) -> None:
    book = ledger(Asynchronous(EVERY, buffer=buffer), 1, batches=12)
    while not book.over:
        take(book, 0)
        verdict, update = push(book, 0)
        assert (verdict.kept, verdict.tau, verdict.factor, verdict.rate) == (True, 0, 1.0, 1.0)
        assert update is None or update.rate == 1.0
    assert book.version == 12 // buffer


@pytest.mark.parametrize("workers", [2, 5])
def test_in_turn_every_gradient_is_w_minus_1_old(workers: int) -> None:
    book = ledger(Asynchronous([ScaleDown(), LowerRate()]), workers, batches=10 * workers)
    pulled = {}
    for worker in range(workers):
        take(book, worker)
        pulled[worker] = 0
    taus = []
    for turn in range(9 * workers):
        worker = turn % workers
        verdict, update = push(book, worker, pulled[worker])
        taus.append(verdict.tau)
        assert verdict.factor == (1 + verdict.tau) ** -0.5
        assert verdict.rate == 1 / math.sqrt(workers)
        assert update is not None and update.rate == verdict.rate
        take(book, worker)
        pulled[worker] = book.version
    assert taus[:workers] == list(range(workers))
    assert set(taus[workers:]) == {workers - 1}
    assert book.recorder.stats().staleness[workers - 1] == 8 * workers + 1


def test_factors_multiply_and_one_drop_is_enough() -> None:
    policies = [ScaleDown(), ScaleDown(linear=True), LowerRate(0.5), LowerRate(0.5), Drop(2)]
    book = ledger(Asynchronous(policies), 4, batches=9)
    for worker in range(4):
        take(book, worker)
    push(book, 0, 0), push(book, 1, 0)
    verdict, _ = push(book, 2, 0)
    assert verdict.factor == pytest.approx(3**-0.5 / 2) and verdict.rate == 0.25
    verdict, update = push(book, 3, 0)
    assert not verdict.kept and verdict.tau == 3 and update is None
    assert "3 updates old" in verdict.why and "Drop" in verdict.why


def test_dropped_work_comes_back_at_once() -> None:
    book = ledger(Asynchronous([Drop(0)]), 2, batches=3)
    take(book, 0), take(book, 1)
    push(book, 0, 0), push(book, 1, 0)
    assert take(book, 0).serial == 1
    assert sorted(p.serial for u in drain(book, [0, 1]) for p in u.pushes) == [1, 2]
    assert (book.recorder.stats().requeued, book.recorder.stats().dropped) == (1, 1)


def test_dropped_work_may_be_lost() -> None:
    book = ledger(Asynchronous([Drop(0)], requeue=False, buffer=1), 2, batches=2)
    take(book, 0), take(book, 1)
    push(book, 0, 0), push(book, 1, 0)
    assert book.over and book.recorder.stats().lost == 1


def test_lost_work_opens_the_gate_for_what_is_left() -> None:
    book = ledger(Asynchronous([Drop(0)], requeue=False, buffer=2), 3, batches=4)
    first = [take(book, worker) for worker in range(3)]
    push(book, 0), push(book, 1)
    take(book, 0)
    assert push(book, 0)[1] is None
    verdict, update = push(book, 2, 0)
    assert not verdict.kept and first[2].serial == 2
    assert update is not None and [p.serial for p in update.pushes] == [3] and book.over


def test_work_of_the_dead_is_put_back_even_without_requeue() -> None:
    book = ledger(Asynchronous(requeue=False), 2, batches=1)
    take(book, 0)
    book.leave(0)
    assert take(book, 1).serial == 0
    book.abandon(1, 0)
    assert take(book, 1).serial == 0 and book.recorder.stats().lost == 0


def test_a_buffer_makes_one_update_of_k_and_of_the_rest() -> None:
    book = ledger(Asynchronous(buffer=3), 2, batches=8)
    assert [len(update.pushes) for update in drain(book, [0, 1])] == [3, 3, 2]


def test_a_buffer_waits_while_more_may_be_dealt() -> None:
    book = ledger(Asynchronous(buffer=3), 1)
    book.deal(0)
    take(book, 0)
    assert push(book, 0)[1] is None and book.recorder.stats().buffered == 1
    book.close_epoch()
    assert not book.over
    update = book.ripe()
    assert update is not None and book.over and book.recorder.stats().buffered == 0


def test_the_rate_of_an_update_is_the_smallest_asked_for() -> None:
    book = ledger(Asynchronous([LowerRate()], buffer=2), 4, batches=9)
    take(book, 0), take(book, 1)
    push(book, 0)
    book.leave(3), book.leave(2)
    _, update = push(book, 1)
    assert update is not None and update.rate == 0.5
    take(book, 0), take(book, 1)
    push(book, 0)
    _, update = push(book, 1)
    assert update is not None and update.rate == 1 / math.sqrt(2)


def test_a_gradient_from_the_future_is_dropped() -> None:
    book = ledger(Asynchronous(), 1, batches=1)
    take(book, 0)
    verdict, _ = push(book, 0, version=3)
    assert not verdict.kept and verdict.tau == -3
    assert take(book, 0).serial == 0


def test_nobody_is_late() -> None:
    book = ledger(Asynchronous(), 2, batches=3)
    take(book, 0), take(book, 1)
    push(book, 0)
    assert not book.late(1) and push(book, 1, 0)[0].kept


# bounded staleness


@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 10**6))
def test_nobody_is_far_ahead(workers: int, bound: int, seed: int) -> None:
    book = ledger(Asynchronous(bound=bound), workers, batches=60)
    chance = random.Random(seed)
    speed = [chance.random() ** 3 + 0.01 for _ in range(workers)]
    done = Counter(dict.fromkeys(range(workers), 0))
    far = 0
    while sum(done.values()) < 60 - workers:
        worker = chance.choices(range(workers), speed)[0]
        if book.take(worker) is None:
            assert done[worker] - min(done.values()) > bound, "it waited for nothing"
            continue
        assert done[worker] - min(done.values()) <= bound, "it should have waited"
        if chance.random() < 0.7:
            push(book, worker)
            done[worker] += 1
        far = max(far, max(done.values()) - min(done.values()))
    assert far <= bound + 1


def test_bound_0_is_lock_step() -> None:
    book = ledger(Asynchronous(bound=0), 3, batches=9)
    for step in range(3):
        for worker in (step % 3, (step + 1) % 3, (step + 2) % 3):
            take(book, worker)
            push(book, worker)
            if worker != (step + 2) % 3:
                assert book.take(worker) is None
    assert book.over


def test_the_last_leaves_and_the_others_go_on() -> None:
    book = ledger(Asynchronous(bound=1), 2, batches=9)
    for _ in range(2):
        take(book, 0)
        push(book, 0)
    assert book.take(0) is None
    turn = book.turn
    book.leave(1)
    assert book.turn != turn and take(book, 0)


def test_who_joins_starts_at_the_lowest_clock() -> None:
    book = ledger(Asynchronous(bound=1), 1, batches=30)
    for _ in range(10):
        take(book, 0)
        push(book, 0)
    book.join(1)
    for _ in range(2):
        take(book, 0)
        push(book, 0)
    assert book.take(0) is None, "two ahead of the newcomer"
    for _ in range(3):
        take(book, 1)
        push(book, 1)
    assert take(book, 0) and take(book, 1), "the newcomer had not ten steps to make up for"


def test_dropped_pushes_count_as_steps_and_strays_do_not() -> None:
    book = ledger(Asynchronous([Drop(0)], bound=0), 2, batches=9)
    take(book, 0), take(book, 1)
    push(book, 0, 0)
    book.push(Push(1, 99, 0, 1.0))
    assert book.take(0) is None
    assert not push(book, 1, 0)[0].kept
    assert take(book, 0)


# warm-up


def test_workers_come_in_one_after_the_other() -> None:
    book = ledger(Asynchronous(warmup=Ramp(6)), 4, batches=40)
    at_work = []
    for _ in range(8):
        at_work.append(sum(book.offer(worker) is not None for worker in range(4)))
        take(book, 0)
        push(book, 0)
    assert at_work == [1, 1, 2, 2, 3, 3, 4, 4]


def test_the_first_dies_and_the_next_takes_its_place() -> None:
    book = ledger(Asynchronous(warmup=Ramp(100)), 3, batches=9)
    take(book, 0)
    assert book.take(1) is None
    book.leave(0)
    assert take(book, 1).serial == 0
    assert book.take(2) is None
    book.join(0)
    assert book.take(0) is None, "who comes back is the last"


def test_who_is_kept_out_does_not_hold_up_the_others_nor_when_let_in() -> None:
    book = ledger(Asynchronous(warmup=Ramp(10), bound=1), 2, batches=40)
    for _ in range(10):
        take(book, 0)
        push(book, 0)
    take(book, 0)
    push(book, 0)
    assert take(book, 0) and take(book, 1)
    assert book.states.active_workers.clocks.low == 10


def clocks_that_count(book: Ledger) -> list[int]:
    active_workers = book.states.active_workers
    return sorted(clock for clock, count in active_workers.clocks._at.items() for _ in range(count))


def warmed_up_to_two_of_three() -> Ledger:
    book = ledger(Asynchronous(warmup=Ramp(8), bound=0), 3, batches=40)
    for _ in range(4):
        take(book, 0)
        push(book, 0)
    take(book, 1)
    assert book.take(2) is None
    assert clocks_that_count(book) == [4, 4], "the second came in at the lowest clock"
    return book


def test_a_worker_that_is_put_out_finishes_what_it_has() -> None:
    """With fewer workers the warm-up allows fewer; a ticket still bounds other workers."""
    book = warmed_up_to_two_of_three()
    book.leave(2)
    assert clocks_that_count(book) == [4, 4], "put out, but it has a ticket"
    take(book, 0)
    push(book, 0)
    assert book.take(0) is None, "ahead of what is still being done"
    push(book, 1, 4)
    assert book.take(1) is None and clocks_that_count(book) == [5]
    assert take(book, 0)


def test_a_worker_that_is_put_out_and_let_in_again_counts_once() -> None:
    book = warmed_up_to_two_of_three()
    book.leave(2)
    book.join(2)
    assert clocks_that_count(book) == [4, 4]
    push(book, 1, 4)
    assert clocks_that_count(book) == [4, 5] and book.take(1) is None


def test_who_is_put_out_with_nothing_in_hand_holds_up_nobody() -> None:
    book = warmed_up_to_two_of_three()
    book.abandon(1, 4)
    book.leave(2)
    assert clocks_that_count(book) == [4]
    take(book, 0)
    push(book, 0)
    assert take(book, 0)


def test_policies_count_the_workers_that_are_let_in() -> None:
    book = ledger(Asynchronous([LowerRate()], warmup=Ramp(2)), 4, batches=9)
    rates = []
    for _ in range(3):
        take(book, 0)
        rates.append(push(book, 0)[0].rate)
    assert rates == [1.0, 1 / math.sqrt(2), 0.5]


# accounting


def test_waiting_and_stats_as_json() -> None:
    book = ledger(Asynchronous(), 2, batches=2)
    book.recorder.wait(1, 0.5)
    book.recorder.wait(1, 0.25)
    take(book, 0), take(book, 1)
    push(book, 0, 0), push(book, 1, 0)
    stats = book.recorder.stats()
    assert stats.waiting == {0: 0.0, 1: 0.75} and stats.staleness == {0: 1, 1: 1}
    plain = stats.to_json()
    assert plain["waiting"] == {"0": 0.0, "1": 0.75} and plain["updates"] == 2
    assert plain["by_worker"]["1"]["applied"] == 1 and plain["staleness"] == {"0": 1, "1": 1}
