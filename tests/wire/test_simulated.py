"""A simulated network: how long messages take, alone and together."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import UsageError
from stratagem.plan.simulation.simulated_server import LinkQueue
from stratagem.wire.send_queue import LARGE
from stratagem.wire.simulated import Clock, Flow, Network, Route, SimulatedLink, Topology

SIZES = st.floats(1.0, 1e9)
RATES = st.floats(1e3, 1e12)


def arrivals(topology: Topology, messages: list[tuple[float, int, int, float]]) -> list[float]:
    """Return the arrival time of each message (at, source, target, bytes)."""
    clock = Clock()
    network = Network(clock, topology)
    found = [inf] * len(messages)

    def note(i: int) -> None:
        found[i] = clock.now

    for i, (at, source, target, size) in enumerate(messages):
        clock.at(at, lambda i=i, s=source, t=target, n=size: network.send(s, t, n, lambda: note(i)))  # type: ignore[misc]
    clock.run()
    return found


@given(SIZES, RATES, st.floats(0, 1))
def test_a_message_alone(size: float, rate: float, latency: float) -> None:
    (arrived,) = arrivals(Topology(rate, latency), [(0.0, 0, 1, size)])
    assert arrived == pytest.approx(size / rate + latency)


def test_two_senders_share_the_way_in() -> None:
    both = arrivals(Topology(100.0), [(0.0, 0, 2, 100.0), (0.0, 1, 2, 100.0)])
    assert both == pytest.approx([2.0, 2.0])


def test_there_and_back_do_not_disturb_each_other() -> None:
    assert arrivals(Topology(100.0), [(0.0, 0, 1, 100.0), (0.0, 1, 0, 100.0)]) == [1.0, 1.0]


def test_who_comes_later_has_its_share_from_then_on() -> None:
    # alone for 1 s: 100 of 150 bytes; then both have half: 50 bytes in 1 s; the other 50 alone
    first, second = arrivals(Topology(100.0), [(0.0, 0, 2, 150.0), (1.0, 1, 2, 100.0)])
    assert (first, second) == pytest.approx((2.0, 2.5))


def test_the_way_out_of_a_rack_is_shared_by_its_hosts() -> None:
    racks = Topology(100.0, per_rack=2, rack_rate=100.0)
    assert arrivals(racks, [(0.0, 0, 1, 100.0), (0.0, 1, 0, 100.0)]) == [1.0, 1.0]
    across = arrivals(racks, [(0.0, 0, 2, 100.0), (0.0, 1, 3, 100.0)])
    assert across == pytest.approx([2.0, 2.0])


def test_tasks_of_one_host_use_its_memory() -> None:
    inside = Topology(100.0, latency=5.0, inside_rate=1000.0, inside_latency=0.1)
    assert arrivals(inside, [(0.0, 0, 0, 100.0)]) == pytest.approx([0.2])
    assert arrivals(Topology(100.0), [(0.0, 0, 0, 100.0)]) == [0.0]


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.integers(0, 3), st.integers(4, 6), st.floats(1, 1000)),
        min_size=1,
        max_size=12,
    )
)
def test_no_link_carries_more_than_it_can(messages: list[tuple[float, int, int, float]]) -> None:
    """The last arrival over a link is not before all its bytes can have passed.

    If all messages begin at once, it is not after the slowest link could have sent everything.
    """
    rate = 100.0
    found = arrivals(Topology(rate), messages)
    for end in (1, 2):
        for host in {message[end] for message in messages}:
            mine = [i for i, message in enumerate(messages) if message[end] == host]
            first = min(messages[i][0] for i in mine)
            total = sum(messages[i][3] for i in mine)
            assert max(found[i] for i in mine) >= first + total / rate * (1 - 1e-9)
    for (at, _, _, size), arrived in zip(messages, found, strict=True):
        assert arrived >= at + size / rate * (1 - 1e-9)
    total = sum(size for *_, size in messages)
    assert max(found) <= max(at for at, *_ in messages) + total / rate * (1 + 1e-9)


@given(st.lists(SIZES, min_size=1, max_size=20), RATES)
def test_a_link_is_never_idle_while_something_waits(sizes: list[float], rate: float) -> None:
    clock = Clock()
    link = SimulatedLink(clock, rate)
    done: list[float] = []
    for size in sizes:
        link.send(size, lambda: done.append(clock.now))
    clock.run()
    assert len(done) == len(sizes)
    assert done[-1] == pytest.approx(sum(sizes) / rate)


def test_a_route_puts_the_sum_on_what_its_flows_share() -> None:
    clock = Clock()
    network = Network(clock, Topology(100.0, latency=0.5))
    route = Route(network, [Flow(0, 1, 100.0, 100.0), Flow(0, 2, 50.0, 50.0)])
    done: list[float] = []
    route.send(lambda: done.append(clock.now))
    clock.run()
    assert done == pytest.approx([2.0])  # 150 bytes out of host 0


def test_a_host_that_is_cut_off_waits() -> None:
    clock = Clock()
    network = Network(clock, Topology(100.0))
    done: list[tuple[str, float]] = []
    network.send(0, 1, 100.0, lambda: done.append(("under way", clock.now)))
    clock.at(0.5, lambda: network.cut(1))
    clock.at(1.0, lambda: network.send(1, 0, 0.0, lambda: done.append(("held", clock.now))))
    clock.at(1.0, lambda: network.send(0, 2, 100.0, lambda: done.append(("another", clock.now))))
    clock.at(3.0, lambda: network.mend(1))
    clock.run()
    # the blocked message keeps its half of host 0's up link until it has passed
    assert dict(done)["held"] == 3.0
    assert dict(done)["under way"] > 3.0 and dict(done)["another"] >= 2.0


def test_the_same_moment_keeps_its_order() -> None:
    clock = Clock()
    seen: list[int] = []
    for i in range(5):
        clock.at(1.0, lambda i=i: seen.append(i))  # type: ignore[misc]
    clock.run()
    assert seen == [0, 1, 2, 3, 4]


def test_it_can_be_stopped_and_go_on() -> None:
    clock = Clock()
    seen: list[int] = []
    clock.at(1.0, clock.stop)
    clock.at(2.0, lambda: seen.append(2))
    clock.run()
    assert (seen, clock.now) == ([], 1.0)
    clock.run()
    assert seen == [2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0.0},
        {"rate": -1.0},
        {"rate": 1.0, "latency": -1.0},
        {"rate": 1.0, "latency": inf},
        {"rate": 1.0, "per_host": 0},
        {"rate": 1.0, "rack_rate": 0.0},
        {"rate": float("nan")},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Topology(**wrong)  # type: ignore[arg-type]


def test_what_is_asked_for_one_time_happens_in_the_order_of_asking() -> None:
    clock, seen = Clock(), list[str]()

    def first() -> None:
        seen.append("first")
        clock.at(1.0, lambda: seen.append("asked meanwhile"))

    clock.at(1.0, first)
    clock.at(2.0, lambda: seen.append("later"))
    clock.at(1.0, lambda: seen.append("second"))
    clock.at(1.0, lambda: seen.append("third"))
    clock.run()
    assert seen == ["first", "second", "third", "asked meanwhile", "later"]


def test_nothing_happens_after_a_stop_not_even_at_the_same_time() -> None:
    clock, seen = Clock(), list[str]()
    clock.at(1.0, lambda: seen.append("first"))
    clock.at(1.0, clock.stop)
    clock.at(1.0, lambda: seen.append("too late"))
    clock.run()
    assert seen == ["first"]
    clock.at(1.0, lambda: seen.append("last"))
    clock.run()
    assert seen == ["first", "too late", "last"], "it goes on where it was"
    clock.at(1.0, lambda: seen.append("again"))
    clock.run()
    assert seen[-1] == "again"


def test_a_small_message_overtakes_a_large_one() -> None:
    clock, seen = Clock(), list[tuple[str, float]]()
    link = SimulatedLink(clock, 100.0)
    link.send(100.0, lambda: seen.append(("large", clock.now)))
    link.send(10.0, lambda: seen.append(("small", clock.now)))
    clock.run()
    assert seen == [("small", pytest.approx(0.2)), ("large", pytest.approx(1.1))]


def answers(size: float, worked: float, groups: list[int]) -> list[list[float]]:
    """Return the durations of groups of answers from one server.

    Each answer takes a second of the link; a group is requested when the last one has arrived.
    """
    clock = Clock()
    network = Network(clock, Topology(size))
    turns = LinkQueue(network, 1, size, worked, overtakes=False)
    found: list[list[float]] = []
    for group in groups:
        begun, took = clock.now, list[float]()
        for host in range(1, 1 + group):
            route = Route(network, [Flow(0, host, size, size)])
            turns.send(route, lambda t=took, b=begun: t.append(clock.now - b))  # type: ignore[misc]
        clock.run()
        found.append(took)
    return found


def test_large_answers_are_sent_in_turn_and_small_ones_at_once() -> None:
    assert answers(LARGE, 0.0, [3]) == [pytest.approx([1.0, 2.0, 3.0])]
    assert answers(LARGE - 1.0, 0.0, [3]) == [pytest.approx([3.0, 3.0, 3.0])]


def test_after_four_turns_in_vain_there_are_no_more() -> None:
    """If a processor is busy for most of a turn, turns do not help: the link is not the limit."""
    assert answers(8e6, 0.5, [1, 1, 1, 1, 2])[-1] == pytest.approx([1.0, 2.0])
    assert answers(8e6, 0.7, [1, 1, 1, 2])[-1] == pytest.approx([1.0, 2.0])
    assert answers(8e6, 0.7, [1, 1, 1, 1, 2])[-1] == pytest.approx([2.0, 2.0])
