"""Real processes leave and join an elastic job, one membership after another."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratagem.cluster.failure import Member
from stratagem.cluster.generation_hub import GenerationHub
from stratagem.cluster.rendezvous import Visitor
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import ClusterError
from tests.clock import in_time
from tests.ports import free_ports

sys.path.insert(0, str(Path(__file__).parent))
from member_processes import Process

pytestmark = pytest.mark.timeout(60)

TASK = """
import json, logging, os, signal, sys, time
from stratagem.cluster.generations import Generations
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.errors import ReplicaError

logging.basicConfig(level=logging.INFO, format="%(message)s")
how = json.loads(sys.argv[1])
job = Generations(ClusterSpec(how["cluster"]), Task("worker", how["worker"]), secret=b"s",
                  limit=how.get("limit", 20), least=how.get("least", 1),
                  give_up=how.get("give_up", 60), hub=how.get("hub"))

def say(**words):
    print(json.dumps(words), flush=True)

try:
    members = job.first() or job.join("work")
    while True:
        job.open("work")
        names = [member.name for member in members.members]
        say(event="working", rank=members.rank, names=names)
        try:
            while True:
                notes = members.exchange({"me": how["worker"]}, 20)
                assert [f"worker {note['me']}" for note in notes] == names
                time.sleep(0.01)
        except ReplicaError as error:
            say(event="trouble", kind=members.trouble.kind, text=str(error))
            if how.get("dies") == [how["worker"], "coming"]:
                os.kill(os.getpid(), signal.SIGKILL)
            members = job.next(members, how.get("calls", {}).get(str(how["worker"]), "work"))
            if how.get("dies") == [how["worker"], "started"]:
                os.kill(os.getpid(), signal.SIGKILL)
except ReplicaError as error:
    say(event="over", error=type(error).__name__, text=str(error))
"""

Start = Callable[[int], Process]


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    running: list[Process] = []
    more = dict(getattr(request, "param", {}))
    how_many = 4 if "dies" in more else 3
    addresses = {"worker": [f"127.0.0.1:{port}" for port in free_ports(how_many)]}

    def begin(worker: int) -> Process:
        how = {"cluster": addresses, "worker": worker, **more}
        running.append(Process(TASK, json.dumps(how)))
        return running[-1]

    begin.addresses = addresses["worker"]  # type: ignore[attr-defined]
    hub = GenerationHub(ClusterSpec(addresses), b"s") if more.pop("outside", False) else None
    if hub is not None:
        more["hub"], begin.hub = hub.address, hub  # type: ignore[attr-defined]
    yield begin
    for process in running:
        process.end()
    if hub is not None:
        hub.close()


def works(process: Process, names: list[int], since: float = 0.0) -> float:
    word = json.dumps([f"worker {each}" for each in names])
    return process.expect(f'"names": {word}', 20, since)[0]


def test_the_others_go_on_and_a_new_one_joins(start: Start) -> None:
    tasks = [start(i) for i in range(3)]
    for task in tasks:
        works(task, [0, 1, 2])
    when = tasks[1].signal(signal.SIGKILL)
    for task in (tasks[0], tasks[2]):
        in_time(works(task, [0, 2], when) - when, 1.0)
    again = start(1)
    for task in (tasks[0], again, tasks[2]):
        works(task, [0, 1, 2], when)


def test_two_deaths_at_once(start: Start) -> None:
    tasks = [start(i) for i in range(3)]
    for task in tasks:
        works(task, [0, 1, 2])
    when = tasks[1].signal(signal.SIGKILL)
    tasks[2].signal(signal.SIGKILL)
    in_time(works(tasks[0], [0], when) - when, 1.0)
    start(2)
    works(tasks[0], [0, 2], when)


@pytest.mark.parametrize(
    "start", [{"dies": [2, "coming"]}, {"dies": [2, "started"]}], indirect=True
)
def test_a_second_death_while_the_others_come_together(start: Start) -> None:
    """The survivors of both are not refused, and form a generation."""
    tasks = [start(i) for i in range(4)]
    for task in tasks:
        works(task, [0, 1, 2, 3])
    when = tasks[3].signal(signal.SIGKILL)
    for task in tasks[:2]:
        works(task, [0, 1], when)
    start(3)
    for task in tasks[:2]:
        works(task, [0, 1, 3], when)


@pytest.mark.parametrize("start", [{"give_up": 4}], indirect=True)
def test_one_that_was_stopped_comes_back_as_a_new_one(start: Start) -> None:
    tasks = [start(i) for i in range(3)]
    for task in tasks:
        works(task, [0, 1, 2])
    when = tasks[2].signal(signal.SIGSTOP)
    works(tasks[0], [0, 1], when)
    works(tasks[1], [0, 1], when)
    woken = tasks[2].signal(signal.SIGCONT)
    for task in tasks:
        works(task, [0, 1, 2], woken)


def test_without_the_chief_the_job_ends(start: Start) -> None:
    tasks = [start(i) for i in range(3)]
    for task in tasks:
        works(task, [0, 1, 2])
    tasks[0].signal(signal.SIGKILL)
    for task in tasks[1:]:
        _, said = task.expect('"over"', 20)
        assert said["error"] == "ReplicaMissing"


@pytest.mark.parametrize("start", [{"outside": True}], indirect=True)
def test_with_a_hub_outside_the_next_is_the_chief(start: Start) -> None:
    """A new task is never the chief, as it has no state."""
    tasks = [start(i) for i in range(3)]
    hub: GenerationHub = start.hub  # type: ignore[attr-defined]
    for task in tasks:
        works(task, [0, 1, 2])
    when = tasks[0].signal(signal.SIGKILL)
    for task in tasks[1:]:
        in_time(works(task, [1, 2], when) - when, 1.0)
    tasks[0] = start(0)
    for task in tasks:
        works(task, [1, 2, 0], when)
    when = tasks[1].signal(signal.SIGKILL)
    for task in (tasks[2], tasks[0]):
        works(task, [2, 0], when)
    assert hub.does_without("worker 2") and not hub.does_without("worker 3")
    hub.open(None)  # the chief is between two calls
    assert hub.does_without("worker 0") and not hub.does_without("worker 2")
    when = tasks[2].signal(signal.SIGKILL)
    works(tasks[0], [0], when)
    assert not hub.does_without("worker 2")
    tasks[2] = start(2)  # another task is the chief now, and this one joins as any task
    for task in (tasks[0], tasks[2]):
        works(task, [0, 2], when)
    assert hub.does_without("worker 2")


@pytest.mark.parametrize(
    "start", [{"outside": True, "calls": {"2": "another"}, "limit": 5}], indirect=True
)
def test_with_a_hub_outside_one_in_another_call_is_refused(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [start(i) for i in range(3)]
    for task in tasks:
        works(task, [0, 1, 2])
    when = tasks[0].signal(signal.SIGKILL)
    works(tasks[1], [1], when)
    assert "the job is in work, and this task has come to another" in caplog.text


@pytest.mark.parametrize("start", [{"outside": True}], indirect=True)
def test_a_hub_outside_serves_the_next_job_when_nobody_is_left(start: Start) -> None:
    first = [start(i) for i in range(3)]
    for task in first:
        works(task, [0, 1, 2])
    for task in first:
        task.signal(signal.SIGKILL)
    second = [start(i) for i in range(3)]
    for task in second:
        works(task, [0, 1, 2])


@pytest.mark.parametrize("start", [{"least": 2, "limit": 3}], indirect=True)
def test_too_few_are_left(start: Start) -> None:
    tasks = [start(i) for i in range(3)]
    for task in tasks:
        works(task, [0, 1, 2])
    tasks[1].signal(signal.SIGKILL)
    when = tasks[2].signal(signal.SIGKILL)
    _, said = tasks[0].expect('"over"', 20, when)
    assert said["error"] == "ReplicaMissing"
    assert "worker 1" in str(said["text"]) and "worker 2" in str(said["text"])


def test_a_stranger_interrupts_nobody(start: Start) -> None:
    """A task that knows the secret but names another cluster is refused meanwhile."""
    tasks = [start(i) for i in range(3)]
    chief = start.addresses[0]  # type: ignore[attr-defined]
    for task in tasks:
        works(task, [0, 1, 2])
    members = (Member("worker 0", chief), Member("worker 1", "127.0.0.1:1"))
    with pytest.raises(ClusterError, match="its cluster is not the chief's"):
        Visitor(members, 1, b"s", 5.0, {"call": "work"}).arrive()
    time.sleep(0.5)
    assert not any("trouble" in line for _, line in tasks[0].out)


@pytest.mark.slow
@pytest.mark.parametrize("start", [{"give_up": 4}], indirect=True)
def test_one_that_falls_silent_while_the_others_gather(start: Start) -> None:
    tasks = [start(i) for i in range(3)]
    for task in tasks:
        works(task, [0, 1, 2])
    when = tasks[1].signal(signal.SIGSTOP)
    time.sleep(1.5)
    tasks[2].signal(signal.SIGSTOP)
    works(tasks[0], [0], when)
