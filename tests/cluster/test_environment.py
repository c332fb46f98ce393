"""The place that each scheduler gives, from the variables that it sets in reality."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from stratagem.cluster import environment
from stratagem.cluster.environment import cores, detect, expand_counts, expand_nodelist
from stratagem.cluster.parsing import endpoint
from stratagem.cluster.spec import Place, Task
from stratagem.errors import ClusterError

calm = settings(deadline=None)  # a busy machine may be slow
Environ = dict[str, str]


def found(environ: Environ) -> Place:
    place = detect(environ)
    assert place is not None
    return place


def message(environ: Environ) -> str:
    with pytest.raises(ClusterError) as caught:
        detect(environ)
    text = str(caught.value)
    assert "; correct: " in text
    assert "\n" not in text
    return text


def lists(prefix: str, *counts: int) -> list[list[str]]:
    """Addresses: lists("h", 2, 1) is [[h0:2222, h1:2222], [h2:2222]]."""
    numbers = itertools.count()
    return [[f"{prefix}{next(numbers)}:2222" for _ in range(count)] for count in counts]


# --- TF_CONFIG ------------------------------------------------------------------------------------

CHIEF, WORKERS, SERVERS = lists("h", 1, 2, 1)
CLUSTER = {"chief": CHIEF, "worker": WORKERS, "ps": SERVERS}


def tf(task: Any, cluster: Any = CLUSTER, **more: Any) -> Environ:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, **more})}


@pytest.mark.parametrize(
    ("task", "expected", "rank"),
    [
        ({"type": "chief", "index": 0}, Task("chief"), 0),
        ({"type": "chief"}, Task("chief"), 0),
        ({"type": "master", "index": 0}, Task("chief"), 0),
        ({"type": "worker", "index": 1}, Task("worker", 1), 2),
        ({"type": "worker", "index": "1", "trial": ""}, Task("worker", 1), 2),
    ],
)
def test_tf_config(task: object, expected: Task, rank: int) -> None:
    place = found(tf(task, environment="cloud", job={}))
    assert (place.task, place.rank, place.source) == (expected, rank, "TF_CONFIG")
    assert (place.size, place.chief_address, place.local_rank) == (3, "h0:2222", None)


def test_tf_config_of_a_server() -> None:
    place = found(tf({"type": "ps", "index": 0}))
    assert place.task == Task("ps", 0)
    assert place.spec.address(place.task) == "h3:2222"


def test_tf_config_with_the_old_name_of_the_chief() -> None:
    old = {"master": CHIEF, "worker": WORKERS, "ps": SERVERS}
    task = {"type": "master", "index": 0}
    assert found(tf(task, old)) == found(tf({"type": "chief", "index": 0}))


@pytest.mark.parametrize("index", [0, "0", 3, "x", None])
def test_tf_config_of_an_evaluator_that_the_cluster_leaves_out(index: object) -> None:
    place = found(tf({"type": "evaluator", "index": index}))
    assert place.task == Task("evaluator", 0)
    assert place.task not in place.spec
    assert place.size == 3
    with pytest.raises(ClusterError, match="evaluator has no rank, for it does not train"):
        _ = place.rank


def test_tf_config_of_an_evaluator_in_the_cluster() -> None:
    place = found(tf({"type": "evaluator", "index": 0}, {**CLUSTER, "evaluator": ["e:1"]}))
    assert place.spec.address(place.task) == "e:1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "{}",
        '{"cluster": {}}',
        '{"cluster": null}',
        '{"environment": "cloud", "task": {"type": "worker"}}',
    ],
)
@pytest.mark.parametrize("name", ["TF_CONFIG", "CLUSTER_SPEC"])
def test_no_cluster_is_no_place(name: str, text: str) -> None:
    assert detect({name: text}) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TF_CONFIG": "{cluster}"}, "'{cluster}' is not JSON"),
        ({"TF_CONFIG": "[]"}, "[] is JSON, but not an object"),
        (tf({"type": "worker", "index": 0}, []), "the cluster must be an object, not []"),
        (tf({"type": "worker", "index": 0}, "a:1"), "the cluster must be an object, not 'a:1'"),
        (tf({"type": "worker", "index": 2}), "worker 2 is not in the cluster"),
        (tf({"type": "chief", "index": 1}), "chief 1 is not in the cluster"),
        (tf({"type": "worker", "index": -1}), "the task's index is -1"),
        (tf({"type": "worker", "index": 1.5}), "the task's index is 1.5, not a whole number"),
        (tf({"type": "worker", "index": True}), "the task's index is True"),
        (tf({"type": "worker", "index": "one"}), "the task's index is 'one'"),
        (tf({"type": "worker"}), "the task's index is None"),
        (tf({"type": "coach", "index": 0}), "'coach' is not a role (chief, worker, ps, evaluator"),
        (tf({"type": ["worker"], "index": 0}), "['worker'] is not a role"),
        (tf({"index": 0}), "None is not a role"),
        (tf(None), "the task must be an object with type and index, not None"),
        (tf("worker"), "the task must be an object with type and index, not 'worker'"),
        (tf({}, {"coach": ["a:1"]}), "'coach' is not a role"),
        (tf({}, {"chief": ["a:1"], "master": ["b:1"]}), "'master' lists the chief a second time"),
        (tf({}, {"chief": ["a:1", "b:1"]}), "2 tasks are chief"),
        (tf({}, {"worker": ["a:1", "a:1"]}), "worker 0 and worker 1 have the same address"),
        (tf({}, {"worker": ["a"]}), "the address of worker 0, 'a', has no port"),
        (tf({}, {"worker": ["a:99999"]}), "has the port '99999'"),
        (tf({}, {"ps": ["a:1"]}), "neither a chief nor a worker"),
        (tf({}, {"worker": "a:1"}), "worker must be a list"),
    ],
)
def test_a_bad_tf_config(environ: Environ, words: str) -> None:
    text = message(environ)
    assert text.startswith("TF_CONFIG: ")
    assert words in text
    assert text.rstrip("}").endswith('"index": 0')


def test_the_examples_in_the_messages_are_correct() -> None:
    assert found({"TF_CONFIG": environment.TF_CONFIG_EXAMPLE}).rank == 0
    without_remark = environment.VERTEX_EXAMPLE.partition(" (")[0]
    assert found({"CLUSTER_SPEC": without_remark}).rank == 1


# --- Vertex AI ------------------------------------------------------------------------------------


def pool(number: int, replicas: int) -> list[str]:
    return [f"cmle-training-workerpool{number}-b644f12a34-{i}:2222" for i in range(replicas)]


POOLS = {f"workerpool{i}": pool(i, n) for i, n in enumerate([1, 2, 1, 1])}


def vertex_ai(task: Any, cluster: Any = POOLS) -> Environ:
    job = '{"python_module":"","package_uris":[],"job_args":[]}'
    document = {"cluster": cluster, "environment": "cloud", "task": task, "job": job}
    return {"CLUSTER_SPEC": json.dumps({**document, "open_ports": [3333]})}


@pytest.mark.parametrize(
    ("task", "expected", "rank"),
    [
        ({"type": "workerpool0", "index": 0}, Task("chief"), 0),
        ({"type": "workerpool1", "index": 0, "trial": "1"}, Task("worker", 0), 1),
        ({"type": "workerpool1", "index": "1"}, Task("worker", 1), 2),
        ({"type": "workerpool2", "index": 0}, Task("ps", 0), None),
        ({"type": "workerpool3", "index": "0"}, Task("evaluator"), None),
    ],
)
def test_vertex(task: object, expected: Task, rank: int | None) -> None:
    place = found(vertex_ai(task))
    assert (place.task, place.source, place.size) == (expected, "CLUSTER_SPEC", 3)
    assert place.chief_address == "cmle-training-workerpool0-b644f12a34-0:2222"
    assert place.task in place.spec
    if rank is not None:
        assert place.rank == rank


def test_vertex_with_one_machine_and_nothing_but_the_necessary() -> None:
    text = '{"cluster": {"workerpool0": ["a:2222"]}, "task": {"type": "workerpool0", "index": 0}}'
    place = found({"CLUSTER_SPEC": text})
    assert (place.rank, place.size, place.is_chief) == (0, 1, True)
    # The form that Google's client uses in its own tests.
    text = '{"cluster":{"chief":["localhost:1234"]},"task":{"type":"chief","index":0}}'
    assert found({"CLUSTER_SPEC": text}).chief_address == "localhost:1234"


def test_vertex_with_an_empty_pool() -> None:
    place = found(vertex_ai({"type": "workerpool2", "index": 0}, {**POOLS, "workerpool1": []}))
    assert (place.task, place.size) == (Task("ps", 0), 1)


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ({**POOLS, "workerpool0": pool(0, 2)}, "2 tasks are chief"),
        ({**POOLS, "workerpool3": pool(3, 2)}, "2 tasks are evaluator"),
        ({**POOLS, "workerpool4": pool(4, 1)}, "'workerpool4' is not a role (workerpool0,"),
        ({"workerpool0": ["replica-0"]}, "the address of chief, 'replica-0', has no port"),
    ],
)
def test_a_bad_vertex_spec(cluster: Any, words: str) -> None:
    text = message(vertex_ai({"type": "workerpool0", "index": 0}, cluster))
    assert text.startswith("CLUSTER_SPEC: ")
    assert words in text
    assert "give pools 0 and 3 a replicaCount of 1" in text


# --- torchrun -------------------------------------------------------------------------------------

# The names are those that `torchrun --nproc-per-node 2` was seen to set, less its paths; the
# values are written out for two nodes.
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "1",
    "ROLE_NAME": "default",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_torchrun() -> None:
    place = found(TORCHRUN)
    assert (place.task, place.rank, place.size) == (Task("worker", 3), 3, 4)
    assert (place.local_rank, place.source) == (1, "torchrun")
    assert place.chief_address == "10.0.0.1:29501"
    labels = ("10.0.0.1:29501", "10.0.0.1:29502", "node1:29503", "node1:29504")
    assert place.spec.jobs == {"worker": labels}


def test_torchrun_alone() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place = found({**alone, "MASTER_ADDR": "a-name", "MASTER_PORT": "45715"})
    assert (place.rank, place.size, place.is_chief, place.local_rank) == (0, 1, True, 0)
    assert place.chief_address == "127.0.0.1:45716"  # all ranks are on this node


def test_a_rendezvous_set_by_hand_without_local_ranks() -> None:
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    place = found(by_hand)
    assert (place.rank, place.local_rank) == (1, None)
    assert place.spec.jobs == {"worker": ("a:29501", "node1:29502")}
    assert found({**by_hand, "LOCAL_RANK": "1"}).local_rank == 1


@pytest.mark.parametrize(
    ("change", "chief"),
    [
        ({"STRATAGEM_PORT": "4000"}, "10.0.0.1:4000"),
        ({"STRATAGEM_PORT": ""}, "10.0.0.1:29501"),
        ({"MASTER_PORT": "65534"}, "10.0.0.1:65535"),
        ({"MASTER_PORT": "65535"}, "10.0.0.1:65534"),
        ({"MASTER_ADDR": "fe80::1"}, "[fe80::1]:29501"),
        ({"MASTER_ADDR": "[fe80::1]"}, "[fe80::1]:29501"),
    ],
)
def test_the_chiefs_address_under_torchrun(change: Environ, chief: str) -> None:
    place = found({**TORCHRUN, **change})
    assert place.chief_address == chief
    assert chief != f"10.0.0.1:{change.get('MASTER_PORT')}"


@calm
@given(st.integers(1, 400), st.integers(1, 16), st.integers(1, 65535), st.data())
def test_any_torchrun_job(size: int, per_node: int, port: int, data: st.DataObject) -> None:
    assume(per_node <= size)
    rank = data.draw(st.integers(0, size - 1))
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(per_node), "MASTER_ADDR": "m"}
    place = environment.from_torchrun(
        {**common, "RANK": str(rank), "LOCAL_RANK": "0", "MASTER_PORT": str(port)}
    )
    assert place is not None
    assert (place.rank, place.size) == (rank, size)
    hosts, ports = zip(*map(endpoint, place.spec.jobs["worker"]), strict=True)
    assert len(set(ports)) == size
    assert 0 < ports[0] != port
    assert hosts[:per_node] == ("127.0.0.1" if per_node == size else "m",) * per_node
    assert hosts[per_node:] == tuple(f"node{r // per_node}" for r in range(per_node, size))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "4"}, "RANK: '4' is not a whole number from 0 to 3 (WORLD_SIZE is 4)"),
        ({"RANK": "-1"}, "RANK: '-1' is not"),
        ({"RANK": "one"}, "RANK: 'one' is not"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: '0' is not a whole number from 1"),
        ({"WORLD_SIZE": "999999999"}, "WORLD_SIZE: '999999999' is not"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK: '4' is not"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE: '5' is not"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: not set, though RANK is"),
        ({"MASTER_ADDR": "a b"}, "MASTER_ADDR: the address of worker 0, 'a b:29501', has no valid"),
        ({"MASTER_PORT": ""}, "MASTER_PORT: not set; it must be a whole number from 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT: '0' is not a whole number from 1 to 65535"),
        ({"STRATAGEM_PORT": "x"}, "STRATAGEM_PORT: 'x' is not a whole number from 1 to 65535"),
    ],
)
def test_a_bad_torchrun_environment(change: Environ, words: str) -> None:
    assert words in message({**TORCHRUN, **change})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_of_torchrun_is_not_torchrun(name: str) -> None:
    assert detect({**TORCHRUN, name: ""}) is None


# --- Kubernetes -----------------------------------------------------------------------------------

KUBERNETES = {
    "JOB_COMPLETION_INDEX": "2",
    "HOSTNAME": "train-mnist-2",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "STRATAGEM_WORKERS": "3",
    "STRATAGEM_SERVICE": "trainer",
}


def test_kubernetes() -> None:
    place = found(KUBERNETES)
    assert (place.task, place.rank, place.size) == (Task("worker", 2), 2, 3)
    assert (place.source, place.local_rank) == ("Kubernetes", None)
    pods = tuple(f"train-mnist-{i}.trainer:2222" for i in range(3))
    assert place.spec.jobs == {"worker": pods}


@pytest.mark.parametrize(
    ("change", "chief"),
    [
        ({"STRATAGEM_PORT": "4000"}, "train-mnist-0.trainer:4000"),
        ({"STRATAGEM_JOB": "other"}, "other-0.trainer:2222"),
        ({"STRATAGEM_JOB": "other", "HOSTNAME": "whatever"}, "other-0.trainer:2222"),
        ({"HOSTNAME": "set-workers-0-2"}, "set-workers-0-0.trainer:2222"),
        ({"HOSTNAME": "train-2.trainer.ns.svc.cluster.local"}, "train-0.trainer:2222"),
        ({"STRATAGEM_SERVICE": "trainer.ns.svc"}, "train-mnist-0.trainer.ns.svc:2222"),
    ],
)
def test_the_chiefs_address_under_kubernetes(change: Environ, chief: str) -> None:
    assert found({**KUBERNETES, **change}).chief_address == chief


def test_an_indexed_job_of_someone_else() -> None:
    assert detect({**KUBERNETES, "STRATAGEM_WORKERS": ""}) is None
    assert detect({"STRATAGEM_WORKERS": "3"}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"STRATAGEM_WORKERS": "0"}, "STRATAGEM_WORKERS: '0' is not a whole number from 1"),
        ({"STRATAGEM_WORKERS": "many"}, "STRATAGEM_WORKERS: 'many' is not a whole number"),
        ({"STRATAGEM_WORKERS": "2"}, "JOB_COMPLETION_INDEX: '2' is not a whole number from 0 to 1"),
        ({"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX: not set; it must be"),
        ({"JOB_COMPLETION_INDEX": ""}, "completionMode: Indexed sets it"),
        ({"STRATAGEM_SERVICE": ""}, "STRATAGEM_SERVICE: not set; it must be the headless Service"),
        ({"STRATAGEM_SERVICE": "a b"}, "has no valid host name"),
        ({"STRATAGEM_PORT": "65536"}, "STRATAGEM_PORT: '65536' is not"),
        ({"HOSTNAME": "train-mnist-1"}, "HOSTNAME: 'train-mnist-1' does not end in -2"),
        ({"HOSTNAME": "-2"}, "the Job's name is unknown; set STRATAGEM_JOB"),
        ({"HOSTNAME": ""}, "the Job's name is unknown; set STRATAGEM_JOB"),
    ],
)
def test_a_bad_kubernetes_environment(change: Environ, words: str) -> None:
    assert words in message({**KUBERNETES, **change})


# --- Slurm ----------------------------------------------------------------------------------------

# As seen with Slurm 22.05, but for the job's id: `srun -n 7` on machines of 4 CPUs, task 5.
SLURM = {
    "SLURM_GTIDS": "4,5,6",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[01-02]",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NODELIST": "gpu[01-02]",
    "SLURM_NPROCS": "7",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_LAUNCHER_PORT": "35981",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_TASKS_PER_NODE": "4,3",
}
# Likewise the script that sbatch runs once, outside any step.
BATCH = {
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[01-02]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "3,1",
}
# The second component of `srun -n 2 -N 1 … : -n 1 -N 1 …`; its SLURM_DISTRIBUTION says cyclic.
HETEROGENEOUS = {
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_GTIDS": "2",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}


def test_slurm() -> None:
    place = found(SLURM)
    assert (place.task, place.rank, place.size) == (Task("worker", 5), 5, 7)
    assert (place.source, place.local_rank) == ("Slurm", 1)
    ports = [23456, 23457, 23458, 23459]
    expected = [f"gpu01:{p}" for p in ports] + [f"gpu02:{p}" for p in ports[:3]]
    assert place.spec.jobs == {"worker": tuple(expected)}


def test_slurm_with_one_task_per_machine_leaves_it_every_device() -> None:
    one_each = {
        "SLURM_GTIDS": "1",
        "SLURM_LOCALID": "0",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    place = found({**SLURM, **one_each})
    assert (place.rank, place.local_rank) == (1, None)
    assert place.spec.jobs == {"worker": ("gpu01:23456", "gpu02:23456")}


def test_a_step_smaller_than_its_job() -> None:
    step = {
        "SLURM_GTIDS": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "7",  # of the job, as srun --preserve-env leaves it
        "SLURM_PROCID": "0",
        "SLURM_STEP_NODELIST": "gpu02",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }
    assert found({**SLURM, **step}).spec.jobs == {"worker": ("gpu02:23456",)}


def test_slurm_without_the_variables_of_the_step() -> None:
    names = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")
    assert found({**SLURM, **dict.fromkeys(names, "")}) == found(SLURM)


def test_a_heterogeneous_step() -> None:
    place = found(HETEROGENEOUS)
    assert (place.rank, place.local_rank) == (2, 0)
    assert place.spec.jobs == {"worker": ("gpu01:20004", "gpu01:20005", "gpu02:20004")}
    shared = found({**HETEROGENEOUS, "SLURM_STEP_NODELIST": "gpu01,gpu01"})
    assert shared.spec.jobs == {"worker": ("gpu01:20004", "gpu01:20005", "gpu01:20006")}


@pytest.mark.parametrize(
    "step",
    [None, "", "batch", "extern", "interactive", "4294967294", "4294967291", "4294967290", "-5"],
)
def test_a_batch_script_or_shell_is_on_its_own(step: str | None) -> None:
    assert detect(BATCH if step is None else {**BATCH, "SLURM_STEP_ID": step}) is None


def test_the_port_under_slurm() -> None:
    assert found({**SLURM, "STRATAGEM_PORT": "4000"}).chief_address == "gpu01:4000"
    assert found({**SLURM, "SLURM_JOB_ID": "39999"}).chief_address == "gpu01:39999"
    assert found({**SLURM, "SLURM_JOB_ID": "40000"}).chief_address == "gpu01:20000"
    assert found({**SLURM, "STRATAGEM_PORT": "65532"}).chief_address == "gpu01:65532"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"SLURM_PROCID": "7"},
            "SLURM_PROCID: '7' is not a whole number from 0 to 6 (the step has",
        ),
        ({"SLURM_PROCID": ""}, "SLURM_PROCID: not set"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID: not set"),
        ({"SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS: 'x' is not"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "'4,3' is 7 tasks on 2 machines, but the step has 8 tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "7"}, "is 7 tasks on 1 machines, but the step has 7 tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4;3"}, "SLURM_STEP_TASKS_PER_NODE: '4;3' is not a list"),
        ({"SLURM_STEP_NODELIST": "gpu[01"}, "SLURM_STEP_NODELIST: 'gpu[01' is not a list of"),
        ({"SLURM_STEP_NODELIST": "gpu[2-1]"}, "SLURM_STEP_NODELIST: [2-1] is not a list of ranges"),
        ({"SLURM_STEP_NODELIST": "a b,c"}, "SLURM_STEP_NODELIST: the address of worker 0"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "SLURM_STEP_NODELIST: ''"),
        ({"STRATAGEM_PORT": "65533"}, "STRATAGEM_PORT: 65533 leaves no room for 4 tasks"),
        ({"STRATAGEM_PORT": "65533"}, "correct: STRATAGEM_PORT=65532"),
    ],
)
def test_a_bad_slurm_environment(change: Environ, words: str) -> None:
    assert words in message({**SLURM, **change})


@pytest.mark.parametrize(
    ("task", "node", "local", "ids", "variable"),
    [
        ("0", "0", "0", "0,2,3", "SLURM_GTIDS"),
        ("1", "1", "0", "1", "SLURM_NODEID"),
        ("2", "0", "1", "0,2,3", "SLURM_LOCALID"),
        ("3", "0", "2", "0,2,3", "SLURM_NODEID"),
    ],
)
def test_every_task_of_a_cyclic_step_refuses(
    task: str, node: str, local: str, ids: str, variable: str
) -> None:
    # As seen: `srun -N 2 -n 4 -m cyclic`.
    cyclic = {
        "SLURM_GTIDS": ids,
        "SLURM_LOCALID": local,
        "SLURM_NODEID": node,
        "SLURM_PROCID": task,
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "3,1",
    }
    text = message({**SLURM, **cyclic})
    assert text.startswith(f"{variable}: ")
    assert text.endswith("correct: srun --distribution=block")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", "login"),
        ("gpu[01-03,7],login", "gpu01 gpu02 gpu03 gpu7 login"),
        ("a[098-101]", "a098 a099 a100 a101"),
        ("a[9-11],a[09-11]", "a9 a10 a11 a09 a10 a11"),
        ("rack[0-1]node[08-09]", "rack0node08 rack0node09 rack1node08 rack1node09"),
        ("n[001-2]", "n001 n002"),
    ],
)
def test_nodelists_as_scontrol_expands_them(text: str, names: str) -> None:
    # `scontrol show hostnames` of Slurm 22.05 gave these.
    assert expand_nodelist(text) == names.split()


@pytest.mark.parametrize(
    "text",
    [
        *["", ",", "a,", "a,,b", "a[", "a]", "a[]", "a[1", "a[[1]]", "a[1-]", "a[x]", "a[3-1]"],
        *["a[1,]", "a[1-2-3]", "a[١-٣]", "a[0-99999999999]", "a[0-9999][0-9999]"],
        "a[" + "9" * 5000 + "]",
    ],
)
def test_a_bad_nodelist(text: str) -> None:
    with pytest.raises(ClusterError, match=r"^NODES: .*; correct: gpu\[01-03,7\]"):
        expand_nodelist(text, "NODES")


def compressed(prefix: str, numbers: list[str]) -> str:
    """Slurm's shorthand for machines of one name; a range is as wide as its first number."""
    runs: list[list[str]] = []
    for text in numbers:
        if runs and text == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][0])):
            runs[-1].append(text)
        else:
            runs.append([text])
    ranges = (run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{prefix}[{','.join(ranges)}]"


def test_the_compressor_compresses() -> None:
    assert compressed("gpu", ["01", "02", "7", "9", "10", "11"]) == "gpu[01-02,7,9-11]"
    assert compressed("gpu", ["098", "099", "100"]) == "gpu[098-100]"
    assert compressed("gpu", ["009", "10", "9", "010"]) == "gpu[009,10,9,010]"


def stretch(start: int, length: int, width: int) -> list[str]:
    return [str(number).zfill(width) for number in range(start, start + length)]


def words(first: str, more: str, most: int) -> st.SearchStrategy[str]:
    return st.builds(str.__add__, st.sampled_from(first), st.text(more, max_size=most))


STRETCHES = st.builds(stretch, st.integers(0, 130), st.integers(1, 5), st.integers(1, 4))
MACHINES: st.SearchStrategy[tuple[str, list[str]]] = st.one_of(
    words("abgxz", "abz019.-", 8).map(lambda name: (name, [])),
    st.tuples(
        words("abgxz", "abz-", 5).map(lambda name: name.rstrip("-") or "a"),
        st.lists(STRETCHES, min_size=1, max_size=4).map(lambda parts: [*itertools.chain(*parts)]),
    ),
)


@calm
@given(st.lists(MACHINES, min_size=1, max_size=6))
def test_any_nodelist_expands_to_what_was_compressed(machines: list[tuple[str, list[str]]]) -> None:
    parts = [compressed(name, numbers) if numbers else name for name, numbers in machines]
    names = [name + number for name, numbers in machines for number in numbers or [""]]
    assert expand_nodelist(",".join(parts)) == names


COUNTS = st.lists(st.integers(1, 4), min_size=1, max_size=8)


def counts_as_slurm_writes_them(counts: list[int]) -> str:
    runs = [(count, len(list(run))) for count, run in itertools.groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in runs)


@calm
@given(COUNTS)
@example([2, 2, 2, 1])
def test_any_tasks_per_node_expands_to_what_was_compressed(counts: list[int]) -> None:
    assert expand_counts(counts_as_slurm_writes_them(counts)) == counts


@pytest.mark.parametrize("text", ["", "2(x3", "2x3", "2(3)", "a", "1,,2", "-1", "1(x99999),1(x9)"])
def test_bad_tasks_per_node(text: str) -> None:
    with pytest.raises(ClusterError, match=r"^TASKS: .*; correct: 2\(x3\),1"):
        expand_counts(text, "TASKS")


@calm
@given(COUNTS)
def test_tasks_fill_the_machines_in_block_order(counts: list[int]) -> None:
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
        "SLURM_STEP_TASKS_PER_NODE": counts_as_slurm_writes_them(counts),
    }
    slots = [(node, i) for node, count in enumerate(counts) for i in range(count)]
    for rank, (node, i) in enumerate(slots):
        place = environment.from_slurm({**step, "SLURM_PROCID": str(rank)})
        assert place is not None
        assert place.rank == rank
        assert place.local_rank == (i if max(counts) > 1 else None)
        assert place.spec.address(place.task) == f"n{node + 1}:{20001 + i}"
        assert (place.size, place.chief_address) == (sum(counts), "n1:20001")


# --- all of them ----------------------------------------------------------------------------------


def test_nothing_set_is_no_place() -> None:
    assert detect({}) is None
    assert detect({"PATH": "/bin", "HOSTNAME": "laptop"}) is None


def test_the_first_that_answers_wins() -> None:
    sources = [
        ("TF_CONFIG", tf({"type": "worker", "index": 0})),
        ("CLUSTER_SPEC", vertex_ai({"type": "workerpool0", "index": 0})),
        ("torchrun", TORCHRUN),
        ("Kubernetes", KUBERNETES),
        ("Slurm", SLURM),
    ]
    while sources:
        merged = {name: value for _, environ in sources for name, value in environ.items()}
        assert found(merged).source == sources[0][0]
        del sources[0]


SET = [*tf({}), *vertex_ai({}), *TORCHRUN, *KUBERNETES, *SLURM, "STRATAGEM_PORT", "STRATAGEM_JOB"]
# Environment variables hold no NUL; surrogates stand for bytes that are no text.
VALUES = st.one_of(
    st.integers(-2, 70000).map(str),
    st.text(st.characters(exclude_characters="\0"), max_size=12),
    st.sampled_from(
        ["1" * 5000, "0", "٣", "1e3", "gpu[1-2]", "1(x2)", "{", '{"cluster": {"": 1}}']
    ),
)


@pytest.mark.parametrize("base", [{}, TORCHRUN, KUBERNETES, SLURM])
@calm
@given(changes=st.dictionaries(st.sampled_from(SET), VALUES, max_size=4))
def test_garbage_raises_nothing_but_a_cluster_error(base: Environ, changes: Environ) -> None:
    try:
        place = detect({**base, **changes})
    except ClusterError as error:
        assert "; correct: " in str(error)
    else:
        assert place is None or place.rank < place.size


DOCUMENTS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "cluster": st.dictionaries(
            st.sampled_from([*CLUSTER, "master", "evaluator", "workerpool1", "coach"]),
            st.lists(st.sampled_from(["a:1", "b:1", "c:1", "d", "", 5, None])) | st.text(),
        ),
        "task": st.none()
        | st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from([*CLUSTER, "evaluator", "workerpool1", None, 0]),
                "index": st.integers(-1, 3) | st.sampled_from(["0", "x", None, 0.5, True, []]),
            },
        ),
    },
)


@calm
@given(DOCUMENTS, st.sampled_from(["TF_CONFIG", "CLUSTER_SPEC"]))
def test_any_document_is_a_place_or_a_cluster_error(document: Any, name: str) -> None:
    try:
        place = detect({name: json.dumps(document)})
    except ClusterError as error:
        assert str(error).startswith(f"{name}: ")
    else:
        assert (place is None) == (not document.get("cluster"))
        assert place is None or place.task in place.spec or place.task == Task("evaluator")


def test_every_source_is_asked_with_the_given_environment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {**TORCHRUN, **SLURM, **tf({"type": "chief"})}.items():
        monkeypatch.setenv(name, value)
    assert detect({}) is None
    assert environment.from_kubernetes(KUBERNETES) == found(KUBERNETES)


HERE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_containers_are_limited(tmp_path: Path, files: dict[str, str], most: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cores(tmp_path) == min(HERE, most or HERE)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes have no mask here")
def test_a_mask_counts(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)
