"""Synchronous updates: the result of one device, and spare workers."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import UsageError
from stratagem.rules.ledger import Ledger
from stratagem.rules.tickets import Push
from stratagem.rules.updates import Synchronous
from tests.rules.drive import drain, ledger, push, take

# all of N


@given(
    st.lists(st.lists(st.integers(-5, 5), min_size=1, max_size=7), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 10**6),
)
def test_all_of_n_is_one_device_whatever_the_order(
    batches: list[list[int]], workers: int, seed: int
) -> None:
    """Least squares of one weight, exactly: w -= mean(w - x) / 2, in any order, with deaths."""
    chance = random.Random(seed)
    alone = Fraction(1)
    for batch in batches:
        alone -= sum(alone - x for x in batch) / len(batch) / 2

    book = ledger(Synchronous(), workers, len(batches), workers)
    weights = {0: Fraction(1)}
    total = Fraction(0)
    while not book.over:
        worker = chance.choice(range(workers))
        ticket = book.take(worker)
        if ticket is None:
            continue
        if chance.random() < 0.1:
            book.leave(worker)
            book.join(worker)
            continue
        share = batches[ticket.batch][ticket.part :: ticket.parts]
        now = weights[book.version]
        verdict = book.push(Push(worker, ticket.serial, book.version, len(share)))
        assert verdict.kept and (verdict.factor, verdict.rate) == (1, 1)
        total += sum(now - x for x in share)
        update = book.ripe()
        if update is not None:
            assert update.divisor == len(batches[ticket.batch]) and update.rate == 1
            weights[update.version], total = now - total / int(update.divisor) / 2, Fraction(0)
    assert weights[len(batches)] == alone


def test_nobody_starts_on_the_next_batch() -> None:
    book = ledger(Synchronous(), 3, batches=2, parts=3)
    assert [take(book, worker).part for worker in range(3)] == [0, 1, 2]
    push(book, 0)
    assert book.take(0) is None and not book.offer(0)
    push(book, 1)
    _, update = push(book, 2)
    assert update is not None and update.version == book.version == 1
    assert take(book, 2).batch == 1


@given(st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 999))
def test_everybody_has_a_part_of_each_batch(workers: int, cuts: list[int], seed: int) -> None:
    """No worker has two parts while another has none, and worker 0 has exactly one."""
    chance = random.Random(seed)
    book = ledger(Synchronous(), workers)
    parts = [min(cut, workers) for cut in cuts]
    for batch, number in enumerate(parts):
        book.deal(batch, number)
    book.close_epoch()
    updates = []
    while not book.over:
        worker = chance.choice(range(workers))
        if book.take(worker) is not None and chance.random() < 0.7:
            updates += [update] if (update := push(book, worker)[1]) else []
    who = [[p.worker for p in update.pushes] for update in updates]
    assert [len(workers) for workers in who] == parts
    assert all(len({*each}) == len(each) and 0 in each for each in who)


@given(st.integers(2, 5), st.integers(0, 999))
def test_worker_0_has_one_part_of_each_batch_unless_alone(workers: int, seed: int) -> None:
    """Also while other workers die, come back, and skip parts."""
    chance = random.Random(seed)
    book = ledger(Synchronous(), workers, batches=6, parts=workers)
    had: dict[int, int] = {}
    alone: set[int] = set()
    here = set(range(workers))
    for _ in range(100_000):
        if book.over:
            break
        worker = chance.choice(range(workers))
        dice = chance.random()
        if worker and dice < 0.1:
            here.symmetric_difference_update({worker})
            (book.join if worker in here else book.leave)(worker)
        elif worker in here:
            ticket = book.take(worker)
            if ticket is None:
                continue
            if worker == 0:
                if book.recorder.stats().received == 0 or len(here) == 1:
                    alone.add(ticket.batch)
                had[ticket.batch] = had.get(ticket.batch, 0) + 1
                push(book, 0)
            elif dice < 0.2:
                book.leave(worker)
                here.discard(worker)
            elif dice < 0.3:
                book.skip(worker, ticket.serial)
                book.ripe()
            elif dice < 0.8:
                push(book, worker)
    assert book.over, "nobody may act and the epoch is not over"
    assert set(had) == set(range(6))
    assert all(count == 1 for batch, count in had.items() if batch not in alone)


def test_who_leaves_is_not_waited_for() -> None:
    book = ledger(Synchronous(), 3, batches=2, parts=3)
    take(book, 0), take(book, 2)
    push(book, 2)
    assert book.take(2) is None  # that one is worker 1's
    turn = book.turn
    book.leave(1)
    assert book.turn > turn and take(book, 2).part == 2
    push(book, 0)
    assert book.take(0) is None
    assert push(book, 2)[1] is not None
    book.join(1)
    assert [take(book, worker).batch for worker in (1, 2, 0)] == [1, 1, 1]  # it is back


def test_survivors_do_the_parts_of_the_dead_at_the_same_version() -> None:
    book = ledger(Synchronous(), 3, batches=2, parts=3)
    for worker in range(3):
        take(book, worker)
    push(book, 0)
    book.leave(0)  # what it pushed stays
    book.leave(1)
    assert book.ripe() is None
    push(book, 2)
    ticket = take(book, 2)
    assert (ticket.batch, ticket.part, book.version) == (0, 1, 0)
    _, update = push(book, 2)
    assert update is not None and [p.serial for p in update.pushes] == [0, 2, 1]


def test_all_die_and_another_goes_on() -> None:
    book = ledger(Synchronous(), 2, batches=3, parts=2)
    take(book, 0), take(book, 1)
    push(book, 0)
    book.leave(0), book.leave(1)
    assert not book.over and book.ripe() is None
    book.join(7)
    assert take(book, 7).serial == 1
    assert [len(update.pushes) for update in drain(book, [7])] == [2, 2, 2]


def test_a_lost_part_does_not_stop_the_batch() -> None:
    book = ledger(Synchronous(requeue=False), 2, batches=2, parts=2)
    take(book, 0), take(book, 1)
    push(book, 0)
    verdict, update = push(book, 1, version=5)
    assert not verdict.kept and "not been" in verdict.why
    assert update is not None and len(update.pushes) == 1
    assert book.recorder.stats().lost == 1


def test_a_batch_that_was_lost_whole_does_not_stop_the_epoch() -> None:
    book = ledger(Synchronous(requeue=False), 1, batches=2)
    take(book, 0)
    assert push(book, 0, version=5)[1] is None
    assert take(book, 0).batch == 1


# spares


def test_the_first_n_make_the_update_and_the_last_is_late() -> None:
    book = ledger(Synchronous(spares=1), 4, batches=2, parts=3)
    tickets = [take(book, worker) for worker in range(4)]
    assert [push(book, worker)[1] for worker in (3, 1)] == [None, None]
    assert not book.late(0)
    _, update = push(book, 2)
    assert update is not None and [p.worker for p in update.pushes] == [3, 1, 2]
    assert update.divisor == 3

    assert book.late(0) and book.holds(0) is None
    assert book.recorder.stats().requeued == 1
    assert take(book, 1) == tickets[0], "late work comes first"

    verdict = book.push(Push(0, tickets[0].serial, 0, 1.0))
    assert not verdict.kept and verdict.tau == 1 and "late" in verdict.why
    assert book.recorder.stats().requeued == 1, "it is put back once only"
    assert not book.late(0)


def test_a_late_worker_stops_and_takes_other_work() -> None:
    book = ledger(Synchronous(spares=1), 2, batches=3)
    first = take(book, 0)
    take(book, 1)
    push(book, 1)
    assert book.late(0)
    book.abandon(0, first.serial)
    assert not book.late(0) and book.recorder.stats().abandoned == 1
    assert take(book, 0) == first
    verdict, update = push(book, 0)
    assert verdict.kept and update is not None
    stats = book.recorder.stats()
    assert (stats.received, stats.applied, stats.dropped, stats.requeued) == (2, 2, 0, 1)


def test_without_requeue_late_work_is_lost_and_counted() -> None:
    book = ledger(Synchronous(spares=1, requeue=False), 2, batches=2)
    take(book, 0), take(book, 1)
    push(book, 1)
    assert book.late(0) and book.over
    assert (book.recorder.stats().lost, book.recorder.stats().requeued) == (1, 0)


def test_one_ticket_a_version() -> None:
    book = ledger(Synchronous(spares=1), 4, batches=9)
    take(book, 0)
    push(book, 0)
    assert book.take(0) is None, "the others have not had theirs"
    for worker in (1, 2, 3):
        take(book, worker)
    book.join(4)
    assert take(book, 4).serial == 4, "who came on top of those expected is one more spare"


def test_a_step_that_is_complete_takes_no_more() -> None:
    book = ledger(Synchronous(spares=1), 3, batches=9)
    book.join(3)
    for worker in range(3):
        take(book, worker)
    for worker in (0, 1):
        assert book.push(Push(worker, worker, 0, 1.0)).kept
    assert not book.offer(3), "though it had none yet"
    verdict = book.push(Push(2, 2, 0, 1.0))  # nobody called ripe() in between
    assert not verdict.kept and "complete" in verdict.why
    update = book.ripe()
    assert update is not None and len(update.pushes) == 2
    assert take(book, 0).serial == 2


def test_survivors_draw_more_when_fewer_than_n_are_left() -> None:
    book = ledger(Synchronous(spares=1), 4, batches=6)
    book.leave(0), book.leave(1), book.leave(2)
    assert [len(update.pushes) for update in drain(book, [3])] == [3, 3]


def test_fewer_make_an_update_at_the_end_of_the_epoch() -> None:
    book = ledger(Synchronous(spares=1), 4, batches=5)
    assert [len(update.pushes) for update in drain(book, range(4))] == [3, 2]


@pytest.mark.parametrize("holding", [False, True])
@pytest.mark.parametrize("dead", [0, 1, 2])
@pytest.mark.parametrize("batches", range(1, 12))
def test_as_many_as_there_are_spares_may_stand_still(
    batches: int, dead: int, holding: bool
) -> None:
    """Workers stand still undetected, with or without a ticket, while others are dead."""
    book = ledger(Synchronous(spares=2), 6, batches)
    if holding:
        for worker in (0, 1):
            book.take(worker)
    for worker in range(2, 2 + dead):
        book.take(worker)
        book.leave(worker)
    applied = [p.serial for update in drain(book, range(2 + dead, 6)) for p in update.pushes]
    assert sorted(applied) == list(range(batches))


def test_backups_at_the_end_of_the_epoch() -> None:
    book = Ledger(Synchronous(spares=1), workers=4)
    for worker in range(4):
        book.join(worker)
    book.deal(0, 2)
    first, second = take(book, 0), take(book, 1)
    assert book.take(2) is None, "more may be dealt"
    book.close_epoch()
    assert take(book, 2) == first, "the oldest"
    assert book.take(3) is None, "as many backups as spares"
    assert push(book, 2)[0].kept
    assert book.late(0), "what it does was done by another"
    assert take(book, 3) == second
    verdict = book.push(Push(0, first.serial, 0, 1.0))
    assert not verdict.kept
    assert push(book, 1)[1] is not None and book.over and book.late(3)
    stats = book.recorder.stats()
    assert (stats.applied, stats.dropped, stats.requeued) == (2, 1, 0)


def test_a_backup_that_leaves_takes_nothing_with_it() -> None:
    book = ledger(Synchronous(spares=1), 2, batches=1)
    take(book, 0), take(book, 1)
    book.leave(1)
    assert book.recorder.stats().requeued == 0 and not book.over
    book.join(1)
    assert take(book, 1).serial == 0
    book.abandon(0, 0)
    assert book.recorder.stats().requeued == 0 and book.take(0) is not None
    assert push(book, 1)[1] is not None and book.over


def test_no_backups_without_spares() -> None:
    book = ledger(Synchronous(), 2, batches=1)
    take(book, 0)
    assert book.take(1) is None


def test_n_follows_who_is_here_if_none_are_expected() -> None:
    book = Ledger(Synchronous(spares=1))
    for worker in range(3):
        book.join(worker)
    for batch in range(9):
        book.deal(batch)
    for worker in range(3):
        take(book, worker)
    assert push(book, 0)[1] is None
    book.leave(1)
    update = book.ripe()
    assert update is not None and len(update.pushes) == 1


def test_spares_must_leave_somebody() -> None:
    with pytest.raises(UsageError, match=r"spares=2\) leaves nobody.*2 workers; have fewer"):
        Ledger(Synchronous(spares=2), workers=2)


# whoever holds what


def test_asking_twice_gives_the_same_ticket() -> None:
    book = ledger(Synchronous(), 2, batches=1, parts=2)
    assert take(book, 0) == take(book, 0)
    assert take(book, 1).part == 1


def test_a_push_counts_once_and_only_for_who_holds_the_ticket() -> None:
    book = ledger(Synchronous(), 2, batches=1, parts=2)
    take(book, 0), take(book, 1)
    assert not book.push(Push(0, 1, 0, 1.0)).kept, "of another"
    assert not book.push(Push(0, 77, 0, 1.0)).kept, "of nobody"
    assert not book.push(Push(5, 0, 0, 1.0)).kept, "by a stranger"
    assert push(book, 0)[0].kept
    assert not book.push(Push(0, 0, 0, 1.0)).kept, "again"
    _, update = push(book, 1)
    assert update is not None and len(update.pushes) == 2
    stats = book.recorder.stats()
    assert (stats.received, stats.applied, stats.dropped) == (6, 2, 4)
    assert stats.by_worker[0]["dropped"] == 3 and stats.by_worker[5]["dropped"] == 1
    assert stats.by_worker[1] == {
        "received": 1,
        "applied": 1,
        "dropped": 0,
        "buffered": 0,
        "abandoned": 0,
    }


def test_who_comes_back_starts_afresh() -> None:
    book = ledger(Synchronous(), 2, batches=1, parts=2)
    take(book, 0)
    book.join(0)
    assert book.holds(0) is None and book.recorder.stats().requeued == 1
    assert take(book, 1).part == 0


def test_a_stranger_is_told_to_join() -> None:
    book = ledger(Synchronous(), 1, batches=1)
    with pytest.raises(UsageError, match=r"worker 9 .* join"):
        book.take(9)
    book.leave(9)
    book.abandon(9, 0)
    assert not book.late(9) and not book.offer(9) and book.holds(9) is None


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_would_spoil_the_sum_are_refused(weight: float) -> None:
    with pytest.raises(UsageError, match="worker 3"):
        Push(3, 0, 0, weight)


# epochs


def test_epochs_follow_each_other_with_new_serials() -> None:
    book = ledger(Synchronous(), 1, batches=2)
    drain(book, [0])
    with pytest.raises(UsageError, match="closed"):
        book.deal(0)
    book.open_epoch()
    assert not book.over
    book.deal(0)
    book.close_epoch()
    assert take(book, 0).serial == 2
    assert push(book, 0)[1] is not None and book.over and book.version == 3


def test_what_is_given_up_is_nobodys() -> None:
    """Not even if a worker that held it puts it back."""
    book = ledger(Synchronous(), 2, batches=2, parts=2)
    take(book, 0)
    book.open_epoch()
    book.deal(0)
    book.leave(0)
    book.close_epoch()
    assert len(book.states.queue) == 1 and take(book, 1).serial == 4
    assert push(book, 1)[1] is not None and book.over


def test_an_empty_epoch_is_over() -> None:
    book = Ledger(Synchronous())
    assert not book.over
    book.close_epoch()
    assert book.over


def test_parts_are_at_least_one() -> None:
    with pytest.raises(UsageError, match="at least one"):
        Ledger(Synchronous()).deal(0, 0)


def test_a_copy_that_is_dropped_leaves_the_ticket_with_the_other() -> None:
    book = ledger(Synchronous(spares=1), 2, batches=1)
    take(book, 0), take(book, 1)
    assert not push(book, 1, version=-1)[0].kept
    assert book.recorder.stats().requeued == 0 and book.states.left == 1
    assert push(book, 0)[1] is not None and book.over


def test_those_who_wait_are_told_when_backups_are_possible() -> None:
    book = ledger(Synchronous(spares=1), 4, batches=2)
    take(book, 0)
    push(book, 0)
    assert book.take(0) is None
    turn = book.turn
    take(book, 1)
    assert book.turn != turn and take(book, 0).serial == 1


def test_backups_are_spread() -> None:
    book = ledger(Synchronous(spares=2), 4, batches=2)
    assert [take(book, worker).serial for worker in range(4)] == [0, 1, 0, 1]


def test_no_backup_for_a_step_that_is_complete() -> None:
    book = ledger(Synchronous(spares=1), 4, batches=4)
    for worker in range(4):
        take(book, worker)
    for worker in range(3):
        assert book.push(Push(worker, worker, 0, 1.0)).kept
    assert not book.offer(0)
    assert book.ripe() is not None and take(book, 0).serial == 3


def test_who_was_dropped_may_try_again_at_the_same_version() -> None:
    book = ledger(Synchronous(spares=1), 4, batches=9)
    book.join(4)
    take(book, 0)
    assert not push(book, 0, version=-1)[0].kept
    assert take(book, 0).serial == 0
