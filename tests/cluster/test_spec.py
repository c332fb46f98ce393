"""ClusterSpec as a value: the chief, the ranks, and every mistake in a cluster."""

from __future__ import annotations

import dataclasses
import doctest
import json
import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.cluster import spec as spec_module
from stratagem.cluster.environment import from_tf_config
from stratagem.cluster.spec import ROLES, ClusterSpec, Place, Task
from stratagem.errors import ClusterError

calm = settings(deadline=None)  # a busy machine may be slow
HOSTS = st.one_of(
    st.from_regex(r"[a-z][a-z0-9_.-]{0,8}", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda ip: f"[{ip}]"),
)
ADDRESSES = st.builds("{}:{}".format, HOSTS, st.integers(1, 65535))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(ROLES) | st.text(), inner)
    ),
    max_leaves=8,
)


@st.composite
def job_dicts(draw: st.DrawFn) -> dict[str, list[str]]:
    """Draw any valid cluster."""
    addresses = draw(st.lists(ADDRESSES, min_size=1, max_size=12, unique=True))
    jobs: dict[str, list[str]] = {}
    for role in draw(st.permutations(ROLES)):
        most = 1 if role in ("chief", "evaluator") else 4
        count = draw(st.integers(0, most))
        jobs[role] = [addresses.pop() for _ in range(min(count, len(addresses)))]
    if not jobs["chief"] and not jobs["worker"]:
        jobs["worker"] = ["the-one-worker-left:1"]
    return jobs


SPECS = job_dicts().map(ClusterSpec)


@calm
@given(SPECS)
def test_json_round_trip(spec: ClusterSpec) -> None:
    again = ClusterSpec.from_json(spec.to_json())
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.jobs == spec.jobs


@calm
@given(SPECS)
def test_pickle_round_trip(spec: ClusterSpec) -> None:
    assert pickle.loads(pickle.dumps(spec)) == spec


@calm
@given(job_dicts(), st.randoms())
def test_a_spec_is_its_content_in_any_order(
    jobs: dict[str, list[str]], order: random.Random
) -> None:
    shuffled = list(jobs.items())
    order.shuffle(shuffled)
    filled = {role: tuple(listed) for role, listed in shuffled if listed}
    assert ClusterSpec(filled) == ClusterSpec(jobs)
    assert len({ClusterSpec(filled), ClusterSpec(jobs)}) == 1
    assert ClusterSpec(jobs).jobs == filled


@calm
@given(SPECS)
def test_exactly_one_chief_of_rank_0_and_ranks_without_gaps(spec: ClusterSpec) -> None:
    training = spec.training_tasks()
    chiefs = [task for task in spec.tasks() if spec.is_chief(task)]
    assert chiefs == [spec.chief] == [training[0]]
    assert spec.chief.type == ("chief" if "chief" in spec.jobs else "worker")

    places = [Place(spec, task, "test") for task in training]
    assert [place.rank for place in places] == list(range(len(training)))
    assert [place.is_chief for place in places] == [True] + [False] * (len(training) - 1)
    assert {place.size for place in places} == {len(training)}
    assert {place.chief_address for place in places} == {spec.address(spec.chief)}

    workers = [task.index for task in training if task.type == "worker"]
    assert workers == list(range(len(spec.jobs.get("worker", ()))))


@calm
@given(SPECS)
def test_servers_and_the_evaluator_do_not_train(spec: ClusterSpec) -> None:
    others = set(spec.tasks()) - set(spec.training_tasks())
    assert {task.type for task in others} == set(spec.jobs) & {"ps", "evaluator"}
    for task in others:
        assert not Place(spec, task, "test").is_chief
        with pytest.raises(ClusterError, match="does not train"):
            _ = Place(spec, task, "test").rank


@calm
@given(SPECS)
def test_every_task_has_its_own_address(spec: ClusterSpec) -> None:
    tasks = spec.tasks()
    assert len({spec.address(task) for task in tasks}) == len(tasks)
    assert len(tasks) == sum(len(listed) for listed in spec.jobs.values())
    assert all(task in spec for task in tasks)
    beyond = Task("worker", len(spec.jobs.get("worker", ())))
    assert beyond not in spec
    assert "worker 0" not in spec
    with pytest.raises(ClusterError, match="is not in the cluster"):
        spec.address(beyond)


@calm
@given(SPECS)
def test_tf_config_tells_each_task_its_place(spec: ClusterSpec) -> None:
    for task in (*spec.tasks(), Task("evaluator")):
        place = from_tf_config({"TF_CONFIG": spec.tf_config(task)})
        assert place == Place(spec, task, "TF_CONFIG")


def test_the_evaluator_may_be_absent_from_the_spec() -> None:
    spec = ClusterSpec({"worker": ["a:1"]})
    place = Place(spec, Task("evaluator"), "test")
    assert place.task not in spec
    assert (place.size, place.is_chief, place.chief_address) == (1, False, "a:1")
    with pytest.raises(ClusterError, match="evaluator 0 is not in the cluster"):
        spec.address(place.task)


def test_a_named_chief_comes_before_the_workers() -> None:
    spec = ClusterSpec({"worker": ["b:1", "c:1"], "ps": ["d:1"], "chief": ["a:1"]})
    assert spec.training_tasks() == (Task("chief"), Task("worker", 0), Task("worker", 1))
    assert [str(task) for task in spec.tasks()] == ["chief", "worker 0", "worker 1", "ps 0"]
    assert not spec.is_chief(Task("worker", 0))
    assert Place(spec, Task("worker", 1), "test").rank == 2


def test_tasks_may_share_a_machine() -> None:
    spec = ClusterSpec({"worker": ["a:1", "a:2", "[::1]:1"], "ps": ["a:3"]})
    assert spec.address(Task("ps", 0)) == "a:3"


def test_nothing_can_be_changed() -> None:
    spec = ClusterSpec({"worker": ["a:1"]})
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec._jobs = ()  # type: ignore[misc]
    spec.jobs["worker"] = ("b:1",)
    assert spec.jobs == {"worker": ("a:1",)}


def test_task_names() -> None:
    tasks = [Task("chief"), Task("evaluator"), Task("worker", 1), Task("ps")]
    assert [str(task) for task in tasks] == ["chief", "evaluator", "worker 1", "ps 0"]


@pytest.mark.parametrize(("role", "index"), [("boss", 0), ("worker", -1)])
def test_no_task_of_an_unknown_role_or_a_negative_index(role: str, index: int) -> None:
    with pytest.raises(ClusterError, match=r'Task: .*; correct: Task\("worker", 0\)'):
        Task(role, index)


def test_the_example_in_the_docstring() -> None:
    outcome = doctest.testmod(spec_module)
    assert outcome.attempted == 3
    assert outcome.failed == 0


BAD_JOBS: list[tuple[Any, str]] = [
    ({}, "neither a chief nor a worker"),
    ({"ps": ["a:1"], "evaluator": ["b:1"]}, "neither a chief nor a worker"),
    ({"worker": []}, "neither a chief nor a worker"),
    ({"wroker": ["a:1"]}, "'wroker' is not a role (chief, worker, ps, evaluator)"),
    ({1: ["a:1"]}, "1 is not a role"),
    ({"chief": ["a:1", "b:1"]}, "2 tasks are chief; at most one may be"),
    ({"worker": ["a:1"], "evaluator": ["b:1", "c:1"]}, "2 tasks are evaluator"),
    ({"worker": "a:1"}, "worker must be a list of addresses, not 'a:1'"),
    ({"worker": None}, "worker must be a list of addresses, not None"),
    ({"worker": {"0": "a:1"}}, "worker must be a list of addresses"),
    ({"worker": ["a:1", 2]}, "the address of worker 1, 2, is not a string"),
    ({"worker": ["a:1", "b:1"], "ps": ["a:1"]}, "worker 0 and ps 0 have the same address, 'a:1'"),
    ({"worker": ["a:1", "A:01"]}, "worker 0 and worker 1 have the same address"),
    ({"worker": ["[::1]:1", "[0:0::1]:1"]}, "worker 0 and worker 1 have the same address"),
    ({"worker": ["a:1", "host"]}, "the address of worker 1, 'host', has no port"),
    ({"worker": ["[::1]"]}, "has no port"),
    ({"worker": ["a:"]}, "has the port '', which is not a number from 1 to 65535"),
    ({"worker": ["a:0"]}, "has the port '0'"),
    ({"worker": ["a:65536"]}, "has the port '65536'"),
    ({"worker": ["a:-1"]}, "has the port '-1'"),
    ({"worker": ["a:ssh"]}, "has the port 'ssh'"),
    ({"worker": ["a:１"]}, "has the port '１'"),
    ({"worker": [":2222"]}, "has no valid host name before its port"),
    ({"worker": ["a b:2222"]}, "has no valid host name before its port"),
    ({"worker": ["a/b:2222"]}, "has no valid host name before its port"),
    ({"worker": ["http://a:2222"]}, "is not host:port"),
    ({"worker": ["fe80::1:2222"]}, "an IPv6 address goes in brackets"),
    ({"worker": ["[fe80::x]:2222"]}, "has no IPv6 address between its brackets"),
    ([["worker", ["a:1"]]], "is not a mapping of roles to addresses"),
]


@pytest.mark.parametrize(("jobs", "words"), BAD_JOBS)
def test_a_bad_spec_says_what_where_and_how(jobs: Any, words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        ClusterSpec(jobs, where="cluster.json")
    message = str(caught.value)
    assert words in message
    assert message.startswith("cluster.json: ")
    assert '; correct: {"chief": ["10.0.0.1:2222"], "worker"' in message
    assert "\n" not in message


def test_the_example_in_the_messages_is_correct() -> None:
    assert ClusterSpec.from_json(spec_module.EXAMPLE).chief == Task("chief")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not JSON"),
        ("worker: a:1", "is not JSON"),
        ("{'worker': ['a:1']}", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
        ('["a:1"]', "['a:1'] is JSON, but not an object"),
        ("null", "None is JSON, but not an object"),
        ('{"worker": ["a:1"], "worker": ["b:1"]}', "'worker' appears twice"),
        ('{"worker": ["' + "x" * 10_000 + '"]}', "has no port"),
    ],
)
def test_bad_json_says_what_and_where(text: str, words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_json(text, where="cluster.json")
    message = str(caught.value)
    assert words in message
    assert message.startswith("cluster.json: ")
    assert len(message) < 400


@calm
@given(st.text() | JSON.map(json.dumps))
def test_garbage_raises_nothing_but_a_cluster_error(text: str) -> None:
    try:
        spec = ClusterSpec.from_json(text)
    except ClusterError as error:
        assert "; correct: " in str(error)
    else:
        assert ClusterSpec(json.loads(text)) == spec


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Task("worker", 2), "worker 2 is not in the cluster (2 x worker, 1 x ps; indices count"),
        (Task("worker", 2), '; correct: {"type": "worker", "index": 0}'),
        (Task("ps", 1), "ps 1 is not in the cluster"),
        (Task("ps", 1), '; correct: {"type": "ps", "index": 0}'),
        (Task("chief"), "chief 0 is not in the cluster"),
        (Task("chief"), '; correct: {"type": "worker", "index": 0}'),
    ],
)
def test_a_task_absent_from_its_own_cluster(task: Task, words: str) -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
    with pytest.raises(ClusterError) as caught:
        Place(spec, task, "TF_CONFIG")
    assert words in str(caught.value)
    assert str(caught.value).startswith("TF_CONFIG: ")
    with pytest.raises(ClusterError, match="is not in the cluster"):
        spec.tf_config(task)
