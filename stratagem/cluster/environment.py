"""Reads this process's place in a cluster, and its processors, from the environment.

No other file reads the variables of schedulers:

    TF_CONFIG      the cluster and this process's task in one JSON variable
    Vertex AI      CLUSTER_SPEC: TF_CONFIG with the pools of the job for roles
    torchrun       RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    Kubernetes     an Indexed Job behind a headless Service
    Slurm          a step started by srun, one worker per task
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from stratagem.cluster import exit_cause
from stratagem.cluster.parsing import (
    MAX_PORT,
    MAX_TASKS,
    Fail,
    integer,
    join,
    number,
    port,
    quote,
    read_object,
    wrong,
)
from stratagem.cluster.spec import ROLES, SINGLE, ClusterSpec, Place, Task

TF_CONFIG_EXAMPLE = (
    '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
TF_ROLES = {**{role: role for role in ROLES}, "master": "chief"}  # TensorFlow 1 wrote "master"


def from_tf_config(environ: Mapping[str, str]) -> Place | None:
    """Return the place in TF_CONFIG, if it holds a cluster."""
    return read_tf_config(environ.get("TF_CONFIG", ""), TF_ROLES, "TF_CONFIG", TF_CONFIG_EXAMPLE)


def read_tf_config(text: str, names: Mapping[str, str], where: str, example: str) -> Place | None:
    """Return the place in a document of TF_CONFIG's form; `names` maps its names to roles."""
    if not text.strip():
        return None
    fail = partial(wrong, where=where, example=example)
    document = read_object(text, fail)
    cluster = document.get("cluster")
    # For a single machine schedulers write `{}`.
    if cluster is None or cluster == {}:
        return None
    if not isinstance(cluster, dict):
        raise fail(f"the cluster must be an object, not {quote(cluster)}")
    spec = ClusterSpec(_by_role(cluster, names, fail), where=where, example=example)
    hub = document.get("hub")  # where `stratagem run` listens
    task = _task(document.get("task"), names, fail)
    return Place(spec, task, where, hub=hub if isinstance(hub, str) else None)


def _by_role(cluster: Mapping[str, Any], names: Mapping[str, str], fail: Fail) -> dict[str, Any]:
    jobs: dict[str, Any] = {}
    for name, listed in cluster.items():
        role = _role(name, names, fail)
        if role in jobs:
            raise fail(f"{quote(name)} lists the {role} a second time")
        jobs[role] = listed
    return jobs


def _task(raw: object, names: Mapping[str, str], fail: Fail) -> Task:
    if not isinstance(raw, dict):
        raise fail(f"the task must be an object with type and index, not {quote(raw)}")
    role = _role(raw.get("type"), names, fail)
    # There is at most one evaluator, to which Vertex AI may give any index.
    if role == "evaluator":
        return Task("evaluator")
    index = integer(raw.get("index", 0 if role in SINGLE else None))
    if index is None or index < 0:
        raise fail(f"the task's index is {quote(raw.get('index'))}, not a whole number from 0")
    return Task(role, index)


def _role(name: object, names: Mapping[str, str], fail: Fail) -> str:
    if not isinstance(name, str) or name not in names:
        raise fail(f"{quote(name)} is not a role ({', '.join(names)})")
    return names[name]


_POOLS = {
    "workerpool0": "chief",
    "workerpool1": "worker",
    "workerpool2": "ps",
    "workerpool3": "evaluator",
}
VERTEX_EXAMPLE = (
    '{"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]}, '
    '"task": {"type": "workerpool1", "index": 0}} '
    "(workerpool0 is the chief, 1 the workers, 2 ps, 3 the evaluator; "
    "give pools 0 and 3 a replicaCount of 1)"
)


def from_vertex(environ: Mapping[str, str]) -> Place | None:
    """Return the place in CLUSTER_SPEC, if it holds a cluster."""
    # For a single machine Google's client writes TensorFlow's role names instead of pools.
    names = {**_POOLS, **TF_ROLES}
    return read_tf_config(environ.get("CLUSTER_SPEC", ""), names, "CLUSTER_SPEC", VERTEX_EXAMPLE)


_MASTER_EXAMPLE = "MASTER_ADDR=10.0.0.1"


def from_torchrun(environ: Mapping[str, str]) -> Place | None:
    """Return the place of this rank, if RANK and WORLD_SIZE are set.

    Every rank is a worker, rank 0 the chief. torchrun gives no addresses of the other ranks, so
    only the chief's can be reached; the others are labels (node1:29504) that name a task, and nodes
    with different numbers of processes see different labels. If all ranks are on one node, they use
    its loopback address, whatever name torchrun gave it.
    """
    if not environ.get("RANK") or not environ.get("WORLD_SIZE"):
        return None
    size = number(environ, "WORLD_SIZE", 1, MAX_TASKS)
    why = f"WORLD_SIZE is {size}"
    rank = number(environ, "RANK", 0, size - 1, why=why)
    per_node = number(environ, "LOCAL_WORLD_SIZE", 1, size, default=1, why=why)
    local_rank = None
    if environ.get("LOCAL_RANK"):
        local_rank = number(environ, "LOCAL_RANK", 0, size - 1, why=why)
    spec = ClusterSpec(
        {"worker": _rank_addresses(environ, size, per_node)},
        where="MASTER_ADDR",
        example=_MASTER_EXAMPLE,
    )
    return Place(spec, Task("worker", rank), "torchrun", local_rank)


def _rank_addresses(environ: Mapping[str, str], size: int, per_node: int) -> list[str]:
    master = environ.get("MASTER_ADDR", "").strip()
    if not master:
        raise wrong(
            "not set, though RANK is; it must be rank 0's host", "MASTER_ADDR", _MASTER_EXAMPLE
        )
    first = port(environ, _neighbour(number(environ, "MASTER_PORT", 1, MAX_PORT)))
    if per_node == size:
        master = "127.0.0.1"
    hosts = (master if rank < per_node else f"node{rank // per_node}" for rank in range(size))
    # Ports wrap around and stay distinct: there are at least as many as tasks.
    return [join(host, (first + rank - 1) % MAX_PORT + 1) for rank, host in enumerate(hosts)]


def _neighbour(master_port: int) -> int:
    """Return a port next to MASTER_PORT, where torchrun's store listens."""
    return master_port + 1 if master_port < MAX_PORT else master_port - 1


_POD_PORT = 2222


def from_kubernetes(environ: Mapping[str, str]) -> Place | None:
    """Return the place of this pod, if its Job is indexed and says how many workers it has.

    Kubernetes sets JOB_COMPLETION_INDEX. The manifest sets STRATAGEM_WORKERS (its `completions`)
    and STRATAGEM_SERVICE (its `subdomain`); STRATAGEM_PORT (2222) and STRATAGEM_JOB (the hostname
    less its index) are optional. Pod i is reached as <job>-<i>.<service>.
    """
    if not environ.get("STRATAGEM_WORKERS"):
        return None
    service = environ.get("STRATAGEM_SERVICE", "").strip()
    if not service and not environ.get("JOB_COMPLETION_INDEX"):
        return None
    size = number(environ, "STRATAGEM_WORKERS", 1, MAX_TASKS)
    # A Service without an index is an error, or every pod would train alone unnoticed.
    why = f"completionMode: Indexed sets it; STRATAGEM_WORKERS is {size}"
    index = number(environ, "JOB_COMPLETION_INDEX", 0, size - 1, why=why)
    if not service:
        raise wrong(
            "not set; it must be the headless Service that names the pods",
            "STRATAGEM_SERVICE",
            "STRATAGEM_SERVICE=trainer",
        )
    job, at = _job(environ, index), port(environ, _POD_PORT)
    spec = ClusterSpec(
        {"worker": [join(f"{job}-{i}.{service}", at) for i in range(size)]},
        where="STRATAGEM_JOB, STRATAGEM_SERVICE",
        example="STRATAGEM_JOB=train STRATAGEM_SERVICE=trainer",
    )
    return Place(spec, Task("worker", index), "Kubernetes")


def _job(environ: Mapping[str, str], index: int) -> str:
    """Return the Job's name; pods are called <job>-<index>."""
    if named := environ.get("STRATAGEM_JOB", "").strip():
        return named
    pod = environ.get("HOSTNAME", "").strip().partition(".")[0]
    job = pod.removesuffix(f"-{index}")
    if job in ("", pod):
        raise wrong(
            f"{quote(pod)} does not end in -{index} (JOB_COMPLETION_INDEX), "
            "so the Job's name is unknown; set STRATAGEM_JOB",
            "HOSTNAME",
            "STRATAGEM_JOB=train",
        )
    return job


# Step ids from here on are the batch script, an interactive shell or no step: one process.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

_NODES = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"(?P<low>[0-9]{1,18})(?:-(?P<high>[0-9]{1,18}))?")
_COUNT = re.compile(r"(?P<tasks>[0-9]{1,5})(?:\(x(?P<times>[0-9]{1,5})\))?")


def from_slurm(environ: Mapping[str, str]) -> Place | None:
    """Return the place of this task, if srun started it.

    Task i of a machine listens at port + i, where port is STRATAGEM_PORT or
    20000 + SLURM_JOB_ID % 20000, so that jobs that share a machine seldom collide; two simultaneous
    steps of one job need a STRATAGEM_PORT each.
    """
    step = integer(environ.get("SLURM_STEP_ID", ""))
    if step is None or not 0 <= step < _FIRST_SPECIAL_STEP:
        return None
    size = number(environ, _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), 1, MAX_TASKS)
    rank = number(environ, "SLURM_PROCID", 0, size - 1, why=f"the step has {size} tasks")
    nodes, counts = _layout(environ, size)
    slot = _slot(environ, rank, counts)
    spec = ClusterSpec(
        {"worker": _task_addresses(environ, nodes, counts)},
        where=_first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        example="gpu[01-04]",
    )
    return Place(spec, Task("worker", rank), "Slurm", slot if max(counts) > 1 else None)


def expand_nodelist(text: str, where: str = "nodelist") -> list[str]:
    """Expand Slurm's shorthand: gpu[01-03,7],login is gpu01 gpu02 gpu03 gpu7 login."""
    example = "gpu[01-03,7],login"
    parts = _NODES.findall(text)
    if not parts or ",".join(parts) != text:
        raise wrong(f"{quote(text)} is not a list of machines", where, example)
    names: list[str] = []
    for part in parts:
        # Odd pieces were in brackets; every combination is a machine.
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        choices = [_expand_ranges(p, where) if i % 2 else [p] for i, p in enumerate(pieces)]
        if len(names) + math.prod(map(len, choices)) > MAX_TASKS:
            raise wrong(f"{quote(text)} is more than {MAX_TASKS} machines", where, example)
        names += map("".join, itertools.product(*choices))
    return names


def _expand_ranges(text: str, where: str) -> list[str]:
    """Expand 01-03,7 to 01 02 03 7, padded to the width of each range's start."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        low, high = (match["low"], match["high"] or match["low"]) if match else ("1", "0")
        if not 0 <= int(high) - int(low) < MAX_TASKS - len(numbers):
            raise wrong(f"[{text[:60]}] is not a list of ranges", where, "gpu[01-03,7]")
        numbers += (str(i).zfill(len(low)) for i in range(int(low), int(high) + 1))
    return numbers


def expand_counts(text: str, where: str = "tasks per node") -> list[int]:
    """Expand the tasks of each machine from Slurm's shorthand: 2(x3),1 is 2 2 2 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        times = int(match["times"] or 1) if match else 0
        if not match or len(counts) + times > MAX_TASKS:
            raise wrong(f"{quote(text)} is not a list of task counts", where, "2(x3),1")
        counts += [int(match["tasks"])] * times
    return counts


def _layout(environ: Mapping[str, str], size: int) -> tuple[list[str], list[int]]:
    """Return the machines of the step, and the number of tasks of each."""
    name = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    nodes = expand_nodelist(environ.get(name, ""), name)
    name = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = expand_counts(environ.get(name, ""), name)
    if len(counts) != len(nodes) or sum(counts) != size:
        raise wrong(
            f"{quote(environ[name])} is {sum(counts)} tasks on {len(counts)} machines, "
            f"but the step has {size} tasks on {len(nodes)}",
            name,
            "2(x3),1 for 7 tasks on 4 machines",
        )
    return nodes, counts


def _slot(environ: Mapping[str, str], rank: int, counts: Sequence[int]) -> int:
    """Return this task's index on its machine; an error unless tasks fill machines in order."""
    ends = list(itertools.accumulate(counts))
    node = next(node for node, end in enumerate(ends) if rank < end)
    start = ends[node] - counts[node]
    block_order = {
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(rank - start),
        # The only one that reveals another order to the chief, whose place never differs.
        "SLURM_GTIDS": ",".join(map(str, range(start, ends[node]))),
    }
    for name, expected in block_order.items():
        found = environ.get(name) or expected
        if found != expected:
            raise wrong(
                f"{quote(found)} for task {rank}, where machines filled one after the other would "
                f"give {quote(expected)}; the tasks' addresses would be wrong",
                name,
                "srun --distribution=block",
            )
    return rank - start


def _task_addresses(
    environ: Mapping[str, str], nodes: Sequence[str], counts: Sequence[int]
) -> list[str]:
    # By name, as the components of a heterogeneous step may share a machine.
    used: Counter[str] = Counter()
    slots: list[tuple[str, int]] = []
    for node, count in zip(nodes, counts, strict=True):
        slots += ((node, used[node] + i) for i in range(count))
        used[node] += count
    first = port(environ, 20000 + number(environ, "SLURM_JOB_ID", 0, 2**32) % 20000)
    most = max(used.values())
    if first + most - 1 > MAX_PORT:
        raise wrong(
            f"{first} leaves no room for {most} tasks on one machine",
            "STRATAGEM_PORT",
            f"STRATAGEM_PORT={max(1, MAX_PORT + 1 - most)}",
        )
    return [join(node, first + slot) for node, slot in slots]


def _first(environ: Mapping[str, str], *names: str) -> str:
    """Return the first variable that is set, or the first one if none is."""
    return next((name for name in names if environ.get(name)), names[0])


# Variables that people write come before those of schedulers, and torchrun before the scheduler
# that may have started it, as torchrun divides a machine among its processes.
SOURCES = (
    from_tf_config,
    from_vertex,
    from_torchrun,
    from_kubernetes,
    from_slurm,
)


def detect(environ: Mapping[str, str]) -> Place | None:
    """Return this process's place in a cluster, or None without one."""
    exit_cause.at_exit(environ)
    return next((place for source in SOURCES if (place := source(environ)) is not None), None)


_GROUPS = Path("/sys/fs/cgroup")


def cores(groups: Path = _GROUPS) -> int:
    """Return how many processors this process may use, by its affinity and its container's limit.

    `groups` is the folder of the kernel's control groups.
    """
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    return max(1, min(usable, _limit(groups) or usable))


def _limit(groups: Path) -> int | None:
    """Return a container's CPU limit (docker's --cpus, Kubernetes' limits) in whole processors, or
    None."""
    words = _words(groups / "cpu.max") or [
        *_words(groups / "cpu" / "cpu.cfs_quota_us"),
        *_words(groups / "cpu" / "cpu.cfs_period_us"),
    ]
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        return None  # "max", -1, or not Linux
    return max(1, int(words[0]) // int(words[1]))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
