"""Members, as real processes, find each other, exchange notes, and all name the one that fails."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratagem.cluster.membership import Failure, Member, Membership
from stratagem.cluster.rendezvous import form
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.errors import (
    ClusterError,
    ReplicaFailed,
    ReplicaLost,
    ReplicaMissing,
    ReplicaStalled,
    UsageError,
)
from tests.clock import PATIENCE, in_time, unless_late
from tests.ports import free_ports

sys.path.insert(0, str(Path(__file__).parent))
from member_processes import MEMBER, Process

pytestmark = pytest.mark.timeout(60)

Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start members, which are ended with the test."""
    running: list[Process] = []

    def begin(how: dict[str, object], fds: tuple[int, ...] = ()) -> Process:
        running.append(Process(MEMBER, json.dumps(how), fds=fds))
        return running[-1]

    yield begin
    for process in running:
        process.end()


def cluster(count: int) -> dict[str, list[str]]:
    return {"worker": [f"127.0.0.1:{port}" for port in free_ports(count)]}


def tcp(start: Start, count: int, **more: object) -> list[Process]:
    """Start workers that meet over loopback TCP."""
    spec = cluster(count)
    found = [start({"cluster": spec, "task": ["worker", r], **more}) for r in range(count)]
    for process in found:
        process.expect('"ready"', 20)
    return found


def pairs(start: Start, count: int, **more: object) -> list[Process]:
    """Start replicas over socket pairs, as a process does for its own replicas."""
    members = [[f"replica {r}", f"cpu:{r}"] for r in range(count)]
    ends = {r: socket.socketpair() for r in range(1, count)}
    mine = {r: ends[r][0].fileno() for r in ends}
    found = [start({"members": members, "rank": 0, "sockets": mine, **more}, tuple(mine.values()))]
    for rank, (_, end) in ends.items():
        how = {"members": members, "rank": rank, "sockets": {0: end.fileno()}, **more}
        found.append(start(how, (end.fileno(),)))
    for end in ends.values():
        end[0].close()
        end[1].close()
    for process in found:
        process.expect('"ready"', 20)
    return found


@pytest.fixture(params=["tcp", "pairs"])
def gather(request: pytest.FixtureRequest, start: Start) -> Callable[..., list[Process]]:
    how = tcp if request.param == "tcp" else pairs
    return lambda count, **more: how(start, count, **more)


Gather = Callable[..., list[Process]]


def member_name(process: Process, rank: int) -> str:
    return f"replica {rank}" if "replica" in str(process.child.args) else f"worker {rank}"


def test_every_member_gets_every_note_in_order(gather: Gather) -> None:
    group = gather(3)
    for turn in range(3):
        for rank, process in enumerate(group):
            process.say(f'exchange {{"note": {{"rank": {rank}, "turn": {turn}}}}}')
    for process in group:
        for turn in range(3):
            expected = [{"rank": rank, "turn": turn} for rank in range(3)]
            process.expect(json.dumps({"event": "notes", "notes": expected}), 10)


def test_a_killed_member_is_named_by_every_survivor_within_two_seconds(gather: Gather) -> None:
    group = gather(3)
    group[0].say('exchange {"note": {}}')
    when = group[2].signal(signal.SIGKILL)
    for survivor in group[:2]:
        seen, told = survivor.expect('"trouble"', 20)
        in_time(seen - when, 2)
        assert (told["rank"], told["kind"]) == (2, "died")
        assert told["error"] == "ReplicaLost" and told["who"] == member_name(survivor, 2)
        assert told["thread"] == "stratagem-membership"
    # The one that waited in exchange() is not left there.
    seen, told = group[0].expect('{"error": "ReplicaLost"', 20)
    in_time(seen - when, 2)
    group[1].say('exchange {"note": {}}')
    group[1].expect('{"error": "ReplicaLost"', 20)


def test_a_killed_hub_is_named_by_every_spoke(gather: Gather) -> None:
    group = gather(3)
    when = group[0].signal(signal.SIGKILL)
    for survivor in group[1:]:
        seen, told = survivor.expect('"trouble"', 20)
        in_time(seen - when, 2)
        assert (told["rank"], told["kind"]) == (0, "died")
        assert member_name(survivor, 0) in str(told["text"])


@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stopped_member_is_named_and_named_again_when_it_wakes(
    gather: Gather, stopped: int
) -> None:
    group = gather(3)
    survivors = [process for rank, process in enumerate(group) if rank != stopped]
    name = member_name(group[0], stopped)
    when = group[stopped].signal(signal.SIGSTOP)
    for survivor in survivors:
        seen, line = survivor.logged("has not answered for", 20)
        in_time(seen - when, 6, least=2)
        assert name in line and "giving up in" in line
    time.sleep(1)
    woken = group[stopped].signal(signal.SIGCONT)
    for survivor in survivors:
        seen, line = survivor.logged("answers again", 20, since=woken)
        assert name in line
    # The one that was stopped names no other member, and the job goes on.
    group[stopped].logged("did not run for", 20)
    for process in group:
        process.say('exchange {"note": {}}')
    for process in group:
        process.expect('"notes"', 20)
        assert not any('"trouble"' in line for _, line in process.out)
    assert not group[stopped].has_logged("has not answered")


@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_member_that_stays_stopped_becomes_trouble_and_learns_of_it(
    start: Start, stopped: int
) -> None:
    group = tcp(start, 3, give_up=5)
    when = group[stopped].signal(signal.SIGSTOP)
    for survivor in (process for rank, process in enumerate(group) if rank != stopped):
        seen, told = survivor.expect('"trouble"', 20)
        in_time(seen - when, 8, least=4)
        assert (told["rank"], told["kind"]) == (stopped, "stalled")
        assert told["error"] == "ReplicaStalled"
    group[stopped].signal(signal.SIGCONT)
    _, told = group[stopped].expect('"trouble"', 20)
    assert (told["rank"], told["kind"]) == (stopped, "stalled")


def test_a_failure_is_told_to_all_with_its_traceback(gather: Gather) -> None:
    group = gather(3)
    group[1].say("fail zero")
    for process in group:
        _, told = process.expect('"trouble"', 20)
        assert (told["rank"], told["kind"]) == (1, "failed")
        assert "ZeroDivisionError: by zero" in str(told["text"])
    # The death that follows from it is not a second trouble.
    group[1].signal(signal.SIGKILL)
    time.sleep(0.7)
    for process in (group[0], group[2]):
        assert sum('"trouble"' in line for _, line in process.out) == 1


def test_last_words_are_heard_before_the_death(gather: Gather) -> None:
    group = gather(2)
    group[1].say("fail at once")
    group[1].say("exit")
    _, told = group[0].expect('"trouble"', 20)
    assert told["kind"] == "failed"


def test_a_trouble_learnt_elsewhere_keeps_its_name(start: Start) -> None:
    group = tcp(start, 3)
    group[2].say('announce {"rank": 2, "name": "replica 1 of worker 2", "where": "cpu:1, pid 7"}')
    for process in group:
        _, told = process.expect('"trouble"', 20)
        assert told["who"] == "replica 1 of worker 2" and told["rank"] == 2
        assert "it was shot" in str(told["text"])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_leaving_is_no_trouble_and_leaves_nothing(gather: Gather, order: tuple[int, ...]) -> None:
    group = gather(3)
    for rank in order:
        asked = time.monotonic()
        group[rank].say("leave")
        group[rank].say("leave")
        seen, told = group[rank].expect('"left"', 20)
        in_time(seen - asked, 0.8)
        assert told["threads"] == ["MainThread"]
        group[rank].say("exit")
        assert group[rank].ends() == 0
    for process in group:
        assert not any('"trouble"' in line for _, line in process.out)
        unless_late(not process.err, process.err)  # such as that it did not run


def test_who_left_is_not_waited_for(gather: Gather) -> None:
    group = gather(3)
    group[2].say("leave")
    group[2].expect('"left"', 20)
    for process in group[:2]:
        process.say('exchange {"note": {}}')
    for process in group[:2]:
        _, told = process.expect('"error"', 20)
        assert told["error"] == "ReplicaLost" and "finished and left" in str(told["text"])
        assert told["who"] == member_name(process, 2)


@pytest.mark.slow
def test_who_does_not_come_to_an_exchange_is_named(gather: Gather) -> None:
    group = gather(3)
    asked = time.monotonic()
    for process in group[:2]:
        process.say('exchange {"note": {}, "limit": 6}')
    for process in group[:2]:
        seen, line = process.logged("waiting for", 20)
        in_time(seen - asked, 6, least=4.5)
        assert member_name(process, 2) in line
        seen, told = process.expect('"error"', 20)
        in_time(seen - asked, 8, least=5.5)
        assert told["error"] == "ReplicaStalled" and told["who"] == member_name(process, 2)


def test_a_big_note_arrives(gather: Gather) -> None:
    group = gather(3)
    big = "x" * 900_000
    for process in group:
        process.say("exchange " + json.dumps({"note": {"big": big}}))
    for process in group:
        _, told = process.expect('"notes"', 20)
        assert [note["big"] for note in told["notes"]] == [big] * 3  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_missing_worker_is_named_until_patience_ends(start: Start) -> None:
    spec = cluster(3)
    here = [start({"cluster": spec, "task": ["worker", rank], "limit": 6}) for rank in (0, 1)]
    for process in here:
        words = f"waiting for worker 2 at {spec['worker'][2]}, "
        seen, first = process.logged(words + "2 s", 20)
        later, line = process.logged(words, 20, seen + 0.01)
        in_time(later - seen, 5, least=2)
        for each in (first, line):
            assert "worker 1" not in each and "worker 0" not in each
    for process in here:
        _, told = process.expect('"error"', 20)
        assert told["error"] == "ReplicaMissing" and told["who"] == "worker 2"
        assert "stratagem check" in str(told["text"]) and spec["worker"][2] in str(told["text"])
        assert "worker 1" not in str(told["text"])


def test_a_missing_chief_is_named(start: Start) -> None:
    spec = cluster(2)
    process = start({"cluster": spec, "task": ["worker", 1], "limit": 3})
    process.logged(f"waiting for worker 0 at {spec['worker'][0]}, 2 s", 20)
    _, told = process.expect('"error"', 20)
    assert told["error"] == "ReplicaMissing" and told["who"] == "worker 0"
    assert "refused" in str(told["text"])


def test_ctrl_c_ends_the_wait_at_once(start: Start) -> None:
    spec = cluster(3)
    waiting = [start({"cluster": spec, "task": ["worker", rank]}) for rank in (0, 1)]
    for process in waiting:
        process.logged("waiting for", 20)
    for process in reversed(waiting):
        when = process.signal(signal.SIGINT)
        seen, _ = process.expect("KeyboardInterrupt", 20)
        in_time(seen - when, 3)  # patience would last longer


def test_strangers_at_the_door_harm_nobody(start: Start) -> None:
    spec = cluster(3)
    chief = start({"cluster": spec, "task": ["worker", 0]})
    host, _, port = spec["worker"][0].partition(":")
    strangers = [_knock(host, int(port)) for _ in range(4)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    strangers[1].sendall(b"STRATGM\x04" + os.urandom(64))
    strangers[2].close()
    # strangers[3] says nothing at all: it would hold them up for five seconds.
    began = time.monotonic()
    others = [start({"cluster": spec, "task": ["worker", rank]}) for rank in (1, 2)]
    for process in (chief, *others):
        seen, _ = process.expect('"ready"', 20)
        in_time(seen - began, 4)
    chief.logged("refused a connection", 20)
    for process in (chief, *others):
        process.say('exchange {"note": {}}')
    for process in (chief, *others):
        process.expect('"notes"', 20)
    for sock in strangers:
        sock.close()


def test_another_secret_is_refused_on_both_sides(start: Start) -> None:
    spec = cluster(3)
    chief = start({"cluster": spec, "task": ["worker", 0]})
    wrong = start({"cluster": spec, "task": ["worker", 1], "secret": "other"})
    _, told = wrong.expect('"error"', 20)
    assert told["error"] == "WrongSecret" and "STRATAGEM_SECRET" in str(told["text"])
    chief.logged("refused a connection", 20)
    right = [start({"cluster": spec, "task": ["worker", rank]}) for rank in (1, 2)]
    for process in (chief, *right):
        process.expect('"ready"', 20)


def test_a_second_claim_to_a_rank_is_refused_with_a_sentence(start: Start) -> None:
    spec = cluster(3)
    chief = start({"cluster": spec, "task": ["worker", 0]})
    first = start({"cluster": spec, "task": ["worker", 1]})
    first.logged("waiting for worker 2", 20)
    second = start({"cluster": spec, "task": ["worker", 1]})
    _, told = second.expect('"error"', 20)
    assert told["error"] == "ClusterError" and "worker 1 is already here" in str(told["text"])
    chief.logged("worker 1 is already here", 20)
    last = start({"cluster": spec, "task": ["worker", 2]})
    for process in (chief, first, last):
        process.expect('"ready"', 20)


def test_a_worker_restarted_while_others_wait_is_let_in_again(start: Start) -> None:
    spec = cluster(3)
    chief = start({"cluster": spec, "task": ["worker", 0]})
    first = start({"cluster": spec, "task": ["worker", 1]})
    first.logged("waiting for worker 2", 20)
    when = first.signal(signal.SIGKILL)
    seen, _ = chief.logged("left before everybody was here", 20)
    in_time(seen - when, 2)
    group = [chief, *(start({"cluster": spec, "task": ["worker", rank]}) for rank in (1, 2))]
    for process in group:
        process.expect('"ready"', 20)


def test_a_chief_restarted_while_others_wait_is_found_again(start: Start) -> None:
    spec = cluster(3)
    chief = start({"cluster": spec, "task": ["worker", 0]})
    first = start({"cluster": spec, "task": ["worker", 1]})
    first.logged("waiting for worker 2", 20)
    chief.signal(signal.SIGKILL)
    group = [first, *(start({"cluster": spec, "task": ["worker", rank]}) for rank in (0, 2))]
    for process in group:
        process.expect('"ready"', 20)


def test_a_task_with_another_cluster_is_refused_with_a_sentence(start: Start) -> None:
    spec = cluster(3)
    start({"cluster": spec, "task": ["worker", 0]})
    other = start({"cluster": {"worker": spec["worker"][:2]}, "task": ["worker", 1]})
    _, told = other.expect('"error"', 20)
    assert told["error"] == "ClusterError" and "same cluster" in str(told["text"])


def test_a_busy_port_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"127.0.0.1:{busy.getsockname()[1]}"
        spec = ClusterSpec({"worker": [address, "127.0.0.1:1"]})
        with pytest.raises(ClusterError, match="already in use"):
            form(spec, Task("worker", 0), secret=b"s", limit=1)


def test_a_chief_whose_name_is_not_this_machine_listens_everywhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # 192.0.2.0/24 is kept for documentation: no interface has it.
    spec = ClusterSpec({"worker": [f"192.0.2.1:{free_ports(1)[0]}", "192.0.2.2:1"]})
    with caplog.at_level(logging.WARNING, "stratagem"), pytest.raises(ReplicaMissing):
        form(spec, Task("worker", 0), secret=b"s", limit=0.3)
    assert "all its interfaces" in caplog.text


def test_a_task_that_does_not_train_has_no_place() -> None:
    spec = ClusterSpec({"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]})
    with pytest.raises(ClusterError, match="ps 0"):
        form(spec, Task("ps", 0), secret=b"s")


def test_a_lone_process() -> None:
    before = threading.active_count()
    spec = ClusterSpec({"worker": ["127.0.0.1:1"]})
    seen: list[Failure] = []
    for alone in (Membership.alone(), form(spec, Task("worker", 0), secret=b"s")):
        assert (alone.rank, len(alone.members)) == (0, 1)
        assert alone.exchange({"a": (1, 2)}, limit=1) == [{"a": [1, 2]}]
        assert alone.trouble is None and alone.await_trouble(0.01) is None
        alone.raise_if_trouble()
        alone.on_trouble(seen.append)
        alone.report_failure("why")
        with pytest.raises(ReplicaFailed, match="why"):
            alone.raise_if_trouble()
        alone.leave()
        alone.leave()
    assert [trouble.detail for trouble in seen] == ["why", "why"]
    assert threading.active_count() <= before


def two() -> tuple[Membership, Membership]:
    """Make two members in this process."""
    members = [Member("replica 0", "cpu:0"), Member("replica 1", "cpu:1")]
    ours, theirs = socket.socketpair()
    return Membership.hub(members, {1: ours}), Membership.spoke(members, 1, theirs)


def test_callbacks_are_called_once_also_late_and_a_bad_one_harms_nobody() -> None:
    hub, spoke = two()
    seen: list[tuple[str, int]] = []

    def bad(trouble: Failure) -> None:
        raise KeyError("bad callback")

    hub.on_trouble(bad)
    hub.on_trouble(lambda trouble: seen.append(("early", trouble.rank)))
    spoke.report_failure("x" * 100_000 + "the end")
    trouble = hub.await_trouble(20)
    assert trouble is not None and trouble.detail.endswith("the end")
    assert len(trouble.detail) < 66_000
    hub.on_trouble(lambda trouble: seen.append(("late", trouble.rank)))
    hub.report_failure("too late to count")
    hub.leave()
    spoke.leave()
    assert sorted(seen) == [("early", 1), ("late", 1)]
    assert hub.trouble == trouble


def test_a_callback_may_leave() -> None:
    before = set(threading.enumerate())
    hub, spoke = two()
    spoke.on_trouble(lambda trouble: spoke.leave())
    hub.report_failure("why")
    spoke.await_trouble(20)
    hub.leave()
    spoke.leave()
    assert set(threading.enumerate()) <= before


def test_a_forked_child_does_not_hide_the_death_of_its_parent(gather: Gather) -> None:
    group = gather(3)
    group[2].say("fork")
    _, forked = group[2].expect('"forked"', 20)
    try:
        when = group[2].signal(signal.SIGKILL)
        for survivor in group[:2]:
            seen, told = survivor.expect('"trouble"', 20)
            in_time(seen - when, 2)
            assert told["kind"] == "died"
    finally:
        os.kill(int(str(forked["pid"])), signal.SIGKILL)


@pytest.mark.parametrize(
    "note",
    [
        {"t": "note", "rank": 0, "turn": 0, "note": {}},
        {"t": "bye", "rank": 7},
        {"t": "silent", "rank": 1, "seconds": 3},
        {"t": "note", "rank": 1, "turn": "x", "note": {}},
        {"t": "note", "rank": 1, "turn": 0},
        {"t": "trouble", "rank": 1, "kind": "odd", "name": "a", "where": "b", "detail": ""},
        {"t": ["unhashable"], "rank": 1},
        {},
    ],
)
def test_a_spoke_that_sends_nonsense_is_lost_and_nothing_else_happens(
    note: dict[str, object],
) -> None:
    hub, spoke = two()
    spoke._tell(note)
    trouble = hub.await_trouble(20)
    assert trouble is not None and (trouble.rank, trouble.kind) == (1, "died")
    hub.leave()
    spoke.leave()


def test_errors_say_what_happened_to_whom_and_what_to_do() -> None:
    member = Member("worker 1", "10.0.0.2:2222")
    for kind, error, advice in (
        ("died", ReplicaLost, "dmesg"),
        ("stalled", ReplicaStalled, "kill -CONT"),
        ("failed", ReplicaFailed, "start the job again"),
    ):
        trouble = Failure(1, member, kind, "the {detail}")  # type: ignore[arg-type]
        raised = trouble.error()
        assert type(raised) is error and raised.who == "worker 1"
        for part in ("worker 1 (10.0.0.2:2222)", "the {detail}", advice):
            assert part in str(raised)
        assert Failure.from_note(json.loads(json.dumps(trouble.to_note()))) == trouble


def test_mistakes_of_use() -> None:
    hub, spoke = two()
    hub.leave()
    spoke.leave()
    with pytest.raises(UsageError):
        hub.exchange({}, limit=1)
    with pytest.raises(UsageError, match="limit"):
        Membership.alone().exchange({"a": "x" * 2_000_000}, limit=1)
    with pytest.raises(UsageError):
        Membership.hub([Member("a", "b")] * 3, {})
    with pytest.raises(UsageError):
        Membership.spoke([Member("a", "b")] * 3, 0, socket.socket())


def _knock(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((host, port), 1)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
