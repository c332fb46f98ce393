"""Tasks leave an elastic job and join it: real processes, one membership after another."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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
                  give_up=how.get("give_up", 60))

def say(**words):
    print(json.dumps(words), flush=True)

try:
    members = job.first() or job.join("work")
    job.open("work")
    while True:
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
            members = job.next(members, "work")
            if how.get("dies") == [how["worker"], "started"]:
                os.kill(os.getpid(), signal.SIGKILL)
except ReplicaError as error:
    say(event="over", error=type(error).__name__, text=str(error))
"""

Start = Callable[[int], Process]


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    running: list[Process] = []
    more = getattr(request, "param", {})
    how_many = 4 if "dies" in more else 3
    addresses = {"worker": [f"127.0.0.1:{port}" for port in free_ports(how_many)]}

    def begin(worker: int) -> Process:
        how = {"cluster": addresses, "worker": worker, **more}
        running.append(Process(TASK, json.dumps(how)))
        return running[-1]

    yield begin
    for process in running:
        process.end()


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
    """The survivors of both are not refused, and make up a generation."""
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
