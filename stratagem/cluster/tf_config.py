"""TF_CONFIG: the cluster and this process's task in one JSON variable.

TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from stratagem.cluster.parsing import Fail, integer, quote, read_object, wrong
from stratagem.cluster.spec import ROLES, SINGLE, ClusterSpec, Place, Task

EXAMPLE = (
    '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
NAMES = {**{role: role for role in ROLES}, "master": "chief"}  # TensorFlow 1 wrote "master"


def detect(environ: Mapping[str, str]) -> Place | None:
    """The place that TF_CONFIG gives, if it holds a cluster."""
    return read(environ.get("TF_CONFIG", ""), NAMES, "TF_CONFIG", EXAMPLE)


def read(text: str, names: Mapping[str, str], where: str, example: str) -> Place | None:
    """The place in a document of this form; `names` turns its names into roles."""
    if not text.strip():
        return None
    fail = partial(wrong, where=where, example=example)
    document = read_object(text, fail)
    cluster = document.get("cluster")
    # One machine alone is told of no cluster: `{}` is what schedulers then write.
    if cluster is None or cluster == {}:
        return None
    if not isinstance(cluster, dict):
        raise fail(f"the cluster must be an object, not {quote(cluster)}")
    spec = ClusterSpec(_by_role(cluster, names, fail), where=where, example=example)
    return Place(spec, _task(document.get("task"), names, fail), where)


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
    # There is one evaluator at most, and Vertex AI numbers it freely.
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
